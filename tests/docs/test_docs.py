"""The documentation holds: commands run or parse, links lead somewhere, named files exist.

Core checks every command line against the real parsers, runs the `python` blocks and the blocks
whose output is compared (`exact`). Full runs the commands of every block that has no `needs` or
`parsed` marker. `pages.py` lists the markers.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.cli import reading
from tests.docs.pages import (
    LANGUAGES,
    NEEDS,
    PROGRAMS,
    QUOTED,
    ROOT,
    Block,
    all_blocks,
    anchors,
    blocks,
    links,
    named_paths,
    pages,
    prose,
    simple_commands,
)
from tests.support import default_model_path
from twostroke.cli import COMMANDS, parse
from twostroke.commands.flags import engine_config

pytestmark = pytest.mark.skipif(
    not (ROOT / "docs" / "images").is_dir(), reason="of the repository, not of an unpacked sdist"
)
BLOCKS = all_blocks()
PATIENCE_S = 300


def of_text(text: str) -> list[Block]:
    return list(blocks("page.md", text))


# ── every block says what it is ─────────────────────────────────────────────────────────────────


def is_command(words: list[str]) -> bool:
    """Say if words begin like a command: `twostroke` alone may also begin a banner."""
    if words[:1] == ["twostroke"]:
        return words[1:2] != [] and words[1] in COMMANDS
    return words != [] and words[0] in PROGRAMS


def problems_of_form(block: Block) -> list[str]:
    """Return the reasons for which nothing could check a block."""
    found = []
    if block.language not in LANGUAGES:
        found.append(f"the language is one of {', '.join(LANGUAGES)}, not {block.language!r}")
    if "needs" in block.markers and block.markers["needs"] not in NEEDS:
        found.append(f"a block needs one of {', '.join(NEEDS)}, not {block.markers['needs']!r}")
    if "parsed" in block.markers and not block.markers["parsed"]:
        found.append("a block that is only parsed says why")
    if block.language == "text":
        for line in block.text.splitlines():
            if line.startswith("$ ") or is_command(line.split()):
                found.append(f"a text block holds no command, but: {line}")
    return found


@pytest.mark.core
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_has_a_language_and_known_markers(block: Block) -> None:
    assert problems_of_form(block) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```\ntwostroke run hi\n```", "the language is one of"),
        ("<!-- needs: luck -->\n```sh\ntwostroke run hi\n```", "a block needs one of"),
        ("<!-- parsed -->\n```sh\ntwostroke run hi\n```", "says why"),
        ("```text\n$ twostroke run hi\n```", "holds no command"),
        ("```text\ntwostroke run --hot hi\n```", "holds no command"),
    ],
)
@pytest.mark.core
def test_a_block_that_nothing_could_check_is_found(text: str, problem: str) -> None:
    (block,) = of_text(text)
    assert any(problem in one for one in problems_of_form(block))


# ── command lines, through the real parsers ─────────────────────────────────────────────────────


def problems_of_line(words: list[str]) -> list[str]:
    """Return what the parser of a command of twostroke, or the file of a script, has against it."""
    if words[0] == "twostroke":
        return problems_of_twostroke(words[1:])
    if words[0] in ("python", "python3"):
        return problems_of_script(words[1:])
    return []


def problems_of_twostroke(words: list[str]) -> list[str]:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            if words[0] == "serve":
                return reading.read(*words[1:]).problems
            args = parse(words, reading.PARSER)
            if args is not None and args.parser.collects_errors:
                engine_config(args)
                args.parser.finish()
    except SystemExit as end:
        return [stderr.getvalue()] if end.code else []
    return []


def problems_of_script(words: list[str]) -> list[str]:
    """Return the problems of `python -m MODULE` or `python FILE`: its file and flags."""
    if words[0] == "-c":
        try:
            compile(words[1], "page", "exec")
        except SyntaxError as error:
            return [str(error)]
        return []
    if words[0] == "-m":
        name, rest = words[1], words[2:]
        if name.split(".")[0] not in ("bench", "tests", "twostroke"):
            return files_not_there(rest)
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            return [f"there is no module {name}"]
        file = Path(spec.origin)
    else:
        file, rest = ROOT / words[0], words[1:]
        if not file.is_file():
            return [f"there is no file {words[0]}"]
    return [f"{name} has no {flag}" for name, flag in flags_not_in(file, rest)]


def flags_not_in(file: Path, words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags that no source of the script's package names."""
    own = [file] if file.parent.name == "bench" else list(file.parent.glob("*.py"))
    shared = [ROOT / "bench" / name for name in ("peers", "machine", "results_file")]
    sources = [*own, *(one for folder in shared for one in folder.glob("*.py"))]
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and f'"{flag}"' not in text:
            yield str(file.relative_to(ROOT)), flag


