"""The KV cache on the page, in `/metrics` and in the log: what the audit finds, at any moment."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.running import Running, running
from tests.tiny import tiny_llm
from twostroke.serve.monitor.stats_log import StatsLog

STATES = ("used", "fragmented", "cached", "free")
NUMBERS = r"([\d,]+) used \+ ([\d,]+) fragmented \+ ([\d,]+) cached \+ ([\d,]+) free = ([\d,]+)"


class Gate:
    """Holds an engine between two steps: each step waits for `let_a_step_pass`."""

    def __init__(self, core: Any) -> None:
        self.lock = threading.Lock()
        self.steps = 0
        self._allowed = threading.Semaphore(0)
        step = core.step

        def gated() -> Any:
            self._allowed.acquire()
            with self.lock:
                self.steps += 1
                return step()

        core.step = gated

    def let_a_step_pass(self, ended: Callable[[], bool]) -> None:
        """Returns after the step, or when `ended` says that no step comes."""
        steps = self.steps
        self._allowed.release()
        while self.steps == steps and not ended():
            sleep(0.0002)

    def open(self) -> None:
        self._allowed.release(1_000_000)


def as_metrics(server: Running) -> list[int]:
    status, _, text = server.ask("GET", "/metrics")
    assert status == 200
    found = {
        sample.labels.get("state", sample.name): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name in ("twostroke:kv_cache_tokens", "twostroke:kv_cache_reserved_tokens")
    }
    return [int(found[s]) for s in (*STATES, "twostroke:kv_cache_reserved_tokens")]


def as_page(server: Running) -> list[int]:
    status, _, text = server.ask("GET", "/dash/feed")
    assert status == 200
    kv = json.loads(text)["kv"]
    return [kv[state] for state in (*STATES, "reserved")]


def as_log(server: Running) -> list[int]:
    log = StatsLog(server.client, server.app.service.metrics.totals, monotonic() - 1)
    log._last = (-1, -1, -1)  # so that there is something to say
    line = log.line(monotonic())
    assert line is not None
    match = re.search(NUMBERS, line)
    assert match is not None, line
    return [int(number.replace(",", "")) for number in match.groups()]


def test_page_metrics_log_and_audit_agree_at_every_sampled_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "twostroke.serve.dashboard.dash.MOST_A_SECOND", 1e9
    )  # asked as fast as it steps
    llm = tiny_llm(tmp_path)
    core = llm.engine.core
    gate = Gate(core)
    with running(llm) as server:
        asked: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
        asked["model"] = llm.engine.model_name
        threads = [
            threading.Thread(
                target=server.post,
                args=(
                    "/v1/completions",
                    {
                        **asked,
                        "model": llm.engine.model_name,
                        "prompt": list(range(5, 60 + 13 * n)),
                    },
                ),
            )
            for n in range(6)
        ]
        for thread in threads:
            thread.start()
        seen = set()
        moments = busy = 0

        def ended() -> bool:
            return not any(thread.is_alive() for thread in threads)

        while not ended():
            with gate.lock:
                core.scheduler.audit()
                usage = core.scheduler.kv.usage()
                right = [getattr(usage, state) for state in (*STATES, "reserved")]
                assert sum(right[:4]) == right[4]
                assert as_metrics(server) == as_page(server) == as_log(server) == right
                moments += 1
                busy += usage.used > 0
                seen.add(tuple(right))
            gate.let_a_step_pass(ended)
        gate.open()
        for thread in threads:
            thread.join()
        assert moments > 3
        assert busy
        assert len(seen) > 2


@pytest.mark.parametrize("happened", [False, True])
def test_a_line_is_said_only_of_what_happened(happened: bool, tmp_path: Path) -> None:
    llm = tiny_llm(tmp_path)
    with running(llm) as server:
        log = StatsLog(server.client, server.app.service.metrics.totals, 100.0)
        if happened:
            body = {"model": llm.engine.model_name, "prompt": [5, 6, 7], "max_tokens": 4}
            server.post("/v1/completions", {**body, "ignore_eos": True})
            server.assert_idle()
        line = log.line(110.0)
        assert (line is not None) == happened
        if line is not None:
            assert line.startswith("prefill 0.3 tok/s, decode 0.3 tok/s; 0 running, 0 waiting, 1")
        assert log.line(120.0) is None
