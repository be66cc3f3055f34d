"""`ab`: the statistics on given numbers, and runs on servers with known delays."""

from __future__ import annotations

import json
import math
import random
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.paced import write_model
from tests.measure.paced_server import paced_server
from twostroke.cli import main
from twostroke.commands.ab import status
from twostroke.measure.compare.ab import RunFigures, Trial, compare_runs, pilot_of
from twostroke.measure.compare.ab_report import markdown
from twostroke.measure.compare.arms import command_line
from twostroke.measure.compare.paired_comparison import (
    compare,
    detectable,
    overall,
    pairs_needed,
    t_quantile,
)
from twostroke.measure.compare.playbook import PLAYBOOK
from twostroke.measure.compare.prediction import (
    PredictionOutcome,
    arms_of,
    outcome_of,
    read_experiment,
)
from twostroke.measure.doctor.verdict import ProposedExperiment, Verdict
from twostroke.measure.load.bench import ServeOptions


@pytest.mark.parametrize(
    ("share", "freedom", "value"),
    [(0.975, 1, 12.7062), (0.975, 5, 2.5706), (0.975, 30, 2.0423), (0.9, 7, 1.4149)],
)
def test_students_t(share: float, freedom: int, value: float) -> None:
    assert t_quantile(share, freedom) == pytest.approx(value, abs=1e-4)


def runs(rng: random.Random, count: int, mean: float, spread: float) -> list[float]:
    return [mean * math.exp(rng.gauss(0.0, spread)) for _ in range(count)]


def test_nothing_is_found_where_there_is_nothing() -> None:
    rng = random.Random(0)
    verdicts = [
        compare("tpot", runs(rng, 8, 10.0, 0.05), runs(rng, 8, 10.0, 0.05), 1).verdict
        for _ in range(1000)
    ]
    assert verdicts.count("WIN") + verdicts.count("LOSS") <= 22  # 1%, and the chance of more


def test_a_change_of_the_size_told_is_found_nine_times_of_ten() -> None:
    rng = random.Random(1)
    needed = pairs_needed(spread=0.05 * math.sqrt(2), effect=0.1)
    found = [
        compare("tpot", runs(rng, needed, 10.0, 0.05), runs(rng, needed, 11.0, 0.05), 1)
        for _ in range(500)
    ]
    assert sum(one.verdict == "LOSS" for one in found) >= 430
    assert 9 <= needed <= 13


def test_which_way_is_better_depends_on_the_metric() -> None:
    a, b = [10.0, 10.1, 9.9, 10.0], [12.0, 12.2, 11.9, 12.1]
    assert compare("ttft", a, b, 1).verdict == "LOSS"
    assert compare("throughput", a, b, 1).verdict == "WIN"
    assert compare("throughput", b, a, 1).verdict == "LOSS"
    assert compare("tpot", a, [x * 1.001 for x in a], 1).verdict == "TIE"
    assert compare("tpot", a, [9.0, 12.0, 8.0, 13.0], 1).verdict == "INCONCLUSIVE"
    assert compare("tpot", [1.0], [2.0], 1).verdict == "INCONCLUSIVE"


def test_a_change_of_up_to_three_percent_is_none() -> None:
    """Two processes of one program differ by so much, however often each is run."""
    a = [10.0, 10.01, 9.99, 10.0, 10.0]
    small = compare("tpot", a, [10.2, 10.21, 10.2, 10.19, 10.2], 1)
    assert small.low > 1
    assert small.verdict == "TIE"
    unclear = compare("tpot", a, [10.2, 10.3, 10.25, 10.2, 10.35], 1)
    assert 1 < unclear.low < unclear.ratio < 1.03 < unclear.high
    assert unclear.verdict == "INCONCLUSIVE"
    assert compare("tpot", a, [10.5, 10.6, 10.5, 10.4, 10.5], 1).verdict == "LOSS"


def test_several_metrics_widen_the_interval() -> None:
    a, b = [10.0, 10.2, 9.9, 10.1], [10.4, 10.3, 10.5, 10.2]
    one, four = compare("tpot", a, b, 1), compare("tpot", a, b, 4)
    assert four.low < one.low < one.ratio < one.high < four.high


