"""Does a real Prometheus tell of a real server what its clients have seen?

    python bench/prometheus.py [MODEL] [--requests 24] [--json FILE]

Starts `twostroke serve` (the default model, unless one is named) and Prometheus (`prometheus` on
the path) with deploy/monitoring/prometheus.yml, scraping every second. Streams answer; each client
times its own. Then, over the last five minutes, mean decode, prefill and first-token times as
Prometheus gives them are compared with the clients'; every query of vLLM's Grafana dashboard and of
ours must return data; and the server is started again to see that a single request is counted.
Prints what was asked and told, ends with one JSON line; exit status 1 if something is wrong.
"""

from __future__ import annotations

import sys

sys.path[0] = __file__.rpartition("/bench/")[0] or "."  # `bench` is found there

import argparse  # noqa: E402
import asyncio  # noqa: E402
import contextlib  # noqa: E402
import http.client  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import platform  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402
from urllib.parse import quote  # noqa: E402

from twostroke.measure.load.definitions import Sample  # noqa: E402
from twostroke.measure.load.http_client import Connections, Endpoint  # noqa: E402
from twostroke.measure.load.load_run import run_closed_loop  # noqa: E402
from twostroke.measure.load.sample_client import OpenAIClient  # noqa: E402
from twostroke.measure.load.workload import Planned  # noqa: E402

MONITORING = Path(__file__).parent.parent / "deploy" / "monitoring"
MODEL_NAME = "measured"
PATIENCE_S = 120.0
TOLERANCE = 0.05
OUTPUT = 48

# What vLLM's dashboards ask: the function, and the series it is asked of.
QUANTILES = ("e2e_request_latency", "inter_token_latency", "time_to_first_token")
MEANS = QUANTILES
HEATMAPS = ("request_prompt_tokens", "request_generation_tokens")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
RATES = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
)


def vllm_queries() -> list[str]:
    of, over = f'{{model_name="{MODEL_NAME}"}}', "[1m]"
    queries = [
        f"histogram_quantile({p}, sum by(le) (rate(vllm:{name}_seconds_bucket{of}{over})))"
        for name in QUANTILES
        for p in (0.99, 0.95, 0.9, 0.5)
    ]
    queries += [
        f"rate(vllm:{name}_seconds_sum{of}{over}) / rate(vllm:{name}_seconds_count{of}{over})"
        for name in MEANS
    ]
    queries += [f"sum by(le) (increase(vllm:{name}_bucket{of}{over}))" for name in HEATMAPS]
    queries += [f"vllm:{name}{of}" for name in GAUGES]
    queries += [f"rate(vllm:{name}{of}{over})" for name in RATES]
    queries.append(f"sum by(finished_reason) (increase(vllm:request_success_total{of}{over}))")
    rates = [f"sum(rate(vllm:{n}_total{of}{over}))" for n in ("prompt_tokens", "request_success")]
    return [*queries, " / ".join(rates)]


def own_queries() -> list[str]:
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    targets = [t for panel in dashboard["panels"] for t in panel.get("targets", ())]
    filled = [t["expr"].replace("$model_name", MODEL_NAME) for t in targets]
    return [query.replace("$__rate_interval", "1m") for query in filled]


def mean(name: str, window: str) -> str:
    series = f"vllm:{name}_seconds"
    return f"increase({series}_sum[{window}]) / increase({series}_count[{window}])"


# ── processes ───────────────────────────────────────────────────────────────────────────────────


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def until(what: str, condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if condition():
                return
        if time.monotonic() > end:
            raise SystemExit(f"{what}: waited for {PATIENCE_S:.0f} s in vain")
        time.sleep(0.2)


@contextlib.contextmanager
def process(command: list[str], log: Path) -> Iterator[None]:
    with log.open("ab") as file:
        running = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield
    except BaseException:
        print(log.read_text()[-2000:], file=sys.stderr)
        raise
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(PATIENCE_S)


@contextlib.contextmanager
def server(model: str | None, port: int, folder: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "twostroke", "serve", *([model] if model else [])]
    command += ["--port", str(port), "--served-model-name", MODEL_NAME, "--max-model-len", "2048"]
    command += ["--kv-cache-memory-bytes", "256M"]
    with process(command, folder / "server.log"):
        until("the server", lambda: get(port, "/health")[0] == 200)
        yield


class Prometheus:
    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, query: str) -> list[float]:
        """The values of an instant vector, without those that are no number."""
        status, body = get(self.port, f"/api/v1/query?query={quote(query)}")
        answer = json.loads(body)
        if status != 200 or answer["status"] != "success":
            raise SystemExit(f"{query}: {answer}")
        values = [float(row["value"][1]) for row in answer["data"]["result"]]
        return [value for value in values if not math.isnan(value)]

    def settle(self) -> None:
        """Two scrapes more: what has happened by now is in them."""
        query = f'count_over_time(vllm:num_requests_running{{model_name="{MODEL_NAME}"}}[10m])'
        scrapes = sum(self.ask(query))
        until("Prometheus", lambda: sum(self.ask(query)) >= scrapes + 2)


