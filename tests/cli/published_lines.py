"""Launch lines that vLLM and llama.cpp publish in their source archives.

python -m tests.cli.published_lines VLLM_FOLDER LLAMA_CPP_FOLDER

counts the lines that `serve` accepts, refuses for a valid reason, and refuses wrongly, and the
reasons. It writes each line with a new option to `data/published_lines.txt`. Lines of shell
scripts, pages, Python lists and vLLM's recipes are found; a recipe has a line for each of its lists
of arguments. docs/COMPATIBILITY.md has the counts.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.cli.reading import OPTIONS, SERVE, read
from twostroke.commands.foreign import RefusedOption, RestrictedOption

DATA = Path(__file__).parent / "data" / "published_lines.txt"
SUFFIXES = {".md", ".sh", ".rst", ".py", ".yaml", ".yml", ".txt", ".toml", ".json", ".jinja"}
START = re.compile(
    r"(vllm\s+serve|-m\s+vllm\.entrypoints\.openai\.api_server|"
    r"vllm/vllm-openai(?:-(?:cpu|rocm|xpu))?(?::[\w.-]+)?|"
    r"llama-server(?:\.exe)?|llama\.cpp:server[\w-]*)(?=\s)"
)
IN_LIST = re.compile(r"""["']vllm["'],\s*["']serve["'],([^]]*)]""")
ELEMENT = re.compile(r"""(?:"[^"\n]*"|'[^'\n]*')(?=\s*(?:,|$))|[^\s,][^,]*""")
CONTINUED = re.compile(r"\\\\?[ \t]*(?:#[^\n]*)?\n")  # with a comment, as some pages have it
END = re.compile(r"^(\d?[&|>]|<$|;|then$)")
QUOTED_LINES = 12  # of a JSON value over several lines
VARIABLE = re.compile(r"\$\{?\w+(?::-\w+)?\}?|<[\w .-]+>")  # of a shell, or a placeholder
# Words that show that a text is not a launch line: a word of prose, a container build, `--np` and
# `-ctx`, mistakes on pages of llama.cpp, and options of other programs.
NO_LINE = re.compile(
    r"[$…()]|\.\.\.|^\s*$|^-ctx$|^--help|^bench\.py$|SYCLxxx|^-lc$|ocker(file|/)|^--np$|"
    r"^--(hf|amend|head|worker|hardware|bench-cmd|max-tokens|1)$"
)
# Options whose values may belong to an unsupported family of models or format of weights.
OF_OTHER_MODELS = {
    *("--tool-call-parser", "--reasoning-parser", "--tokenizer-mode"),
    *("--quantization", "--kv-cache-dtype", "--load-format"),
    *("--speculative-config", "--spec-type"),  # a model that drafts
    "--kv-transfer-config",  # a connector of another project
}


class Line(NamedTuple):
    server: str  # vllm or llama-server
    words: tuple[str, ...]


def lines_in(folder: Path) -> Iterator[Line]:
    for path in sorted(folder.rglob("*")):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        text = CONTINUED.sub(" ", path.read_text(encoding="utf-8", errors="replace"))
        lines = text.splitlines()
        for at, line in enumerate(lines):
            for match in START.finditer(line):
                server = "llama-server" if match[1].startswith("llama") else "vllm"
                rest = _with_whole_quotes(line[match.end() :], lines[at + 1 : at + QUOTED_LINES])
                if words := _words(rest):
                    yield Line(server, words)
        for match in IN_LIST.finditer(text):
            if words := _words(" ".join(map(_element, ELEMENT.findall(match[1])))):
                yield Line("vllm", words)
        if path.suffix == ".yaml" and "base_args:" in text:
            yield from _recipe(yaml.safe_load(path.read_text(encoding="utf-8")))


def _element(code: str) -> str:
    """Return an element of a list in Python as a word; anything but a text as a variable."""
    if code[0] in "\"'":
        return shlex.quote(code[1:-1])
    return "" if code.startswith("*") else "$x"


def _recipe(recipe: dict[str, Any]) -> Iterator[Line]:
    """Yield the lines of a recipe of vLLM: its base, alone and with each list of arguments."""
    base = [recipe["model"]["model_id"], *recipe["model"]["base_args"]]
    for more in [[], *_argument_lists(recipe)]:
        # The command builder writes the arguments side by side: some hold an option and its value.
        split = [
            str(one).split() if str(one).startswith("-") else [str(one)] for one in base + more
        ]
        if words := _words(shlex.join(word for part in split for word in part)):
            yield Line("vllm", words)


def _argument_lists(node: Any) -> Iterator[list[str]]:
    for name, value in node.items() if isinstance(node, dict) else ():
        if name in ("args", "extra_args", "vllm_args") and isinstance(value, list):
            yield value
        else:
            yield from _argument_lists(value)
    for value in node if isinstance(node, list) else ():
        yield from _argument_lists(value)


