"""`twostroke serve`: its options, its banner, and a server in its own process."""

from __future__ import annotations

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

from tests.cli.reading import OPTIONS, PARSER, heavy_imports, read
from tests.support import default_model_path
from tests.tiny import tiny_llm
from twostroke.cli import main, parse
from twostroke.commands import llama_flags, vllm_flags
from twostroke.commands.banner import banner, concurrent_requests
from twostroke.commands.serve_flags import normalize_options, parse_count
from twostroke.config import GIB, EngineConfig
from twostroke.engine.api import EngineInfo
from twostroke.kernels import cpu
from twostroke.request import SamplingParams
from twostroke.serve.settings import ServeSettings


def config_of(*words: str) -> EngineConfig:
    taken = read(*words)
    assert taken.problems == []
    assert taken.config is not None
    return taken.config


def settings_of(*words: str) -> ServeSettings:
    taken = read(*words)
    assert taken.problems == []
    assert taken.settings is not None
    return taken.settings


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TWOSTROKE_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


# Flags


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--quantization-config={}"], "--quantization-config: weights are used as the files"),
        (["--quantization", "hqq"], "--quantization hqq: weights can be rounded to int8"),
        (
            ["--enable_lora"],
            "--enable-lora: LoRA adapters are not supported yet; merge the adapter",
        ),
        (["--enable-lora", "m", "--port", "1"], "--enable-lora: LoRA adapters"),
        (["--speculative-config.method", "mtp"], "--speculative-config: the method 'mtp' is not"),
        (["--spec-tokens", "1000"], "--speculative-config: num_speculative_tokens must be a whole"),
        (["--spec-tokens", "few"], "--spec-tokens few: expected a whole number"),
        (["--spec-type", "draft-mtp"], "--spec-type draft-mtp: not supported yet; draft-simple"),
        (["--spec-draft-p-min", "few"], "--spec-draft-p-min few: expected a number"),
        (["-c", "lots"], "-c lots: expected a whole number"),
        (["-ctk", "q4_0"], "-ctk q4_0: the KV cache supports f32, f16, bf16 and q8_0; give one"),
        (["-ctk", "f16", "-ctv", "f32"], "-ctv f32: keys and values have the same type"),
        (["--temp", "hot"], "--temp hot: expected a number"),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere: the file cannot be read"),
        (
            ["--pipeline-parallel-size", "2"],
            "--pipeline-parallel-size 2: only 1 is supported: layers",
        ),
        (["-tp", "0"], "--tensor-parallel-size must be a whole number from 1 to 1024, not 0"),
        (["-dp", "0"], "--data-parallel-size must be a whole number from 1 to 64, not 0"),
        (["--prefill-engines", "1"], "--prefill-engines is given, and --decode-engines is not"),
        (["--device-ids", "0,1"], "--device-ids 0,1: expected one number; CUDA_VISIBLE_DEVICES"),
        (["--generation-config", "x"], "--generation-config x: expected auto or vllm"),
        (["m", "--model", "n"], "the model is given twice: m and --model n"),
        (["m", "n"], "unexpected argument 'n'"),
        (["--max-model-len", "4kb"], "--max-model-len 4kb: expected a number such as 4096 or 4K"),
        (["--allowed-origins", "[1]"], "--allowed-origins [1]: expected a JSON list of origins"),
        (["--uvicorn-log-level", "loud"], "--uvicorn-log-level loud: expected one of critical"),
        (["--port", "70000"], "--port must be a whole number from 0 to 65535, not 70000"),
        (["--api-key", "sesame", ""], "--api-key: a key is empty; give one, or leave the option"),
        (["--shutdown-timeout", "-5"], "--shutdown-timeout must be a number of seconds, not -5"),
        (["--ssl-keyfile", "k"], "--ssl-keyfile is set without --ssl-certfile; set both"),
        (["--port"], "--port: a value is missing"),
        (["--seed", "x"], "--seed x: expected a whole number"),
        (["--tool-call-parser", "hermess"], "--tool-call-parser must be one of auto, hermes"),
    ],
)
def test_a_refusal_has_a_reason(words: list[str], says: str) -> None:
    (problem,) = read(*words).problems
    assert problem.startswith(says)


