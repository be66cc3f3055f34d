"""Blocks that stayed in the pool, and blocks that went to a tier and came back, give the same
tokens: for every kind of KV group and type, on both backends, in host memory and on a disk."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.equivalence.harness import Written, make_core, run, small_spec
from tests.equivalence.test_kv_dtypes import TAU, assert_same
from tests.equivalence.test_latent_matrix import latent_spec
from tests.equivalence.test_window_matrix import mixed_spec
from tests.loud import Loud
from tests.support import narrow_isa
from twostroke.engine.core import EngineCore
from twostroke.engine.open_tiers import OpenTiers, host_tier
from twostroke.kernels import cpu
from twostroke.kernels.reference import Kernels
from twostroke.kv.tiers.disk import DiskFolder, DiskTier
from twostroke.kv.tiers.piece_file import PieceLayout, identity_of
from twostroke.kv.tiers.tier import Tier, TierBlocks, piece_span
from twostroke.kv.tiers.tiers import Tiers
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.native_decoder import NativeDecoder, Packing
from twostroke.model.torch.decoder import Decoder
from twostroke.sched.step import SchedulerConfig

SPECS = {
    "heads": lambda: small_spec(qk_norm="head"),
    "windows": lambda: mixed_spec("two groups"),
    "latents": latent_spec,
    "latents, heads and a window": lambda: latent_spec("mixed"),
}
KINDS = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
CASES = [
    (name, kind) for name in SPECS for kind in KINDS if "latents" not in name or kind.itemsize > 1
]
PROMPTS = [[(7 * n * n + 3 * n + size) % 512 for n in range(size)] for size in (20, 150)]
PROMPTS.append([*PROMPTS[-1][:130], 3, 1, 4])
OUTPUT = 6
NATIVE = pytest.mark.skipif(not cpu.available(), reason="built without the native kernels")


def opener(where: Path | None) -> OpenTiers:
    """Return how to open a tier in a folder, or in host memory."""

    def open_tiers(blocks: TierBlocks, limits: SchedulerConfig, spec: ModelSpec) -> Tiers:
        size, windows = limits.block_size, [group.window for group in limits.groups]
        span = piece_span(blocks.block_bytes, size, windows)
        if where is None:
            tier: Tier = host_tier(blocks, span, 64 << 20)
        else:
            layout = PieceLayout(identity_of("test"), 4 * span * size, blocks.block_bytes, span)
            tier = DiskTier(DiskFolder(str(where), layout, 1 << 30), blocks)
        return Tiers([tier], size, span)

    return open_tiers


@cache
def decoder(name: str, native: bool = False) -> Decoder | NativeDecoder:
    spec = SPECS[name]()
    if native:
        packing = Packing(spec, Loud(spec), "float32", None, narrow_isa())
        return NativeDecoder(packing, 1024, 1, 1, narrow_isa(), exact=True)
    return Decoder(spec, Loud(spec), torch.float32, torch.device("cpu"), 1024, Kernels())


def wait_for_stores(core: EngineCore) -> None:
    tiers = core.scheduler.kv.tiers
    assert tiers is not None
    while tiers.is_storing:
        tiers.wait(1.0)
        tiers.take_finished()
    core.scheduler.audit()


def run_each(core: EngineCore) -> list[Written]:
    """One prompt at a time: what is computed together is then the same in every run."""
    written = [run(core, [prompt], OUTPUT)[0] for prompt in PROMPTS]
    core.scheduler.audit()
    return written


def fetched(core: EngineCore) -> int:
    return sum(record.num_fetched for record in core.records.requests)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=NATIVE)])
@pytest.mark.parametrize(("name", "kind"), CASES, ids=str)
def test_blocks_on_a_disk_come_back_as_they_were(
    name: str, kind: torch.dtype, native: bool, tmp_path: Path
) -> None:
    if native and (kind not in (torch.float32, torch.int8) or "latents" in name):
        pytest.skip("the native kernels have fp16 and int8")
    where = opener(tmp_path)
    first = make_core(decoder(name, native), 1, kind, where, prefix_caching=True)
    run_each(first)
    stayed = run_each(first)
    assert fetched(first) == 0
    wait_for_stores(first)
    first.close()
    second = make_core(decoder(name, native), 1, kind, where, prefix_caching=True)
    came_back = run_each(second)
    assert fetched(second) >= 128
    assert_same(stayed, came_back, TAU)
    second.close()


@pytest.mark.parametrize(("name", "kind"), CASES, ids=str)
def test_so_do_blocks_in_host_memory(name: str, kind: torch.dtype) -> None:
    """The device is a CPU here, and the code is that of a GPU."""
    core = make_core(decoder(name), 1, kind, opener(None), prefix_caching=True)
    run_each(core)
    stayed = run_each(core)
    wait_for_stores(core)
    core.scheduler.kv.reset_prefixes()  # of the pool alone
    came_back = run_each(core)
    assert fetched(core) >= 128
    assert_same(stayed, came_back, TAU)
    core.close()


def test_preempted_requests_come_back_by_fetching(tmp_path: Path) -> None:
    """Their blocks are written behind each step, so that a small pool loses none of their work."""
    prompts = [[(3 * n * n + k) % 512 for n in range(90)] for k in range(6)]
    settings = {"num_blocks": 24, "lookahead": 0, "prefix_caching": True}
    alone = make_core(decoder("heads"))
    expected = [run(alone, [prompt], 60)[0].tokens for prompt in prompts]
    core = make_core(decoder("heads"), 1, open_tiers=opener(tmp_path), **settings)
    got = run(core, prompts, 60)
    assert [one.tokens for one in got] == expected
    assert sum(one.num_preempted for one in got) > 0
    core.scheduler.audit()
    core.close()