def _with_whole_quotes(rest: str, following: list[str]) -> str:
    """Return the rest of a line, with the following lines until its quotes are closed."""
    for end in range(len(following)):
        whole = " ".join([rest, *following[:end]])
        with contextlib.suppress(ValueError):
            shlex.split(re.split(r"`|\s#\s|</", whole)[0])
            return whole
    return rest


def _words(rest: str) -> tuple[str, ...]:
    """Return the words of a complete command; none if the command is incomplete. A variable or a
    placeholder is replaced by a value that its option takes."""
    try:
        words = shlex.split(re.split(r"`|\s#\s|</", rest)[0])
    except ValueError:
        return ()
    ends = next((at for at, word in enumerate(words) if END.match(word)), len(words))
    kept = [word.removesuffix(";") for word in words[:ends]]
    kept = [
        word for word in kept if not re.match(r"\.\.\.$|\\?$|\$@$|\$\{\w+\[[@*]|.*\[[@*]\]", word)
    ]
    kept = [
        _without_variables(word, before)
        for before, word in pairwise(["", *kept])
        if not (VARIABLE.fullmatch(word) and _holds_options(before, kept))
    ]
    has_option = any(word.startswith("-") for word in kept)
    cut_off = bool(kept) and kept[-1] in OPTIONS and OPTIONS[kept[-1]].nargs is None
    is_line = has_option and not cut_off and not any(map(NO_LINE.search, kept))
    return tuple(kept) if is_line else ()


def _holds_options(before: str, words: list[str]) -> bool:
    """Return whether a variable after the word `before` holds options or a condition."""
    if not before:
        return "--model" in words  # else it holds the model
    return not before.startswith("-") or (before in OPTIONS and OPTIONS[before].nargs == 0)


def _without_variables(word: str, before: str) -> str:
    if not VARIABLE.search(word):
        return word
    name, equals, _ = word.partition("=")
    if equals and name in VALUES:
        return f"{name}={VALUES[name]}"
    return VALUES.get(before) or VARIABLE.sub("1", word)


def _values() -> dict[str, str]:
    """Return a value that each option of vLLM takes."""
    text = (DATA.parent / "vllm_options.txt").read_text(encoding="utf-8")
    listed = re.findall(r"^(-.*) = (.+)$", text, re.M)
    return {name: value for names, value in listed for name in names.split()}


VALUES = _values()


def problems_of(words: tuple[str, ...]) -> list[str]:
    SERVE.problems = []
    found = read(*words).problems
    return [one for one in found if not re.match(r"--config .* cannot be read", one)]


def is_justified(problem: str) -> bool:
    """Return whether a problem has a valid reason: an unsupported option, a value for an
    unsupported family of models, or an abbreviation, for which the message names the option."""
    flag = problem.split()[0].rstrip(":")
    is_abbreviation = f"unknown option; did you mean {flag}-" in problem
    return (
        flag in OF_OTHER_MODELS
        or is_abbreviation
        or isinstance(OPTIONS.get(flag), RefusedOption | RestrictedOption)
    )


def reason_of(problem: str) -> str:
    """Return the reason without the option's value; the option for a value of other models."""
    flag = problem.split()[0].rstrip(":")
    if flag in OF_OTHER_MODELS:
        return f"{flag} of a model, a format or a draft that is not supported"
    return re.sub(r"^(-[^\s:]+) [^:]*:", r"\1:", problem)


def main() -> None:
    reasons: Counter[str] = Counter()
    wrong: list[tuple[Line, list[str]]] = []
    kept: list[Line] = []
    seen: dict[str, set[str]] = {"vllm": set(), "llama-server": set()}
    counts: Counter[tuple[str, str]] = Counter()
    for line in dict.fromkeys(line for folder in sys.argv[1:] for line in lines_in(Path(folder))):
        problems = problems_of(line.words)
        if not problems:
            outcome = "taken"
        elif all(map(is_justified, problems)):
            outcome = "refused for a valid reason"
            reasons.update({reason_of(problem) for problem in problems})
        else:
            outcome = "refused wrongly"
            wrong.append((line, problems))
        counts[line.server, outcome] += 1
        options = {word.partition("=")[0] for word in line.words if word.startswith("-")}
        if not options <= seen[line.server]:
            kept.append(line)
            seen[line.server] |= options
    for (server, outcome), count in sorted(counts.items()):
        print(f"{server}: {count} {outcome}")
    for reason, count in reasons.most_common():
        print(f"{count:6} {reason}")
    for line, problems in wrong:
        print(f"wrongly: {shlex.join(line.words)}", *problems, sep="\n    ")
    text = "".join(f"{line.server} {shlex.join(line.words)}\n" for line in kept)
    DATA.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
