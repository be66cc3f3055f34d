"""Launch lines that vLLM and llama.cpp publish in their source archives.

python -m tests.cli.published_lines VLLM_FOLDER LLAMA_CPP_FOLDER

counts the lines that `serve` accepts, refuses for a valid reason, and refuses wrongly. It writes
each line with a new option to `data/published_lines.txt`.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.cli.reading import OPTIONS, SERVE, read
from twostroke.commands.foreign import RefusedOption, RestrictedOption

DATA = Path(__file__).parent / "data" / "published_lines.txt"
SUFFIXES = {".md", ".sh", ".rst", ".py", ".yaml", ".yml", ".txt", ".toml", ".json", ".jinja"}
START = re.compile(
    r"(vllm\s+serve|-m\s+vllm\.entrypoints\.openai\.api_server|vllm/vllm-openai(?::[\w.-]+)?|"
    r"llama-server(?:\.exe)?|llama\.cpp:server[\w-]*)(?=\s)"
)
END = re.compile(r"^(\d?[&|>]|<$|;|then$)")
# Words that show that a text is not a launch line: a placeholder, a shell variable, a word of
# prose, a container build, or `--np`, a mistake on a page of llama.cpp.
NO_LINE = re.compile(
    r"[$…()]|<(?!model|path|tag)|\.\.\.|^\s*$|^-ctx$|^--help|\.py$|SYCLxxx|"
    r"^-lc$|ocker(file|/)|^--np$"
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
        text = path.read_text(encoding="utf-8", errors="replace")
        for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
            for match in START.finditer(line):
                server = "llama-server" if match[1].startswith("llama") else "vllm"
                if words := _words(line[match.end() :]):
                    yield Line(server, words)


def _words(rest: str) -> tuple[str, ...]:
    """Return the words of a complete command; none if the command is incomplete."""
    try:
        words = shlex.split(re.split(r"`|\s#\s|</", rest)[0])
    except ValueError:
        return ()
    ends = next((at for at, word in enumerate(words) if END.match(word)), len(words))
    kept = tuple(word.removesuffix(";") for word in words[:ends])
    has_option = any(word.startswith("-") for word in kept)
    cut_off = bool(kept) and kept[-1] in OPTIONS and OPTIONS[kept[-1]].nargs is None
    return kept if has_option and not cut_off and not any(map(NO_LINE.search, kept)) else ()


def problems_of(words: tuple[str, ...]) -> list[str]:
    SERVE.problems = []
    found = read(*words).problems
    return [one for one in found if not re.match(r"--config .* cannot be read", one)]


def is_justified(problem: str) -> bool:
    """Return whether a problem has a valid reason: an unsupported option, or a value for an
    unsupported family of models."""
    flag = problem.split()[0].rstrip(":")
    return flag in OF_OTHER_MODELS or isinstance(
        OPTIONS.get(flag), RefusedOption | RestrictedOption
    )


def main() -> None:
    found = dict.fromkeys(line for folder in sys.argv[1:] for line in lines_in(Path(folder)))
    taken, refused, wrong = 0, 0, []
    kept: list[Line] = []
    seen: dict[str, set[str]] = {"vllm": set(), "llama-server": set()}
    for line in found:
        problems = problems_of(line.words)
        if not problems:
            taken += 1
        elif all(map(is_justified, problems)):
            refused += 1
        else:
            wrong.append((line, problems))
        options = {word.partition("=")[0] for word in line.words if word.startswith("-")}
        if not options <= seen[line.server]:
            kept.append(line)
            seen[line.server] |= options
    print(f"{len(found)} lines: {taken} taken, {refused} refused for a valid reason")
    print(f"{len(wrong)} refused wrongly")
    for line, problems in wrong:
        print(f"  {shlex.join(line.words)}", *problems, sep="\n    ")
    text = "".join(f"{line.server} {shlex.join(line.words)}\n" for line in kept)
    DATA.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
