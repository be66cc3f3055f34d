"""Error messages of the measuring commands: one line that says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.measure.paced_server import paced_server
from tests.server.running import running
from tests.tiny import tiny_llm
from twostroke.cli import main

DEAD = "http://127.0.0.1:9"
ROOFLINE = ["roofline", "7B", "--hardware", "A100", "--server"]
# Each is given the server's address as its last word.
COMMANDS = {
    "bench serve": ["bench", "serve", "--num-prompts", "2", "--base-url"],
    "phases": ["phases"],
    "trace": ["trace"],
    "profile": ["profile", "--seconds", "0.1"],
    "why": ["why"],
    "roofline": ROOFLINE,
    "ab": ["ab", "--pairs", "2", "--num-prompts", "2", "--a", DEAD, "--b"],
}
TALKING = {name: COMMANDS[name] for name in ("bench serve", "phases")}


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[str]:
    with running(tiny_llm(folder), api_keys=("sesame",)) as server:
        yield server.url


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setattr("twostroke.measure.load.workload.FIRST_ID", 10)
    monkeypatch.setattr("twostroke.measure.load.workload.LAST_ID", 299)


def refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1, nothing on stdout, and one line on stderr."""
    assert main(words) == 1
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("twostroke: error: ")
    assert re.search(says, line), line


@pytest.mark.parametrize("command", COMMANDS)
def test_nobody_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    says = (
        r"no server answers at http://127.0.0.1:9 .*start a server there, or give another address"
    )
    refused([*COMMANDS[command], DEAD], says, capsys)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("key", [[], ["--api-key", "wrong"]])
def test_a_wrong_key(
    command: str, key: list[str], locked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [locked if word == DEAD else word for word in COMMANDS[command]]
    says = r"answered 401: .*; give the server's key with --api-key or OPENAI_API_KEY"
    refused([*words, locked, *key], says, capsys)


@pytest.mark.parametrize("command", [*TALKING, "ab"])
def test_a_model_that_is_not_there(
    command: str, locked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [locked if word == DEAD else word for word in COMMANDS[command]]
    says = r"answered 404: the model 'nope' .*which has tiny; choose a model .* with --model"
    refused([*words, locked, "--api-key", "sesame", "--model", "nope"], says, capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "latency", "--model", "/no/such"], "/no/such"),
        (["bench", "throughput", "--model", "/no/such"], "/no/such"),
        (
            ["roofline", "lama-3.1-8b", "--hardware", "A100"],
            "did you mean 'llama-3.1-8b'\\? Known names",
        ),
        (["roofline", "7B", "--hardware", "A1000"], "not in the table; did you mean 'A100'"),
    ],
)
def test_a_model_or_machine_that_nobody_knows(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(words, says, capsys)


@pytest.mark.parametrize("command", TALKING)
def test_a_server_that_streams_nothing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with paced_server(content=False) as server:
        says = "streamed no content; try another route .*--chat"
        refused([*TALKING[command], server.url], says, capsys)


@pytest.mark.parametrize("command", ["trace", "profile", "why", "roofline"])
def test_a_server_that_keeps_no_records(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with paced_server() as server:
        refused([*COMMANDS[command], server.url], "the server is not twostroke", capsys)


def test_nothing_to_explain_yet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tiny_llm(folder)) as server:
        says = "no request has ended in the last 120 s; send requests, or give a larger --seconds"
        refused(["why", server.url], says, capsys)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            ['{"timestamp": 0, "input_length": 5, "output_length": 2}', "{"],
            r"line 2: .*is not a JSON",
        ),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "noon,5,2"], r"line 2: .*a time and two"),
        (["hello"], r"line 1: unknown format"),
    ],
)
def test_a_malformed_trace(
    lines: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    trace.write_text("\n".join(lines))
    words = [*COMMANDS["bench serve"]]
    with paced_server() as server:
        given = [server.url, "--dataset-name", "trace", "--dataset-path", str(trace)]
        refused([*words, *given], says, capsys)


@pytest.mark.parametrize("content", [None, "", "hello", "{}", "[1]", '{"benchmarks": []}'])
def test_a_file_that_is_no_result(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    if content is not None:
        file.write_text(content)
    says = "has an unknown format; there are readers for" if content is not None else "No such"
    refused(["import", str(file)], says, capsys)


@pytest.mark.parametrize("command", ["bench serve", "phases", "profile", "why", "roofline"])
def test_a_report_that_cannot_be_written_is_said_before_measuring(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "no" / "r.html"
    words = [*COMMANDS[command], DEAD, "--html", str(file)]
    refused(words, f"cannot be written: there is no folder {file.parent}", capsys)
