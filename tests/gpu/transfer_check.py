"""KV blocks between processes on one GPU: CUDA IPC, and sockets; then whole engines.

    python -m tests.gpu.transfer_check [--limit-s 150] [--device cuda]

First blocks alone: bit by bit as they were sent, by every way, and how fast against the copy
ceiling; the sender killed, and its memory free again. Then one prefill and one decode engine with a
tiny model in fp32: the tokens of one engine alone, greedy and seeded, the prefill engine killed in
between; the memory that each takes. A line a check, the last one says how many; times go to
`$OUT/transfer.json`. On a CPU (`--device cpu`) the same, with torch's reference kernels.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch

from bench.gpu_pools import end_children_with_stacks
from tests.gpu.report import tally
from tests.specs import make_spec
from tests.tiny import tiny_folder
from twostroke import SamplingParams
from twostroke.config import EngineConfig
from twostroke.kv.device_memory import DeviceMemory, staged_copy
from twostroke.kv.pool import KVPool
from twostroke.kv.transfer import Address, KVTransfer, Offer, SenderGoneError
from twostroke.kv.ways import Sharing
from twostroke.model.describe.spec import ModelSpec
from twostroke.outputs import RequestOutput
from twostroke.route.pool_settings import PoolSettings
from twostroke.route.routed_engine import RoutedEngine

# Seconds that a part may take before its processes are ended, and one that has parts.
PART_S, ALL_S = 40.0, 120.0
BLOCKS, SENT = 2048, 1024  # of a pool, and of one fetch
LENGTH = 1024  # of the engines' model
WAYS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, seed=7, top_k=40, max_tokens=40, ignore_eos=True),
}


class Check:
    def __init__(self, device: str, limit_s: float) -> None:
        self.device, self._began, self._until = device, monotonic(), monotonic() + limit_s
        self.passed = self.failed = 0
        self.times: dict[str, Any] = {}

    def __call__(self, name: str, work: Callable[[], object], limit_s: float = PART_S) -> None:
        said: object = "no time left"
        begun = monotonic()
        stacks = threading.Timer(limit_s, self.give_up)
        stacks.daemon = True
        stacks.start()
        try:
            if begun < self._until:
                said = work()
                self.passed += 1
                self._tell("passed", name, said or "right", begun)
                return
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            stacks.cancel()
        self.failed += 1
        self._tell("FAILED", name, str(said)[:1500], begun)

    def _tell(self, outcome: str, name: str, said: object, begun: float) -> None:
        now = monotonic()
        print(f"{outcome} [{now - self._began:5.1f} s] {name}: {said} ({now - begun:.1f} s)")
        sys.stdout.flush()

    def give_up(self) -> None:
        """A part has taken too long: where it stands, on stderr; its processes are ended."""
        faulthandler.dump_traceback(all_threads=True)
        end_children_with_stacks()

    @property
    def left_s(self) -> float:
        return max(1.0, self._until - monotonic())


# ── blocks ──────────────────────────────────────────────────────────────────────────────────


def block_spec(on_gpu: bool) -> ModelSpec:
    """On a GPU, blocks of 2 MiB, as an 8B model has them."""
    if not on_gpu:
        return make_spec(windows=(8, None, None))
    heads = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 1024}
    return make_spec(**heads, windows=(None,) * 32)


def noise(pool: KVPool) -> None:
    """The same in every process."""
    for group, data in enumerate(pool.groups):
        words = data.view(torch.int16)
        rows = torch.arange(len(words), device=words.device).view(-1, *[1] * (words.dim() - 1))
        inner = torch.arange(words[0].numel(), device=words.device).view(words[0].shape)
        for start in range(0, len(words), 64):
            some = rows[start : start + 64] * 31 + inner * 7 + group
            words[start : start + 64] = (some % 65521 - 32768).to(torch.int16)


def sender_pool(device: str) -> KVPool:
    spec, place = block_spec(device == "cuda"), torch.device(device)
    count = len(spec.kv_groups())
    pool = KVPool(spec, [BLOCKS] * count, 16, torch.bfloat16, place, shared=True)
    noise(pool)
    return pool


SENDER = """
import sys, torch
from tests.gpu.transfer_check import SENT, BLOCKS, sender_pool
from twostroke.kv.ways import Sharing
device, transport = sys.argv[1:]
pool = sender_pool(device)
if device == "cuda":
    torch.cuda.synchronize()