def test_all_errors_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "m --prot 80 --enable-lora --lora-modules a=b c=d -pp 4 --seed x --port 70000 -tp 0 "
        "--max-num-seqs 0 --max-queue -1 --uds --trust-remote-code"
    )
    with pytest.raises(SystemExit) as ended:
        main(["serve", *line.split()])
    assert ended.value.code == 2
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert first == "twostroke: error: this command line has 10 errors:"
    assert last == "Try `twostroke serve --help`."
    told = [line.split()[0].rstrip(":") for line in lines]
    wrong = "--prot --enable-lora --lora-modules -pp --seed --uds --max-num-seqs "
    wrong += "--tensor-parallel-size --port --max-queue"
    assert sorted(told) == sorted(wrong.split())
    assert read().problems == [], "and forgotten"


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--prot", "--port"),
        ("--hots", "--host"),
        ("--max-model-lem", "--max-model-len"),
        ("--max-model", "--max-model-len"),
        ("--gpu-memory-utilisation", "--gpu-memory-utilization"),
        ("--max-num-seq", "--max-num-seqs"),
        ("--served-model-names", "--served-model-name"),
        ("--apikey", "--api-key"),
        ("--enable-auto-tool-choise", "--enable-auto-tool-choice"),
        ("--tensor-parralel-size", "--tensor-parallel-size"),
        ("--ngl", "-ngl"),
        ("--completely-other", None),
    ],
)
def test_a_misspelt_flag_is_answered_with_what_it_was_meant_to_be(
    flag: str, meant: str | None
) -> None:
    (problem,) = read(flag, "1", "model").problems
    assert problem == f"{flag}: unknown option" + (f"; did you mean {meant}?" if meant else "")


def test_redundant_and_ignored_options_have_no_effect() -> None:
    tables = (vllm_flags.REDUNDANT, vllm_flags.IGNORED, llama_flags.REDUNDANT, llama_flags.IGNORED)
    words = [
        word
        for table in tables
        for flag, option in table.items()
        for word in ([flag] if option.nargs == 0 else [flag, "1"])
    ]
    for only in (vllm_flags.RESTRICTED, llama_flags.RESTRICTED):
        for flags, (allowed, _) in only.items():
            words += [word for flag in flags.split() for word in (flag, allowed[0])]
    taken = read(
        *words, "--max-log-len", "100", "-tp", "1", "-n", "1", "--generation-config", "auto"
    )
    assert taken.problems == []
    assert taken.config == EngineConfig()
    assert taken.settings == ServeSettings()


def test_options_without_effect_are_named_in_one_line() -> None:
    line = "--trust-remote-code --async-scheduling -O3 --enable-expert-parallel -ngl 33 --jinja"
    taken = read(*line.split(), "-cc.mode=3", "--limit-mm-per-prompt.image", "2")
    assert taken.problems == []
    told, _, rest = taken.notice.partition("; -ngl 33: ")
    assert rest == "all layers of a model run on one device"
    assert told.startswith("options without effect: --trust-remote-code (code from a model's")
    assert "-O, -cc (models are not compiled" in told, "options with one reason stand together"
    for flag in ("--async-scheduling", "--enable-expert-parallel", "--limit-mm-per-prompt"):
        assert f" {flag} (" in told
    assert "--jinja (chat templates are always Jinja templates)" in told
    assert read().notice == ""


def test_parts_of_objects_are_given_one_by_one() -> None:
    line = (
        "--override-generation-config.temperature 0.5 --override_generation_config.top_k=3 "
        "--default-chat-template-kwargs.enable_thinking false "
        "--default-chat-template-kwargs.a.b_c+ x --default-chat-template-kwargs.a.b_c+ 2"
    )
    taken = read(*line.split(), "--override-generation-config", '{"top_p": 0.9}')
    assert taken.config is not None
    assert taken.settings is not None
    override = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
    assert taken.config.override_generation_config == override
    template = {"enable_thinking": False, "a": {"b_c": ["x", 2]}}
    assert taken.settings.chat_template_kwargs == template


