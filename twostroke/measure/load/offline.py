"""`bench latency` and `bench throughput`: measurements of an engine in this process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from twostroke.measure.load.definitions import DEFINITIONS, Sample, engine_sample
from twostroke.measure.load.result import SCHEMA, environment, values_ms
from twostroke.measure.load.stats import percentile, summary_statistics
from twostroke.measure.load.workload import PromptGenerator, random_lengths
from twostroke.observe.record import RequestRecord
from twostroke.request import SamplingParams

if TYPE_CHECKING:
    from twostroke.llm import LLM

OFFLINE = {
    "without a server": "times of the engine: a request is due when the engine receives the "
    "request, and every token is an event",
    "latency": "from the start of a batch to the last token of its last request",
}
PERCENTILES = (10, 25, 50, 75, 90, 99)
BINS = 60  # time intervals in the report's chart


def latency(
    llm: LLM,
    batch: int,
    input_len: int,
    output_len: int,
    warmups: int,
    iterations: int,
    tell: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Measure the seconds of a batch of requests, under vLLM's names, and the phases."""
    taken: list[float] = []
    samples: list[Sample] = []
    for turn in range(warmups + iterations):
        prompts = _prompts(f"latency {turn}", [(input_len, output_len)] * batch)
        seconds, outputs = _generate(llm, prompts, [output_len] * batch)
        if turn >= warmups:
            taken.append(seconds)
            samples += [engine_sample(one) for one in _records(outputs)]
            tell(turn - warmups + 1)
    return {
        "schema_version": SCHEMA,
        "avg_latency": statistics.fmean(taken),
        "latencies": taken,
        "percentiles": {str(share): percentile(taken, share) for share in PERCENTILES},
        "batch_size": batch,
        "input_len": input_len,
        "output_len": output_len,
        **_by_phase(samples),
        **_about(llm),
    }


def throughput(
    llm: LLM, count: int, input_len: int, output_len: int, range_ratio: float, seed: int
) -> dict[str, Any]:
    """Measure the throughput of requests that are sent all at once, under vLLM's names."""
    lengths = random_lengths(count, input_len, output_len, range_ratio, seed)
    _generate(llm, _prompts("warm up", lengths[:4]), [2] * len(lengths[:4]))
    prompts = _prompts("throughput", lengths)
    seconds, outputs = _generate(llm, prompts, [output for _, output in lengths])
    records = _records(outputs)
    tokens_in = sum(len(prompt) for prompt in prompts)
    tokens_out = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "schema_version": SCHEMA,
        "elapsed_time": seconds,
        "num_requests": count,
        "total_num_tokens": tokens_in + tokens_out,
        "total_output_tokens": tokens_out,
        "requests_per_second": count / seconds,
        "tokens_per_second": (tokens_in + tokens_out) / seconds,
        "output_tokens_per_second": tokens_out / seconds,
        "over_time": over_time(records),
        **_by_phase([engine_sample(one) for one in records]),
        **_about(llm),
    }


def over_time(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the tokens of prefill and of decode in equal intervals of the run. The tokens of a
    prefill chunk count at the time when the chunk was planned."""
    begin = min(record.received_s for record in records)
    size = max((record.finished_s - begin) / BINS for record in records) or 1.0
    counts = {"prefill": [0] * BINS, "decode": [0] * BINS}
    for record in records:
        for at_s, _, _, tokens in record.chunks:
            counts["prefill"][min(BINS - 1, int((at_s - begin) / size))] += tokens
        for at_s in record.token_s:
            counts["decode"][min(BINS - 1, int((at_s - begin) / size))] += 1
    return {"bin_s": size, **counts}


def _by_phase(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the statistics of TTFT, TPOT and ITL, and every value of TTFT and TPOT."""
    values = values_ms(samples)
    found: dict[str, Any] = {}
    for name in ("ttft", "tpot", "itl"):
        for key, value in summary_statistics(values[name], (90.0, 99.0)).items():
            found[f"{key}_{name}_ms"] = value
    return found | {"ttfts_ms": values["ttft"], "tpots_ms": values["tpot"]}


def _about(llm: LLM) -> dict[str, Any]:
    info = llm.engine.info()
    return {
        "server": {"model": info.model_name, "device": info.device, "dtype": info.dtype},
        "definitions": DEFINITIONS | OFFLINE,
        "environment": environment(),
    }


def _records(outputs: Sequence[Any]) -> list[RequestRecord]:
    return [record for output in outputs for record in output.records]


def _prompts(name: str, lengths: Sequence[tuple[int, int]]) -> list[list[int]]:
    prompts = PromptGenerator(0, name, as_text=False)
    return [list(prompts.unique(n, size)) for n, (size, _) in enumerate(lengths)]  # type: ignore[arg-type]


def _generate(llm: LLM, prompts: Any, outputs: list[int]) -> tuple[float, list[Any]]:
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in outputs
    ]
    begun = perf_counter()
    found = llm.generate(prompts, params, use_tqdm=False)
    return perf_counter() - begun, found
