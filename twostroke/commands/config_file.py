"""`--config FILE.yaml`: converts the options of a file to words of the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from twostroke.commands.foreign import IgnoredOption, RefusedOption, RestrictedOption
from twostroke.commands.parser import Parser


def file_words(path: Path, parser: Parser) -> list[str]:
    """Return the options of a file as words of a command line. Errors are added to the parser's
    problems."""
    import yaml

    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        parser.problem(f"--config {path} cannot be read: {error}")
        return []
    except yaml.YAMLError as error:
        parser.problem(f"--config {path} is not YAML: {' '.join(str(error).split())}")
        return []
    if not isinstance(options, dict):
        parser.problem(f"--config {path} must have lines such as `port: 8000`")
        return []
    words: list[str] = []
    for key, value in options.items():
        flag = "--" + str(key).partition(".")[0].replace("_", "-")
        if flag not in parser._option_string_actions or flag in ("--config", "--help"):
            hint = parser.did_you_mean(flag)
            parser.problem(f"--config {path}: unknown option {key!r}{hint}")
        else:
            words += _words(path, parser, str(key), flag, value)
    return words


def _words(path: Path, parser: Parser, key: str, flag: str, value: object) -> Iterator[str]:
    action = parser._option_string_actions[flag]
    if value is None or (value is False and isinstance(action, RefusedOption | IgnoredOption)):
        return  # the default
    if action.nargs == 0:
        if not isinstance(value, bool):
            parser.problem(f"--config {path}: {key} must be true or false, not {value!r}")
        elif value:
            yield flag
        elif f"--no-{flag[2:]}" in parser._option_string_actions:
            yield f"--no-{flag[2:]}"
    elif isinstance(value, list):
        if isinstance(action, IgnoredOption):
            yield from (flag, *map(_word, value))
        else:
            yield from (f"{flag}={_word(item)}" for item in value)
    elif isinstance(value, bool) and isinstance(action, RestrictedOption | IgnoredOption):
        yield f"{flag}={'on' if value else 'off'}"  # YAML reads on and off as booleans
    else:
        yield f"--{key}={_word(value)}"


def _word(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)
