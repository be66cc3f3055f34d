"""The doctor's exam in `bench/doctor_exam`: its cases, its faults and its count."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.doctor_exam.__main__ import main
from bench.doctor_exam.cases import CASES
from bench.doctor_exam.exam import CaseResult, find_cases, result_json, run_case
from bench.doctor_exam.faulty_server import main as serve_with_fault
from bench.doctor_exam.slow_link import slow_link
from tests.tiny import tiny_folder
from twostroke.errors import ConfigError


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", "ligt"]) == 1
    assert "did you mean 'light'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--jobs", "0"])
    assert "must be at least 1" in capsys.readouterr().err


def test_the_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CASES)


def test_there_are_enough_faults_and_controls() -> None:
    faults = [case for case in CASES.values() if case.expected]
    assert len(faults) >= 12
    assert len(CASES) - len(faults) >= 6
    with pytest.raises(ConfigError, match="no case"):
        find_cases("light,nothing")


@pytest.mark.long  # the doctor judges by the clock
def test_the_doctor_finds_an_injected_fault(tmp_path: Path) -> None:
    """A real server with a fault, a real load, and the doctor as a process of its own."""
    folder = tiny_folder(tmp_path / "tiny")
    found = asyncio.run(run_case(CASES["slow-tokenizer"], str(folder), watch_s=4.0))
    assert found["causes"][0]["cause"] == "tokenizer_or_template"
    assert found["verdict"] == "slow_to_start"


def test_an_exam_counts_what_was_right_and_false_alarms() -> None:
    verdicts = {"one-seat": "batch_too_small", "light": "healthy", "idle": "kv_pressure"}
    answers = [CaseResult(CASES[name], answer, {}, 1.0) for name, answer in verdicts.items()]
    found = result_json(answers)
    assert (found["right"], found["runs"], found["false_alarms"]) == (2, 3, 1)
    assert not found["passed"]
    assert found["matrix"]["healthy"] == {"healthy": 1, "kv_pressure": 1}
    assert result_json(answers[:2])["passed"]


def test_a_fault_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SystemExit, match="unknown fault 'clock_s'"):
        serve_with_fault(["clock_s=1", "serve"])


@pytest.mark.parametrize("mode", ["far", "buffering"])
def test_a_slow_link_delays_or_buffers(mode: str) -> None:
    async def run() -> tuple[float, list[bytes]]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            for word in (b"one", b"two"):
                writer.write(word)
                await asyncio.sleep(0.05)
            await reader.read(100)
            writer.close()

        real = await asyncio.start_server(answer, "127.0.0.1", 0)
        loop, pieces = asyncio.get_running_loop(), []
        async with real, slow_link(real.sockets[0].getsockname()[1], mode, 0.3) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            begun = loop.time()
            writer.write(b"hello")
            while sum(map(len, pieces)) < 6:
                pieces.append(await reader.read(100))
            took = loop.time() - begun
            writer.close()
        return took, pieces

    took, pieces = asyncio.run(run())
    assert b"".join(pieces) == b"onetwo"
    assert took >= (0.6 if mode == "far" else 0.3)
    if mode == "buffering":
        assert pieces == [b"onetwo"]
