"""The doctor's rules on given records: each cause is found, and healthy records have no cause."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from twostroke.errors import ConfigError
from twostroke.measure.doctor.account import account_of_records
from twostroke.measure.doctor.diagnosis import diagnose
from twostroke.measure.doctor.verdict import Verdict
from twostroke.measure.doctor.watch import GaugeReading, Observations
from twostroke.measure.load.definitions import Sample
from twostroke.measure.load.scrape import MetricsScrape

STEP_S = 0.02
BEGUN_S = 50.0  # on the server's clock
KV = {"reserved": 1000, "used": 100, "fragmented": 0, "cached": 0, "free": 900}


def step(number: int, prefill: int = 0, **changes: Any) -> dict[str, Any]:
    """Steps of 20 ms, one after the other; those with a prompt belong to it."""
    at = BEGUN_S + number * STEP_S
    since = {"decode": 0.0 if prefill else STEP_S, "prefill": STEP_S if prefill else 0.0}
    made: dict[str, Any] = {
        "step": number,
        "planned_s": at - STEP_S,
        "committed_s": at,
        "device_s": STEP_S,
        "host_gap_s": 0.0,
        "prefill": {"rows": int(prefill > 0), "tokens": prefill},
        "decode": {"rows": int(not prefill), "tokens": int(not prefill)},
        "waiting": 0,
        "running": 1,
        "preempted": 0,
        "kv": KV,
        "regular": 0 if prefill else 1,
        "late": [],
        "since_s": {**since, "preemption": 0.0, "host": 0.0},
    }
    return made | changes


def request(
    number: int, received: int, scheduled: int, first: int, tokens: int = 10, **changes: Any
) -> dict[str, Any]:
    """Times in steps."""
    times = [BEGUN_S + STEP_S * (first + n) for n in range(tokens)]
    made: dict[str, Any] = {
        "request_id": f"cmpl-{number}",
        "num_prompt": 100,
        "num_cached": 0,
        "received_s": BEGUN_S + STEP_S * received,
        "tokenised_s": BEGUN_S + STEP_S * received,
        "queued_s": BEGUN_S + STEP_S * received,
        "scheduled_s": BEGUN_S + STEP_S * scheduled,
        "first_token_s": times[0],
        "finished_s": times[-1],
        "sent_s": 0.0,
        "chunks": [(0.0, n, 0, 20) for n in range(scheduled + 1, first + 1)],
        "preempted": [],
        "token_s": times,
        "token_step": [first + n for n in range(tokens)],
        "finish_reason": "length",
        "gaps": {"decode": times[-1] - times[0], "prefill": 0.0, "preemption": 0.0, "host": 0.0},
        "worst_gap": None,
        "prefix_marks": [f"mark {number}"],
    }
    return made | changes


def seen(
    steps: Sequence[dict[str, Any]], requests: Sequence[dict[str, Any]], **more: Any
) -> Observations:
    limits = {"kv_tokens": 1000, "block_size": 10, "device": "cpu", "max_num_seqs": 4}
    given: dict[str, Any] = {
        "seconds": 10.0,
        "steps": list(steps),
        "requests": list(requests),
        "max_num_seqs": 4,
        "limits": limits,
        "has_traffic": True,
    }
    return Observations({"kind": "twostroke"}, **(given | more))


def waiting_for(steps: Sequence[dict[str, Any]]) -> Observations:
    """Five requests that wait for 40 steps, are computed in 5 and write 10 tokens."""
    computed = [step(n, 20) for n in range(41, 46)]
    written = [step(n) for n in range(46, 60)]
    requests = [request(n, 0, 40, 45) for n in range(5)]
    return seen([*steps, *computed, *written], requests)


def first_cause(found: Verdict) -> str:
    return found.causes[0].cause if found.causes else found.verdict


def test_own_work_is_healthy_however_long_it_takes() -> None:
    steps = [step(n, 20) for n in range(1, 101)] + [step(n) for n in range(101, 300)]
    found = diagnose(seen(steps, [request(n, 0, 0, 100, 190) for n in range(4)]))
    assert (found.verdict, found.causes, found.experiment) == ("healthy", (), None)
    assert sum(found.ledger.values()) == pytest.approx(1.0)
    assert found.evidence_level == "step records"
    assert any("long answers" in note for note in found.notes)


def test_time_in_which_no_step_worked_is_blamed_on_nobodys_prompts() -> None:
    steps = [step(n, 20, device_s=STEP_S / 4) for n in range(1, 51)]
    steps += [step(n) for n in range(51, 65)]
    found = diagnose(seen(steps, [request(0, 0, 0, 50)] * 3))
    assert found.verdict == "healthy"
    assert found.ledger["host, during prefill"] > 0.5
    assert found.ledger.get("prompts of others, during prefill", 0.0) == 0.0


def test_a_queue_is_blamed_on_what_its_steps_had_no_room_for() -> None:
    prompts = waiting_for([step(n, 512, waiting=5) for n in range(1, 41)])
    busy = waiting_for([step(n, waiting=5, running=4) for n in range(1, 41)])
    full = KV | {"free": 50, "used": 950}
    cache = waiting_for([step(n, waiting=5, running=2, kv=full) for n in range(1, 41)])
    for given, cause, flag in (
        (prompts, "queueing_behind_prefills", "--ttft-slo-ms"),
        (busy, "batch_too_small", "--max-num-seqs"),
        (cache, "kv_pressure", "--num-gpu-blocks-override"),
    ):
        found = diagnose(given)
        assert (found.verdict, first_cause(found)) == ("slow_to_start", cause)
        assert found.causes[0].share == pytest.approx(40 / 45, abs=0.01)
        assert found.causes[0].confidence >= 0.9
        assert found.experiment is not None
        assert list(found.experiment.setting) == [flag]
        # Without the queue, 5 of 45 steps are left.
        assert found.experiment.predicted_ratio == pytest.approx(5 / 45, abs=0.01)
        assert found.experiment.metric == "ttft"


def test_many_seats_that_are_all_taken_are_an_overload() -> None:
    given = waiting_for([step(n, waiting=5, running=256) for n in range(1, 41)])
    given.max_num_seqs = 256
    found = diagnose(given)
    assert first_cause(found) == "overloaded"
    assert found.experiment is None


def test_streams_that_stand_still_are_blamed_on_prompts() -> None:
    def made(stall_s: float) -> Verdict:
        causes = {"decode": 0.01, "prefill": stall_s, "preemption": 0.0, "host": 0.0}
        steps = [step(n) for n in range(1, 60)]
        steps[30] = step(31, 4000, since_s=causes, regular=3)
        return diagnose(seen(steps, [request(n, 0, 0, 1, 58) for n in range(3)]))

    found = made(3.0)
    assert (found.verdict, first_cause(found)) == ("slow_to_stream", "prefill_starves_decode")
    assert found.experiment is not None
    assert found.experiment.setting == {"--max-decode-stall": 8}
    assert found.experiment.predicted_ratio == pytest.approx(8 * STEP_S / 3.01, abs=0.01)
    assert made(0.15).verdict == "healthy"  # what serve's default allows


@pytest.mark.parametrize(
    ("part", "cause"), [("host", "host_bound_decode"), ("preemption", "kv_pressure")]
)
def test_time_between_tokens_is_blamed_by_its_parts(part: str, cause: str) -> None:
    steps = [step(n) for n in range(1, 60)]
    gaps = {"decode": 0.5, "prefill": 0.0, "preemption": 0.0, "host": 0.0, part: 0.6}
    requests = [request(n, 0, 0, 1, 56, gaps=gaps) for n in range(3)]
    found = diagnose(seen(steps, requests))
    assert (found.verdict, first_cause(found)) == ("slow_to_stream", cause)


def test_a_slow_template_is_told_from_a_queue() -> None:
    steps = [step(n, 20) for n in range(41, 46)] + [step(n) for n in range(46, 60)]
    requests = [request(n, 0, 40, 45, tokenised_s=BEGUN_S + STEP_S * 39) for n in range(4)]
    found = diagnose(seen(steps, requests))
    assert (found.verdict, first_cause(found)) == ("slow_to_start", "tokenizer_or_template")
    assert found.experiment is None  # no setting of the server helps


def test_prompts_that_begin_alike_and_are_computed_again() -> None:
    steps = [step(n, 20) for n in range(1, 51)] + [step(n) for n in range(51, 65)]
    marks = ["a", "b"]  # the same first 64 and 128 tokens
    alike = [request(n, 0, 0, 50, num_prompt=140, prefix_marks=marks) for n in range(5)]
    found = diagnose(seen(steps, alike))
    assert (found.verdict, first_cause(found)) == ("slow_to_start", "no_prefix_reuse")
    assert found.experiment is not None
    assert found.experiment.setting == {"--enable-prefix-caching": True}
    evicted = [one | {"num_cached": 4} for one in alike]
    for limits, setting in (
        ({"kv_tokens": 1000, "block_size": 10}, {"--num-gpu-blocks-override": 400}),
        ({}, {"--gpu-memory-utilization": 0.95}),  # the size of the cache is unknown
    ):
        found = diagnose(seen(steps, evicted, limits=limits))
        assert found.experiment is not None
        assert found.experiment.setting == setting
    reused = [one | {"num_cached": 128} for one in alike]
    assert diagnose(seen(steps, reused)).verdict == "healthy"
    differ = [request(n, 0, 0, 50, num_prompt=140) for n in range(5)]
    assert diagnose(seen(steps, differ)).verdict == "healthy"


def probe(ttft_s: float, gap_s: float, count: int = 9) -> Sample:
    times = [ttft_s + gap_s * n for n in range(count)]
    return Sample(0.0, content_s=times, ended_s=times[-1], output_tokens=count)


def test_time_outside_the_server_is_the_networks() -> None:
    steps = [step(n, 20) for n in range(1, 6)] + [step(n) for n in range(6, 20)]
    names = [f"doctor-x-{n}" for n in range(3)]
    records = [request(n, 0, 0, 5, 9, request_id=f"chatcmpl-{names[n]}-1") for n in range(3)]
    near, far = probe(0.11, STEP_S), probe(0.61, STEP_S)
    given = seen(steps, records, probes=[near] * 3, probe_names=names, has_traffic=False)
    assert diagnose(given).verdict == "healthy"
    given = seen(steps, records, probes=[far] * 3, probe_names=names, has_traffic=False)
    found = diagnose(given)
    assert (found.verdict, first_cause(found)) == ("slow_to_start", "client_or_network")
    assert "500.0 ms" in found.causes[0].evidence[0] or "510.0 ms" in found.causes[0].evidence[0]


def test_a_probe_that_waits_for_anothers_long_prompt_is_no_fault() -> None:
    steps = [step(n, 512, waiting=1) for n in range(1, 61)]
    probe_alone = request(0, 0, 50, 51, 9, request_id="chatcmpl-doctor-x-0-1")
    found = diagnose(seen(steps, [probe_alone], has_traffic=True))
    assert (found.verdict, found.causes) == ("not_enough_evidence", ())


def test_an_engine_that_was_not_up_is_a_cold_start() -> None:
    given = waiting_for([step(n, 512, waiting=5) for n in range(1, 41)])
    given.unready_s = 3.0
    assert "cold_start" in [one.cause for one in diagnose(given).causes]


def test_nothing_seen_is_no_evidence() -> None:
    found = diagnose(seen([], [], has_traffic=False))
    assert (found.verdict, found.requests) == ("not_enough_evidence", 0)
    assert "No request ended" in found.notes[0]


def test_the_ledger_of_records_has_every_second_once() -> None:
    given = waiting_for([step(n, waiting=5, running=4) for n in range(1, 41)])
    account = account_of_records(given)
    took = sum(one["finished_s"] - one["received_s"] for one in given.requests)
    assert account.total_s == pytest.approx(took)
    assert account.start_s + account.stream_s == pytest.approx(took)


# ── other servers ───────────────────────────────────────────────────────────────────────────────


def scraped(**values: float) -> MetricsScrape:
    names = {"queue": "queue", "prefill": "prefill", "decode": "decode"}
    lines = [
        f"vllm:request_{name}_time_seconds_sum {values.get(name, 0.0)}" for name in names.values()
    ]
    lines.append(f"vllm:time_to_first_token_seconds_count {values.get('count', 0.0)}")
    lines.append(f"vllm:num_preemptions_total {values.get('preemptions', 0.0)}")
    return MetricsScrape("\n".join(lines) + "\n")


def vllm(after: MetricsScrape, looks: list[GaugeReading]) -> Observations:
    server = {"kind": "vllm"}
    return Observations(server, 10.0, before=scraped(), after=after, gauges=looks, has_traffic=True)


def test_vllms_counters_tell_a_queue_and_gauges_what_for() -> None:
    after = scraped(queue=40.0, prefill=2.0, decode=20.0, count=10)
    found = diagnose(vllm(after, [GaugeReading(4.0, 6.0, 0.2)] * 20))
    assert (found.verdict, first_cause(found)) == ("slow_to_start", "batch_too_small")
    assert found.evidence_level == "/metrics"
    assert found.experiment is not None
    assert "10 requests were active at one time; a larger batch" in found.experiment.why
    assert found.causes[0].confidence <= 0.8
    found = diagnose(vllm(after, [GaugeReading(4.0, 6.0, 0.97)] * 20))
    assert first_cause(found) == "kv_pressure"
    calm = scraped(queue=0.1, prefill=2.0, decode=20.0, count=10)
    assert diagnose(vllm(calm, [GaugeReading(4.0, 0.0, 0.2)] * 20)).verdict == "healthy"
    assert "host_bound_decode" in found.not_examined


def test_a_server_that_says_nothing_is_judged_by_probes_alone() -> None:
    def judged(*probes: Sample) -> Verdict:
        names = [str(n) for n in range(len(probes))]
        found = Observations({"kind": "unknown"}, 10.0, probes=list(probes), probe_names=names)
        return diagnose(found)

    assert judged(*[probe(0.05, 0.01)] * 4).verdict == "healthy"
    found = judged(*[probe(2.0, 0.01)] * 4)  # slow, and nobody can say why
    assert (found.verdict, found.causes) == ("not_enough_evidence", ())
    assert found.evidence_level == "client only"


# ── the contract ────────────────────────────────────────────────────────────────────────────────


def test_a_verdict_comes_back_from_its_json() -> None:
    found = diagnose(waiting_for([step(n, waiting=5, running=4) for n in range(1, 41)]))
    again = Verdict.from_json(json.dumps(found.as_json()))
    assert again.experiment == found.experiment
    assert [one.cause for one in again.causes] == [one.cause for one in found.causes]
    assert again.experiment is not None
    assert again.experiment.options == "--max-num-seqs 8"
    for wrong in ("[]", "{}", "nonsense", json.dumps(found.as_json() | {"schema": 99})):
        with pytest.raises(ConfigError, match="verdict"):
            Verdict.from_json(wrong)
    odd = replace(found, verdict="fine").as_json()
    with pytest.raises(ConfigError, match="unknown verdict 'fine'"):
        Verdict.from_json(json.dumps(odd))