def test_max_new_tokens_of_a_generation_config_limits_all_requests() -> None:
    taken = read("--override-generation-config", '{"max_new_tokens": 9, "top_k": 3, "top_p": null}')
    assert taken.config is not None
    assert taken.settings is not None
    assert taken.config.override_generation_config == {"top_k": 3}
    assert taken.settings.max_output_tokens == 9
    (problem,) = read("--override-generation-config.max_new_tokens", "many").problems
    assert problem == (
        "--override-generation-config: max_new_tokens must be a whole number of at least 1, "
        "not 'many'"
    )


def test_other_names_of_vllm_have_the_same_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "--generation-config vllm --override-generation-config.top_k 7 --max-model-len auto "
        "--device-memory-utilization 0.5 --device-ids 1 --load-format fastsafetensors "
        "--max-num-queued-reqs 9 --log-level INFO --root-path /llm --enable-request-id-headers "
        "--enable-force-include-usage --reasoning-parser qwen3 --enable-log-requests "
        "--chat-template-content-format string"
    )
    taken = read(*line.split())
    neutral = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 7,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    assert taken.config == EngineConfig(
        override_generation_config=neutral,
        gpu_memory_utilization=0.5,
        device="cuda:1",
        load_format="safetensors",
    )
    assert taken.settings == ServeSettings(
        max_queue=9,
        uvicorn_log_level="info",
        root_path="/llm",
        enable_request_id_headers=True,
        force_include_usage=True,
        reasoning_parser="qwen3",
        access_log=True,
        chat_template_content_format="string",
    )


def test_options_of_huggingface_hub_go_into_the_environment() -> None:
    words = ["serve", "--hf-token", "t", "--download-dir", "/models", "--offline"]
    args = parse(words, PARSER)
    assert args is not None
    assert args.environment == {"HF_TOKEN": "t", "HF_HUB_CACHE": "/models", "HF_HUB_OFFLINE": "1"}


