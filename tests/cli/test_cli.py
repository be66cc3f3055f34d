"""The command in its own process, with the default model."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, cast

import pytest

from tests.cli.reading import heavy_imports
from tests.support import default_model_path
from twostroke import __version__
from twostroke.cli import make_parser
from twostroke.commands.chat import Conversation, command_of
from twostroke.commands.chat_input import History, read_turns
from twostroke.commands.flags import (
    ROUTER_ONLY,
    SERVER_ONLY,
    engine_config,
    parse_bytes,
    sampling_params,
)
from twostroke.commands.terminal import WordWriter
from twostroke.config import EngineConfig
from twostroke.model.find.hub import names_a_model
from twostroke.model.gguf.gguf_file import GGUFFile
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.request import SamplingParams

SMALL = ["--device", "cpu", "--num-gpu-blocks-override", "90", "--temperature", "0"]
KV_TOKENS = 90 * 16


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "twostroke", *arguments]


def twostroke(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), input=stdin, capture_output=True, text=True, timeout=120
    )


# Before anything is loaded


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["chat", "--help"], ["--version"], ["run", "--max-tokns", "5"]],
)
def test_help_and_mistakes_are_answered_without_heavy_imports(arguments: list[str]) -> None:
    assert heavy_imports(arguments) == []


def test_the_check_for_heavy_imports_can_fail() -> None:
    assert heavy_imports(["--version"], also="import numpy") == ["numpy"]


def test_version_and_a_bare_call() -> None:
    assert twostroke("--version").stdout == f"twostroke {__version__}\n"
    bare = twostroke()
    assert bare.returncode == 0
    assert "run " in bare.stdout
    assert "chat " in bare.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (
            ["run", "--max-tokns", "5", "hi"],
            2,
            "--max-tokns: unknown option; did you mean",
        ),
        (["run", "hi", "--max_tokens=5"], 2, "--max_tokens: unknown option; did you mean"),
        (["chat", "--json"], 2, "--json: unknown option"),
        (["chat", "./nowhere", "hi"], 2, "unexpected argument 'hi'"),
        (["chat", "./nowhere", "-m", "x"], 2, "the model is given twice: ./nowhere and --model x"),
        (["chat", "./nowhere"], 1, "no such file or folder: nowhere"),
        (["run", "hi", "--seed", "x"], 2, "--seed x: expected a whole number"),
        (["run", "hi", "--kv-cache-memory-bytes", "4X"], 2, "4X: expected a size such as 512M"),
        (["run", "hi", "--raw", "--system", "s"], 2, "--system needs a chat template"),
        (["run"], 2, "the prompt is empty"),
        (["rum", "hi"], 2, "unknown command 'rum'; did you mean 'run'?"),
        (
            ["run", "hi", "--max-tokens", "0"],
            2,
            "--max-tokens must be a whole number of at least 1",
        ),
        (["run", "hi", "--temperature", "nan"], 2, "--temperature must be a number"),
        (["run", "hi", "--dtype", "float23"], 2, "did you mean 'float32'?"),
        (["run", "hi", "-m", "./nowhere.gguf"], 1, "no such file or folder: nowhere.gguf"),
        (["run", "./nowhere.gguf"], 1, "no such file or folder: nowhere.gguf"),
        (["run", "nowhere.gguf", "hi"], 1, "no such file or folder: nowhere.gguf"),
        (["run", "/no/where", "hi"], 1, "no such file or folder: /no/where"),
    ],
)
def test_an_error_is_reported_in_one_line(arguments: list[str], status: int, says: str) -> None:
    done = twostroke(*arguments)
    assert done.returncode == status
    assert done.stdout == ""
    assert done.stderr.startswith("twostroke: error: ")
    assert says in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr


def test_every_engine_setting_has_its_option_and_an_option_not_given_is_the_default() -> None:
    parser = make_parser()
    assert engine_config(parser.parse_args(["run"])) == EngineConfig()
    changed = ["--no-enable-prefix-caching", "--enforce-eager", "--max-num-seqs", "3"]
    config = engine_config(parser.parse_args(["chat", "-m", "x", *changed, "--block-size", "8"]))
    assert config == EngineConfig(
        model="x", enable_prefix_caching=False, enforce_eager=True, max_num_seqs=3, block_size=8
    )
    options = {
        option for a in parser.parse_args(["run"]).parser._actions for option in a.option_strings
    }
    missing = {
        field.name
        for field in dataclasses.fields(EngineConfig)
        if "--" + field.name.replace("_", "-") not in options
    }
    assert missing == SERVER_ONLY | ROUTER_ONLY


def test_sampling_options_reach_the_request() -> None:
    given = ["--stop", "a", "--stop", "b", "--top-k", "-1", "--min-tokens", "2", "--ignore-eos"]
    params = sampling_params(make_parser().parse_args(["run", *given]))
    assert (params.stop, params.top_k, params.min_tokens) == (("a", "b"), -1, 2)
    assert params.ignore_eos
    assert params.greedy
    assert params.max_tokens == 512


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("512M", 512 * 1024**2),
        ("4G", 4 * 1024**3),
        ("4GiB", 4 * 1024**3),
        ("1.5g", 3 * 1024**3 // 2),
        ("4GB", 4 * 1000**3),
        ("64 KiB", 65536),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("org/name", True),
        ("org/name:Q4_K_M", True),
        ("./x", True),
        ("/models/x", True),
        ("~/x.gguf", True),
        ("x.gguf", True),
        ("here", True),
        ("empty", False),
        ("Why", False),
        ("Why is the sky blue?", False),
        ("read ./x", False),
        ("https://a.org/b", False),
        ("...and", False),
    ],
)
def test_the_first_word_is_a_model_if_it_names_one(
    word: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert names_a_model(word) == expected


def test_messages_go_on_after_a_backslash_and_may_be_dropped() -> None:
    lines = ["one", "", "two\\", "three", "four\\", None, "five", "six\\"]
    kept: list[str] = []
    assert list(read_turns(iter(lines), kept.append)) == ["one", "two\nthree", "five", "six"]
    assert kept == ["one", "two\nthree", "five", "six"]


def test_the_history_of_a_chat_brings_messages_of_several_lines_back_whole(tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    path = tmp_path / "folder" / "chat_history"
    first = History(path)
    for message in ("one", "two\nthree"):
        first.add(message)
    readline.clear_history()
    History(path)
    assert [readline.get_history_item(n + 1) for n in range(2)] == ["one", "two\nthree"]
    assert path.stat().st_mode & 0o077 == 0, "nobody else reads it"
    readline.clear_history()


def test_commands_of_a_chat_change_the_next_answer(tmp_path: Path) -> None:
    chat = Conversation(cast(Any, None), SamplingParams(max_tokens=5), None)
    assert chat.set_system("") == "no system message"
    chat.set_system("Be brief.")
    assert chat.set_system("") == "system message: Be brief."
    assert chat.set_sampling("temperature 0.5") == "temperature 0.5"
    assert chat.set_sampling("--top-k=3") == "top_k 3"
    assert "temperature 0.5  top_p 1.0  top_k 3" in chat.set_sampling("")
    assert "did you mean 'temperature'" in chat.set_sampling("temprature 1")
    assert chat.set_sampling("temperature x") == "temperature must be a number, not x"
    assert "temperature" in chat.set_sampling("temperature -1")
    assert chat.save(str(tmp_path / "talk.json")).startswith("wrote 0 messages to ")
    talk = json.loads((tmp_path / "talk.json").read_text())
    assert talk == {"messages": [{"role": "system", "content": "Be brief."}]}
    assert "cannot be written" in chat.save(str(tmp_path / "no" / "folder"))
    chat.set_system("-")
    assert chat.set_system("") == "no system message"
    assert command_of("/system Be brief.") == ("/system", "Be brief.")
    assert command_of("/sytem") == ("/sytem", ""), "which is told what it was meant to be"
    assert command_of("/etc/passwd is a file") is None


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_no_word_of_a_streamed_answer_is_broken_at_the_edge(pieces: int) -> None:
    text = (
        "The answer to this question lies in the\n  intricate dance of light, 漢字漢字漢字漢字漢字."
    )
    stream = io.StringIO()
    words = WordWriter(stream, 20)
    for at in range(0, len(text), pieces):
        words.write(text[at : at + pieces])
    words.flush()
    assert stream.getvalue().splitlines() == [
        "The answer to this ",
        "question lies in the",
        "  intricate dance of",
        "light, 漢字漢字漢字",
        "漢字漢字.",
    ]


# With the model


def test_run_prints_the_answer_alone_on_stdout_and_the_phases_on_stderr() -> None:
    done = twostroke("run", *SMALL, "Name the capital", "--max-tokens", "4", "of France.")
    assert done.returncode == 0
    assert "capital" in done.stdout  # the words after the option are part of the prompt
    assert done.stdout.count("\n") == 1
    lines = [line for line in done.stderr.splitlines() if line]
    assert lines[0] == "the answer was cut off at 4 tokens; --max-tokens allows more"
    assert re.fullmatch(r"prefill +\d\d +0 +TTFT, caller's side +[\d.,]+ m?s +[\d.,]+", lines[2])
    assert re.fullmatch(r"decode +4 +TPOT +[\d.,]+ m?s +[\d.,]+", lines[3])
    assert lines[4].split() == ["KV", "cache", "reserved", "used", "fragmented", "cached", "free"]
    reserved, *parts = (int(cell.replace(",", "")) for cell in lines[5].split()[1:])
    assert reserved == sum(parts) == KV_TOKENS
    assert parts[0] > 0
    assert len({len(line) for line in lines[4:7]}) == 1  # aligned


@pytest.mark.full
@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            "of CPU time",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ range(99999)|map('string')|join('x'*99999)|length }}", "too much memory"),
    ],
    ids=["doubling", "recursive", "memory"],
)
def test_an_endless_template_ends_run_with_its_limit(
    tmp_path: Path, template: str, why: str
) -> None:
    file = tmp_path / "bomb.jinja"
    file.write_text(template)
    ran = twostroke("run", *SMALL, "--chat-template", str(file), "hi")
    assert ran.returncode == 1
    assert ran.stderr.startswith("twostroke: error: the model's chat template ")
    assert why in ran.stderr
    assert "Traceback" not in ran.stderr


def test_json_is_one_object_whose_fields_add_up() -> None:
    options = ["--json", "--max-tokens", "6", "--kv-cache-dtype", "float32"]
    # The operand is the model; the prompt comes from stdin.
    done = twostroke("run", str(default_model_path()), *SMALL, *options, stdin="Say hello.\n")
    assert done.returncode == 0
    said = json.loads(done.stdout)
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(default_model_path()).metadata)
    assert said["model"] == default_model_path().stem
    assert said["text"] == tokenizer.decode(said["token_ids"])
    assert "user\nSay hello.\n" in tokenizer.decode(said["prompt_token_ids"])
    assert (said["finish_reason"], said["stop_reason"]) == ("length", None)
    assert said["usage"] == {
        "prompt_tokens": len(said["prompt_token_ids"]),
        "cached_tokens": 0,
        "completion_tokens": len(said["token_ids"]),
    }
    assert len(said["token_ids"]) == 6
    times, kv = said["timings"], said["kv"]
    assert times["tpot_s"] == pytest.approx(times["decode_s"] / 5)
    assert times["decode_tokens_per_s"] == pytest.approx(5 / times["decode_s"])
    prompt_tokens = said["usage"]["prompt_tokens"]
    assert times["prefill_tokens_per_s"] == pytest.approx(prompt_tokens / times["prefill_s"])
    assert times["ttft_s"] >= times["queue_s"] + times["prefill_s"]
    assert times["load_s"] > 0
    assert kv["reserved"] == kv["used"] + kv["fragmented"] + kv["cached"] + kv["free"]
    assert kv["bytes_per_token"] == 46080  # 30 layers, keys and values, 3 heads of 64, float32


def test_a_piped_conversation_remembers_and_its_second_turn_hits_the_prefix_cache() -> None:
    turns = "My name is Ada.\nTell me more.\n/cler\n/clear\nHi.\n"
    limits = ["--max-tokens", "3", "--system", "Be brief.", "--max-model-len", "64"]
    done = twostroke("chat", *SMALL, *limits, stdin=turns + "word " * 60 + "\n")
    assert done.stdout.count("\n") == 3
    assert ">" not in done.stdout
    first, second, third = re.findall(
        r"prefill (\d+) tok \((\d+) of (\d+) cached\) · TTFT .* │ decode 3 tok · TPOT .* │ "
        rf"KV (\d+) of {KV_TOKENS:,} tokens used",
        done.stderr,
    )
    assert (int(first[0]), int(first[1])) == (int(first[2]), 0)
    assert int(second[1]) == int(first[2]) // 16 * 16  # every full block of the first prompt
    assert int(second[0]) + int(second[1]) == int(second[2]) > int(first[2])
    assert int(third[2]) < int(second[2])  # /clear has worked
    assert "unknown command /cler; did you mean '/clear'?" in done.stderr
    assert "tokens, and max_model_len is 64; /clear starts a new one" in done.stderr
    assert done.returncode == 1  # one of the turns was refused


def test_a_batch_has_an_answer_or_an_error_for_every_line(tmp_path: Path) -> None:
    ask = {"messages": [{"role": "user", "content": "Name the capital of France."}]}
    lines = [
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": ask},
        {"custom_id": "2", "method": "POST", "url": "/v1/completions", "body": {"prompt": 5}},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*map(json.dumps, lines), "broken"]))
    files = ["-i", str(source), "-o", str(target), "--override-generation-config.temperature", "0"]
    done = twostroke("run-batch", *files, *SMALL, "--max-output-tokens", "12", "--api-key", "k")
    assert (done.returncode, done.stdout) == (0, "")
    assert re.search(r"^1 answered, 2 failed, in [\d.]+ s: ", done.stderr, re.MULTILINE)
    first, second, third = map(json.loads, target.read_text().splitlines())
    assert "Paris" in first["response"]["body"]["choices"][0]["message"]["content"]
    assert (second["custom_id"], second["response"]["status_code"]) == ("2", 400)
    assert third["error"]["message"].startswith("line 3: it is not JSON")
    again = twostroke("run-batch", "-i", str(source), "-o", str(source))
    assert again.returncode == 1
    assert "is the input file; give another" in again.stderr
    assert twostroke("run-batch").stderr.count("is missing") == 2


def test_run_batch_serves_its_metrics_until_the_file_is_answered(tmp_path: Path) -> None:
    """The file is a pipe, which has lines until the test has seen an answer in the metrics."""
    source, target, seen = tmp_path / "in.jsonl", tmp_path / "out.jsonl", threading.Event()
    os.mkfifo(source)
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}

    def write() -> None:
        with source.open("w") as lines:
            while not seen.is_set():
                lines.write(json.dumps(line) + " " * 4096 + "\n")  # few lines are in the pipe

    files = ["-i", str(source), "-o", str(target)]
    words = command("run-batch", *files, *SMALL, "--enable-metrics", "--port", "0")
    writer = threading.Thread(target=write)
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        writer.start()
        try:
            url = next(m[0] for text in run.stderr if (m := re.search(r"http\S+/metrics", text)))
            answered = re.compile(r'^vllm:request_success_total\{.*"length".*\} [1-9]', re.M)
            while not answered.search(urllib.request.urlopen(url, timeout=60).read().decode()):
                assert run.poll() is None
        finally:
            seen.set()
        (counts,) = re.findall(r"(\d+) answered, 0 failed", run.stderr.read())
    writer.join()
    assert run.returncode == 0
    assert len(target.read_text().splitlines()) == int(counts)


def test_a_reader_that_closes_the_pipe_ends_it_quietly() -> None:
    line = command("run", *SMALL, "--ignore-eos", "--max-tokens", "200", "Hi")
    writer = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert writer.stdout is not None
    assert writer.stderr is not None
    assert len(writer.stdout.read(1)) == 1
    writer.stdout.close()
    assert writer.wait(timeout=60) == 128 + signal.SIGPIPE
    assert writer.stderr.read() == b""
    writer.stderr.close()


# At a terminal


class Terminal:
    """`twostroke` on a pseudo-terminal of its own."""

    def __init__(self, *arguments: str, columns: int = 80) -> None:
        import pty

        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ["COLUMNS"] = str(columns)
            os.execv(sys.executable, command(*arguments))
        self.seen = ""  # output after the last text that was waited for

    def wait_for(self, text: str, timeout_s: float = 60) -> str:
        """Return the output up to and including `text`."""
        until = time.monotonic() + timeout_s
        while text not in self.seen:
            ready, _, _ = select.select([self._fd], [], [], until - time.monotonic())
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self._fd, 4096).decode(errors="replace")
        shown, _, self.seen = self.seen.partition(text)
        return shown + text

    def wait_for_text(self, num_chars: int) -> None:
        while len(self.seen) < num_chars:
            self.seen += os.read(self._fd, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def status(self) -> int:
        """Wait for the end, and return the exit status."""
        try:
            while shown := os.read(self._fd, 4096):
                self.seen += shown.decode(errors="replace")
        except OSError:  # the other end is closed
            pass
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on() -> None:
    terminal = Terminal("chat", *SMALL, "--ignore-eos", "--max-tokens", "1000", columns=200)
    loading = terminal.wait_for("> ")
    assert "loading SmolLM2-135M-Instruct" in loading
    assert f"KV cache {KV_TOKENS:,} tokens" in loading
    terminal.type("Tell me a long story.\n")
    terminal.wait_for_text(100)  # far more than the echo: the answer has begun
    terminal.type("\x03")
    written = re.search(r"decode (\d+) tok", terminal.wait_for("tokens used"))
    assert written is not None
    assert 0 < int(written[1]) < 1000
    terminal.wait_for("> ")
    terminal.type("Go on.\n")
    terminal.wait_for_text(100)
    terminal.type("\x03")
    line = terminal.wait_for("tokens used")
    cached = re.search(r"\((\d+) of (\d+) cached\)", line)
    assert cached is not None
    # The first turn had 37 tokens and the generated part of its answer.
    assert int(cached[2]) > 37 + int(written[1])
    assert int(cached[1]) > 37
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.status() == 0


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_report_fits_a_narrow_terminal() -> None:
    terminal = Terminal("run", *SMALL, "--ignore-eos", "--max-tokens", "3", "Hi", columns=44)
    assert terminal.status() == 0
    report = re.sub(r"\x1b\[[\d;]*m", "", terminal.seen).partition("cut off")[2]
    lines = report.splitlines()
    assert max(map(len, lines)) <= 44
    words = report.split()
    for word in ("prefill", "decode", "caller's", "reserved", "fragmented", "cached", "free"):
        assert word in words, "whole"


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_ctrl_c_ends_run_with_130_and_no_traceback() -> None:
    terminal = Terminal("run", *SMALL, "--ignore-eos", "--max-tokens", "1000", "Hi")
    terminal.wait_for("ready in")
    terminal.wait_for_text(100)
    terminal.type("\x03")
    assert terminal.status() == 130
    assert "Traceback" not in terminal.seen
