"""`/start_profile`, `/stop_profile` and `twostroke profile` on the native kernels, with server and
engine in separate processes, and on torch."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

import pytest

from tests.measure.paced_server import paced_server
from tests.server.running import Running, running
from tests.server.test_load import PATIENCE_S, Server, served
from tests.tiny import tiny_folder, tiny_llm
from twostroke import LLM, SamplingParams
from twostroke.cli import main
from twostroke.engine.profiler import Profiler
from twostroke.engine.spawn import DEFAULT_BUILDER
from twostroke.errors import RequestError
from twostroke.exec.stage_profile import MethodWrappers
from twostroke.exec.torch_profile import KernelRun, between_kernels, kernels
from twostroke.kernels import cpu
from twostroke.measure.explain.step_profile import medians, perfetto_trace, stage_rows
from twostroke.observe.record import Records

KEY = "secret"
STAGES = {"embed", "norm", "qkv", "store", "attend", "merge", "output", "gate_up", "down", "head"}
HOST = {"plan", "inputs", "call", "sampling", "commit", "unaccounted"}
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
needs_native = pytest.mark.skipif(not cpu.available(), reason="no native kernels here")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tiny_folder(tmp_path_factory.mktemp("profiled"), **SHAPE)
    with served(folder, DEFAULT_BUILDER, settings={"api_keys": [KEY]}, device="cpu") as one:
        yield one


@pytest.fixture(scope="module")
def on_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tiny_llm(tmp_path_factory.mktemp("tiny"), kernels="reference")) as one:
        yield one


def ask(port: int, path: str, body: Any = None, key: str = KEY, method: str = "POST") -> Any:
    """Status and JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        connection.request(method, path, json.dumps(body or {}), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def use(port: int) -> None:
    """Two streams at one time, whose prompts no cache knows."""
    common = {"ignore_eos": True, "cache_salt": uuid4().hex}
    long = {"prompt": [40] * 30, "max_tokens": 60, **common}
    short = {"prompt": [90] * 100, "max_tokens": 4, **common}
    threads = [Thread(target=ask, args=(port, "/v1/completions", body)) for body in (long, short)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)


def profiled(port: int) -> dict[str, Any]:
    assert ask(port, "/start_profile") == (200, {"status": "profiling"})
    use(port)
    status, found = ask(port, "/stop_profile")
    assert status == 200, found
    return dict(found)


@needs_native
def test_stages_add_up_to_the_steps(server: Server) -> None:
    found = profiled(server.port)
    assert (found["schema_version"], found["kind"], found["ended_by"]) == (1, "stages", "stop")
    assert found["phases"].keys() <= {"prefill", "decode", "mixed"}
    phases = found["phases"].values()
    assert sum(phase["prefill_tokens"] for phase in phases) == 130
    assert sum(phase["decode_tokens"] for phase in phases) == 59 + 3
    assert sum(phase["steps"] for phase in phases) == len(found["steps"])
    total = unaccounted = 0.0
    for phase in phases:
        stages = {name: stage["seconds"] for name, stage in phase["stages"].items()}
        assert stages.keys() == STAGES | HOST
        assert sum(stages.values()) == pytest.approx(phase["step_s"])
        assert min(stages.values()) > -1e-4  # two clocks are read one after the other
        total += phase["step_s"]
        unaccounted += stages["unaccounted"]
    assert unaccounted < 0.05 * total
    assert total < found["seconds"]


@needs_native
def test_work_of_the_stages_is_counted(server: Server) -> None:
    found = profiled(server.port)
    flops = dict.fromkeys(STAGES, 0.0)
    steps = 0
    for phase in found["phases"].values():
        steps += phase["steps"]
        for name in STAGES:
            flops[name] += phase["stages"][name]["flops"]
    computed = sum(p["prefill_tokens"] + p["decode_tokens"] for p in found["phases"].values())
    hidden, inner, layers = 256, 512, 4
    assert flops["down"] == computed * layers * 2 * hidden * inner
    assert flops["gate_up"] == 2 * flops["down"]
    assert flops["head"] == 64 * 2 * 300 * hidden  # every token that was written
    assert flops["attend"] > 0
    assert flops["norm"] == 0  # not known


@needs_native
def test_steps_are_only_taken_apart_while_it_is_asked_for(server: Server) -> None:
    use(server.port)
    first = profiled(server.port)["steps"]
    use(server.port)
    second = profiled(server.port)["steps"]
    assert second[0][0] > first[-1][0] + 1  # those in between are in neither


@needs_native
def test_the_timeline_has_a_lane_of_stages(server: Server) -> None:
    found = profiled(server.port)
    status, records = ask(server.port, "/records?seconds=60", method="GET")
    assert status == 200
    made = perfetto_trace(found, records)["traceEvents"]
    lanes = {e["tid"] for e in made if e["ph"] == "M" and "stages" in str(e["args"].get("name"))}
    (lane,) = lanes
    slices = [event for event in made if event["ph"] == "X" and event["tid"] == lane]
    slices = [event for event in slices if event["pid"] == 1]
    assert {event["name"] for event in slices} == STAGES | HOST
    assert len(slices) == len(found["steps"]) * len(STAGES | HOST)


@needs_native
def test_it_starts_once_stops_once_and_wants_the_key(server: Server) -> None:
    port = server.port
    for path in ("/start_profile", "/stop_profile"):
        assert ask(port, path, key="wrong")[0] == 401
    status, answer = ask(port, "/stop_profile")
    assert status == 400
    assert "no profile is running" in answer["error"]["message"]
    assert ask(port, "/start_profile")[0] == 200
    status, answer = ask(port, "/start_profile")
    assert status == 400
    assert "a profile has been running for" in answer["error"]["message"]
    status, found = ask(port, "/stop_profile")
    assert (status, found["phases"]) == (200, {})
    assert ask(port, "/stop_profile")[0] == 400
    use(port)  # nothing is left of it


@needs_native
def test_the_command_prints_and_writes(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{server.port}"
    done = Event()

    def keep_busy() -> None:
        while not done.is_set():
            use(server.port)

    busy = Thread(target=keep_busy)
    busy.start()
    files = ["-o", str(tmp_path / "t.json"), "--html", str(tmp_path / "p.html")]
    try:
        words = ["profile", url, "--api-key", KEY, "--seconds", "0.5"]
        assert main([*words, *files]) == 0
        shown = capsys.readouterr().out
        assert main([*words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    finally:
        done.set()
        busy.join(PATIENCE_S)
    for word in ("decode:", "gate_up", "unaccounted", "between steps", "--measure-ceilings"):
        assert word in shown
    assert found["environment"]["machine"]
    assert found["server"]["device"] == "cpu"
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    page = (tmp_path / "p.html").read_text()
    assert "gate_up" in page
    assert "http://" not in page  # nothing is loaded from anywhere


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seconds", "0"], "--seconds must be above 0 and at most 60"),
        (["--seconds", "61"], "--seconds must be above 0 and at most 60"),
        (["--api-key", "wrong"], "answered 401: a valid API key is needed"),
        ([], "the server is not twostroke"),
    ],
)
def test_errors_say_what_is_wrong(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with paced_server(key="" if not words else "right") as other:
        assert main(["profile", other.url, *words]) == 1
    assert says in capsys.readouterr().err


def test_nobody_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "http://127.0.0.1:9"]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err


# ── torch ───────────────────────────────────────────────────────────────────────────────────


def test_kernels_of_torch_by_phase_and_part(on_torch: Running) -> None:
    found = profiled(on_torch.port)
    assert found["kind"] == "kernels"
    assert sum(phase["steps"] for phase in found["phases"].values()) >= 60
    for phase in found["phases"].values():
        stages = {name: stage["seconds"] for name, stage in phase["stages"].items()}
        assert sum(stages.values()) == pytest.approx(phase["step_s"])
        assert min(stages["attention"], stages["mlp"]) > 0
        assert any(one["name"].startswith("aten::") for one in phase["kernels"])
        assert phase["host_s"]["plan"] > 0
    written = found["phases"]["decode"]["stages"]
    assert min(written["head"]["seconds"], written["sampling"]["seconds"]) > 0
    names = {event["name"].partition(" ")[0] for event in found["events"]}
    assert {"plan", "decode", "attention", "mlp", "sampling"} <= names
    assert perfetto_trace(found, {})["traceEvents"] == found["events"]


def test_a_profile_leaves_nothing_behind(on_torch: Running) -> None:
    core = on_torch.client.engine.core
    owners = (core.scheduler, core._executor, core._executor.program)  # type: ignore[attr-defined]
    owners = (*owners, owners[2].decoder)
    before = [set(vars(owner)) for owner in owners]
    profiled(on_torch.port)
    assert [set(vars(owner)) for owner in owners] == before
    assert core.profiler not in core.records.listeners


def test_the_tokens_are_the_same_while_it_runs(on_torch: Running) -> None:
    body = {"prompt": [40] * 30, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    before = on_torch.post("/v1/completions", body)["choices"]
    assert ask(on_torch.port, "/start_profile")[0] == 200
    assert on_torch.post("/v1/completions", body)["choices"] == before
    assert ask(on_torch.port, "/stop_profile")[0] == 200


def test_kernels_of_a_gpu_belong_to_where_they_were_launched() -> None:
    def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        tid = 7 if cat == "kernel" else 1
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    events = [
        event("user_annotation", "decode step 3: prefill 0, decode 2", 0, 100),
        event("user_annotation", "mlp", 10, 20),
        event("cpu_op", "aten::mm", 11, 15),
        event("cuda_runtime", "cudaLaunchKernel", 12, 2, correlation=1),
        event("cuda_runtime", "cudaGraphLaunch", 50, 2, correlation=2),
        event("user_annotation", "sampling of mixed step 4: prefill 5, decode 2", 200, 50),
        event("cuda_runtime", "cudaLaunchKernel", 210, 2, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 300, 2, correlation=4),
        *(event("kernel", f"k{n}", 400.0 + n, 5, correlation=n) for n in (1, 2, 2, 3, 4)),
    ]
    found = [(one.name, one.step, one.stage) for one in kernels(events)]
    graph = ("k2", 3, "graph")
    assert found == [("k1", 3, "mlp"), graph, graph, ("k3", 4, "sampling"), ("k4", -1, "other")]


def test_between_a_steps_kernels_is_when_none_ran() -> None:
    def run(step: int, began_us: float, us: float) -> KernelRun:
        return KernelRun("", step, "graph", 1e-6 * us, 1e-6 * began_us)

    found = between_kernels([run(1, 10, 5), run(1, 18, 2), run(2, 30, 5), run(2, 33, 5)])
    assert found == pytest.approx({1: 3e-6, 2: -2e-6})


# ── the profiler ────────────────────────────────────────────────────────────────────────────


def test_what_nobody_stops_ends_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = tiny_llm(tmp_path)
    profiler, now = llm.engine.core.profiler, [1000.0]
    monkeypatch.setattr("twostroke.engine.profiler.monotonic", lambda: now[0])
    profiler.start()
    write(llm)
    now[0] += 61
    write(llm)  # its first step is the last that is profiled
    assert profiler not in llm.engine.core.records.listeners
    found = profiler.stop()
    assert (found["ended_by"], found["seconds"]) == ("time limit", 60.0)
    assert sum(phase["steps"] for phase in found["phases"].values()) == 4 + 1
    profiler.start()
    now[0] += 61  # and without a step
    profiler.start()
    assert profiler.stop()["ended_by"] == "stop"


def test_a_profile_is_bounded_in_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = tiny_llm(tmp_path)
    profiler = llm.engine.core.profiler
    llm.start_profile()
    monkeypatch.setattr(type(profiler._profile), "max_steps", 3)
    write(llm)
    found = llm.stop_profile()
    assert found["ended_by"] == "step limit"
    assert sum(phase["steps"] for phase in found["phases"].values()) == 3


def write(llm: LLM) -> None:
    """Four steps."""
    llm.generate([{"prompt_token_ids": [50] * 8}], SamplingParams(max_tokens=4, ignore_eos=True))


def test_an_executor_without_a_profile_says_so() -> None:
    with pytest.raises(RequestError, match="cannot be profiled"):
        Profiler(None, Records()).start()


def test_nested_wrappers_are_removed_in_reverse_order() -> None:
    class Owner:
        def name(self) -> str:
            return "a"

    owner, first, second = Owner(), MethodWrappers(), MethodWrappers()
    first.wrap(owner, "name", lambda inner: lambda: inner() + "b")
    second.wrap(owner, "name", lambda inner: lambda: inner() + "c")
    assert owner.name() == "abc"
    second.remove()
    assert owner.name() == "ab"
    first.remove()
    assert (owner.name(), vars(owner)) == ("a", {})


def test_the_share_of_the_roof_is_the_floor_over_the_time() -> None:
    stage = {"seconds": 2.0, "flops": 4e9, "num_bytes": 1e9}
    phase = {"steps": 2, "step_s": 4.0, "between_s": 0.5, "stages": {"down": stage}}
    found = {"stage_names": ["down"], "steps": [[1, "decode", 0.0, 0.5], [2, "decode", 1.0, 1.5]]}
    middle = medians(found, "decode")
    assert (middle, medians(found, "mixed")) == ({"down": 1.0, "step": 1.0}, {})
    rows = stage_rows(phase, {"ops_per_s": 4e9, "read_bytes_per_s": 4e9}, middle)
    assert rows[0] == ["down", "1,000 ms", "1,000 ms", "50.0%", "2.0", "0.5", "50%"]
    assert [row[0] for row in rows[1:]] == ["step", "between steps"]
    assert stage_rows(phase, {"ops_per_s": 0.0, "read_bytes_per_s": 0.0}, {})[0][6] == ""
