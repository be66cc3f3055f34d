"""Launch lines and options of vLLM and llama-server are accepted, or refused by name."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from tests.cli import published_lines
from tests.cli.launch_lines import LLAMA, VLLM
from tests.cli.reading import OPTIONS, PARSER, SERVE, read
from twostroke.cli import parse
from twostroke.commands import llama_flags, vllm_flags

DATA = Path(__file__).parent / "data"
ONCE = {"--help", "-h", "--usage", "--version", "--config"}  # options that print something and exit


def options(name: str) -> list[tuple[list[str], str | None]]:
    """Yield the names of each option and a value; None if the option takes no value."""
    found = []
    for line in (DATA / name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            names, equals, value = line.partition(" =")
            found.append((names.split(), value.strip() if equals else None))
    return found


def flags_of(problems: list[str]) -> set[str]:
    return {problem.split()[0].rstrip(":") for problem in problems}


@pytest.mark.parametrize(("line", "refused"), [*VLLM, *LLAMA])
def test_a_launch_line_is_taken_or_all_that_is_wrong_is_told(
    line: str, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.yaml").write_text("max-model-len: 4096\nasync-scheduling: true\n")
    taken = read(*line.split())
    assert flags_of(taken.problems) == set(refused.split()), taken.problems
    for problem in taken.problems:
        assert len(problem.partition(" ")[2]) > 20, "the reason, and what to do"
    if not refused:
        assert taken.config is not None
        assert taken.config.model is not None
        assert taken.settings is not None


def test_no_published_launch_line_is_refused_wrongly() -> None:
    lines = published_lines.DATA.read_text(encoding="utf-8").splitlines()
    assert len(lines) > 150
    wrong = {}
    for line in lines:
        _, *words = shlex.split(line)
        problems = published_lines.problems_of(tuple(words))
        if not all(map(published_lines.is_justified, problems)):
            wrong[line] = problems
    assert wrong == {}
    assert not published_lines.is_justified("--port: a value is missing"), "the check can fail"


def test_most_lines_are_accepted() -> None:
    assert len(VLLM) >= 30
    assert len(LLAMA) >= 12
    assert sum(not refused for _, refused in VLLM) >= 23
    assert sum(not refused for _, refused in LLAMA) >= 9


@pytest.mark.parametrize(("file", "least"), [("vllm_options.txt", 310), ("llama_options.txt", 250)])
def test_every_option_is_taken_or_refused_by_its_name_with_a_reason(file: str, least: int) -> None:
    listed = options(file)
    assert len(listed) >= least
    for names, value in listed:
        for name in set(names) - ONCE:
            given = [] if value is None else [value or "1"]
            if value == "?":
                given = ["auto"]
            problems = read(name, *given).problems
            assert len(problems) <= 1, (name, problems)
            for problem in problems:
                assert problem.split()[0].rstrip(":") in OPTIONS, problem
                assert "unknown option" not in problem
                assert len(problem) > len(name) + 15


# Options whose effect shows only after others, or with another value than "1".
LINES = {
    "-tp": (["-tp", "2"], []),
    "-n": (["-n", "2"], []),
    "-hff": (["org/name", "-hff", "f.gguf"], ["org/name"]),
    "--hf-file": (["org/name", "--hf-file", "f.gguf"], ["org/name"]),
    "--yarn-ext-factor": (["--yarn-ext-factor", "0"], []),
    "--webui": (["--no-webui", "--webui"], ["--no-webui"]),
}


def test_every_option_that_help_does_not_show_acts_is_refused_or_is_named_in_the_log() -> None:
    hidden = {name: act for name, act in OPTIONS.items() if act.help == argparse.SUPPRESS}
    assert len(hidden) > 900
    silent = []
    for name, action in hidden.items():
        words, before = LINES.get(name, ([name] if action.nargs == 0 else [name, "1"], []))
        switch = name.replace("--disable-", "--enable-", 1)
        if name != switch and switch in OPTIONS and switch not in hidden:  # off by default
            words, before = [switch, name], [switch]
        if name == "--enable-log-stats":
            words, before = ["--disable-log-stats", name], ["--disable-log-stats"]
        if not _shows(name, words, before):
            silent.append(name)
    assert silent == []


def _shows(name: str, words: list[str], before: list[str]) -> bool:
    """Return whether an option changes a setting, or an error or the log names it."""
    args = parse(["serve", *words], PARSER)
    SERVE.problems = []
    SERVE.notice()
    if {"environment", "data_parallel_size"} & vars(args).keys():
        return True
    taken, untouched = read(*words), read(*before)
    named = any(name in text for text in (taken.notice, *taken.problems))
    return named or (taken.config, taken.settings) != (untouched.config, untouched.settings)


def test_options_of_earlier_versions_are_marked_as_such() -> None:
    now = {name for names, _ in options("vllm_options.txt") for name in names}
    llamas = {name for names, _ in options("llama_options.txt") for name in names}
    ours = {*vllm_flags.REFUSED, *vllm_flags.IGNORED}
    assert ours - now - llamas - {"-O"} == vllm_flags.OF_EARLIER_VERSIONS
    taken = read("--swap-space", "4", "--use-v2-block-manager")
    assert taken.notice == (
        "options without effect: --swap-space, --use-v2-block-manager (current versions of vLLM do "
        "not have it either)"
    )
    (problem,) = read("--spec-decoding-acceptance-method", "m").problems
    assert problem.endswith("(current versions of vLLM do not have it either)")


def test_no_flag_is_in_two_tables_or_in_a_table_and_in_the_help() -> None:
    tables = [
        table
        for module in (vllm_flags, llama_flags)
        for table in (module.REFUSED, module.IGNORED, module.REDUNDANT, module.RENAMED)
    ]
    only = [
        flag
        for module in (vllm_flags, llama_flags)
        for flags in module.RESTRICTED
        for flag in flags.split()
    ]
    names = [flag for table in tables for flag in table] + only + list(llama_flags.SAMPLING)
    assert sorted(names) == sorted(set(names))
    shown = {name for name, action in OPTIONS.items() if action.help != argparse.SUPPRESS}
    assert shown & set(names) == set(), "what is taken has no place in the tables"
