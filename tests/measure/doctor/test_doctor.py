"""`twostroke doctor` against real servers over real sockets."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.measure.paced_server import paced_server
from tests.server.test_load import Server, served
from twostroke.cli import main
from twostroke.measure.doctor import diagnosis


@pytest.fixture(autouse=True)
def no_fault_in_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of a test may be busy with other tests, which is no subject here
    (`test_machine.py`)."""
    monkeypatch.setattr(diagnosis, "machine_findings", lambda observed, account: ())


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """One request at a time, 20 ms a step."""
    with served(folder, step_s=0.02, num_gpu_blocks_override=256, max_num_seqs=1) as one:
        yield one


def send(server: Server, body: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    assert connection.getresponse().read()


@contextmanager
def users(server: Server, count: int) -> Iterator[None]:
    """Each sends the next request when the last is answered."""
    stop = threading.Event()

    def use(number: int) -> None:
        while not stop.is_set():
            send(server, {"prompt": [60 + number] * 4, "max_tokens": 20, "ignore_eos": True})

    threads = [threading.Thread(target=use, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)


def judged(
    server: Server, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", f"http://127.0.0.1:{server.port}", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.long  # a busy machine does have a slow server
def test_an_idle_server_is_healthy_by_its_probes(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = judged(server, capsys, "--for", "5s")
    assert (status, found["verdict"], found["causes"]) == (0, "healthy", [])
    assert found["evidence_level"] == "step records"
    assert sum(found["ledger"].values()) == pytest.approx(1.0)
    assert found["experiment"] is None
    assert "no traffic" in found["notes"][0]


def test_without_probes_and_traffic_there_is_no_evidence(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = judged(server, capsys, "--for", "2", "--no-probe")
    assert (status, found["verdict"], found["ledger"]) == (5, "not_enough_evidence", {})


def test_five_users_and_one_seat_are_found_and_a_report_is_written(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report, kept = tmp_path / "report.html", tmp_path / "verdict.json"
    words = ["--for", "5", "--html", str(report), "--json", str(kept)]
    with users(server, 5):
        assert main(["doctor", f"http://127.0.0.1:{server.port}", *words]) == 4
    found = json.loads(kept.read_text())
    # On a busy machine the steps have causes of their own, and the verdict is "both".
    assert "batch_too_small" in [one["cause"] for one in found["causes"]]
    assert found["verdict"] in ("slow_to_start", "both")
    shown = capsys.readouterr().out
    assert "Requests wait although the device could run" in shown
    assert "Requests wait although the device could run" in report.read_text()


def test_records_tell_which_prompts_begin_alike(server: Server) -> None:
    alike = [70 + n % 90 for n in range(64)]
    for number, rest in enumerate((5 * [60], 70 * [61], 70 * [62])):
        name = f"mark{number}"
        send(server, {"prompt": alike + rest, "max_tokens": 1, "request_id": name})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/records?seconds=60")
    found = json.loads(connection.getresponse().read())
    assert (found["max_num_seqs"], found["block_size"]) == (1, 16)
    marks = [one["prefix_marks"] for one in found["requests"] if "-mark" in one["request_id"]]
    assert [len(one) for one in marks] == [1, 2, 2]
    assert len({one[0] for one in marks}) == 1
    assert marks[1][1] != marks[2][1]


def test_a_server_that_says_nothing_is_judged_as_its_clients_see_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with paced_server(ttft_s=0.02, itl_s=0.005) as paced:
        main(["doctor", paced.url, "--for", "4", "--json"])
        found = json.loads(capsys.readouterr().out)
    assert found["evidence_level"] == "client only"
    assert "tokenizer_or_template" in found["not_examined"]


@pytest.mark.long  # a busy machine does have a slow server
def test_a_quick_server_that_says_nothing_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    with paced_server(ttft_s=0.02, itl_s=0.005) as paced:
        assert main(["doctor", paced.url, "--for", "4", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "healthy"
    with paced_server(ttft_s=1.0, itl_s=0.005) as paced:
        assert main(["doctor", paced.url, "--for", "5", "--json"]) == 5
        found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "not_enough_evidence"


def test_mistakes_are_answered_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "http://127.0.0.1:9", "--for", "2"]) == 1
    assert "start a server there" in capsys.readouterr().err
    assert main(["doctor", "http://127.0.0.1:9", "--for", "1"]) == 1
    assert "2 to 600 seconds" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--for", "soon"])
    assert ended.value.code == 2
