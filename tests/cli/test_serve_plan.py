"""A server takes its numbers of engines from a plan, and the KubeRay manifest does, too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.reading import PARSER, SERVE
from tests.planner.test_steptimes import records
from twostroke.cli import main, parse
from twostroke.commands.flags import engine_config
from twostroke.commands.serve_plan import apply_plan
from twostroke.commands.serve_settings import pool_settings, with_file
from twostroke.config import EngineConfig
from twostroke.route.pool_settings import PoolSettings

MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "ray.yaml"
SHEET = ["--model", "llama-3.1-8b", "--hardware", "H100"]
LOAD = ["--rate", "2", "--input-len", "200", "--output-len", "10", "--trace-seconds", "2"]


def settings_of(*words: str) -> tuple[PoolSettings, EngineConfig]:
    """Read a `serve` command line without errors."""
    args = parse(["serve", *words], PARSER)
    assert args is not None
    args = with_file(args)
    apply_plan(args)
    pools, config = pool_settings(args), engine_config(args)
    problems, SERVE.problems = SERVE.problems, []
    assert not problems
    assert pools is not None
    assert config is not None
    return pools, config


def problem_of(*words: str) -> str:
    args = parse(["serve", *words], PARSER)
    assert args is not None
    apply_plan(with_file(args))
    (problem,), SERVE.problems = SERVE.problems, []
    return problem


@pytest.fixture
def plan_file(tmp_path: Path) -> Any:
    def write(engines: int = 0, prefill: int = 0, decode: int = 0, **more: Any) -> str:
        layout = {
            "name": "the layout",
            "engines": engines,
            "prefill_engines": prefill,
            "decode_engines": decode,
        }
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({"forecast": {"layout": layout}, "verdict": "meets"} | more))
        return str(path)

    return write


AUTO_POOLS = ["--prefill-engines", "auto", "--decode-engines", "auto"]


def test_a_plan_sets_the_numbers_of_engines(
    plan_file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], AUTO_POOLS):
        pools, _ = settings_of("--plan", plan_file(0, 2, 3), *words)
        assert (pools.prefill_engines, pools.decode_engines) == (2, 3)
    for words in ([], ["--data-parallel-size", "auto"], ["-dp", "auto"]):
        pools, _ = settings_of("--plan", plan_file(4), *words)
        assert (pools.prefill_engines, pools.data_parallel_size) == (0, 4)
    assert "plan.json: meets" in capsys.readouterr().err


def test_settings_that_the_plan_was_made_with_are_the_servers(plan_file: Any) -> None:
    path = plan_file(2, settings={"max_num_seqs": 24, "max_num_batched_tokens": 512})
    _, config = settings_of("--plan", path)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (24, 512)
    _, config = settings_of("--plan", path, "--max-num-seqs", "8")
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (8, 512)


def test_a_plan_of_the_command_is_what_the_server_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    words = [*SHEET, *LOAD, "--prefill-engines", "1", "--decode-engines", "2"]
    assert main(["plan", *words, "--max-num-seqs", "12", "--save-plan", str(path)]) == 0
    assert "plan: " in capsys.readouterr().out
    pools, config = settings_of("--plan", str(path))
    assert (pools.prefill_engines, pools.decode_engines, config.max_num_seqs) == (1, 2, 12)
    assert "1 prefill and 2 decode engines (H100)" in capsys.readouterr().err


def test_a_server_plans_for_a_trace(tmp_path: Path) -> None:
    engine = {
        "kv_tokens": 8192,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "block_size": 16,
        "kv_bytes": 8192 * 1000,
    }
    steps, trace = tmp_path / "steps.json", tmp_path / "trace.csv"
    steps.write_text(json.dumps(records() | engine))
    rows = [f"2026-01-01 00:00:{n / 40:09.6f},300,5" for n in range(80)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    words = ["--plan-trace", str(trace), "--plan-steps", str(steps), "-dp", "auto"]
    pools, _ = settings_of(*words, "--ttft-slo-ms", "400")
    assert pools.data_parallel_size > 1  # an engine takes 60 ms for a prompt, and 40 come a second
    problem = problem_of(*words, "--ttft-slo-ms", "0.001")
    assert re.search("trace.csv: .*no number of engines up to 64 meets the goals", problem)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (AUTO_POOLS, "--prefill-engines auto needs a plan: give --plan FILE"),
        (["-dp", "auto"], "--data-parallel-size auto needs a plan"),
        (["--plan", "a", "--plan-trace", "b"], "--plan and --plan-trace: give one of them"),
        (["--plan", "a", "-dp", "2"], "--data-parallel-size 2 and a plan both set the number"),
        (["--plan", "nowhere.json"], "--plan nowhere.json cannot be read"),
        (["--plan-steps", "a"], "--plan-steps is for --plan-trace"),
        (["--plan-trace", "a", "--plan-steps", "b"], "--plan-trace a needs a goal"),
        (["--plan-trace", "a", "--ttft-slo-ms", "9"], "--plan-trace a needs step times"),
    ],
)
def test_a_server_without_a_usable_plan_says_what_to_give(words: list[str], says: str) -> None:
    assert problem_of(*words).startswith(says)


@pytest.mark.parametrize(
    ("layout", "words", "says"),
    [
        ((3,), AUTO_POOLS, "has engines for both phases .* --data-parallel-size auto"),
        ((0, 1, 1), ["-dp", "auto"], "has pools .* --prefill-engines auto"),
        ((0, 1, 0), [], "is no plan: expected the JSON"),
        ((1, 1, 1), [], "is no plan: expected the JSON"),
        ((-1,), [], "is no plan: expected the JSON"),
        (("2",), [], "is no plan: expected the JSON"),
    ],
)
def test_a_plan_of_another_layout_is_refused(
    layout: tuple[int, ...], words: list[str], says: str, plan_file: Any
) -> None:
    assert re.search(says, problem_of("--plan", plan_file(*layout), *words))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"forecast": 3}', "\0"])
def test_a_file_that_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert re.search("is no plan|is not JSON", problem_of("--plan", str(path)))


def test_the_kuberay_manifest_takes_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ray.yaml"
    path.write_text(MANIFEST.read_text())
    words = [*SHEET, *LOAD, "--prefill-engines", "6", "--decode-engines", "3"]
    assert main(["plan", *words, "--kuberay", str(path)]) == 0
    cluster, server = list(yaml.safe_load_all(path.read_text()))[:2]
    groups = {one["groupName"]: one for one in cluster["spec"]["workerGroupSpecs"]}
    sizes = ("minReplicas", "replicas", "maxReplicas")
    assert [groups["prefill"][name] for name in sizes] == [1, 6, 6]
    assert [groups["decode"][name] for name in sizes] == [1, 3, 8]
    args = server["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--prefill-engines=6", "--decode-engines=3"} <= set(args)
    before, after = MANIFEST.read_text().splitlines(), path.read_text().splitlines()
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 5  # comments and all else stay


@pytest.mark.parametrize(
    ("words", "text", "says"),
    [
        (["--engines", "2"], MANIFEST.read_text(), "the plan has no pools"),
        ([], "kind: RayCluster\n", "is not a copy of deploy/kubernetes/ray.yaml"),
        ([], None, "cannot be read"),
    ],
)
def test_a_manifest_that_cannot_take_the_plan_says_why(
    words: list[str],
    text: str | None,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "ray.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["plan", *SHEET, *LOAD, *words, "--kuberay", str(path)]) == 1
    assert says in " ".join(capsys.readouterr().err.split())
