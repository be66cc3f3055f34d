"""On the native kernels nothing imports torch, whatever is asked; what needs torch, where it is not
installed, says what to install.

Real processes: in some, importing torch fails aloud; in others, it is not installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model.gguf.gguf_files import write_model
from twostroke.kernels import cpu

needs_native = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)
HERE = Path(__file__).parents[2]
MESSAGE = "torch was imported"

# Everything that a request can ask for beside temperature and its companions.
ASK_FOR_ALL = """
import json, sys
from twostroke import LLM, SamplingParams
from twostroke.request import StructuredOutputs

llm = LLM(sys.argv[1], num_gpu_blocks_override=256, **json.loads(sys.argv[2]))
common = {"max_tokens": 4, "ignore_eos": True}
schema = {"enum": ["yes", "no"]}
asked = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 1},
    "penalised": {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 2},
    "logit_bias": {"temperature": 0, "logit_bias": {9: 100.0}},
    "allowed": {"temperature": 0, "allowed_token_ids": [11, 12]},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": [7]},
}
if llm.engine.tokenizer() is not None:
    asked["bad_words"] = {"bad_words": ["the"]}
    asked["grammar"] = {"structured_outputs": StructuredOutputs(json=schema), "max_tokens": 40}
params = [SamplingParams(**(common | one)) for one in asked.values()]
outputs = llm.generate([[5, 6, 7, 8]] * len(params), params, use_tqdm=False)
written = dict(zip(asked, outputs, strict=True))
assert written["logit_bias"].outputs[0].token_ids == [9] * 4
assert set(written["allowed"].outputs[0].token_ids) <= {11, 12}
assert [len(entry) >= 3 for entry in written["logprobs"].outputs[0].logprobs] == [True] * 4
assert len(written["prompt_logprobs"].prompt_logprobs) == 4
if "grammar" in written:
    assert json.loads(written["grammar"].outputs[0].text) in ("yes", "no")