def test_a_line_of_llama_server_has_the_same_meaning(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the office\nsesame\n\n  open \n")
    line = (
        "-m m.gguf -c 4096 -np 8 -b 1024 -t 4 -tb 6 --n-predict 256 -s 7 -a small,tiny -ngl 0 "
        f"-ctk f16 -ctv f16 --chat-template-file t.jinja --api-key word --api-key-file {keys} "
        "--ssl-key-file k --ssl-cert-file c --cors-origins https://a,https://b --no-cache-prompt "
        "-fa on --jinja -cb --metrics --no-webui --temp 0.7 --top-k 40 --top-p 0.9 --min-p 0.05 "
        "--repeat-penalty 1.1 --presence-penalty 0.5 --frequency-penalty 0.25"
    )
    taken = read(*line.split(), "--chat-template-kwargs", '{"thinking": false}', "-fa")
    assert taken.problems == []
    assert taken.config == EngineConfig(
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
    assert taken.settings == ServeSettings(
        api_keys=("word", "sesame", "open"),
        host="0.0.0.0",
        served_model_names=("small", "tiny"),
        max_output_tokens=256,
        ui=False,
        ssl_keyfile="k",
        ssl_certfile="c",
        cors_origins=("https://a", "https://b"),
        chat_template_kwargs={"thinking": False},
    )


@pytest.mark.parametrize(
    "line",
    [
        "-c 0 -np -1 -t -1 -tb -1 --predict -1 -s -1 -n -1",
        "-ngl 99",
        "-ngl all",
        "-ngl auto",
        "-ngl -1",
        "-ngl 33",
        "--reasoning auto --reasoning-budget -1 --reasoning-effort default",
    ],
)
def test_values_that_mean_a_default_in_llama_server_mean_a_default(line: str) -> None:
    taken = read(*line.split())
    assert taken.config == EngineConfig()
    assert taken.settings == ServeSettings()


def test_more_options_of_llama_server_have_the_same_meaning() -> None:
    line = "-n 256 -to 600 -dev CUDA1 --reasoning off -hf org/name --hf-file F.gguf "
    line += "--reasoning-format deepseek"
    taken = read(*line.split())
    assert taken.config == EngineConfig(model="org/name:F.gguf", device="cuda:1")
    assert taken.settings == ServeSettings(
        max_output_tokens=256,
        write_timeout_s=600,
        body_timeout_s=600,
        chat_template_kwargs={"enable_thinking": False},
        reasoning_parser="auto",
    )
    assert taken.notice == "-n 256: read as llama-server's --n-predict"
    assert config_of("--device", "none").device == "cpu"


def test_a_repository_of_gguf_files_is_named_as_llama_server_names_it() -> None:
    assert config_of("-hf", "org/name").model == "org/name:Q4_K_M"
    assert config_of("-hf", "org/name:Q8_0").model == "org/name:Q8_0"


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
    taken = read(*line.split(), *origins, *template)
    assert taken.config == EngineConfig(
        model="org/name",
        gpu_memory_utilization=0.5,
        max_model_len=4096,
        dtype="float16",
        enable_prefix_caching=False,
        kv_cache_memory_bytes=GIB,
    )
    assert taken.settings == ServeSettings(
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
    assert config_of(*line.split()) == expected
    largest = config_of("--max-cudagraph-capture-size", "64")
    assert largest.max_cudagraph_capture_size == 64
    file = tmp_path / "serve.yaml"
    file.write_text("cudagraph-capture-sizes: [1, 4, 8]\n")
    assert config_of("--config", str(file)).cudagraph_capture_sizes == (1, 4, 8)
    again = json.loads(json.dumps(asdict(expected)))  # how it reaches the engine's process
    assert EngineConfig(**again) == expected
    (problem,) = read(*line.split(), "--max-cudagraph-capture-size", "8").problems
    assert problem.startswith("--cudagraph-capture-sizes and --max-cudagraph-capture-size both")
    (problem,) = read("--cudagraph-capture-sizes", "0").problems
    assert "--cudagraph-capture-sizes must be a list of whole numbers of at least 1" in problem


def test_structured_outputs_are_set_as_vllms(tmp_path: Path) -> None:
    flag = "--structured-outputs-config"
    given = '{"backend": "guidance", "disable_fallback": true, "disable_any_whitespace": false}'
    opened = '{"disable_additional_properties": false}'
    file = tmp_path / "serve.yaml"
    file.write_text(f"structured-outputs-config: {opened}\n")
    closed = [settings_of(*words) for words in ((), (flag, given), (f"{flag}.backend", "auto"))]
    assert [one.disable_additional_properties for one in closed] == [True, True, True]
    for words in ((flag, opened), ("--config", str(file))):
        assert not settings_of(*words).disable_additional_properties
    for wrong, says in {
        '{"backend": "regex"}': "backend must be one of auto, guidance, xgrammar",
        '{"disable_any_whitespace": true}': "disable_any_whitespace is not supported",
        '{"disable_additional_properties": 0}': "must be true or false",
        "[]": "expected a JSON object",
    }.items():
        (problem,) = read(flag, wrong).problems
        assert problem.startswith(f"{flag} {wrong}: ")
        assert says in problem


def test_without_a_key_only_this_machine_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of().host == "127.0.0.1"
    assert settings_of("--host", "0.0.0.0").host == "0.0.0.0"
    assert settings_of("--api-key", "k").host == "0.0.0.0"
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert settings_of().api_keys == ("theirs",)
    monkeypatch.setenv("TWOSTROKE_API_KEY", "ours")
    settings = settings_of()
    assert (settings.host, settings.api_keys) == ("0.0.0.0", ("ours",))
    assert settings_of("--api-key", "given").api_keys == ("given",)
    assert settings_of("--admin-api-key", "a", "b").admin_api_keys == ("a", "b")
    monkeypatch.setenv("TWOSTROKE_ADMIN_API_KEY", "admins")
    assert settings_of().admin_api_keys == ("admins",)


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
    prefixes = {"--no-", "--enable-", "--disable-"}
    unknown = {flag for flag in flags if normalize_options([flag])[0] not in OPTIONS}
    assert unknown - known == prefixes


# The file of options


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: from/file\nport: 1234\nmax_model_len: 2048\nenable-prefix-caching: false\n"
        "enforce-eager: true\ntrust-request-chat-template: false\nserved-model-name: [a, b]\n"
        "enable-lora: false\nflash-attn: on\n"
        'default-chat-template-kwargs: {thinking: true}\nallowed-origins: ["https://a"]\nuds:\n'
    )
    taken = read("--config", str(path), "--port", "99", "--served-model-name", "c")
    assert taken.problems == []
    assert taken.config == EngineConfig(
        model="from/file", max_model_len=2048, enable_prefix_caching=False, enforce_eager=True
    )
    assert taken.settings == ServeSettings(
        port=99,
        served_model_names=("c",),
        cors_origins=("https://a",),
        chat_template_kwargs={"thinking": True},
    )
    assert config_of("on/line", "--config", str(path)).model == "on/line"
    assert config_of("--config", str(path), "--model", "on/line").model == "on/line"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "unknown option 'prot'; did you mean --port?"),
        ("config: x.yaml", "unknown option 'config'"),
        ("enforce-eager: 1", "enforce-eager must be true or false, not 1"),
        ("- port", "must have lines such as `port: 8000`"),
        ("a: [", "is not YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text)
    (problem,) = read("--config", str(path)).problems
    assert says in problem


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'],
            {"method": "ngram", "num_speculative_tokens": 4},
        ),
        (["-sc.method=suffix"], {"method": "suffix"}),
        (
            ["--spec-method", "suffix", "--spec-tokens", "6"],
            {"method": "suffix", "num_speculative_tokens": 6},
        ),
        (
            ["--num-speculative-tokens", "3", "--ngram-prompt-lookup-max", "4"],
            {"num_speculative_tokens": 3, "prompt_lookup_max": 4},
        ),
        (
            ["--draft-max", "16", "--draft-min", "2"],
            {"num_speculative_tokens": 16, "min_speculative_tokens": 2},
        ),
        (["--spec-type", "ngram-mod,ngram-cache"], {"method": "ngram"}),
        (["--spec-default"], {"method": "ngram"}),
        (
            ["-md", "d.gguf", "--spec-draft-n-max", "8", "--spec-draft-p-min", "0.5", "-ngld", "9"],
            {"model": "d.gguf", "num_speculative_tokens": 8, "draft_model_min_token_prob": 0.5},
        ),
        (
            ["--spec-type", "draft-simple,ngram-mod", "--model-draft", "d.gguf"],
            {"method": "draft_model,ngram", "model": "d.gguf"},
        ),
        (
            ["--spec-model", "d.gguf", "--spec-method", "draft_model"],
            {"model": "d.gguf", "method": "draft_model"},
        ),
        (["--spec-type", "none"], None),
    ],
)
def test_speculative_decoding_has_the_flags_of_both_servers(
    words: list[str], config: dict[str, object] | None
) -> None:
    taken = read(*words)
    assert not taken.problems
    assert taken.config is not None
    assert taken.config.speculative_config == config