def test_a_loss_outweighs_a_win() -> None:
    def said(*verdicts: str) -> str:
        base = compare("tpot", [1.0, 1.0], [1.0, 1.0], 1)
        return overall([replace(base, verdict=verdict) for verdict in verdicts])

    assert said("WIN", "TIE") == "WIN"
    assert said("WIN", "LOSS") == "MIXED"
    assert said("TIE", "LOSS") == "LOSS"
    assert said("TIE", "TIE") == "TIE"
    assert said("TIE", "INCONCLUSIVE") == "INCONCLUSIVE"


def runs_of(ttft: float, failed: int = 0) -> list[RunFigures]:
    return [RunFigures(ttft + n / 100, 5.0, 6.0, 100.0, failed) for n in range(4)]


def trial_of(a: list[RunFigures], b: list[RunFigures]) -> Trial:
    return Trial(a, b, compare_runs(a, b))


def test_a_table_for_a_pull_request() -> None:
    trial = trial_of(runs_of(10.0), runs_of(20.0))
    assert trial.verdict == "LOSS"
    text = markdown(trial, ("", "--x"), ServeOptions(url="", num_prompts=7))
    assert text.startswith("**LOSS**: B (`--x`) against A (`defaults`), 4 pairs of runs")
    assert "| mean TTFT | 10.0 ms | 20.0 ms | 1.99" in text
    assert "Each run: num_prompts 7, input_len 1024" in text


def test_an_arm_whose_requests_fail_wins_nothing() -> None:
    trial = trial_of(runs_of(20.0), runs_of(10.0, failed=1))
    assert overall(trial.comparisons) == "WIN"
    assert trial.verdict == "INVALID"


def test_the_pilot_says_what_the_pairs_can_find() -> None:
    """The arms differ, and that is none of its business: only runs of one arm are compared."""
    a = [RunFigures(10.0 * math.exp(x), 5.0, 6.0, 100.0) for x in (-0.05, 0.0, 0.05)]
    b = [RunFigures(90.0 * math.exp(x), 5.0, 6.0, 100.0) for x in (0.05, -0.05, 0.0)]
    pilot = pilot_of(a, b)
    assert pilot.spread["ttft"] == pytest.approx(math.sqrt(2) * 0.05)
    assert pilot.detectable(8)["ttft"] == detectable(pilot.spread["ttft"], 8, 4)
    assert pilot.detectable(8)["tpot"] == 0.03  # smaller changes are none
    pairs = pilot.pairs_for(0.1)["ttft"]
    assert pilot.detectable(pairs)["ttft"] <= 0.1 < pilot.detectable(pairs - 1)["ttft"]


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("WIN", 0), ("TIE", 0), ("INVALID", 3), ("LOSS", 4), ("MIXED", 4), ("INCONCLUSIVE", 5)],
)
def test_the_exit_status_is_the_verdict(verdict: str, code: int) -> None:
    assert status(verdict) == code
    # A against itself: whatever is found is wrong, and finding nothing is right.
    assert status(verdict, aa=True) == {5: 0, 0: 4 if verdict == "WIN" else 0}.get(code, code)


WORKLOAD = ["--num-prompts", "6", "--input-len", "4", "--output-len", "4"]
WORKLOAD += ["--random-range-ratio", "0", "--pairs", "3", "--pilot", "2"]