@contextlib.contextmanager
def prometheus(binary: str, target: int, folder: Path) -> Iterator[Prometheus]:
    config = (MONITORING / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:8000", f"127.0.0.1:{target}").replace(" 5s", " 1s")
    (folder / "prometheus.yml").write_text(config)
    (folder / "alerts.yml").write_text((MONITORING / "alerts.yml").read_text())
    port = free_port()
    command = [binary, f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with process(command, folder / "prometheus.log"):
        one = Prometheus(port)
        until("Prometheus", lambda: get(port, "/-/ready")[0] == 200)
        yield one


# ── load ────────────────────────────────────────────────────────────────────────────────────────


def stream(port: int, numbers: Sequence[int], at_once: int) -> list[Sample]:
    """Requests of these numbers, so many at one time."""

    async def work() -> list[Sample]:
        client = OpenAIClient(Connections(Endpoint(f"http://127.0.0.1:{port}")), MODEL_NAME)
        try:
            return (await run_closed_loop(client, list(map(planned, numbers)), at_once)).samples
        finally:
            client.connections.close()

    samples = asyncio.run(work())
    if error := next((sample.error for sample in samples if sample.error), ""):
        raise SystemExit(error)
    return samples


def planned(number: int) -> Planned:
    words = " ".join(f"{number}-{n} apples" for n in range(20 + 10 * (number % 4)))
    return Planned(0.0, f"Count these: {words}.", 0, OUTPUT)


def compare(one: Prometheus, seen: list[Sample], window: str) -> dict[str, dict[str, float]]:
    """Mean seconds, as the clients saw them and as Prometheus tells them."""
    queues = [(answer.timings or {})["queue_ms"] / 1e3 for answer in seen]
    firsts = [answer.ttft_s for answer in seen]
    expected = {
        "request_decode_time": statistics.mean(answer.e2el_s - answer.ttft_s for answer in seen),
        "request_prefill_time": statistics.mean(f - q for f, q in zip(firsts, queues, strict=True)),
        "time_to_first_token": statistics.mean(firsts),
    }
    rows = {}
    for name, client in expected.items():
        (told,) = one.ask(mean(name, window))
        rows[name] = {"client_s": client, "prometheus_s": told, "ratio": told / client}
        print(f"  {name:22} clients {client:.4f} s   Prometheus {told:.4f} s   {told / client:.3f}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="as for twostroke serve (default: its default)")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--streams", type=int, default=4, help="at one time")
    parser.add_argument("--prometheus", default="prometheus", help="the program")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    port, wrong = free_port(), []
    with (
        tempfile.TemporaryDirectory() as name,
        prometheus(args.prometheus, port, Path(name)) as one,
    ):
        with server(args.model, port, Path(name)):
            until("a first scrape", lambda: one.ask("vllm:num_requests_running"))
            one.settle()
            seen = stream(port, range(args.requests), args.streams)
            one.settle()
            print(f"{len(seen)} streams, {args.streams} at one time:")
            load = compare(one, seen, "5m")
            queries = vllm_queries()
            empty = [query for query in queries if not one.ask(query)]
            print(f"vLLM's dashboard: {len(queries) - len(empty)} of {len(queries)} have data")
            own = own_queries()
            own_empty = [query for query in own if not one.ask(query)]
            print(f"our dashboard: {len(own) - len(own_empty)} of {len(own)} have data")
            rules = json.loads(get(one.port, "/api/v1/rules")[1])["data"]["groups"][0]["rules"]
            sick = [rule["name"] for rule in rules if rule["health"] == "err"]
            wrong += [*empty, *own_empty, *sick]
        with server(args.model, port, Path(name)):
            began = time.monotonic()
            until("a scrape", lambda: one.ask("vllm:request_success_total") == [0.0] * 4)
            one.settle()
            alone = stream(port, [1000], 1)
            one.settle()
            print("one request after a restart:")
            window = f"{int(time.monotonic() - began)}s"
            restart = compare(one, alone, window)
            counted = sum(one.ask(f"increase(vllm:request_success_total[{window}])"))
            print(f"  increase() of answers in the last {window}: {counted:.2f}")
    wrong += [
        f"{when} {name}"
        for when, rows in (("load", load), ("restart", restart))
        for name, row in rows.items()
        if abs(row["ratio"] - 1) > TOLERANCE
    ]
    if not 0.5 < counted < 2:
        wrong.append("the one request after a restart")
    for what in wrong:
        print(f"wrong: {what}")
    line = json.dumps(
        {
            "bench": "prometheus",
            "machine": platform.machine(),
            "model": Path(args.model).name if args.model else "default",
            "requests": len(seen),
            "load": load,
            "restart": {**restart, "counted": counted},
            "vllm_queries": len(queries),
            "own_queries": len(own),
            "tolerance": TOLERANCE,
            "wrong": wrong,
        }
    )
    print(line)
    if args.json:
        Path(args.json).write_text(line + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