def test_the_file_may_not_name_refused_flags_either(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "enable_lora: true\nmodel-impl: off\nseed: x\nasync-scheduling: true\n"
        "numa-bind-nodes: [0, 1]\nprot: 1\noverride-generation-config.temperature: 0.5\n"
    )
    taken = read("--config", str(path), "-pp", "2")
    told = [problem.split()[0].rstrip(":") for problem in taken.problems]
    assert told == ["-pp", "--config", "--enable-lora", "--model-impl", "--seed"]
    assert taken.config is not None
    assert taken.config.override_generation_config == {"temperature": 0.5}
    assert taken.notice.startswith("options without effect: --async-scheduling (")
    assert "--numa-bind-nodes (all ranks are processes on this machine)" in taken.notice


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
    assert "100,000 tokens; requests at the same time: 12 of 8,192 tokens or 64" in lines[2]
    assert lines[3].endswith("http://127.0.0.1:8000")
    assert "none, so only this machine can connect" in lines[4]
    assert lines[4].endswith("ready in 2.3 s")


@pytest.mark.skipif(not cpu.available(), reason="needs the native kernels")
def test_the_banner_names_what_the_weights_are_kept_in(tmp_path: Path) -> None:
    info = tiny_llm(tmp_path, quantization="int8").engine.info()
    first = banner(info, "u", 0, False, 1).splitlines()[0]
    assert first.endswith(", int8, from float32 on cpu")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(8192, 12), (1024, 64), (1600, 62), (1601, 61), (100_000, 1), (100_001, 0)],
)
def test_concurrent_requests_are_counted_in_whole_blocks(tokens: int, expected: int) -> None:
    assert concurrent_requests(INFO, tokens) == expected


