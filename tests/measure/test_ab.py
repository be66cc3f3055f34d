"""Comparisons by pairs: the statistics on numbers, the runs on servers whose delays are known."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from tests.measure.paced_server import paced_server
from twostroke.cli import main
from twostroke.measure.ab import Figures, Trial, compare_runs, markdown
from twostroke.measure.compare import compare, overall, pairs_needed, t_quantile


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
    assert verdicts.count("WIN") + verdicts.count("LOSS") <= 65  # 5%, and the chance of more


def test_a_change_of_the_size_told_is_found_nine_times_of_ten() -> None:
    rng = random.Random(1)
    needed = pairs_needed(spread=0.05 * math.sqrt(2), effect=0.1)
    found = [
        compare("tpot", runs(rng, needed, 10.0, 0.05), runs(rng, needed, 11.0, 0.05), 1)
        for _ in range(500)
    ]
    assert sum(one.verdict == "LOSS" for one in found) >= 430
    assert 6 <= needed <= 10


def test_which_way_is_better_depends_on_the_metric() -> None:
    a, b = [10.0, 10.1, 9.9, 10.0], [12.0, 12.2, 11.9, 12.1]
    assert compare("ttft", a, b, 1).verdict == "LOSS"
    assert compare("throughput", a, b, 1).verdict == "WIN"
    assert compare("throughput", b, a, 1).verdict == "LOSS"
    assert compare("tpot", a, [x * 1.001 for x in a], 1).verdict == "TIE"
    assert compare("tpot", a, [9.0, 12.0, 8.0, 13.0], 1).verdict == "INCONCLUSIVE"
    assert compare("tpot", [1.0], [2.0], 1).verdict == "INCONCLUSIVE"


def test_several_metrics_widen_the_interval() -> None:
    a, b = [10.0, 10.2, 9.9, 10.1], [10.4, 10.3, 10.5, 10.2]
    one, four = compare("tpot", a, b, 1), compare("tpot", a, b, 4)
    assert four.low < one.low < one.ratio < one.high < four.high


def test_a_loss_outweighs_a_win() -> None:
    def said(*verdicts: str) -> str:
        base = compare("tpot", [1.0, 1.0], [1.0, 1.0], 1)
        from dataclasses import replace

        return overall([replace(base, verdict=verdict) for verdict in verdicts])

    assert said("WIN", "TIE") == "WIN"
    assert said("WIN", "LOSS") == "MIXED"
    assert said("TIE", "LOSS") == "LOSS"
    assert said("TIE", "TIE") == "TIE"
    assert said("TIE", "INCONCLUSIVE") == "INCONCLUSIVE"


def test_a_table_for_a_pull_request() -> None:
    a = [Figures(10.0 + n / 100, 5.0, 6.0, 100.0, True, ()) for n in range(4)]
    b = [Figures(20.0 + n / 100, 5.0, 6.0, 100.0, True, ()) for n in range(4)]
    trial = Trial(a, b, compare_runs(a, b))
    assert trial.verdict == "LOSS"
    text = markdown(trial, ("", "--x"))
    assert text.startswith("**LOSS**: B (`--x`) against A (`defaults`), 4 pairs of runs")
    assert "| ttft | 1.99" in text


WORKLOAD = ["--num-prompts", "6", "--input-len", "4", "--output-len", "4", "--pairs", "3"]


def test_a_slower_server_loses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten times slower: no noise of a test machine hides that."""
    table = tmp_path / "table.md"
    with paced_server(itl_s=0.005) as fast, paced_server(itl_s=0.05) as slow:
        words = ["ab", "--a", fast.url, "--b", slow.url, *WORKLOAD]
        assert main([*words, "--json", "--markdown", str(table)]) == 4
        found = json.loads(capsys.readouterr().out)
        orders = [len(server.bodies) for server in (fast, slow)]
    assert orders == [19, 19]  # a warm-up, and three runs of six
    (tpot,) = [one for one in found["metrics"] if one["metric"] == "tpot"]
    assert tpot["verdict"] == "LOSS"
    assert tpot["low"] > 1.5
    assert found["verdict"] in ("LOSS", "MIXED")
    assert "| tpot |" in table.read_text()


def test_both_arms_get_the_same_requests() -> None:
    with paced_server() as one, paced_server() as other:
        main(["ab", "--a", one.url, "--b", other.url, *WORKLOAD])
    sent = [sorted(body["prompt"] for body in server.bodies) for server in (one, other)]
    assert sent[0] == sent[1]
    assert len({tuple(body["prompt"]) for body in one.bodies}) == 19


def test_one_server_as_both_arms_gets_no_prompt_twice() -> None:
    with paced_server() as server:
        main(["ab", "--aa", "--a", server.url, *WORKLOAD])
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 38


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--pairs", "1", "--b", "http://127.0.0.1:9"], "--pairs must be at least 2"),
        ([], "give the change as --b"),
        (["--playbook", "chunk-buget"], "did you mean 'chunk-budget'"),
        (["--a", "http://127.0.0.1:9", "--b", "http://127.0.0.1:9"], "nobody answers"),
    ],
)
def test_wrong_words_say_what_to_give(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ab", *words]) == 1
    assert says in capsys.readouterr().err
    assert main(["ab", "--playbook", "list"]) == 0
