"""`bench latency` and `bench throughput`: an engine in this process, without a server."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from twostroke.measure.result import environment
from twostroke.measure.stats import percentile
from twostroke.measure.workload import Prompts, random_lengths
from twostroke.request import SamplingParams

if TYPE_CHECKING:
    from twostroke.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


def latency(
    llm: LLM,
    batch: int,
    input_len: int,
    output_len: int,
    warmups: int,
    iterations: int,
    tell: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Seconds from a batch of prompts to all their answers, under vLLM's names, and by phase."""
    taken, ttfts, tpots = [], [], []
    for turn in range(warmups + iterations):
        prompts = _prompts(f"latency {turn}", [(input_len, output_len)] * batch)
        seconds, outputs = _generate(llm, prompts, [output_len] * batch)
        if turn >= warmups:
            taken.append(seconds)
            records = [record for output in outputs for record in output.records]
            ttfts += [record.ttft_s for record in records]
            tpots += [record.tpot_s for record in records]
            tell(turn - warmups + 1)
    return {
        "schema_version": 1,
        "avg_latency": statistics.fmean(taken),
        "latencies": taken,
        "percentiles": {str(share): percentile(taken, share) for share in PERCENTILES},
        "mean_ttft_ms": 1e3 * statistics.fmean(ttfts),
        "mean_tpot_ms": 1e3 * statistics.fmean(tpots),
        "batch_size": batch,
        "input_len": input_len,
        "output_len": output_len,
        "environment": environment(),
    }


def throughput(
    llm: LLM, count: int, input_len: int, output_len: int, range_ratio: float, seed: int
) -> dict[str, Any]:
    """All requests at once, under vLLM's names."""
    lengths = random_lengths(count, input_len, output_len, range_ratio, seed)
    _generate(llm, _prompts("warm up", lengths[:4]), [2] * len(lengths[:4]))
    prompts = _prompts("throughput", lengths)
    seconds, outputs = _generate(llm, prompts, [output for _, output in lengths])
    tokens_in = sum(len(prompt) for prompt in prompts)
    tokens_out = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "schema_version": 1,
        "elapsed_time": seconds,
        "num_requests": count,
        "total_num_tokens": tokens_in + tokens_out,
        "total_output_tokens": tokens_out,
        "requests_per_second": count / seconds,
        "tokens_per_second": (tokens_in + tokens_out) / seconds,
        "output_tokens_per_second": tokens_out / seconds,
        "environment": environment(),
    }


def _prompts(name: str, lengths: Sequence[tuple[int, int]]) -> list[list[int]]:
    prompts = Prompts(0, name, as_text=False)
    return [list(prompts.unique(n, size)) for n, (size, _) in enumerate(lengths)]  # type: ignore[arg-type]


def _generate(llm: LLM, prompts: Any, outputs: list[int]) -> tuple[float, list[Any]]:
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in outputs
    ]
    begun = perf_counter()
    found = llm.generate(prompts, params, use_tqdm=False)
    return perf_counter() - begun, found
