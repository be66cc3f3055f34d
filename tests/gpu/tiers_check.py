"""Prefixes in host memory and on a disk, below the pool of a device.

    python -m tests.gpu.tiers_check [--device cuda] [--limit-s 240]

First blocks alone, bit by bit, while the device computes: what was stored comes back, fetches that
are given up and stores that are cancelled leave other blocks as they were. Then small models, in
graphs and planned ahead: a prefix that went to a tier and came back gives exactly the tokens and
log-probabilities of a prefix that stayed, and the tokens of computing again. A line a check, and a
last one that counts; figures go to $OUT/tiers.json where OUT is set. With `--device cpu` the
kernels are the reference ones, and the same code copies from host memory to host memory.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tests.equivalence.harness import Written, assert_same, run
from tests.equivalence.test_latent_matrix import latent_spec
from tests.gpu.cuda_check import core_of, kernels_of
from tests.gpu.report import tally
from tests.loud import Loud
from tests.specs import make_spec
from twostroke.engine.core import EngineCore
from twostroke.engine.open_tiers import OpenTiers, host_tier
from twostroke.kernels.reference import Kernels
from twostroke.kv.device_memory import DeviceBlocks
from twostroke.kv.tiers.disk import DiskFolder, DiskTier
from twostroke.kv.tiers.host import HostTier
from twostroke.kv.tiers.piece_file import PieceLayout, identity_of
from twostroke.kv.tiers.tier import Load, Store, Tier, TierBlocks, piece_span
from twostroke.kv.tiers.tiers import Tiers
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.torch.decoder import Decoder
from twostroke.sched.step import SchedulerConfig

FP32, BF16, FP8, INT8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8
SPECS = {
    "heads": lambda: make_spec(head_dim=64, qk_norm="head"),
    "windows": lambda: make_spec(head_dim=64, qk_norm="head", windows=(None, 80, 80)),
    "latents and a window": lambda: latent_spec("mixed"),
}
# The type of activations, and that of the cache.
CASES = [
    ("heads", FP32, FP32),
    ("heads", BF16, BF16),
    ("heads", BF16, FP8),
    ("heads", BF16, INT8),
    ("windows", FP32, FP32),
    ("windows", BF16, INT8),
    ("latents and a window", FP32, FP32),
    ("latents and a window", BF16, BF16),
]
PLACES = ("host", "disk", "host over disk")
# Their full blocks are whole pieces of one, two and four blocks, so that a prefix that came back is
# as long as one that stayed. The last begins like the one before.
PROMPTS = [[(7 * n * n + 3 * n + size) % 512 for n in range(size)] for size in (72, 200)]
PROMPTS.append([*PROMPTS[-1][:140], *((5 * n + 1) % 512 for n in range(62))])
OUTPUT = 12
OVERWRITTEN = -1  # a word of a block that must be written again
# How far a log-probability may move with the size of the chunk that it is computed in.
MOVES = {FP32: 1e-4, BF16: 0.5}


# ── blocks ──────────────────────────────────────────────────────────────────────────────────


class Pool:
    """Blocks of one group or several, full of noise. On a GPU a block has up to 2 MiB."""

    def __init__(self, device: torch.device, num_blocks: int, sizes: tuple[int, ...]) -> None:
        torch.manual_seed(1)
        self.data = [
            torch.randint(-(2**60), 2**60, (num_blocks, size // 8), device=device) for size in sizes
        ]
        for data in self.data:
            data[0] = 0  # the null block
        self.blocks = DeviceBlocks(self.data, 16)

    def read(self, group: int, numbers: list[int]) -> torch.Tensor:
        return self.data[group][torch.tensor(numbers, device=self.data[0].device)].clone()

    def overwrite(self, first: int) -> None:
        """Overwrite all blocks from `first` on, and wait until that is done: a tier copies on
        streams of its own, which do not wait for queued work."""
        for data in self.data:
            data[first:] = OVERWRITTEN
        finish(self.data[0].device)


def wait_for(tier: Tier, count: int) -> list[bool]:
    """Wait for the ends of this many stores; return whether each piece is stored."""
    ended = tier.finished()
    while len(ended) < count:
        tier.wait(1.0)
        ended += tier.finished()
    return [one.ok for one in ended]


def finish(device: torch.device) -> None:
    """Wait for all queued work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def difference(got: torch.Tensor, expected: torch.Tensor) -> str:
    """Return which blocks differ, and how; empty: none."""
    words = (got != expected).sum(1)
    blocks = words.nonzero().flatten().tolist()
    if not blocks:
        return ""
    overwritten = int((got[blocks] == OVERWRITTEN).all(1).sum())
    num_bytes = int(words.sum()) * got.element_size()
    return (
        f"{len(blocks)} of {len(got)} blocks ({blocks[0]} to {blocks[-1]}), {num_bytes:,} bytes; "
        f"{overwritten} of them were not written or were overwritten"
    )


