"""Help by topic, `twostroke version`, lines of options as values, and suggestions that exist."""

from __future__ import annotations

import argparse
import ast
import contextlib
import re
from pathlib import Path

import pytest

from tests.cli.reading import OPTIONS, PARSER, SERVE
from twostroke import __version__
from twostroke.cli import _commands, main, parse
from twostroke.commands.parser import nearest_flag
from twostroke.commands.serve_flags import USUAL, VLLM_GROUPS

PACKAGE = Path(__file__).parents[2] / "twostroke"


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> set[str]:
    """The options that a help describes."""
    with contextlib.suppress(SystemExit):
        main([*words])
    text = capsys.readouterr().out
    return set(re.findall(r"^  (?:-\w+(?: \w+)?, )?(--[\w\[\]-]+)", text, re.M))


def test_help_shows_the_usual_options_and_all_of_them_when_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert 18 <= len(USUAL) <= 22
    usual = help_of(capsys, "serve", "--help")
    assert {flag.replace("[no-]", "") for flag in usual} == set(USUAL)
    everything = help_of(capsys, "serve", "--help=all")
    shown = [action for action in SERVE._actions if action.help != argparse.SUPPRESS]
    assert len(everything) >= len(shown) - 2  # the model, and -h
    for group in ("server", "limits", "several engines", "ModelConfig", "Frontend"):
        found = help_of(capsys, "serve", f"--help={group}")
        assert 3 < len(found) < len(everything)
    assert help_of(capsys, "serve", "--help=max-num") == {
        "--max-num-seqs",
        "--max-num-batched-tokens",
    }
    assert set(VLLM_GROUPS.values()) == {"server", "several engines", "model and engine"}
    main(["serve", "--help=nothing-like-it"])
    assert "no group or option matches" in capsys.readouterr().out


def test_version_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"twostroke {__version__}\n"


def test_a_single_option_may_be_an_arm_and_a_line_of_quality() -> None:
    args = parse(["ab", "--a", "-tp 2", "--b", "--no-enable-prefix-caching"], PARSER)
    assert args is not None
    assert (args.a, args.b) == ("-tp 2", "--no-enable-prefix-caching")
    args = parse(["quality", "m", "--try", "--exact", "--against", "--kv-cache-dtype=int8"], PARSER)
    assert args is not None
    assert (args.tries, args.against) == (["--exact"], "--kv-cache-dtype=int8")


@pytest.mark.parametrize("flag", ["--enable-foo", "--disable-bar", "--no-enable-x"])
def test_a_switch_is_not_taken_for_another_that_only_begins_alike(flag: str) -> None:
    assert nearest_flag(flag, OPTIONS) is None


def test_every_option_that_a_message_of_serve_names_exists() -> None:
    known = {flag for one in _commands(PARSER).values() for flag in one._option_string_actions}
    for path in (PACKAGE / "commands").glob("*_flags.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = re.findall(r"(?<![\w-])--[a-z][\w-]+\w(?![\w.-])", node.value)
                for flag in {flag.replace("_", "-") for flag in named}:
                    assert flag in known, f"{path.name}: {flag} in {node.value!r}"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import twostroke.lora", "merge the adapter into the model"),
        ("from twostroke.lora.request import LoRARequest", "LoRA adapters are not supported yet"),
        ("from twostroke.multimodal import MultiModalRegistry", "models read and write text only"),
        ("from twostroke.pooling_params import PoolingParams", "the engine writes text"),
        ("from twostroke import PoolingParams", "the engine writes text"),
    ],
)
def test_an_import_of_what_is_not_there_says_what_is(line: str, says: str) -> None:
    with pytest.raises(ImportError, match=re.escape(says)):
        exec(line)