transfer = pool.transfer(Sharing("checked" if transport == "sockets" else "shared", transport))
count = SENT if transport == "device" else 64
tables = [[1 + (7 * n) % BLOCKS for n in range(count)] for _ in pool.groups]
for _ in range(3):
    print(repr(tuple(transfer.offer(tables, 16 * count))), flush=True)
sys.stdin.read()
"""


class Sender:
    """Another process, whose pool is full of noise."""

    def __init__(self, device: str, transport: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SENDER, device, transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def offer(self) -> Offer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return Offer(*eval(line, {"Address": Address}))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def fetch(transfer: KVTransfer, offer: Offer, places: list[list[tuple[int, int]]]) -> float:
    """Seconds."""
    fetching = transfer.fetch(offer, places)
    begun, until = monotonic(), monotonic() + 60
    while not fetching.advance():
        if monotonic() > until:
            raise AssertionError("it does not end")
    return monotonic() - begun


def check_blocks(check: Check, transport: str, sender: Sender) -> None:
    device = check.device
    try:
        spec = block_spec(device == "cuda")
        groups = range(len(spec.kv_groups()))
        expected = sender_pool(device)
        own = KVPool(spec, [BLOCKS] * len(groups), 16, torch.bfloat16, torch.device(device))
        transfer = own.transfer(Sharing(transport=transport, timeout_s=30))
        transfer.warm()
        count = SENT if transport == "device" else 64
        places = [[(n, BLOCKS - n) for n in range(count)] for _ in groups]
        offer = sender.offer()

        def arrive() -> str:
            first = fetch(transfer, offer, places)
            for group in groups:
                table = offer.tables[group]
                sources = torch.tensor([table[entry] for entry, _ in places[group]])
                targets = torch.tensor([target for _, target in places[group]])
                sent = expected.groups[group][sources.to(device)].view(torch.int16)
                got = own.groups[group][targets.to(device)].view(torch.int16)
                assert torch.equal(sent, got), f"group {group} differs"
                rest = own.groups[group][: BLOCKS - count + 1].view(torch.int16)
                assert not rest.any(), "another block was written"
            seconds = min(fetch(transfer, offer, places) for _ in range(5))
            moved = sum(len(one) * size for one, size in zip(places, offer.block_bytes))  # noqa: B905
            rate = moved / seconds
            check.times[f"{transport}_bytes_per_s"] = rate
            check.times[f"{transport}_first_s"] = first
            return f"bit by bit; {moved / 1e6:,.0f} MB, {rate / 1e9:,.1f} GB/s, first {first:.3f} s"

        check(f"blocks by {transport}", arrive)
        if transport == "device":
            check("a killed sender's memory is let go", lambda: killed(sender, transfer, device))
        transfer.close()
    finally:
        sender.kill()


def killed(sender: Sender, transfer: KVTransfer, device: str) -> str:
    offer = sender.offer()
    places = [[(0, 1)] for _ in offer.tables]
    fetch(transfer, offer, places)
    before = free_bytes(device)
    sender.kill()
    try:
        fetch(transfer, offer, places)
    except SenderGoneError:
        pass
    else:
        raise AssertionError("fetched from a process that has ended")
    transfer.tidy()
    (way,) = transfer._ways
    assert isinstance(way, DeviceMemory)
    assert not way._opened
    gc.collect()
    freed, until = 0, monotonic() + 20
    pool_bytes = sum((BLOCKS + 1) * size for size in offer.block_bytes)
    while device == "cuda" and freed < pool_bytes and monotonic() < until:
        sleep(0.1)
        freed = free_bytes(device) - before
    assert device != "cuda" or freed >= pool_bytes, f"{freed:,} of {pool_bytes:,} bytes are free"
    return f"{freed / 1e9:.1f} GB are free again"


def free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def check_kernel(check: Check) -> None:
    """The copy alone, in one process: the ceiling, and what the kernel reaches of it."""
    from twostroke.kernels.cuda.copy_blocks import copy_blocks

    pool = torch.randint(-(2**60), 2**60, (1024, 1 << 18), device="cuda")  # 2 MiB a block
    target = torch.zeros_like(pool)
    pairs = torch.tensor([[n, (5 * n + 3) % 1024] for n in range(1024)], device="cuda")

    def time(call: Callable[[], object]) -> float:
        best = 1e9
        for _ in range(6):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
        return pool.numel() * 8 / best

    def right() -> str:
        copy_blocks(pool, target, pairs)
        assert torch.equal(target[pairs[:, 1]], pool[pairs[:, 0]])
        odd, into = pool.view(-1)[: 9 * 5001].view(9, 5001), torch.zeros(9, 5001).long().cuda()
        copy_blocks(odd, into, torch.tensor([[8, 0], [0, 4]], device="cuda"))
        assert torch.equal(into[[0, 4]], odd[[8, 0]])
        assert not into[[1, 2, 3, 5, 6, 7, 8]].any()
        ceiling = time(lambda: target.copy_(pool))
        kernel = time(lambda: copy_blocks(pool, target, pairs))
        staged = time(lambda: staged_copy(pool, target, pairs))
        check.times["copy_ceiling_bytes_per_s"] = ceiling
        check.times["copy_kernel_bytes_per_s"] = kernel
        check.times["copy_staged_bytes_per_s"] = staged
        return (
            f"{kernel / 1e9:,.0f} GB/s of {ceiling / 1e9:,.0f} (copy_ of one piece), without the "
            f"kernel {staged / 1e9:,.0f}"
        )

    check("the copy kernel", right)


# ── engines ─────────────────────────────────────────────────────────────────────────────────


async def last(engine: RoutedEngine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    return [output async for output in engine.generate(prompt, params)][-1]


def check_engines(check: Check, folder: Path) -> None:
    kernels = "auto" if check.device == "cuda" else "reference"
    common: dict[str, Any] = {"dtype": "float32", "device": check.device, "kernels": kernels}
    common |= {"max_num_seqs": 16, "max_model_len": LENGTH}
    # Few graphs: two engines start one after another, and one again.
    common |= {"max_num_batched_tokens": 256, "cudagraph_capture_sizes": (1, 4, 16)}
    prompts = [[50 + (11 * n + k) % 200 for k in range(20 + 7 * n)] for n in range(20)]
    # Of several chunks: their blocks are fetched while the rest is computed.
    prompts += [[50 + (n + 7 * k * k) % 200 for k in range(900 + n)] for n in range(4)]
    expected: dict[str, list[RequestOutput]] = {}
    whole = 0
    if check.device == "cuda":
        torch.cuda.empty_cache()
        whole = torch.cuda.mem_get_info()[1]
    config = EngineConfig(model=str(folder), gpu_memory_utilization=0.1, **common)
    settings = PoolSettings(prefill_engines=1, decode_engines=1, kv_transfer_checksums=True)
    with asyncio.Runner() as runner:
        engines: list[RoutedEngine] = []

        def start() -> str:
            begun = monotonic()
            engine = runner.run(RoutedEngine.start(settings.engines(config), restart_limit=3))
            engine._router._place_directly = lambda *_: None  # type: ignore[method-assign]
            engines.append(engine)
            kv_bytes = {member.name: member.info.kv_bytes for member in engine.members}
            if whole:
                for name, size in kv_bytes.items():
                    share = size / whole
                    assert 0.03 < share < 0.05, f"{name} has {share:.3f} of the memory"
            check.times["engines_ready_s"] = monotonic() - begun
            shares = {name: f"{size / 1e9:.1f} GB" for name, size in kv_bytes.items()}
            return f"{shares} of KV, in {monotonic() - begun:.0f} s"

        check("two engines on one device, each with its share of the memory", start, ALL_S)
        if not engines:
            return
        (engine,) = engines

        def run(test: Callable[[], Coroutine[Any, Any, str]]) -> str:
            return runner.run(asyncio.wait_for(test(), check.left_s))

        async def alone() -> str:
            """The decode engine does it all: what the others must be equal to."""
            router, decode = engine._router, engine.members[1].state
            place = router.place

            def at_decode(*what: Any, **more: Any) -> Any:
                placement = place(*what, **more)
                assert placement is not None
                return placement._replace(engine=decode, hand_over=False)

            router.place = at_decode  # type: ignore[method-assign]
            try:
                for way, params in WAYS.items():
                    asked = [last(engine, prompt, params) for prompt in prompts]
                    expected[way] = await asyncio.gather(*asked)
            finally:
                del router.place  # type: ignore[method-assign]
            firsts = {tuple(one.outputs[0].token_ids) for one in expected["greedy"]}
            return f"{len(firsts)} different answers"

        async def same(way: str) -> str:
            engine.reset_prefix_cache()
            asked = [last(engine, prompt, WAYS[way]) for prompt in prompts]
            outputs = await asyncio.gather(*asked)
            pairs = list(zip(outputs, expected[way], strict=True))
            wrong = [
                n
                for n, (output, right) in enumerate(pairs)
                if output.outputs[0].token_ids != right.outputs[0].token_ids
            ]
            assert not wrong, f"{len(wrong)} of {len(prompts)} differ: {wrong}"
            routes = [output.records[0].route for output in outputs]
            handed = sum("MB fetched in" in route for route in routes)
            assert handed == len(prompts), routes[0]
            assert await engine.drain(30)
            await engine.audit()
            ahead = sum("while it was prefilled" in route for route in routes)
            return f"{len(prompts)} requests, {ahead} sent ahead in part; {routes[-1]}"

        async def with_a_death() -> str:
            engine.reset_prefix_cache()
            tasks = [asyncio.create_task(last(engine, one, WAYS["greedy"])) for one in prompts]
            await asyncio.sleep(0.02)
            os.kill(engine.members[0].pid, signal.SIGKILL)
            outputs = await asyncio.gather(*tasks)
            for output, right in zip(outputs, expected["greedy"], strict=True):
                assert output.outputs[0].token_ids == right.outputs[0].token_ids
            begun = monotonic()
            while not engine.members[0].healthy and not engine.members[0].given_up:
                await asyncio.sleep(0.05)
            assert engine.members[0].healthy, "it could not be started again"
            again = monotonic() - begun
            engine.reset_prefix_cache()
            route = (await last(engine, prompts[3], WAYS["greedy"])).records[0].route
            assert "MB fetched in" in route, route
            await engine.audit()
            return f"up again after {again:.1f} s, with its memory; {route}"

        check("not handed over", lambda: run(alone))
        for way in WAYS:
            check(f"handed over, {way}", lambda way=way: run(lambda: same(way)))
        check("the prefill engine killed", lambda: run(with_a_death))
        runner.run(engine.close())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit-s", type=float, default=150.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    os.environ["PYTHONFAULTHANDLER"] = "1"
    check = Check(args.device, args.limit_s)
    senders = {transport: Sender(args.device, transport) for transport in ("device", "sockets")}
    if args.device == "cuda":
        check_kernel(check)
    # Ready before anything is measured: free memory, and rates.
    check("senders", lambda: f"{len([one.offer() for one in senders.values()])} are ready", ALL_S)
    for transport, sender in senders.items():

        def blocks(transport: str = transport, sender: Sender = sender) -> None:
            check_blocks(check, transport, sender)

        check(f"processes, {transport}", blocks, ALL_S)
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as name:
        wider = {"hidden_size": 128, "intermediate_size": 256}  # heads of 32 channels
        wider["max_position_embeddings"] = LENGTH
        folder = tiny_folder(Path(name) / "tiny", **wider)
        check("engines", lambda: check_engines(check, folder), ALL_S)
    result = {"check": "transfer", "passed": check.passed, "failed": check.failed} | check.times
    if out := os.environ.get("OUT"):
        (Path(out) / "transfer.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return tally(check.passed, check.failed)


if __name__ == "__main__":
    sys.exit(main())
