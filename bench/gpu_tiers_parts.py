"""The parts of `gpu_tiers.py`, each in a process of its own.

    python -m bench.gpu_tiers_parts link|host|disk [--shape llama-3.1-8b] [--device cpu] [--quick]

Prints `RESULT {name: figures}` as soon as figures are known.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu_workloads import SHAPES, Prompts
from bench.tiers import leave_the_cache, pieces, plain_reads
from twostroke import LLM, SamplingParams
from twostroke.config import GIB, EngineConfig
from twostroke.engine import build_torch
from twostroke.engine.open_tiers import tiers_of
from twostroke.engine.remote import RemoteEngine
from twostroke.exec.memory import available_memory_bytes, host_memory_bytes
from twostroke.kv.device_memory import DeviceBlocks
from twostroke.kv.pinned_memory import PinnedMemory
from twostroke.kv.tiers import disk
from twostroke.kv.tiers.disk import DiskFolder, DiskTier
from twostroke.kv.tiers.host import HostTier
from twostroke.kv.tiers.piece_file import PieceLayout, identity_of
from twostroke.kv.tiers.tier import Load, Store, Tier
from twostroke.observe.record import RequestRecord
from twostroke.request import EngineRequest

MIB = 1 << 20
BLOCK_BYTES = (2 * MIB, MIB, MIB // 4)  # the first are those of an 8B in bf16
GROWTH_S = 40.0  # that the machine may take to give us its memory
WRITES_S = 45.0  # that a disk may take for a conversation


def tell(name: str, figures: Any) -> None:
    print("RESULT " + json.dumps({name: figures}), flush=True)


def each(name: str, work: Callable[[], Any]) -> None:
    """Run one measurement; if it fails the others follow."""
    try:
        tell(name, work())
    except Exception as error:
        traceback.print_exc()
        tell(name, {"error": f"{type(error).__name__}: {error}"[:800]})


class Sizes:
    def __init__(self, device: str, quick: bool) -> None:
        self.device, self.quick = torch.device(device), quick
        self.copied = 64 * MIB if quick else 2 * GIB
        self.conversation, self.count = (500, 6) if quick else (16_000, 24)
        self.pool_bytes = 2 * MIB if quick else 16 * GIB
        self.host_bytes = 80 * MIB if quick else int(49.5 * GIB)
        self.long = 800 if quick else 32_000
        self.rounds = 2 if quick else 12
        self.prompts, self.prompt, self.written = (2, 200, 8) if quick else (8, 4096, 64)


# ── the link ────────────────────────────────────────────────────────────────────────────────


def link(sizes: Sizes) -> None:
    device, total = sizes.device, sizes.copied
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    memory_bytes = {"host": host_memory_bytes(), "available": available_memory_bytes()}
    tell("machine", {"device": name, "torch": torch.__version__, "cpus": os.cpu_count()})
    tell("memory", memory_bytes)
    start = perf_counter()
    memory = PinnedMemory(total, device)
    tell("pin", {"bytes": total, "seconds": perf_counter() - start})
    there = torch.zeros(total, dtype=torch.uint8, device=device)
    each("copies", lambda: copies(memory.data, there))
    memory.close()
    for size in BLOCK_BYTES:
        each(f"tier_{size}", partial(tier_alone, there, size))


def seconds_of(device: torch.device, work: Callable[[], object], times: int = 5) -> float:
    """The median of several, after one that does not count."""
    taken = []
    for _ in range(times + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(perf_counter() - start)
    return statistics.median(taken[1:])


def copies(here: torch.Tensor, there: torch.Tensor) -> dict[str, Any]:
    device, found = there.device, dict[str, Any]()
    for size in (len(here), *BLOCK_BYTES):
        parts = (torch.split(memory, size) for memory in (here, there))
        pairs = list(zip(*parts, strict=True))

        def to_device(pairs: list[tuple[torch.Tensor, torch.Tensor]] = pairs) -> None:
            for one, other in pairs:
                other.copy_(one, non_blocking=True)

        def to_host(pairs: list[tuple[torch.Tensor, torch.Tensor]] = pairs) -> None:
            for one, other in pairs:
                one.copy_(other, non_blocking=True)

        label = "whole" if size == len(here) else str(size)
        found[f"to_device_{label}"] = len(here) / seconds_of(device, to_device)
        found[f"to_host_{label}"] = len(here) / seconds_of(device, to_host)
    return found


def tier_alone(memory: torch.Tensor, size: int) -> dict[str, float]:
    """Bytes a second of the host tier without an engine, one block a piece."""
    data = memory.view(-1, size)
    count = len(data) - 1
    blocks = DeviceBlocks([data], 16)
    start = perf_counter()
    tier = HostTier(blocks, 1, count * size)
    opened_s = perf_counter() - start
    stores = []
    for _ in range(3):
        start = perf_counter()
        store_all(tier, count)
        stores.append(perf_counter() - start)
    fetches = [fetch_all(tier, count) for _ in range(3)]
    probed = tier.speed.bytes_per_s
    tier.close(1.0)
    return {
        "opened_s": opened_s,
        "stored_per_s": count * size / statistics.median(stores),
        "fetched_per_s": count * size / statistics.median(fetches),
        "probed_per_s": probed,
    }


def name_of(number: int) -> bytes:
    return number.to_bytes(4, "little")


def store_all(tier: Tier, count: int) -> None:
    for n in range(count):
        store = Store(tier.name_of(name_of(n)), name_of(n), [[1 + n]])
        store.slot = n
        tier.store(store)
    ended = tier.finished()
    while len(ended) < count:
        tier.wait(1.0)
        ended += tier.finished()
    assert all(one.ok for one in ended), "a store failed"


def fetch_all(tier: Tier, count: int) -> float:
    loads = [Load(tier.name_of(name_of(n)), n, name_of(n), ((0, 0, 1 + n),)) for n in range(count)]
    start = perf_counter()
    read = tier.fetch(loads)
    while not read.poll():
        tier.wait(1.0)
    return perf_counter() - start


# ── host memory ─────────────────────────────────────────────────────────────────────────────


def settings(shape: str, sizes: Sizes, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "load_format": "dummy",
        "device": sizes.device.type,
        "max_num_seqs": 64,
        "max_model_len": sizes.conversation + 600,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": sizes.pool_bytes,
    }
    if sizes.device.type == "cpu":
        given |= {"kernels": "reference", "dtype": "float32"}
    return given | more


def grown_memory(wanted: int) -> dict[str, float]:
    """Some virtual machines get their memory as they use it: use it once, a part at a time."""
    before, start = available_memory_bytes(), monotonic()
    while available_memory_bytes() < wanted and monotonic() - start < GROWTH_S:
        parts: list[torch.Tensor] = []
        with contextlib.suppress(RuntimeError, MemoryError):
            while available_memory_bytes() > 3 * GIB and len(parts) * GIB < wanted:
                parts.append(torch.ones(GIB, dtype=torch.uint8))
        sleep(0.2)
        del parts
    return {"before": before, "available": available_memory_bytes(), "s": monotonic() - start}


def host(shape: str, sizes: Sizes) -> None:
    spare = GIB if sizes.quick else 8 * GIB
    tell("memory", grown_memory(sizes.host_bytes + spare))
    host_bytes = min(sizes.host_bytes, available_memory_bytes() - spare)
    start = perf_counter()
    llm = LLM(shape, **settings(shape, sizes, kv_offloading_size=host_bytes / GIB))
    tell("start", {"ready_s": perf_counter() - start, "host_bytes": host_bytes})
    bench = HostBench(llm, sizes)
    each("returns", bench.returns)
    each("overlap", bench.overlap)
    each("cost", lambda: bench.cost(shape))
    tell("audit", audit(llm))


def audit(llm: LLM) -> str:
    llm.engine.core.scheduler.audit()
    return "clean"


class HostBench:
    def __init__(self, llm: LLM, sizes: Sizes) -> None:
        self.llm, self.sizes, self.prompt = llm, sizes, Prompts()
        self.core = llm.engine.core
        self.conversations = [self.prompt(sizes.conversation) for _ in range(sizes.count)]
        for _ in range(3):  # the first prompts choose the libraries' kernels
            self.ask(self.prompt(sizes.conversation))

    def ask(self, prompt: list[int]) -> tuple[RequestRecord, list[int]]:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8, detokenize=False)
        (output,) = self.llm.generate([prompt], params, use_tqdm=False)
        self.rest()
        return output.records[0], list(output.outputs[0].token_ids)

    def rest(self) -> None:
        """Wait for the copies under way."""
        wait_for_stores(self.llm)

    def returns(self) -> dict[str, Any]:
        tiers = self.core.scheduler.kv.tiers
        assert tiers is not None
        computed, answers = [], []
        for prompt in self.conversations:
            record, tokens = self.ask(prompt)
            computed.append(record.ttft_s)
            answers.append(tokens)
        before = tiers.status()[0]
        records, same = [], 0
        for prompt, answer in zip(self.conversations, answers, strict=True):
            record, tokens = self.ask(prompt)
            records.append(record)
            same += tokens == answer
        after = tiers.status()[0]
        fetches = [one.tier_fetch for one in records if one.tier_fetch is not None]
        good = [one for one in fetches if one.outcome == "fetched"]
        rates = [one.num_bytes / one.seconds for one in good]
        fetched = [
            one.ttft_s
            for one in records
            if one.tier_fetch is not None and one.tier_fetch.outcome == "fetched"
        ]
        copied_s = after.fetch_s - before.fetch_s
        return {
            "tokens": self.sizes.conversation,
            "conversations": len(self.conversations),
            "pool_tokens": self.llm.kv_usage().reserved,
            "outcomes": {name: sum(one.outcome == name for one in fetches) for name in OUTCOMES},
            "problems": sorted({one.problem for one in fetches if one.problem}),
            "ttft_computed_ms": spread(computed),
            "ttft_fetched_ms": spread(fetched),
            "fetch_ms": spread([one.seconds for one in good]),
            "fetch_expected_ms": spread([one.fetch_expected_s for one in good]),
            "fetch_bytes": good[0].num_bytes if good else 0,
            "fetch_bytes_per_s": statistics.median(rates) if rates else 0,
            "copy_bytes_per_s": (after.fetched_bytes - before.fetched_bytes) / max(1e-9, copied_s),
            "store_bytes_per_s": after.stored_bytes / max(1e-9, after.store_s),
            "stores_dropped": after.dropped_stores,
            "stores_failed": after.failed_stores,
            "same_answers": same,
        }

    def overlap(self) -> dict[str, Any]:
        """Decode steps of streams, alone and while a conversation is fetched."""
        core, found = self.core, []
        streams = 2 if self.sizes.quick else 16
        for n in range(streams):
            core.add(request(f"s{n}", self.prompt(64), 400))
        for _ in range(30):
            core.step()
        for n in range(2):
            core.records.steps.clear()
            for _ in range(30):
                core.step()
            alone = [one for one in core.records.steps if not one.prefill.tokens]
            core.records.steps.clear()
            core.add(request(f"return{n}", self.conversations[n], 2))
            start = monotonic()
            record = None
            while record is None and monotonic() - start < 20:
                for update in core.step():
                    if update.request_id == f"return{n}" and update.record is not None:
                        record = update.record
            assert record is not None, "the conversation did not return"
            beside = [one for one in core.records.steps if not one.prefill.tokens]
            fetch = record.tier_fetch
            found.append(
                {
                    "streams": streams,
                    "alone_step_ms": spread([one.device_s for one in alone]),
                    "alone_host_gap_ms": spread([one.host_gap_s for one in alone]),
                    "beside_step_ms": spread([one.device_s for one in beside]),
                    "beside_host_gap_ms": spread([one.host_gap_s for one in beside]),
                    "beside_steps": len(beside),
                    "ttft_ms": 1e3 * (record.token_s[0] - start),
                    "fetch": None if fetch is None else fetch._asdict(),
                }
            )
        for name in list(core.scheduler._requests):
            core.abort(name)
        while core.has_work:
            core.step()
        self.rest()
        return {"rounds": found}

    def cost(self, shape: str) -> dict[str, Any]:
        """The arms take turns, and each round the other one begins."""
        sizes = self.sizes
        start = perf_counter()
        arms = {"without": LLM(shape, **settings(shape, sizes)), "with": self.llm}
        ready_s = perf_counter() - start
        params = SamplingParams(
            temperature=0.6, seed=1, ignore_eos=True, max_tokens=sizes.written, detokenize=False
        )
        times: dict[str, list[float]] = {name: [] for name in arms}
        found: dict[str, Any] = {"ready_s": ready_s}
        for n in range(sizes.rounds + 1):
            prompts = [self.prompt(sizes.prompt) for _ in range(sizes.prompts)]
            for name in list(arms)[:: 1 if n % 2 else -1]:
                start = perf_counter()
                arms[name].generate(prompts, params, use_tqdm=False)
                if n:
                    times[name].append(perf_counter() - start)
                wait_for_stores(arms[name])
            if n > 1:
                pairs = zip(times["with"], times["without"], strict=True)
                ratios = [one / other for one, other in pairs]
                quartiles = statistics.quantiles(ratios, n=4)
                found |= {
                    "rounds": n,
                    "prompts": [sizes.prompts, sizes.prompt, sizes.written],
                    "median_s": {arm: statistics.median(some) for arm, some in times.items()},
                    "least_s": {arm: min(some) for arm, some in times.items()},
                    "ratio_median": statistics.median(ratios),
                    "ratio_quartiles": [quartiles[0], quartiles[2]],
                }
                tell("cost", found)
        return found


OUTCOMES = ("fetched", "computed", "failed")


def wait_for_stores(llm: LLM) -> None:
    tiers = llm.engine.core.scheduler.kv.tiers
    while tiers is not None and tiers.is_storing:
        tiers.wait(0.1)
        tiers.take_finished()


def request(name: str, prompt: list[int], outputs: int) -> EngineRequest:
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=outputs)
    return EngineRequest(name, tuple(prompt), params, seed=1, received_s=monotonic())


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    if not seconds:
        return {}
    names = {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
    return {name: round(1e3 * value, 3) for name, value in names.items()}


# ── a disk ──────────────────────────────────────────────────────────────────────────────────


def disk_part(shape: str, sizes: Sizes, folder: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        tell("file_system", file_system(name))
        each("tier_alone", lambda: disk_alone(sizes, Path(name) / "alone"))
        each("conversation", lambda: asyncio.run(conversation(shape, sizes, Path(name) / "kv")))


def file_system(folder: str) -> str:
    """Return the device and the type of the file system of a folder."""
    found = max(
        (line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()),
        key=lambda mount: (
            len(mount[1]) if f"{folder}/".startswith(mount[1].rstrip("/") + "/") else -1
        ),
    )
    return f"{found[0]} {found[2]}"


def disk_alone(sizes: Sizes, path: Path) -> dict[str, Any]:
    """Bytes a second of the disk tier without an engine, by its number of reading threads, beside
    plain reads of the same files by as many threads."""
    size = BLOCK_BYTES[0]
    total = sizes.copied // 2
    data = torch.randint(255, (total,), dtype=torch.uint8, device=sizes.device).view(-1, size)
    count, found = len(data) - 1, dict[str, Any]()
    layout = PieceLayout(identity_of("bench"), 4, (size,), 1)
    before = disk.READERS
    try:
        for readers in (before, 1, 2, 2 * before, 4 * before):
            disk.READERS = readers  # of the tiers that are opened now
            tier = DiskTier(DiskFolder(str(path), layout, 4 * total), DeviceBlocks([data], 16))
            if not found:
                start = perf_counter()
                store_all(tier, count)
                found["written_per_s"] = count * size / (perf_counter() - start)
                found["direct"] = bool(tier.folder.direct)
            leave_the_cache(path)
            fetched = count * size / fetch_all(tier, count)
            tier.close(5.0)
            plain = plain_reads(path, pieces(path), readers)
            share = fetched / plain
            found[str(readers)] = {"fetched_per_s": fetched, "plain_per_s": plain, "share": share}
            tell("tier_alone", found)
    finally:
        disk.READERS = before
        for file in pieces(path):
            file.unlink()
    return found


async def conversation(shape: str, sizes: Sizes, path: Path) -> dict[str, Any]:
    given = settings(shape, sizes, kv_disk_cache=f"{path}:{2 if sizes.quick else 16}GiB")
    given |= {"max_model_len": sizes.long + 600, "skip_tokenizer_init": True}
    found: dict[str, Any] = {"tokens": sizes.long}
    prompt, other = Prompts(), list(range(100, 700))
    text = prompt(sizes.long)

    def note(**figures: Any) -> None:
        found.update(figures)
        tell("conversation", found)

    start = perf_counter()
    engine = await RemoteEngine.start(EngineConfig(model=shape, **given))
    async with engine:
        note(ready_s=perf_counter() - start)
        await ask(engine, other)
        await ask(engine, prompt(sizes.long))
        note(computed=await ask(engine, text))
        start, before = perf_counter(), len(pieces(path))
        await until_written(path)
        taken = perf_counter() - start
        note(files=len(pieces(path)), files_before=before, written_s=taken)
        note(stayed=await ask(engine, text))  # what a full queue has dropped is written now
        await until_written(path)
        note(all_files=len(pieces(path)))
        leave_the_cache(path)
        start = perf_counter()
        os.kill(engine.pid, signal.SIGKILL)
        dead = engine.pid
        while engine.pid == dead or not engine.healthy:
            await asyncio.sleep(0.01)
        note(restart_s=perf_counter() - start)
        note(after_kill=await ask(engine, text))
        bytes_read = (found["after_kill"]["fetch"] or {}).get("num_bytes", 0)
        names = pieces(path)[: max(1, bytes_read // pieces(path)[0].stat().st_size)]
        for readers in (disk.READERS, 4 * disk.READERS):
            rate = await asyncio.to_thread(plain_reads, path, names, readers)
            note(**{f"plain_{readers}_per_s": rate})
        if bytes_read:
            fetch = found["after_kill"]["fetch"]
            rate = fetch["num_bytes"] / fetch["seconds"]
            note(fetch_per_s=rate, share=rate / found[f"plain_{disk.READERS}_per_s"])
        leave_the_cache(path)
        start = perf_counter()
        await engine.sleep()
        note(sleep_s=perf_counter() - start)
        start = perf_counter()
        await engine.wake_up()
        note(wake_s=perf_counter() - start)
        note(after_wake=await ask(engine, text))
        await engine.audit()
        note(audit="clean")
    return found


async def ask(engine: RemoteEngine, prompt: list[int]) -> dict[str, Any]:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8, detokenize=False)
    start, first_s, last = monotonic(), 0.0, None
    async for output in engine.generate(prompt, params):
        first_s, last = first_s or monotonic() - start, output
    assert last is not None
    record = last.records[0]
    fetch = record.tier_fetch
    return {
        "ttft_ms": 1e3 * first_s,
        "cached": record.num_cached,
        "fetched": record.num_fetched,
        "fetch": None if fetch is None else fetch._asdict(),
        "tokens": list(last.outputs[0].token_ids),
    }


async def until_written(path: Path) -> None:
    """Until no file has come for a while."""
    count, since, end = -1, monotonic(), monotonic() + WRITES_S
    while monotonic() - since < 1.0 and monotonic() < end:
        await asyncio.sleep(0.1)
        if len(pieces(path)) != count:
            count, since = len(pieces(path)), monotonic()


# ── ─────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def tiers_on(device: str) -> Iterator[None]:
    """On a CPU, to try it out, the host tier too."""
    if device == "cpu":
        with patch.object(
            build_torch, "tiers_of", lambda config, model, on_gpu: tiers_of(config, model, True)
        ):
            yield
    else:
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("link", "host", "disk"))
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder")
    args = parser.parse_args()
    sizes = Sizes(args.device, args.quick)
    shape = args.shape if args.shape.endswith(".json") else f"{SHAPES}/{args.shape}.json"
    with tiers_on(args.device):
        if args.part == "link":
            link(sizes)
        elif args.part == "host":
            host(shape, sizes)
        else:
            disk_part(shape, sizes, args.folder)


if __name__ == "__main__":
    main()