print(json.dumps(["torch" in sys.modules, written["greedy"].outputs[0].token_ids]))
"""


@pytest.fixture(scope="module")
def torchless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment where importing torch fails."""
    path = tmp_path_factory.mktemp("torchless")
    (path / "torch.py").write_text(f"raise AssertionError({MESSAGE!r})\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(path), str(HERE)])}


@pytest.fixture(scope="module")
def not_installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which no process can find torch."""
    path = tmp_path_factory.mktemp("no_torch")
    (path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(path), str(HERE)])}


def run(code: str, *words: str, env: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
        cwd=HERE,
    )


def ask_for_all(path: Path, env: dict[str, str] | None, **settings: Any) -> tuple[bool, list[int]]:
    done = run(ASK_FOR_ALL, str(path), json.dumps({"device": "cpu"} | settings), env=env)
    assert done.returncode == 0, done.stderr
    imported, tokens = json.loads(done.stdout)
    return imported, tokens


@needs_native
def test_no_request_imports_torch(folder: Path, torchless: dict[str, str]) -> None:
    assert ask_for_all(folder, torchless)[0] is False


@needs_native
def test_the_device_is_chosen_without_torch_where_there_can_be_no_gpu(
    folder: Path, torchless: dict[str, str]
) -> None:
    hidden = torchless | {"CUDA_VISIBLE_DEVICES": ""}
    assert ask_for_all(folder, hidden, device="auto")[0] is False


@needs_native
@pytest.mark.parametrize(
    "settings", [{"load_format": "dummy"}, {"quantization": "int8"}, {"exact": True}], ids=str
)
def test_no_setting_of_the_native_kernels_imports_torch(
    settings: dict[str, Any], folder: Path, torchless: dict[str, str]
) -> None:
    assert ask_for_all(folder, torchless, **settings)[0] is False


@needs_native
def test_a_gguf_file_is_read_without_torch(tmp_path: Path, torchless: dict[str, str]) -> None:
    write_model(tmp_path / "m.gguf")
    settings = {"skip_tokenizer_init": True, "max_num_seqs": 16}
    assert ask_for_all(tmp_path / "m.gguf", torchless, **settings)[0] is False


@needs_native
def test_run_answers_without_torch(folder: Path, torchless: dict[str, str]) -> None:
    words = ["run", "--model", str(folder), "--device", "cpu", "--json", "--max-tokens", "5", "hi"]
    words += ["--num-gpu-blocks-override", "64", "--ignore-eos"]
    code = f"import sys\nfrom twostroke.cli import main\nsys.exit(main({words!r}))"
    done = run(code, env=torchless)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 5


def test_without_native_kernels_torch_computes(folder: Path) -> None:
    imported, expected = ask_for_all(folder, None, kernels="reference")
    assert imported
    none = "from twostroke.kernels import cpu\ncpu.native = None\n" + ASK_FOR_ALL
    done = run(none, str(folder), '{"device": "cpu"}', env=None)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, expected]
    assert "no native kernels" in done.stderr


@pytest.mark.parametrize(
    "settings", [{"kernels": "reference"}, {"kv_cache_dtype": "bfloat16"}], ids=str
)
def test_the_check_fails_with_torch(
    settings: dict[str, str], folder: Path, torchless: dict[str, str]
) -> None:
    """Negative control: a setting that needs torch fails here."""
    done = run(ASK_FOR_ALL, str(folder), json.dumps({"device": "cpu"} | settings), env=torchless)
    assert done.returncode != 0
    assert MESSAGE in done.stderr


# Where torch is not installed

LOAD = "import json, sys\nfrom twostroke import LLM\nLLM(sys.argv[1], **json.loads(sys.argv[2]))\n"
NO_KERNELS = "from twostroke.kernels import cpu\ncpu.native = None\n"
# A driver that has found one device, and counts what it is asked.
ONE_GPU = """
import ctypes
from twostroke.engine import device
class Driver:
    def cuInit(self, flags): return 0
    def cuDeviceGetCount(self, count): count._obj.value = 1; return 0
device.may_have_gpu = lambda: True
ctypes.CDLL = lambda name: Driver()
"""
REFERENCE, GPU = "pip install 'twostroke[reference]'", "pip install 'twostroke[gpu]'"


def cli(*words: str) -> str:
    return f"import sys\nfrom twostroke.cli import main\nsys.exit(main({list(words)!r}))"


@needs_native
def test_without_torch_installed_everything_is_answered(
    folder: Path, not_installed: dict[str, str]
) -> None:
    assert ask_for_all(folder, not_installed)[0] is True  # its name is taken, by nothing


@needs_native
def test_a_gpu_without_torch_is_reported_in_one_line_and_the_cpu_computes(
    folder: Path, not_installed: dict[str, str]
) -> None:
    words = [str(folder), json.dumps({"num_gpu_blocks_override": 64})]
    done = run(ONE_GPU + LOAD, *words, env=not_installed)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "this machine has a GPU, but torch is not installed; running on the CPU."
    )
    assert line.endswith(GPU)


@pytest.mark.parametrize(
    ("before", "settings", "says"),
    [
        ("", {"device": "cuda"}, ("device is 'cuda', which needs torch", GPU)),
        ("", {"kernels": "reference"}, ("kernels is 'reference'", "not installed", REFERENCE)),
        ("", {"kv_cache_dtype": "float32"}, ("kv_cache_dtype='float32' on a CPU", REFERENCE)),
        (NO_KERNELS, {}, ("nothing to compute with", "install a C++ compiler", REFERENCE)),
    ],
    ids=["cuda", "reference", "kv_cache_dtype", "no kernels"],
)
def test_errors_without_torch_say_what_to_install(
    before: str,
    settings: dict[str, str],
    says: tuple[str, ...],
    folder: Path,
    not_installed: dict[str, str],
) -> None:
    if not before and not cpu.available():
        pytest.skip("this installation was built without the native kernels")
    settings = {"device": "cpu"} | settings
    done = run(before + LOAD, str(folder), json.dumps(settings), env=not_installed)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("twostroke.errors.ConfigError: ")
    assert all(words in last for words in says), last

    flags = [word for name, value in settings.items() for word in ("--" + name, value)]
    flags = [flag.replace("_", "-") if flag.startswith("--") else flag for flag in flags]
    told = run(before + cli("run", "-m", str(folder), *flags, "hi"), env=not_installed)
    assert told.returncode not in (0, None)
    assert "Traceback" not in told.stderr
    assert says[-1] in told.stderr
    # The model is not looked for before: it may be large, and far away.
    absent = run(before + LOAD, str(folder / "nowhere"), json.dumps(settings), env=not_installed)
    assert says[-1] in absent.stderr


# The server: both of its processes


@contextlib.contextmanager
def served(folder: Path, env: dict[str, str]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "twostroke", "serve", str(folder), "--port", str(port)]
    line += ["--device", "cpu", "--num-gpu-blocks-override", "256", "--served-model-name", "m"]
    process = subprocess.Popen(line, env=env, cwd=HERE, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while True:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until, "the server did not come up"
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=10).close()
                break
            time.sleep(0.05)
        yield url
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[1]
        assert process.returncode == 0
        assert "Traceback" not in said
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def post(url: str, **body: Any) -> Any:
    data = json.dumps({"model": "m", "max_tokens": 4} | body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@needs_native
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("how", ["torchless", "not_installed"])
def test_the_server_answers_without_torch(
    how: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    with served(folder, request.getfixturevalue(how)) as url:
        (choice,) = post(f"{url}/v1/completions", prompt=[5, 6, 7], logprobs=2, echo=True)[
            "choices"
        ]
        assert len(choice["logprobs"]["token_logprobs"]) == 7
        post(f"{url}/v1/completions", prompt="a", temperature=0.7, logit_bias={"9": 5})
        schema = {"enum": ["yes", "no"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        answer = post(
            f"{url}/v1/chat/completions",
            messages=[{"role": "user", "content": "hi"}],
            response_format=wanted,
            max_tokens=40,
        )
        assert json.loads(answer["choices"][0]["message"]["content"]) in ("yes", "no")