def test_the_banner_never_shows_a_key_and_warns_if_there_is_none() -> None:
    last = [banner(INFO, "u", *who, 1).splitlines()[-1] for who in ((1, True), (3, True))]
    assert ["required;" in last[0], "required (one of 3);" in last[1]] == [True, True]
    assert "NONE: any client of the network" in banner(INFO, "u", 0, True, 1)


# Before anything is loaded


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--quantization", "hqq"], ["--max-model-lem", "5"], ["--tensor-parallel-size=0"]],
)
def test_help_and_mistakes_import_nothing_heavy(words: list[str]) -> None:
    assert heavy_imports(["serve", *words]) == []


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (
            ["--max-model-lem", "5"],
            2,
            "--max-model-lem: unknown option; did you mean --max",
        ),
        (["--port", "70000"], 2, "--port must be a whole number from 0 to 65535"),
        (["./nowhere.gguf", "--port", "0"], 1, "no such file or folder: nowhere.gguf"),
    ],
)
def test_an_error_of_serve_is_reported_in_one_line(
    words: list[str], status: int, says: str
) -> None:
    line = [sys.executable, "-m", "twostroke", "serve", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert done.stderr.startswith("twostroke: error: ")
    assert says in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr


def test_too_few_open_files_are_said_before_a_model_is_loaded() -> None:
    line = [sys.executable, "-m", "twostroke", "serve", "--port", "0"]
    limited = ["sh", "-c", 'ulimit -n 20; exec "$@"', "sh", *line]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "may open 20 files, and a server needs at least 64" in done.stderr
    assert "ulimit -n 4096" in done.stderr
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

    def ask(
        self,
        path: str,
        body: object = None,
        key: str | None = None,
        session: str | None = None,
        timeout_s: float = 60.0,
    ) -> tuple[int, bytes]:
        """Send a request over a new connection, and return the status and the body."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
        head += "Connection: close\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {key}\r\n" if key else ""
        head += f"X-Session-ID: {session}\r\n" if session else ""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s) as sock:
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
        if sys.platform == "linux":  # the HTTP process does not import torch
            assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        status, said = server.terminate()
    assert status == 0
    lines = said.splitlines()
    time_and_level = r"(INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d "  # warnings of a slow machine
    refused = "401 POST /v1/chat/completions, request -: invalid_api_key: a valid API key is needed"
    assert [bool(re.match(time_and_level, line)) for line in lines] == [False] * 5 + [True] * (
        len(lines) - 5
    )
    assert any(refused in line for line in lines)
    assert re.fullmatch(r"twostroke [\d.]+: SmolLM2-135M-Instruct, Q4_1 \+ Q8_0 on cpu", lines[0])
    assert "1,440 tokens; requests at the same time: 1 of 1,440 tokens or 1 of 1,024" in lines[2]
    pages = "chat in a browser, /dash shows its metrics"
    assert lines[3].endswith(f"http://127.0.0.1:{server.port}; {pages}")
    assert re.search(r"key +required; ready in [\d.]+ s$", lines[4])
    assert "sesame" not in said


def test_a_launch_line_of_vllm_works_with_another_package_name() -> None:
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


def test_a_launch_line_of_llama_server_sets_the_model_and_its_sampling() -> None:
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