def files_not_there(words: list[str]) -> list[str]:
    return [
        f"there is no {word}"
        for word in words
        if word.endswith(".py") and "/" in word and not (ROOT / word).is_file()
    ]


LINES = [block for block in BLOCKS if block.has_commands]


@pytest.mark.core
@pytest.mark.parametrize("block", LINES, ids=str)
def test_every_command_line_is_one_that_the_program_takes(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_examples(block, tmp_path)
    for line, output in block.commands():
        refused = "twostroke: error:" in output
        for words in simple_commands(line):
            found = problems_of_line(words)
            assert not found or refused, f"{block}: {' '.join(words)}\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "twostroke serve --max-num-seq 8",
        "twostroke sing",
        "twostroke phases --prompt-tokens",
        "twostroke run --kernels fast hi",
        "twostroke serve --kv-cache-dtype fp4",
        "twostroke bench serve --num-prompts many",
        "echo hi | twostroke run --raww",
        "python -m bench.no_such_script",
        "python -m bench.scheduler --no-such-flag",
        "python bench/no_such_script.py",
        "python -m pytest tests/test_no_such_file.py",
        "python -c 'import'",
    ],
)
@pytest.mark.core
def test_a_wrong_command_line_is_found(line: str) -> None:
    (block,) = of_text(f"```sh\n{line}\n```")
    ((command, _),) = block.commands()
    assert any(problems_of_line(words) for words in simple_commands(command))


def test_commands_are_read_as_a_shell_reads_them() -> None:
    text = (
        "<!-- needs: cluster -->\n\n```console\na$ ray start --resources '{\"a\": 1}'  # one\n"
        "b$ twostroke serve m \\\n     --threads 8 > log && curl x\nready\n```"
    )
    (block,) = of_text(text)
    assert block.markers == {"needs": "cluster"}
    first, (second, output) = block.commands()
    assert simple_commands(first[0]) == [["ray", "start", "--resources", '{"a": 1}']]
    assert simple_commands(second) == [["twostroke", "serve", "m", "--threads", "8"], ["curl", "x"]]
    assert output == "ready\n"


# ── blocks of data ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.core
@pytest.mark.parametrize("block", [one for one in BLOCKS if "json" in one.language], ids=str)
def test_json_blocks_are_json(block: Block) -> None:
    for text in block.text.splitlines() if block.language == "jsonl" else [block.text]:
        if text:
            json.loads(text)


@pytest.mark.core
@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "yaml"], ids=str)
def test_yaml_blocks_are_files_of_options(block: Block, tmp_path: Path) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)
    file = tmp_path / "serve.yaml"
    file.write_text(block.text)
    assert reading.read("--config", str(file)).problems == []


# ── links and named files ───────────────────────────────────────────────────────────────────────

# A path in backquotes may begin at one of these folders.
BASES = ("", "twostroke", "native", "tests", "bench", "docs", "twostroke/serve")
# Files that pages name and the repository does not have: files of models and of other programs, and
# files that a reader makes.
FOREIGN = {
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    "chat_template.json", "special_tokens_map.json", "model.safetensors.index.json",
    "verdict.json", "results/gpu_checks.json", "results/gpu_checks.txt", "config.toml",
    "FILE.yaml", "plan-checks.json", "in.jsonl", "out.jsonl", "IN.jsonl", "OUT.jsonl", "llama.cpp",
    "conversion/", "vendor/", "src/models/", "src/llama-context.cpp", "src/llama-model.cpp",
}  # fmt: skip


