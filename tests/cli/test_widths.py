"""The output of commands in 44, 80 and 200 columns: no line is wider, and no word is broken."""

from __future__ import annotations

import io

import pytest

from tests.cli.launch_lines import VLLM
from tests.cli.test_serve import INFO
from twostroke.cli import main, make_parser
from twostroke.commands import answer_report
from twostroke.commands.answer import Answer
from twostroke.commands.banner import INDENT, banner
from twostroke.commands.terminal import columns, wrapped
from twostroke.kv.usage import KVUsage

WIDTHS = (44, 80, 200)
COMMANDS = ("", "run", "chat", "serve", "run-batch")
ANSWER = Answer(
    text="…",
    token_ids=[0] * 1234,
    prompt_token_ids=[],
    finish_reason="stop",
    stop_reason=None,
    prompt_tokens=123_456,
    cached_tokens=120_000,
    queue_s=0.1,
    prefill_s=12.0,
    decode_s=70.0,
    ttft_s=12.5,
    tpot_s=0.0567,
    kv=KVUsage(reserved=1_861_840, used=124_690, fragmented=8, cached=1_234_567, free=502_575),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> Terminal:
    """Replace stdout and stderr by a terminal."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("sys.stderr", stream)
    return stream


def check(text: str, width: int, like: str) -> None:
    """Check that a text fits and has the words of `like`, the same text without wrapping."""
    for line in text.splitlines():
        assert len(line) <= width, line
    assert text.split() == like.split()


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = make_parser()
    if command:
        parser = parser.parse_args([command]).parser
    for about in ("", "all"):
        texts = {}
        for width in (1000, *WIDTHS):
            monkeypatch.setenv("COLUMNS", str(width))
            texts[width] = parser.help_about(about) if about else parser.format_help()
        for width in WIDTHS:
            check(texts[width], width, texts[1000])


@pytest.mark.parametrize("width", WIDTHS)
def test_refusals(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    line = " ".join(line for line, refused in VLLM if refused)
    said = {}
    for one in (10_000, width):
        stream = terminal(monkeypatch, one)
        with pytest.raises(SystemExit):
            main(["serve", *line.split()])
        said[one] = stream.getvalue()
    assert said[10_000].count("\n") >= 6
    assert said[width].count("\n") >= said[10_000].count("\n")
    check(said[width], width, said[10_000])


@pytest.mark.parametrize("width", WIDTHS)
def test_the_banner(width: int) -> None:
    text = banner(INFO, "http://127.0.0.1:8000; /dash shows its metrics", 0, True, 2.34)
    shown = wrapped(text, width, INDENT)
    check(shown, width, text)
    assert len(shown.splitlines()) == (5 if width == 200 else len(shown.splitlines()))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_line_below_a_turn_breaks_between_figures(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = terminal(monkeypatch, width)
    answer_report.print_dim(answer_report.turn_line(ANSWER))
    shown = stream.getvalue()
    check(shown, width, answer_report.turn_line(ANSWER))
    for figure in ("TTFT 12.5 s", "TPOT 57 ms", "decode 1,234 tok", "17.6 tok/s"):
        assert figure in shown, "its number and its unit stand together"


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_that_are_too_wide_are_transposed(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = terminal(monkeypatch, width)
    rows = [("KV cache", *ANSWER.kv._fields), ("tokens", *(f"{n:,}" for n in ANSWER.kv))]
    answer_report.print_table(rows)
    shown = stream.getvalue()
    assert all(len(line) <= width for line in shown.splitlines())
    assert sorted(shown.split()) == sorted(" ".join(word for row in rows for word in row).split())
    assert len(shown.splitlines()) == (6 if width == 44 else 2)


def test_files_and_pipes_have_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    assert columns(io.StringIO()) is None
    assert columns(Terminal()) == 44
    assert wrapped("word " * 50, None) == "word " * 50