def busy(device: torch.device) -> None:
    """Queue some tens of milliseconds of work, as a step does."""
    if device.type == "cuda":
        some = torch.randn(8192, 8192, device=device, dtype=BF16)
        for _ in range(20):
            some = (some @ some).clamp(-1, 1)


def check_blocks(device: torch.device, span: int, sizes: tuple[int, ...]) -> str:
    count = 192  # pieces
    first, rest = count * span, 8
    pool = Pool(device, 2 * first + rest, sizes)
    tier = HostTier(pool.blocks, span, count * span * sum(sizes))
    tables = [[1 + n * span + k for k in range(span)] for n in range(count)]
    expected = [pool.read(group, range_of(1, first)) for group in range(len(sizes))]
    busy(device)
    for slot, table in enumerate(tables):
        store = Store(bytes([slot]), b"", [table] * len(sizes))
        store.slot = slot
        tier.store(store)
    assert all(wait_for(tier, count)), "a store failed"
    pool.overwrite(1)
    # Backwards, to blocks behind those that were stored.
    loads = [
        Load(bytes([slot]), slot, b"", tuple(targets(len(sizes), span, slot, first)))
        for slot in reversed(range(count))
    ]
    busy(device)
    read = tier.fetch(loads)
    while not read.poll():
        tier.wait(1.0)
    for group in range(len(sizes)):
        if differs := difference(pool.read(group, range_of(1 + first, first)), expected[group]):
            finish(device)
            later = difference(pool.read(group, range_of(1 + first, first)), expected[group])
            raise AssertionError(f"group {group}: {differs}; later: {later or 'none'}")
        others = pool.data[group][1 : 1 + first]
        assert bool((others == OVERWRITTEN).all()), "another block was written"
        assert not pool.data[group][0].any(), "the null block was written"
    tier.close(1.0)
    return f"{count} pieces of {span * sum(sizes):,} bytes"