@cache
def repository_files() -> tuple[set[str], set[str]]:
    """Return the paths of the repository's files and folders, and their base names."""
    skipped = {".git", "__pycache__", "build", ".venv"}
    paths = set()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in skipped]
        at = Path(folder).relative_to(ROOT)
        paths |= {str(at / name) for name in files} | {f"{at / name}/" for name in folders}
    return paths, {Path(path).name for path in paths}  # of files and of folders


def is_there(path: str, page: Path) -> bool:
    """Say if a path that a page names exists; patterns need one file that fits."""
    paths, names = repository_files()
    pattern = re.escape(path).replace(r"\*", "[^/]*")
    pattern = re.sub(r"\\\{([^}]*)\\\}", lambda one: f"({one[1].replace(',', '|')})", pattern)
    if "/" not in path.rstrip("/"):
        return any(re.fullmatch(pattern.rstrip("/"), name) for name in names)
    bases = [*BASES, str(page.parent.relative_to(ROOT))]
    places = {pattern, *(f"{re.escape(base)}/{pattern}" for base in bases if base not in ("", "."))}
    return any(re.fullmatch(place, one) for place in places for one in paths)


PAGES = [*pages(), ROOT / "CHANGELOG.md"]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.core
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    text = text.partition("<!-- vllm_tests begin -->")[0]
    named = sorted(named_paths(text) - FOREIGN)
    assert [path for path in named if not is_there(path, page)] == []


# Pages about the code: every identifier that they name is in the sources.
OF_THE_CODE = ("ARCHITECTURE.md", "INTERNALS.md", "ADDING_A_FAMILY.md")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(.*\))?")
# Names in the sources of llama.cpp.
OTHER_PROJECTS = {"llama_model_rope_type", "undo_permute"}


