"""`twostroke serve`: the flags it takes, what its banner says, and a server as people start it."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support import default_model_path
from twostroke.cli import make_parser
from twostroke.commands.banner import banner, concurrent_requests
from twostroke.commands.flags import engine_config
from twostroke.commands.llama_flags import NO_CACHE, SAMPLING, TAKEN
from twostroke.commands.serve import parse_count, serve_settings, spelt, with_file
from twostroke.commands.vllm_flags import ANYWAY, ONLY, REFUSED
from twostroke.config import GIB, EngineConfig
from twostroke.engine.api import EngineInfo
from twostroke.errors import ConfigError
from twostroke.request import SamplingParams
from twostroke.serve.settings import ServeSettings

HEAVY = ("torch", "numpy", "rich", "tokenizers", "jinja2", "starlette", "uvicorn", "zmq", "yaml")


PARSER = make_parser()
OPTIONS = PARSER.parse_args(["serve"]).parser._option_string_actions


def parsed(*words: str) -> argparse.Namespace:
    return with_file(PARSER.parse_args(spelt(["serve", *words])))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parsed(*words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("twostroke: error: ")
    return said.splitlines()[0].removeprefix("twostroke: error: ")


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TWOSTROKE_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


# Flags


def test_every_refused_flag_is_refused_by_its_name_with_a_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flag in REFUSED:
        for words in ([flag], [flag, "x"], ["model", flag, "--port", "1"]):
            said = refusal(capsys, *words)
            assert said.startswith(f"{flag} is ")
            assert len(said) > len(flag) + 30


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--quantization-config={}"], "--quantization-config is vLLM's and not supported"),
        (["--enable_lora"], "--enable-lora is vLLM's and not supported: LoRA adapters are not"),
        (["--compilation-config.level", "3"], "--compilation-config is vLLM's"),
        (["-O3"], "-O is vLLM's and not supported: nothing is compiled"),
        (["-ub", "512"], "-ub is llama-server's and not supported: a step is computed whole; -b"),
        (["-c", "lots"], "-c takes a whole number, not 'lots'"),
        (["-ngl", "20"], "-ngl 20: a model runs on one device; give 0 for the CPU, or 99 (all)"),
        (["-ctk", "q8_0"], "-ctk q8_0: only f32, f16 and bf16 are supported"),
        (["-ctk", "f16", "-ctv", "f32"], "keys and values of the cache have one type"),
        (["--temp", "hot"], "--temp takes a number, not 'hot'"),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere: it cannot be read"),
        (["-fa", "off"], "-fa off is not supported, only on or auto: attention never holds"),
        (["-n", "128"], "-n 128 is not supported, only 1: a model runs on one device in this "),
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size 2 is not supported, only 1"),
        (["-dp", "2"], "-dp 2 is not supported, only 1"),
        (["--generation-config", "vllm"], "--generation-config vllm is not supported, only auto"),
        (["m", "--model", "n"], "the model is given twice: m and --model n"),
        (["--max-model-len", "4kb"], "'4kb' is no number; give one such as 4096 or 4K"),
        (["--allowed-origins", "[1]"], "'[1]' is no JSON list of origins"),
        (["--uvicorn-log-level", "loud"], "invalid choice: 'loud'"),
    ],
)
def test_what_is_refused_says_why(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(capsys, *words)


def test_what_happens_anyway_is_taken_and_changes_nothing() -> None:
    words = [*ANYWAY, *(word for flag in ONLY for word in (flag, ONLY[flag][0][0]))]
    args = parsed(*words, "--max-log-len", "100", "-tp", "1")
    assert engine_config(args) == EngineConfig()
    assert serve_settings(args) == ServeSettings()


def test_no_flag_is_both_taken_and_refused() -> None:
    names = [*REFUSED, *ANYWAY, *ONLY, *TAKEN, *SAMPLING, NO_CACHE]
    assert len(names) == len(set(names))
    serve = parsed().parser
    shown = {
        option
        for action in serve._actions
        if action.help != argparse.SUPPRESS
        for option in action.option_strings
    }
    assert not shown & set(names)


def test_a_line_of_llama_servers_means_the_same_here(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the office\nsesame\n\n  open \n")
    line = (
        "-m m.gguf -c 4096 -np 8 -b 1024 -t 4 -tb 6 --n-predict 256 -s 7 -a small,tiny -ngl 0 "
        f"-ctk f16 -ctv f16 --chat-template-file t.jinja --api-key word --api-key-file {keys} "
        "--ssl-key-file k --ssl-cert-file c --cors-origins https://a,https://b --no-cache-prompt "
        "-fa on --jinja -cb --metrics --no-webui --temp 0.7 --top-k 40 --top-p 0.9 --min-p 0.05 "
        "--repeat-penalty 1.1 --presence-penalty 0.5 --frequency-penalty 0.25"
    )
    args = parsed(*line.split(), "--chat-template-kwargs", '{"thinking": false}', "-fa")
    assert engine_config(args) == EngineConfig(
        model="m.gguf",
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        threads=4,
        threads_batch=6,
        seed=7,
        device="cpu",
        kv_cache_dtype="float16",
        chat_template="t.jinja",
        enable_prefix_caching=False,
        override_generation_config={
            "temperature": 0.7,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
        },
    )
    assert serve_settings(args) == ServeSettings(
        api_keys=("word", "sesame", "open"),
        host="0.0.0.0",
        served_model_names=("small", "tiny"),
        max_output_tokens=256,
        ssl_keyfile="k",
        ssl_certfile="c",
        cors_origins=("https://a", "https://b"),
        chat_template_kwargs={"thinking": False},
    )


@pytest.mark.parametrize(
    "line", ["-c 0 -np -1 -t -1 -tb -1 --predict -1 -s -1", "-ngl 99", "-ngl all", "-ngl auto"]
)
def test_what_llama_server_leaves_open_is_left_open(line: str) -> None:
    args = parsed(*line.split())
    assert engine_config(args) == EngineConfig()
    assert serve_settings(args) == ServeSettings()


def test_a_repository_of_gguf_files_is_named_as_llama_server_names_it() -> None:
    assert engine_config(parsed("-hf", "org/name")).model == "org/name:Q4_K_M"
    assert engine_config(parsed("-hf", "org/name:Q8_0")).model == "org/name:Q8_0"


def test_flags_reach_engine_and_server() -> None:
    line = (
        "org/name --host 10.0.0.1 --port 9000 --api-key a b --api-key c --served-model-name x y "
        "--tensor-parallel-size 1 --gpu_memory_utilization=0.5 --max-model-len 4K --dtype half "
        "--no-enable-prefix-caching --enable-auto-tool-choice --tool-call-parser hermes "
        "--ssl-keyfile k --ssl-certfile c --kv-cache-memory-bytes 1GiB --max-queue 7 "
        "--shutdown-timeout 5 --max-body-bytes 1M --no-open-health --disable-log-requests"
    )
    origins = ["--allowed-origins", '["https://a", "https://b"]', "https://c"]
    template = ["--default-chat-template-kwargs", '{"thinking": false}']
    args = parsed(*line.split(), *origins, *template)
    assert engine_config(args) == EngineConfig(
        model="org/name",
        gpu_memory_utilization=0.5,
        max_model_len=4096,
        dtype="float16",
        enable_prefix_caching=False,
        kv_cache_memory_bytes=GIB,
    )
    assert serve_settings(args) == ServeSettings(
        host="10.0.0.1",
        port=9000,
        api_keys=("a", "b", "c"),
        served_model_names=("x", "y"),
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        ssl_keyfile="k",
        ssl_certfile="c",
        cors_origins=("https://a", "https://b", "https://c"),
        chat_template_kwargs={"thinking": False},
        max_queue=7,
        drain_s=5.0,
        max_body_bytes=1024**2,
        open_health=False,
    )


def test_vllm_flags_of_a_gpu_reach_the_engine(tmp_path: Path) -> None:
    line = "--enforce-eager --num-gpu-blocks-override 100 --nvtx --cudagraph-capture-sizes 8 1 4"
    expected = EngineConfig(
        enforce_eager=True,
        num_gpu_blocks_override=100,
        nvtx=True,
        cudagraph_capture_sizes=(1, 4, 8),
    )
    assert engine_config(parsed(*line.split())) == expected
    largest = engine_config(parsed("--max-cudagraph-capture-size", "64"))
    assert largest.max_cudagraph_capture_size == 64
    file = tmp_path / "serve.yaml"
    file.write_text("cudagraph-capture-sizes: [1, 4, 8]\n")
    assert engine_config(parsed("--config", str(file))).cudagraph_capture_sizes == (1, 4, 8)
    again = json.loads(json.dumps(asdict(expected)))  # how it reaches the engine's process
    assert EngineConfig(**again) == expected
    with pytest.raises(ConfigError, match="give one of them"):
        engine_config(parsed(*line.split(), "--max-cudagraph-capture-size", "8"))
    with pytest.raises(ConfigError, match="a list of whole numbers of at least 1"):
        engine_config(parsed("--cudagraph-capture-sizes", "0"))


def test_more_than_one_gpu_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="runs a model on one device"):
        engine_config(parsed("--tensor-parallel-size", "2"))


def test_without_a_key_only_this_machine_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve_settings(parsed()).host == "127.0.0.1"
    assert serve_settings(parsed("--host", "0.0.0.0")).host == "0.0.0.0"
    assert serve_settings(parsed("--api-key", "k")).host == "0.0.0.0"
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert serve_settings(parsed()).api_keys == ("theirs",)
    monkeypatch.setenv("TWOSTROKE_API_KEY", "ours")
    settings = serve_settings(parsed())
    assert (settings.host, settings.api_keys) == ("0.0.0.0", ("ours",))
    assert serve_settings(parsed("--api-key", "given")).api_keys == ("given",)


@pytest.mark.parametrize(
    ("text", "expected"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500)]
)
def test_counts(text: str, expected: int) -> None:
    assert parse_count(text) == expected


def test_the_page_about_the_server_names_only_flags_there_are() -> None:
    page = Path(__file__).parents[2] / "docs" / "SERVER.md"
    named = set(re.findall(r"`[^`\n]*`", page.read_text(encoding="utf-8")))
    flags = {flag for words in named for flag in re.findall(r"(?<!\w)--[a-z][\w-]+", words)}
    known = {"--url", "--pace"}  # of the benchmark
    assert len(flags) > 60
    assert {flag for flag in flags if spelt([flag])[0] not in OPTIONS} - known == {"--no-"}


# The file of options


def test_the_file_holds_what_the_command_line_does_not_say(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: from/file\nport: 1234\nmax_model_len: 2048\nenable-prefix-caching: false\n"
        "enforce-eager: true\ntrust-request-chat-template: false\nserved-model-name: [a, b]\n"
        "enable-lora: false\nflash-attn: on\n"
        'default-chat-template-kwargs: {thinking: true}\nallowed-origins: ["https://a"]\nuds:\n'
    )
    args = parsed("--config", str(path), "--port", "99", "--served-model-name", "c")
    assert engine_config(args) == EngineConfig(
        model="from/file", max_model_len=2048, enable_prefix_caching=False, enforce_eager=True
    )
    assert serve_settings(args) == ServeSettings(
        port=99,
        served_model_names=("c",),
        cors_origins=("https://a",),
        chat_template_kwargs={"thinking": True},
    )
    assert engine_config(parsed("on/line", "--config", str(path))).model == "on/line"
    assert engine_config(parsed("--config", str(path), "--model", "on/line")).model == "on/line"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "there is no option 'prot'; did you mean '--port'?"),
        ("config: x.yaml", "there is no option 'config'"),
        ("enforce-eager: 1", "enforce-eager is true or false, not 1"),
        ("- port", "must have lines such as `port: 8000`"),
        ("a: [", "is not YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(says)):
        parsed("--config", str(path))


def test_the_file_may_not_name_refused_flags_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("speculative_config: {method: ngram}\n")
    assert "--speculative-config is vLLM's" in refusal(capsys, "--config", str(path))
    path.write_text("flash-attn: off\n")  # to YAML a false
    assert "--flash-attn off is not supported" in refusal(capsys, "--config", str(path))


# The banner

INFO = EngineInfo(
    model_name="Some-1B",
    vocab_size=1000,
    max_model_len=8192,
    max_logprobs=20,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    block_size=16,
    dtype="bfloat16",
    device="cuda",
    total_bytes=80 * GIB,
    weight_bytes=2 * GIB,
    kv_bytes=70 * GIB,
    kv_tokens=100_000,
    load_s=1.0,
    sampling=SamplingParams(),
)


def test_the_banner_says_in_five_lines_what_was_started() -> None:
    lines = banner(INFO, "http://127.0.0.1:8000", 0, False, 2.34).splitlines()
    assert len(lines) == 5
    assert lines[0].endswith("Some-1B, bfloat16 on cuda")
    assert "80.00 GiB → weights 2.00 GiB → KV cache 70.00 GiB → left 8.00 GiB" in lines[1]
    assert "100,000 tokens; requests at one time: 12 of 8,192 tokens or 64 of 1,024" in lines[2]
    assert lines[3].endswith("http://127.0.0.1:8000")
    assert "none, for this machine only" in lines[4]
    assert lines[4].endswith("ready in 2.3 s")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(8192, 12), (1024, 64), (1600, 62), (1601, 61), (100_000, 1), (100_001, 0)],
)
def test_concurrent_requests_are_counted_in_whole_blocks(tokens: int, expected: int) -> None:
    assert concurrent_requests(INFO, tokens) == expected


def test_the_banner_never_shows_a_key_and_warns_if_there_is_none() -> None:
    last = [banner(INFO, "u", *who, 1).splitlines()[-1] for who in ((1, True), (3, True))]
    assert ["required;" in last[0], "required (one of 3);" in last[1]] == [True, True]
    assert "NONE: whoever reaches this address" in banner(INFO, "u", 0, True, 1)


# Before anything is loaded


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--quantization", "awq"], ["--max-model-lem", "5"], ["--tensor-parallel-size=2"]],
)
def test_help_and_mistakes_import_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\nfrom twostroke.cli import main\n"
        f"try: main(['serve', *{words!r}])\nexcept SystemExit: pass\n"
        f"print('loaded:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--max-model-lem", "5"], 2, "unknown option --max-model-lem; did you mean '--max-model-"),
        (["m", "n"], 2, "unexpected argument 'n'"),
        (["--port", "70000"], 1, "port must be a whole number from 0 to 65535"),
        (["--api-key", ""], 1, "api_keys must be a list of non-empty strings"),
        (["./nowhere.gguf", "--port", "0"], 1, "no such file or folder: nowhere.gguf"),
        (["--ssl-keyfile", "k"], 1, "ssl_keyfile is given without ssl_certfile"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(words: list[str], status: int, says: str) -> None:
    line = [sys.executable, "-m", "twostroke", "serve", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert done.stderr.startswith("twostroke: error: ")
    assert says in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_said_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = [sys.executable, "-m", "twostroke", "serve", "--port", str(port)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in done.stderr


# With the model


class Server:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def ask(self, path: str, body: object = None, key: str | None = None) -> tuple[int, bytes]:
        """One request over a socket of its own: the status and the body."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: x\r\n"
        head += "Connection: close\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {key}\r\n" if key else ""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as sock:
            sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            answer = b""
            while part := sock.recv(65536):
                answer += part
        told, _, content = answer.partition(b"\r\n\r\n")
        return int(told.split()[1]), content

    def wait_until_healthy(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if self.ask("/health")[0] == 200:
                    return
            time.sleep(0.1)
        raise AssertionError("the server did not come up")

    def terminate(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=30)
        return self.process.returncode, said


@contextmanager
def started(module: str, *words: str) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = [sys.executable, "-m", module, *words, "--port", str(port)]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    try:
        server = Server(process, port)
        server.wait_until_healthy()
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_serve_answers_a_chat_says_so_in_five_lines_and_ends_with_status_0() -> None:
    options = ["--device", "cpu", "--num-gpu-blocks-override", "90", "--api-key", "sesame"]
    name = ["--served-model-name", "mine", "--host", "127.0.0.1"]
    with started("twostroke", "serve", *options, *name) as server:
        question = {
            "model": "mine",
            "messages": [{"role": "user", "content": "Name the capital of France."}],
            "max_tokens": 16,
            "temperature": 0,
        }
        assert server.ask("/v1/chat/completions", question)[0] == 401
        status, content = server.ask("/v1/chat/completions", question, key="sesame")
        assert status == 200
        answer = json.loads(content)
        assert answer["model"] == "mine"
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert answer["usage"]["completion_tokens"] > 1
        events = server.ask("/v1/chat/completions", question | {"stream": True}, key="sesame")[1]
        assert events.count(b"data: {") > 4
        assert b"data: [DONE]" in events
        if sys.platform == "linux":  # whatever the engine's process runs on
            assert "torch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        status, said = server.terminate()
    assert status == 0
    lines = said.splitlines()
    assert len(lines) == 5
    assert re.fullmatch(
        r"twostroke [\d.]+: SmolLM2-135M-Instruct, (Q4_1 \+ Q8_0|float32) on cpu", lines[0]
    )
    assert "1,440 tokens; requests at one time: 1 of 1,440 tokens or 1 of 1,024" in lines[2]
    assert lines[3].endswith(f"http://127.0.0.1:{server.port}; /dash shows it at work")
    assert re.search(r"key +required; ready in [\d.]+ s$", lines[4])
    assert "sesame" not in said


def test_the_launch_line_of_others_works_with_the_modules_name_changed() -> None:
    line = "--tensor-parallel-size 1 --gpu-memory-utilization 0.90 --max-model-len 4096"
    model = ["--model", str(default_model_path())]
    with started("twostroke.entrypoints.openai.api_server", *model, *line.split()) as server:
        models = json.loads(server.ask("/v1/models")[1])
        assert models["data"][0]["max_model_len"] == 4096
        prompt = {"model": models["data"][0]["id"], "prompt": "One, two,", "max_tokens": 3}
        status, content = server.ask("/v1/completions", prompt)
        assert status == 200
        assert json.loads(content)["usage"]["completion_tokens"] == 3
        assert server.terminate()[0] == 0


def test_a_launch_line_of_llama_servers_serves_with_what_it_says() -> None:
    line = f"serve -m {default_model_path()} -c 512 -np 2 -t 1 -ngl 0 -fa on -a tiny --temp 0"
    with started("twostroke", *line.split()) as server:
        body = {"model": "tiny", "prompt": "The capital of France is", "max_tokens": 8}
        texts = {json.loads(server.ask("/v1/completions", body)[1])["choices"][0]["text"]}
        for temperature in (None, 0):
            status, answer = server.ask("/v1/completions", {**body, "temperature": temperature})
            assert status == 200
            texts.add(json.loads(answer)["choices"][0]["text"])
        assert len(texts) == 1, "--temp is for requests that do not say"
        status, answer = server.ask("/v1/completions", {**body, "prompt": "word " * 600})
        assert status == 400
        assert b"512" in answer
        returncode, said = server.terminate()
    assert returncode == 0
    assert "of 512 tokens" in said
    assert "(at most 2)" in said