def range_of(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def targets(groups: int, span: int, slot: int, first: int) -> Iterator[tuple[int, int, int]]:
    for group in range(groups):
        for place in range(span):
            yield group, place, 1 + first + slot * span + place


def check_given_up(device: torch.device, size: int) -> str:
    """A fetch that is abandoned, and a store that is cancelled, while others are under way."""
    count = 128
    pool = Pool(device, 2 * count + 1, (size,))
    tier = HostTier(pool.blocks, 1, (count + 1) * size)
    stores = [Store(bytes([n]), b"", [[1 + n]]) for n in range(count)]
    for slot, store in enumerate(stores):
        store.slot = slot
        tier.store(store)
    stores[-1].cancel()
    pool.data[0][count] = 7  # the pool gives the block to a request
    given_up = tier.fetch([Load(b"", n, b"", ((0, 0, 1 + count + n),)) for n in range(count)])
    given_up.abandon()
    pool.overwrite(1 + count)
    wait_for(tier, count)
    last = tier.fetch([Load(b"", 0, b"", ((0, 0, 1 + count),))])  # after the one that was given up
    while not last.poll():
        tier.wait(1.0)
    assert torch.equal(pool.data[0][1 + count], pool.data[0][1])
    assert bool((pool.data[0][2 + count :] == OVERWRITTEN).all()), "an abandoned fetch has written"
    assert not given_up.poll()
    tier.close(1.0)
    return "nothing was written afterwards"


# ── models ──────────────────────────────────────────────────────────────────────────────────


def opener(place: str, folder: Path, num_bytes: int = 64 << 20) -> OpenTiers:
    """Return how to open tiers. `num_bytes`: of host memory."""

    def open_tiers(blocks: TierBlocks, limits: SchedulerConfig, spec: ModelSpec) -> Tiers:
        size, windows = limits.block_size, [group.window for group in limits.groups]
        span = piece_span(blocks.block_bytes, size, windows)
        tiers: list[Tier] = []
        if "host" in place:
            tiers.append(host_tier(blocks, span, num_bytes))
        if "disk" in place:
            layout = PieceLayout(identity_of("check"), 4 * span * size, blocks.block_bytes, span)
            tiers.append(DiskTier(DiskFolder(str(folder), layout, 1 << 30), blocks))
        return Tiers(tiers, size, span)

    return open_tiers


@cache
def decoder_of(name: str, dtype: torch.dtype, device: torch.device) -> Decoder:
    spec, on_gpu = SPECS[name](), device.type == "cuda"
    how = (dtype, device, 1024, kernels_of(device) if on_gpu else Kernels())
    return Decoder(spec, Loud(spec), *how, dependent_launch=on_gpu)


def one_by_one(core: EngineCore) -> list[Written]:
    """One prompt at a time, so that what is computed together is the same in every run."""
    return [run(core, [prompt], OUTPUT)[0] for prompt in PROMPTS]


def wait_for_stores(core: EngineCore) -> None:
    tiers = core.scheduler.kv.tiers
    assert tiers is not None
    while tiers.is_storing:
        tiers.wait(1.0)
        tiers.take_finished()
    core.scheduler.audit()


def fetched(core: EngineCore) -> int:
    return sum(record.num_fetched for record in core.records.requests)


def places_of(core: EngineCore) -> set[str]:
    records = [record.tier_fetch for record in core.records.requests]
    return {one.tiers for one in records if one is not None and one.outcome == "fetched"}


def assert_equal(stayed: list[Written], came_back: list[Written]) -> None:
    for number, (one, other) in enumerate(zip(stayed, came_back, strict=True)):
        label = f"prompt {number}"
        assert one.num_cached == other.num_cached, f"{label}: {one.num_cached} {other.num_cached}"
        assert one.tokens == other.tokens, f"{label}: {one.tokens} {other.tokens}"
        assert one.logprobs == other.logprobs, f"{label}: a log-probability differs"


def assert_near(computed: list[Written], stayed: list[Written], moves: float) -> float:
    """Return how far the log-probabilities moved, up to the first step in which tokens differ. The
    two best tokens of such a step must be close to each other."""
    moved = 0.0
    for number, (one, other) in enumerate(zip(computed, stayed, strict=True)):
        for step, (token, its) in enumerate(zip(one.tokens, other.tokens, strict=True)):
            if token != its:
                assert one.gap(step) < 2 * moves, f"prompt {number} differs at step {step}"
                break
            pair = (each.logprobs[step].logprobs[0] for each in (one, other))
            moved = max(moved, abs(next(pair) - next(pair)))
    assert moved < moves, f"a log-probability moved by {moved}"
    return moved


def end(core: EngineCore) -> None:
    wait_for_stores(core)
    assert core.scheduler.kv.is_idle()
    core.close()


def check_model(
    name: str, dtype: torch.dtype, kind: torch.dtype, place: str, device: torch.device, where: Path
) -> str:
    decoder = decoder_of(name, dtype, device)
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 256}
    make = partial(core_of, decoder, True, kind, prefix_caching=True, **settings)
    num_bytes = 64 << 20
    core = make(open_tiers=opener(place, where))
    if place == "host over disk":  # the host has the newest third, the disk has all
        core.close()
        tiers = core.scheduler.kv.tiers
        assert tiers is not None
        num_bytes = tiers.tiers[0].piece_bytes * max(2, 12 // tiers.span)
        core = make(open_tiers=opener(place, where, num_bytes))
    computed = one_by_one(core)
    stayed = one_by_one(core)
    assert fetched(core) == 0
    wait_for_stores(core)
    if place == "disk":
        end(core)
        core = make(open_tiers=opener(place, where))
    else:
        core.scheduler.kv.reset_prefixes()  # of the pool alone
    came_back = one_by_one(core)
    count, places = fetched(core), places_of(core)
    assert count >= 300, f"{count} tokens were fetched"
    if place == "host over disk":
        assert any("disk" in one for one in places), f"fetched from {places}"
        assert any("host" in one for one in places), f"fetched from {places}"
    assert_equal(stayed, came_back)
    moved = assert_near(computed, came_back, MOVES[dtype])
    end(core)
    return f"{count} tokens from {', '.join(sorted(places))}, moved by {moved:.1e}"


def check_small_pool(place: str, device: torch.device, where: Path) -> str:
    """Prompts that evict and preempt each other, several rounds, all at once."""
    decoder = decoder_of("heads", FP32, device)
    prompts = [[(3 * n * n + k) % 512 for n in range(90)] for k in range(6)]
    alone = core_of(decoder, True)
    expected = [run(alone, [prompt], 60)[0] for prompt in prompts]
    settings: dict[str, Any] = {"num_blocks": 24, "lookahead": 0, "prefix_caching": True}
    core = core_of(decoder, True, open_tiers=opener(place, where), **settings)
    preempted = 0
    for _ in range(4):
        got = run(core, prompts, 60)
        assert_same(expected, got)
        preempted += sum(one.num_preempted for one in got)
    assert preempted > 0
    assert fetched(core) > 0
    end(core)
    return f"{preempted} preempted, {fetched(core)} tokens fetched"


def check_damage(device: torch.device, where: Path) -> str:
    """A file that is damaged and one that is gone are computed again."""
    decoder = decoder_of("heads", FP32, device)
    make = partial(
        core_of, decoder, True, prefix_caching=True, open_tiers=opener("disk", where / "kv")
    )
    core = make()
    expected = one_by_one(core)
    end(core)
    files = sorted((where / "kv").glob("*/*.kv"))
    core = make()
    data = bytearray(files[0].read_bytes())
    data[len(data) // 2] ^= 1
    files[0].write_bytes(data)
    files[-1].unlink()
    assert_same(expected, one_by_one(core))
    assert not files[0].exists() or files[0].read_bytes() != bytes(data), "a damaged file stays"
    tiers = core.scheduler.kv.tiers
    assert tiers is not None
    (status,) = tiers.status()
    assert status.failed_fetches >= 1, "no fetch has failed"
    end(core)
    return f"{status.failed_fetches} fetches failed, {status.fetches} in all"


def checks(device: torch.device, where: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    large = 2 << 20 if device.type == "cuda" else 1 << 14
    yield "blocks of an 8B", partial(check_blocks, device, 1, (large,))
    yield "pieces of two groups", partial(check_blocks, device, 3, (large // 8, large // 64 + 8))
    yield "given up", partial(check_given_up, device, large)
    for number, (name, dtype, kind) in enumerate(CASES):
        for place in PLACES:
            label = f"{name}, {short(dtype)}, cache {short(kind)}, {place}"
            folder = where / f"{number} {place}"
            yield label, partial(check_model, name, dtype, kind, place, device, folder)
    for place in ("host", "disk"):
        work = partial(check_small_pool, place, device, where / f"small {place}")
        yield f"a small pool, {place}", work
    yield "a damaged and a vanished file", partial(check_damage, device, where / "damage")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit-s", type=float, default=240.0)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit_s, exit=True)
    begun, passed, failed = perf_counter(), dict[str, float](), dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        for label, work in checks(torch.device(args.device), Path(folder)):
            start = perf_counter()
            try:
                found = work()
                passed[label] = round(perf_counter() - start, 2)
                print(f"equal: {label}: {found}, {passed[label]:.2f} s", flush=True)
            except Exception as error:
                failed[label] = f"{type(error).__name__}: {error}"[:500]
                print(f"DIFFERENT: {label}: {failed[label]}", flush=True)
    if out := os.environ.get("OUT"):
        took = round(perf_counter() - begun, 1)
        told = {"check": "tiers", "seconds": took, "passed": passed, "failed": failed}
        (Path(out) / "tiers.json").write_text(json.dumps(told) + "\n")
    return tally(len(passed), len(failed))


if __name__ == "__main__":
    raise SystemExit(main())