@cache
def words_of_the_sources() -> set[str]:
    folders = ("twostroke", "native", "tests", "bench", ".ci")
    found: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".pyi", ".cpp", ".h", ".js", ".html", ".txt", ".toml"):
            found.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
            found.add(path.stem)
    found.update(re.findall(r"\w+", (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    return found


def unknown_names(text: str) -> list[str]:
    """Return the identifiers that a page names and no source has."""
    named = {one for one in QUOTED.findall(prose(text)) if IDENTIFIER.fullmatch(one)}
    parts = {part for one in named for part in re.findall(r"\w+", one.partition("(")[0])}
    return sorted(parts - words_of_the_sources() - OTHER_PROJECTS)


@pytest.mark.core
@pytest.mark.parametrize("name", OF_THE_CODE)
def test_every_identifier_of_a_page_about_the_code_is_in_the_sources(name: str) -> None:
    assert unknown_names((ROOT / "docs" / name).read_text(encoding="utf-8")) == []


def test_an_identifier_that_no_source_has_is_found() -> None:
    # Put together, since this file is one of the sources.
    absent = "".join(("Schedul", "erette"))
    assert unknown_names(f"`Scheduler.commit`, `{absent}.commit(x)`") == [absent]


def broken_links(page: Path, text: str) -> list[str]:
    found = []
    for link in links(text):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists():
            found.append(link)
        elif anchor and target.suffix == ".md":
            there = text if target == page else target.read_text(encoding="utf-8")
            if anchor not in anchors(there):
                found.append(link)
    return found


@pytest.mark.core
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_a_broken_link_and_an_absent_file_are_found() -> None:
    page = ROOT / "docs" / "CLI.md"
    assert broken_links(page, "[a](NONE.md) [b](SERVER.md#none) [c](SERVER.md#flags)") == [
        "NONE.md",
        "SERVER.md#none",
    ]
    named = named_paths("`model/none.py` and `cli.py` and `bench/results/*.json`, `none/`")
    assert {path for path in named if not is_there(path, page)} == {"model/none.py", "none/"}


def test_every_page_is_reached_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in set(links(text)):
        if name.endswith(".md"):
            text += (ROOT / name).read_text(encoding="utf-8")
    linked = {Path(link.partition("#")[0]).name for link in links(text)}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - linked == set()


def test_every_environment_variable_is_in_the_page_about_the_command_line() -> None:
    page = (ROOT / "docs" / "CLI.md").read_text(encoding="utf-8")
    source = (ROOT / "twostroke" / "environment.py").read_text(encoding="utf-8")
    named = set(re.findall(r'"([A-Z][A-Z_]+[A-Z])"', source))
    assert len(named) > 10
    assert sorted(name for name in named if f"`{name}`" not in page) == []


# ── running ─────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Shell:
    """A folder to run a page's commands in, where `localhost:8000` is a server of the tests."""

    folder: Path
    port: int
    server: subprocess.Popen[bytes] | None = None
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        tools = self.folder / ".tools"
        if not tools.is_dir():
            tools.mkdir()
            for name, words in (("python", ""), ("twostroke", " -m twostroke")):
                script = tools / name
                script.write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n')
                script.chmod(0o755)
        path = os.pathsep.join([str(tools), os.environ["PATH"]])
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}

    def start_server(self, line: str = "twostroke serve") -> None:
        """Start a server and return when it is healthy. It takes the place of an older one."""
        self.stop_server()
        log = (self.folder / "server.log").open("wb")
        own = line.rstrip("& ").replace(
            "twostroke serve", f"exec twostroke serve --port {self.port}"
        )
        self.server = subprocess.Popen(
            ["bash", "-c", own], cwd=self.folder, env=self.environment(), stdout=log, stderr=log
        )
        until = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError):
                url = f"http://127.0.0.1:{self.port}/health"
                if urllib.request.urlopen(url, timeout=5).status == 200:
                    return
            said = (self.folder / "server.log").read_text()
            assert self.server.poll() is None, f"{line}\n{said}"
            assert time.monotonic() < until, f"{line}\n{said}"
            time.sleep(0.1)

    def ask(self) -> None:
        """Send the server one request, so that commands which look back find one."""
        body = json.dumps({"prompt": "a", "max_tokens": 8}).encode()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        assert urllib.request.urlopen(request, timeout=PATIENCE_S).status == 200

    def stop_server(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait(PATIENCE_S)
            self.server = None

    def with_port(self, text: str) -> str:
        text = re.sub(r"(localhost|127\.0\.0\.1):8000", rf"\1:{self.port}", text)
        if re.search(r"\bbench serve\b", text) and "--base-url" not in text:
            text = re.sub(r"\bbench serve\b", f"bench serve --port {self.port}", text)
        return text

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", self.with_port(line)],
            cwd=self.folder,
            env=self.environment(),
            check=False,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
        )

    def start(self, line: str) -> None:
        """Start a command that ends with `&`."""
        command = ["bash", "-c", f"exec {self.with_port(line.rstrip('& '))}"]
        self.started.append(
            subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def close(self) -> None:
        for child in self.started:
            child.terminate()
            child.wait(PATIENCE_S)
        self.stop_server()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    for name in ("bench", "tests", "deploy"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "model.gguf").symlink_to(default_model_path())
    one = Shell(tmp_path, port)
    yield one
    one.close()


def write_examples(block: Block, folder: Path) -> None:
    """Write the files that blocks of the same page show above this one."""
    for other in BLOCKS:
        if other.page == block.page and other.line < block.line and "example" in other.markers:
            (folder / other.markers["example"]).write_text(other.text + "\n")


# Exit statuses that say something about this machine, not about the command: figures that do not
# count (the client had no core of its own), a fault that was found, too little evidence.
VERDICTS = {("bench",): (3,), ("phases",): (3,), ("doctor",): (4, 5)}


def first_words(line: str) -> tuple[str, ...]:
    return tuple(simple_commands(line)[0][:2])


def execute(block: Block, shell: Shell) -> None:
    """Run the commands of a block. A command fails only where the page shows an error."""
    write_examples(block, shell.folder)
    lines = block.commands()
    serves = [line for line, _ in lines if is_server(line)]
    if not serves and any("8000" in line or "bench serve" in line for line, _ in lines):
        shell.start_server()
        shell.ask()
    for line, output in lines:
        missing = [words[0] for words in simple_commands(line) if not program(words[0])]
        if missing:
            pytest.skip(f"{missing[0]} is not installed")
        if is_server(line) and "twostroke: error:" not in output:
            shell.start_server(line)
        elif line.rstrip().endswith("&"):
            shell.start(line)
        else:
            done = shell.run(line)
            fails = "twostroke: error:" in output
            works = done.returncode in (0, *VERDICTS.get(first_words(line)[1:2], ()))
            assert works != fails, f"{block}: {line}\n{done.stdout}"
            if "exact" in block.markers:
                assert is_shown(done.stdout, output), f"{block}: {line}\n{done.stdout}"


def is_shown(output: str, shown: str) -> bool:
    """Say if a page shows this output. Line breaks do not count; a last line `…` omits the rest."""
    wanted, rest = shown.split(), output.split()
    if wanted[-1:] == ["…"]:
        return rest[: len(wanted) - 1] == wanted[:-1]
    return rest == wanted


def is_server(line: str) -> bool:
    return any(words[:2] == ["twostroke", "serve"] for words in simple_commands(line))


def program(name: str) -> bool:
    return name in ("twostroke", "python") or shutil.which(name) is not None


# Blocks whose output is compared need no model and take a second.
RUN = [
    pytest.param(
        block,
        id=str(block),
        marks=pytest.mark.core if "exact" in block.markers else pytest.mark.full,
    )
    for block in BLOCKS
    if block.is_run
]


@pytest.mark.parametrize("block", RUN)
def test_a_block_of_commands_runs(block: Block, shell: Shell) -> None:
    execute(block, shell)


@pytest.mark.core
@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "python"], ids=str)
def test_a_python_block_runs(block: Block, shell: Shell) -> None:
    compile(block.text, str(block), "exec")
    if "needs" in block.markers:
        assert block.markers["needs"] in NEEDS
        return
    if ":8000" in block.text:
        shell.start_server()
    file = shell.folder / "block.py"
    file.write_text(shell.with_port(block.text))
    done = shell.run(f"python {file.name}")
    assert done.returncode == 0, f"{block}\n{done.stdout}"


