"""The parts of `gpu_tiers.py`, each in a process of its own.

    python -m bench.gpu_tiers_parts link|host|overlap|disk [--shape llama-3.1-8b] [--device cpu]
                                    [--quick]

Prints `RESULT {name: figures}` as soon as figures are known.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any
from unittest.mock import patch

from bench.gpu_tiers_alone import disk_alone, file_system, link
from bench.gpu_tiers_common import (
    Sizes,
    each,
    grown_memory,
    settings,
    spread,
    tell,
    wait_for_stores,
)
from bench.gpu_workloads import SHAPES, Prompts
from bench.tiers import leave_the_cache, pieces, plain_reads
from twostroke import LLM, SamplingParams
from twostroke.config import GIB, EngineConfig
from twostroke.engine import build_torch
from twostroke.engine.open_tiers import tiers_of
from twostroke.engine.remote import RemoteEngine
from twostroke.exec.memory import available_memory_bytes
from twostroke.kv.tiers import disk
from twostroke.observe.record import RequestRecord, StepRecord
from twostroke.request import EngineRequest

WRITES_S = 45.0  # that a disk may take for a conversation


# ── host memory ─────────────────────────────────────────────────────────────────────────────


def host(shape: str, sizes: Sizes, whole: bool = True) -> None:
    """`whole`: also measure the cost of prompts that find nothing."""
    spare = GIB if sizes.quick else 8 * GIB
    tell("memory", grown_memory(sizes.host_bytes + spare))
    host_bytes = min(sizes.host_bytes, available_memory_bytes() - spare)
    start = perf_counter()
    llm = LLM(shape, **settings(shape, sizes, kv_offloading_size=host_bytes / GIB))
    tell("start", {"ready_s": perf_counter() - start, "host_bytes": host_bytes})
    bench = HostBench(llm, sizes)
    each("returns", bench.returns)
    each("overlap", bench.overlap)
    if whole:
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
        records, same, stayed, compared = [], 0, 0, 0
        for prompt, answer in zip(self.conversations, answers, strict=True):
            record, tokens = self.ask(prompt)
            records.append(record)
            again, its_tokens = self.ask(prompt)  # the prefix is in the KV cache now
            if record.num_fetched and again.num_cached == record.num_cached:
                compared += 1
                stayed += its_tokens == tokens
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
            # The prefix that came back and the prefix that stayed: all must be equal.
            "compared_to_stayed": compared,
            "answers_equal_to_stayed": stayed,
            # Computing a prompt in one step rounds differently from computing its last tokens: with
            # random weights, the best two tokens are often nearly equal.
            "answers_equal_to_computed": same,
        }

    def overlap(self) -> dict[str, Any]:
        """Decode steps of streams: alone, while a conversation is fetched, and while the same
        conversation returns with its prefix in the KV cache."""
        core, found = self.core, []
        streams = 2 if self.sizes.quick else 16
        for n in range(streams):
            core.add(request(f"s{n}", self.prompt(64), 500))
        for _ in range(30):
            core.step()
        for n in range(3):
            core.records.steps.clear()
            for _ in range(30):
                core.step()
            alone = [one for one in core.records.steps if not one.prefill.tokens]
            fetched = self.beside_a_return(f"return{n}", self.conversations[n])
            stayed = self.beside_a_return(f"stayed{n}", self.conversations[n])
            found.append(
                {"streams": streams, "alone": times(alone), "fetched": fetched, "stayed": stayed}
            )
        for name in list(core.scheduler._requests):
            core.abort(name)
        while core.has_work:
            core.step()
        self.rest()
        return {"rounds": found}

    def beside_a_return(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """Run the streams until a conversation has returned, and a little longer."""
        core, record = self.core, None
        core.records.steps.clear()
        start = monotonic()
        core.add(request(name, prompt, 2))
        while record is None and monotonic() - start < 20:
            for update in core.step():
                if update.request_id == name and update.record is not None:
                    record = update.record
        assert record is not None, "the conversation did not return"
        for _ in range(5):
            core.step()
        steps = list(core.records.steps)
        fetch = record.tier_fetch
        return {
            "ttft_ms": round(1e3 * (record.token_s[0] - start), 3),
            "fetch": None if fetch is None else fetch._asdict(),
            "decode_steps": times([one for one in steps if not one.prefill.tokens]),
            "prefill_steps": times([one for one in steps if one.prefill.tokens]),
            # ms since the request: planned, launched, committed; then device and gap before it
            "each": [
                [
                    *(round(1e3 * (s - start), 2) for s in (one.planned_s, one.launched_s)),
                    round(1e3 * (one.committed_s - start), 2),
                    round(1e3 * one.device_s, 2),
                    round(1e3 * one.host_gap_s, 2),
                    one.prefill.tokens,
                    one.decode.rows,
                ]
                for one in steps
            ],
        }

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


def times(steps: list[StepRecord]) -> dict[str, Any]:
    return {
        "steps": len(steps),
        "device_ms": spread([one.device_s for one in steps]),
        "host_gap_ms": spread([one.host_gap_s for one in steps]),
    }


OUTCOMES = ("fetched", "computed", "failed")


def request(name: str, prompt: list[int], outputs: int) -> EngineRequest:
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=outputs)
    return EngineRequest(name, tuple(prompt), params, seed=1, received_s=monotonic())


# ── a disk ──────────────────────────────────────────────────────────────────────────────────


def disk_part(shape: str, sizes: Sizes, folder: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        tell("file_system", file_system(name))
        each("tier_alone", lambda: disk_alone(sizes, Path(name) / "alone"))
        each("conversation", lambda: asyncio.run(conversation(shape, sizes, Path(name) / "kv")))


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
    parser.add_argument("part", choices=("link", "host", "overlap", "disk"))
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
        elif args.part == "overlap":
            sizes.count, sizes.pool_bytes = 4, min(sizes.pool_bytes, 6 * GIB)
            sizes.host_bytes = min(sizes.host_bytes, 12 * GIB)
            host(shape, sizes, whole=False)
        else:
            disk_part(shape, sizes, args.folder)


if __name__ == "__main__":
    main()
