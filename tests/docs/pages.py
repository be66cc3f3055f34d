"""The pages of the documentation: their code blocks, the commands in the blocks, and the links.

Every block names its language. `sh` blocks hold commands. `console` blocks hold commands after a
prompt (`$ `) and the output that they print. `text` blocks hold no commands. An HTML comment right
above a block is its marker:

    <!-- needs: gpu -->         the commands need what a machine of the tests lacks
    <!-- parsed: takes hours --> the commands only go through the parser, for the reason given
    <!-- exact -->              the output is compared with what the page shows, up to a line `…`
    <!-- example: requests.jsonl -->  the block is a file of that name for the blocks after it
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = ("sh", "console")
LANGUAGES = (*COMMANDS, "python", "json", "jsonl", "yaml", "promql", "text")
# What a block may need. A block that needs one of these is not run.
NEEDS = {
    "another program": "llama-server, vLLM, guidellm, or a tool of NVIDIA's",
    "cluster": "Ray, Kubernetes or Docker",
    "files": "models or traces that the tests do not fetch",
    "gpu": "one NVIDIA GPU, or several",
    "network": "a package index or a model hub",
    "checkout": "a fresh environment or a build folder in a checkout of the repository",
}
MARKER = re.compile(r"\s*<!-- (needs|parsed|exact|example)(?:: (.+))? -->\s*")
FENCE = re.compile(r"(\s*)```(\S*)\s*")
PROMPT = re.compile(r"\w*\$ ")
SEPARATORS = {"&&", "||", "|", ";", "&"}
PROGRAMS = ("twostroke", "python", "python3", "pip", "curl", "docker", "kubectl", "ray", "helm")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    markers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def has_commands(self) -> bool:
        return self.language in COMMANDS

    @property
    def is_run(self) -> bool:
        return self.has_commands and not {"needs", "parsed"} & self.markers.keys()

    def commands(self) -> list[tuple[str, str]]:
        """Return each command line and the output that the page shows below it."""
        found: list[tuple[str, str]] = []
        rest = iter(self.text.splitlines())
        for line in rest:
            if self.language == "console" and not PROMPT.match(line):
                if not found:
                    raise ValueError(f"{self}: a console block begins with a command after `$ `")
                found[-1] = found[-1][0], f"{found[-1][1]}{line}\n"
                continue
            command = PROMPT.sub("", line, count=1) if self.language == "console" else line
            while command.endswith("\\"):
                command = f"{command[:-1].rstrip()} {next(rest).strip()}"
            if command.strip() and not command.startswith("#"):
                found.append((command, ""))
        return found


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "native/README.md"]


def blocks(name: str, text: str) -> Iterator[Block]:
    """Yield the code blocks of a page."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opening = FENCE.fullmatch(lines[at])
        at += 1
        if opening is None:
            continue
        indent, language = opening.groups()
        first = at
        while lines[at].strip() != "```":
            at += 1
        body = "\n".join(line.removeprefix(indent) for line in lines[first:at])
        at += 1
        yield Block(name, first, language, body, _markers(lines[: first - 1]))


def _markers(above: list[str]) -> dict[str, str]:
    """Return the markers that end a page's lines above a block. Empty lines may lie between."""
    found = {}
    for line in reversed(above):
        marker = MARKER.fullmatch(line)
        if marker is None and line.strip():
            break
        if marker is not None:
            found[marker[1]] = marker[2] or ""
    return found


def all_blocks() -> list[Block]:
    return [
        block
        for page in pages()
        for block in blocks(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
    ]


def simple_commands(line: str) -> list[list[str]]:
    """Return the words of each program that a command line starts, without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if word in SEPARATORS:
            found.append([])
        elif word in (">", ">>", "<", "2>"):
            skip = True
        elif skip:
            skip = False
        elif found[-1] or not re.fullmatch(r"[A-Z_]+=.*", word):
            found[-1].append(word)
    return [words for words in found if words]


# ── links and paths ─────────────────────────────────────────────────────────────────────────────

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")
QUOTED = re.compile(r"`([^`\n]+)`")
SUFFIXES = "py|md|cpp|h|js|mjs|json|jsonl|yaml|yml|html|css|svg|png|sh|toml|txt|service|pyi"
PATH = re.compile(rf"(?<![\w./:$-])((?:[\w*{{}},.-]+/)*[\w*{{}},.-]+\.(?:{SUFFIXES}))(?![\w/])")
FOLDER = re.compile(r"(?:[\w-]+/)+")


def prose(text: str) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^( *)```.*?^ *```$", "", text, flags=re.M | re.S)


def links(text: str) -> list[str]:
    return [found[1] or found[2] for found in LINK.finditer(prose(text))]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(text), flags=re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


def named_paths(text: str) -> set[str]:
    """Return the files and folders that a page names in backquotes."""
    found: set[str] = set()
    for quoted in QUOTED.findall(prose(text)):
        found.update(PATH.findall(quoted))
        if FOLDER.fullmatch(quoted):
            found.add(quoted)
    return found
