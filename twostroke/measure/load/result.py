"""The figures of a run with vLLM's names, and the checks that certify the run."""

from __future__ import annotations

import os
import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from twostroke import __version__
from twostroke.measure.load.definitions import DEFINITIONS, Goals, Sample, goodput
from twostroke.measure.load.load_run import LoadRun
from twostroke.measure.load.stats import (
    min_samples,
    percentile,
    percentile_interval,
    summary_statistics,
)

SCHEMA = 1
METRICS = ("ttft", "tpot", "itl", "e2el")
LAG_S = 0.005  # delay of the client that is always allowed
CACHED_SHARE = 0.01  # allowed share of cached prompt tokens above the expected share


def environment() -> dict[str, Any]:
    return {
        "twostroke": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
    }


def values_ms(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Return the values in ms by metric, of requests that succeeded."""
    good = [sample for sample in samples if sample.ok]
    return {
        "ttft": [1e3 * sample.ttft_s for sample in good],
        "tpot": [1e3 * tpot for sample in good if (tpot := sample.tpot_s) is not None],
        "itl": [1e3 * gap for sample in good for gap in sample.itls_s],
        "e2el": [1e3 * sample.e2el_s for sample in good],
    }


def problems(
    run: LoadRun, percentiles: Sequence[float], cached_expected: float | None, limited: bool
) -> list[str]:
    """Return the reasons why the run is not certified.

    `cached_expected`: the share of the prompts that the prefix cache may answer; None: any.
    `limited`: True if requests may wait in the client because of --max-concurrency, so that a late
    send is not an error of the client.
    """
    found, good = [], [sample for sample in run.samples if sample.ok]
    failed = [sample.error for sample in run.samples if not sample.ok]
    if failed:
        error, times = Counter(failed).most_common(1)[0]
        found.append(
            f"{len(failed)} of {len(run.samples)} requests failed ({times} times: {error})"
        )
    if not good:
        return found
    gaps = [gap for sample in good for gap in sample.itls_s]
    allowed = max(LAG_S, 0.5 * statistics.median(gaps)) if gaps else LAG_S
    lag = percentile(run.loop_lags_s, 99)
    if lag > allowed:
        found.append(
            f"the client was late: the p99 delay of its event loop was {1e3 * lag:.1f} ms, and "
            f"{1e3 * allowed:.1f} ms are allowed; give the client its own core"
        )
    sent_late = percentile([sample.lag_s for sample in run.samples], 99)
    allowed = max(LAG_S, 0.1 * statistics.median(sample.ttft_s for sample in good))
    if not limited and sent_late > allowed:
        found.append(
            f"the client was late: the p99 delay of sending a request was {1e3 * sent_late:.1f} "
            f"ms, and {1e3 * allowed:.1f} ms are allowed"
        )
    reported = [sample for sample in good if sample.cached_tokens is not None]
    if reported and cached_expected is not None:
        prompt = sum(sample.prompt_tokens for sample in reported)
        share = sum(sample.cached_tokens or 0 for sample in reported) / max(1, prompt)
        if share > cached_expected + CACHED_SHARE:
            found.append(
                f"the prefix cache answered {share:.0%} of the prompt tokens instead of "
                f"{cached_expected:.0%}: the server has seen the prompts before"
            )
    for share in percentiles:
        if len(good) < min_samples(share):
            found.append(
                f"{len(good)} requests are too few for a p{share:g}; send {min_samples(share)} "
                "requests, or choose another percentile with --metric-percentiles"
            )
    return found


def result(
    run: LoadRun,
    *,
    percentiles: Sequence[float],
    goals: Goals,
    settings: dict[str, Any],
    cached_expected: float | None,
    detailed: bool = False,
) -> dict[str, Any]:
    """Return the result of a run. `settings`: the options of the run under vLLM's names."""
    samples = run.samples
    good = [sample for sample in samples if sample.ok]
    duration = run.duration_s
    tokens_in = sum(sample.prompt_tokens for sample in good)
    tokens_out = sum(sample.output_tokens for sample in good)
    wrong = problems(run, percentiles, cached_expected, settings.get("max_concurrency") is not None)
    found: dict[str, Any] = {
        "schema_version": SCHEMA,
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        **settings,
        "duration": duration,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(good) / duration if duration else 0.0,
        "goals": goals.limits_ms,
        "request_goodput": goodput(samples, goals, duration) if goals.any_set else None,
        "output_throughput": tokens_out / duration if duration else 0.0,
        "total_token_throughput": (tokens_in + tokens_out) / duration if duration else 0.0,
        "max_concurrent_requests": run.max_running,
    }
    intervals: dict[str, list[float] | None] = {}
    for name, values in values_ms(samples).items():
        for key, value in summary_statistics(values, percentiles).items():
            found[f"{key}_{name}_ms"] = value
        for share in percentiles:
            interval = percentile_interval(values, share)
            intervals[f"p{share:g}_{name}_ms"] = None if interval is None else list(interval)
    found["certified"] = not wrong
    found["problems"] = wrong
    found["intervals_95"] = intervals
    found["client"] = {
        "loop_lag_p99_ms": 1e3 * percentile(run.loop_lags_s, 99),
        "send_lag_p99_ms": 1e3 * percentile([s.lag_s for s in samples], 99),
    }
    found["cached_tokens"] = sum(sample.cached_tokens or 0 for sample in good)
    found["environment"] = environment()
    found["definitions"] = DEFINITIONS
    if detailed:
        found |= detail(run)
    return found


def detail(run: LoadRun) -> dict[str, Any]:
    """Return the values of every request, under vLLM's names."""
    samples = run.samples
    return {
        "request_ids": [sample.request_id for sample in samples],
        "input_lens": [sample.prompt_tokens for sample in samples],
        "output_lens": [sample.output_tokens for sample in samples],
        "start_times": [sample.scheduled_s - run.started_s for sample in samples],
        "ttfts": [sample.ttft_s if sample.ok else 0.0 for sample in samples],
        "itls": [sample.itls_s for sample in samples],
        "generated_texts": [sample.text for sample in samples],
        "errors": [sample.error for sample in samples],
        "cached_lens": [sample.cached_tokens for sample in samples],
        "send_lags": [sample.lag_s for sample in samples],
    }