@pytest.mark.core
@pytest.mark.parametrize(
    "text",
    [
        "```sh\ntwostroke roofline no-such-model\n```",
        "```sh\ntwostroke phases http://localhost:9\n```",
        "<!-- exact -->\n```console\n$ python -c 'print(1)'\n2\n```",
        "<!-- exact -->\n```console\n$ python -c 'print(1, 2)'\n2\n…\n```",
        "```console\n$ python -c 'print(1)'\ntwostroke: error: no\n```",
    ],
)
def test_a_block_whose_command_fails_is_found(text: str, shell: Shell) -> None:
    (block,) = of_text(text)
    with pytest.raises(AssertionError, match=r"page\.md"):
        execute(block, shell)


@pytest.mark.full
def test_every_series_of_the_page_about_metrics_is_exported(shell: Shell) -> None:
    """The page also names series of GPUs, ceilings, several engines, drafts and tiers."""
    shell.start_server()
    url = f"http://127.0.0.1:{shell.port}/metrics"
    text = urllib.request.urlopen(url, timeout=PATIENCE_S).read().decode()
    exported = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    page = (ROOT / "docs" / "METRICS.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b((?:vllm|twostroke):[a-z_]+[a-z])\b(?!_)", prose(page)))
    series = {re.sub(r"_(sum|count|bucket)$", "", name) for name in named - exported}
    elsewhere = ("twostroke:ceiling", "twostroke:gpu_", "twostroke:kv_transfer", "vllm:spec_decode")
    elsewhere += ("twostroke:kv_tier", "vllm:kv_offload", "vllm:external_prefix_cache")
    assert len(named & exported) > 30
    assert [one for one in sorted(series - exported) if not one.startswith(elsewhere)] == []