def test_a_slower_server_loses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten times slower: no noise of a test machine hides that."""
    table = tmp_path / "table.md"
    with paced_server(itl_s=0.005) as fast, paced_server(itl_s=0.05) as slow:
        words = ["ab", "--a", fast.url, "--b", slow.url, *WORKLOAD, "--pairs", "5"]
        assert main([*words, "--json", "--markdown", str(table)]) == 4
        said = capsys.readouterr()
        found = json.loads(said.out)
        orders = [len(server.bodies) for server in (fast, slow)]
    assert orders == [43, 43]  # a warm-up, two pilot runs of six, and five runs of six
    assert "5 pairs detect in nine of ten cases a change of: mean TTFT" in " ".join(
        said.err.split()
    )
    assert found["pilot"]["runs"] == 2
    (tpot,) = [one for one in found["metrics"] if one["metric"] == "tpot"]
    assert tpot["verdict"] == "LOSS"
    assert tpot["low"] > 1.5
    assert found["verdict"] in ("LOSS", "MIXED")
    assert "| mean TPOT |" in table.read_text()


@pytest.mark.full
def test_both_arms_get_the_same_requests() -> None:
    with paced_server() as one, paced_server() as other:
        main(["ab", "--a", one.url, "--b", other.url, *WORKLOAD])
    sent = [sorted(body["prompt"] for body in server.bodies) for server in (one, other)]
    assert sent[0] == sent[1]
    assert len({tuple(body["prompt"]) for body in one.bodies}) == 31


def test_a_trace_is_replayed_to_both(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2024-05-10 00:00:00.0000000,5,2"]
    lines.append("2024-05-10 00:00:00.0100000,9,3")
    trace.write_text("\n".join(lines) + "\n")
    with paced_server() as one, paced_server() as other:
        words = ["ab", "--a", one.url, "--b", other.url, "--trace", str(trace), *WORKLOAD]
        main([*words, "--pilot", "0"])
    for server in (one, other):
        sent = [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies[1:]]
        assert sorted(sent) == [(5, 2)] * 3 + [(9, 3)] * 3
    assert one.bodies[1:] == other.bodies[1:]


@pytest.mark.full
def test_one_server_as_both_arms_gets_no_prompt_twice() -> None:
    with paced_server() as server:
        main(["ab", "--aa", "--a", server.url, *WORKLOAD])
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 62


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--pairs", "1", "--b", "http://127.0.0.1:9"], "--pairs must be at least 2"),
        ([], "give the change as --b"),
        (["--pilot", "1", "--b", "http://127.0.0.1:9"], "--pilot must be 0 or at least 2"),
        (["--b", "x", "--aa"], "--b and --aa each define B"),
        (["--playbook", "chunk-buget"], "did you mean 'chunk-budget'"),
        (["--playbook", "chunk-budget", "--a", "http://127.0.0.1:9"], "starts both servers"),
        (["--from-doctor", "/nowhere.json"], "/nowhere.json: No such file"),
        (["--b", "/no/such/program --port {port}"], "`/no/such/program` does not start"),
        (["--b", "'"], "is not a command line: No closing quotation"),
        (["--a", "http://127.0.0.1:9", "--b", "http://127.0.0.1:9"], "no server answers"),
    ],
)
def test_wrong_words_say_what_to_give(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ab", *words]) == 1
    assert says in capsys.readouterr().err
    assert main(["ab", "--playbook", "list"]) == 0


def test_a_server_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    fails = f"{sys.executable} -c 'import sys; sys.exit(\"no room for {{port}}\")'"
    assert main(["ab", "--a", "http://127.0.0.1:9", "--b", fails]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "exited with status 1 during the start no room for" in said


def test_an_arm_with_a_port_is_a_command() -> None:
    assert command_line("vllm serve m --port {port}", 81) == ["vllm", "serve", "m", "--port", "81"]
    assert command_line("--threads 1", 81)[-5:] == ["serve", "--port", "81", "--threads", "1"]


def test_the_playbook_is_made_of_options_that_serve_has() -> None:
    from twostroke.cli import make_parser, parse

    for name, (a, b, load) in PLAYBOOK.items():
        for options in (a, b):
            assert parse(["serve", *shlex.split(options)], make_parser("serve")), name
        assert ServeOptions(url="", **load)


# ── what a doctor predicted ─────────────────────────────────────────────────────────────────────


def experiment(**changed: Any) -> ProposedExperiment:
    usual: dict[str, Any] = {
        "name": "more seats",
        "setting": {"--max-num-seqs": 8, "--enable-prefix-caching": True},
        "metric": "ttft",
        "predicted_ratio": 0.5,
        "why": "requests wait for a seat",
    }
    return ProposedExperiment(**usual | changed)


def verdict_file(path: Path, proposed: ProposedExperiment | None) -> str:
    written = Verdict("slow_to_start", "step records", experiment=proposed)
    (path / "verdict.json").write_text(json.dumps(written.as_json()))
    return str(path / "verdict.json")


def test_an_experiment_changes_b_alone() -> None:
    arms = arms_of(experiment(), "model.gguf --max-num-seqs 1")
    assert arms[0] == "model.gguf --max-num-seqs 1"
    assert arms[1] == f"{arms[0]} --max-num-seqs 8 --enable-prefix-caching"


@pytest.mark.parametrize(
    ("proposed", "a", "says"),
    [
        (None, "", "the verdict slow_to_start proposes no experiment"),
        (experiment(metric="beauty"), "", "'beauty' is not measured here"),
        (experiment(predicted_ratio=-1), "", "predicted_ratio must be a number above 0"),
        (experiment(predicted_ratio="half"), "", "predicted_ratio must be a number above 0"),
        (experiment(setting={"rm": "x {port}"}), "", "the experiment sets 'rm'"),
        (experiment(setting={"--x": "{port}"}), "", "the experiment sets '--x'"),
        (experiment(), "http://127.0.0.1:9", "give the options of the diagnosed server as --a"),
    ],
)
def test_an_experiment_that_cannot_be_run_is_refused(
    proposed: ProposedExperiment | None,
    a: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["ab", "--from-doctor", verdict_file(tmp_path, proposed), "--a", a]
    assert main(words) == 1
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("b", "predicted", "verdict", "code", "says"),
    [
        (10.0, 0.5, "CONFIRMED", 0, "the prediction lies in the interval"),
        (10.0, 0.8, "CONFIRMED", 0, "the gain was larger than predicted"),
        (10.0, 0.1, "CONFIRMED", 0, "the gain was smaller than predicted"),
        (20.0, 0.5, "REFUTED", 4, "the gain was smaller than predicted"),
        (40.0, 0.5, "REFUTED", 4, "the gain was smaller than predicted"),
    ],
)
def test_a_prediction_beside_what_was_measured(
    b: float, predicted: float, verdict: str, code: int, says: str
) -> None:
    trial = trial_of(runs_of(20.0), runs_of(b))
    found = outcome_of(experiment(predicted_ratio=predicted), trial.a, trial.b)
    assert (found.verdict, status(trial.verdict, prediction=found)) == (verdict, code)
    assert says in found.sentence
    assert found.as_json()["measured"]["ratio"] == pytest.approx(b / 20.0, rel=0.01)


def test_a_prediction_of_what_was_not_measured_is_open() -> None:
    runs = [RunFigures(10.0, 5.0, 0.0, 100.0)] * 2  # one token each: no gaps
    found = outcome_of(experiment(metric="itl"), runs, runs)
    assert found == PredictionOutcome("more seats", "itl_p99", 0.5, None)
    assert status("TIE", prediction=found) == 5


@pytest.mark.full
def test_the_doctors_experiment_on_real_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"  # small, with a vocabulary that has the ids of random prompts
    model.mkdir()
    write_model(model, pace_ms=0.0)
    proposed = experiment(setting={"--max-num-seqs": 8})
    path = verdict_file(tmp_path, proposed)
    assert read_experiment(path) == proposed
    a = f"{model} --load-format dummy --max-num-seqs 1 --threads 1"
    words = ["ab", "--json", "--from-doctor", path, "--a", a]
    words += ["--num-prompts", "8", "--input-len", "8", "--output-len", "8", "--pairs", "2"]
    code = main([*words, "--pilot", "0", "--max-concurrency", "8"])
    said = capsys.readouterr()
    assert said.out, said.err
    found = json.loads(said.out)
    assert found["b"] == f"{found['a']} --max-num-seqs 8"
    assert found["pilot"] is None
    prediction = found["prediction"]
    (ttft,) = [one for one in found["metrics"] if one["metric"] == "ttft"]
    assert prediction["measured"]["ratio"] == ttft["ratio"]
    # It was named before, and is judged alone: no correction for other metrics widens it.
    assert ttft["low"] < prediction["measured"]["low"] < prediction["measured"]["high"]
    assert prediction["predicted_ratio"] == 0.5
    # How long it took is this machine's luck; that the status says the same as the words is not.
    assert code == {"CONFIRMED": 0, "REFUTED": 4, "INCONCLUSIVE": 5}[prediction["verdict"]]
    assert all(not run["failed"] for run in (*found["runs"]["a"], *found["runs"]["b"]))
