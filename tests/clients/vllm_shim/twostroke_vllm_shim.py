"""A pytest plugin with which vLLM's tests of its server run against `twostroke serve`.

The plugin replaces the modules that the tests import: `tests.utils`, whose server becomes
`twostroke serve`, and every module of `vllm`. A few helpers of vLLM are implemented here. Other
names have no code: a test that calls one tests vLLM's code and not a server (`internal`). Tests
that start `python -m vllm…` also get twostroke's server. `vllm_tests.py` starts pytest with the
plugin and reads the outcomes that it writes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = os.environ["TWOSTROKE_REPOSITORY"]
TOKENIZER = os.environ["TWOSTROKE_TOKENIZER"]  # a folder that transformers can read
OUTCOMES = os.environ["TWOSTROKE_OUTCOMES"]  # a file with a JSON object on each line
VERSION = os.environ["TWOSTROKE_VERSION"]
MAX_MODEL_LEN = 8192  # of the default model
PATIENCE = float(os.environ["TWOSTROKE_PATIENCE"])
START_S, TEST_S = 120 * PATIENCE, 180 * PATIENCE

# Flags of the model, its adapters, the device and libraries, which differ from those of vLLM's
# tests. The flags are left out with their values.
LEFT_OUT = {
    "--dtype",
    "--gpu-memory-utilization",
    "--attention-backend",
    "--trust-remote-code",
    "--no-async-scheduling",
    "--load-format",
    "--model",
    "--tokenizer",
    "--runner",
    "--port",
    "--host",
    "--structured-outputs-config.backend",
    "--enable-lora",
    "--lora-modules",
    "--max-lora-rank",
    "--max-cpu-loras",
    "--max-loras",
}


class InternalOfVllmError(Exception):
    """The test uses vLLM's Python code."""


class ServerRefusedError(Exception):
    """The server did not start with the flags of the test."""


# ── replaced modules ────────────────────────────────────────────────────────────────────────


class Name:
    """A name of vLLM that a test may import but not use.

    While modules are imported a name can be called and iterated, so that one line does not prevent
    the other tests of a module.
    """

    in_test = False

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(f"{self._name}.{name}")

    def __call__(self, *given: Any, **named: Any) -> Any:
        if Name.in_test:
            raise InternalOfVllmError(self._name)
        is_decorator = len(given) == 1 and not named and callable(given[0])
        return given[0] if is_decorator else Name(f"{self._name}()")

    def __iter__(self) -> Any:
        if Name.in_test:
            raise InternalOfVllmError(self._name)
        return iter(())

    def __or__(self, other: Any) -> Any:
        return object

    __ror__ = __or__

    def __getitem__(self, _: Any) -> Name:
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)


class NoPlatform:
    """A platform without an accelerator."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: False


class NoSettings:
    def __getattr__(self, name: str) -> Any:
        return False


class ShimModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return PROVIDED[name] if name in PROVIDED else Name(f"{self.__name__}.{name}")


class ShimFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        shimmed = ("vllm", "tests.utils", "tests.conftest")
        if name in shimmed or name.startswith("vllm."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name == "transformers.models.auto.tokenization_auto":
            return _with_our_tokenizer(importlib.machinery.PathFinder.find_spec(name, path))
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return ShimModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "vllm.version":
            module.__version__ = VERSION  # type: ignore[attr-defined]


def _with_our_tokenizer(spec: Any) -> Any:
    """Replace the tokenizer of a test by the default model's."""
    execute = spec.loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        own = module.AutoTokenizer.from_pretrained
        module.AutoTokenizer.from_pretrained = lambda *_, **__: own(TOKENIZER)

    spec.loader.exec_module = exec_module
    return spec


def get_tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained()


class NoHub:
    """Replace downloads of adapters, which are left out."""

    def snapshot_download(self, **_: Any) -> str:
        return TOKENIZER


class VLLMValidationError(Exception):
    pass


class BatchRequestOutput:
    """A line of a batch's answers, in OpenAI's format."""

    @staticmethod
    def model_validate_json(line: str) -> None:
        assert {"id", "custom_id", "response", "error"} <= json.loads(line).keys()


def get_open_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port


class ModelConfig:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def get_vocab_size(self) -> int:
        return len(get_tokenizer())


# ── the server ──────────────────────────────────────────────────────────────────────────────


class Popen(subprocess.Popen[Any]):
    """Starts `twostroke` instead of `vllm COMMAND` and `python -m vllm…`."""

    def __init__(self, args: Any, *rest: Any, **given: Any) -> None:
        words = [str(one) for one in args] if isinstance(args, list | tuple) else [str(args)]
        is_module = "vllm.entrypoints" in " ".join(words[1:3])
        if is_module or words[0] == "vllm":
            RemoteOpenAIServer.num_started += 1
            words = ["serve", *words[3:]] if is_module else words[1:]
            if "--served-model-name" not in words and (model := _value(words, "--model")):
                words += ["--served-model-name", model]
            where = [word for name in ("--host", "--port") for word in _pair(words, name)]
            args = [*TWOSTROKE, *_ours(words), *where]
            given["env"] = {**(given.get("env") or os.environ), "PYTHONPATH": REPOSITORY}
        super().__init__(args, *rest, **given)


# The server ends with this process, also if the process is killed.
TWOSTROKE = [sys.executable, "-m", "twostroke.child_process", str(os.getpid()), "twostroke"]


class RemoteOpenAIServer:
    """`twostroke serve` with the flags and the model name of a test."""

    num_started = 0
    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str] | dict[str, Any],
        *,
        env_dict: dict[str, str] | None = None,
        **_: Any,
    ) -> None:
        RemoteOpenAIServer.num_started += 1
        flags = _ours(_as_list(vllm_serve_args))
        self.uds = _value(flags, "--uds")
        self.host, self.port = "127.0.0.1", 0
        if "--served-model-name" not in flags:
            flags += ["--served-model-name", model]
        where = [] if self.uds else ["--host", self.host, "--port", "0"]
        env = {**os.environ, **(env_dict or {}), "PYTHONPATH": REPOSITORY}
        with tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
            self.proc = subprocess.Popen(
                [*TWOSTROKE, "serve", *flags, *where],
                env=env,
                cwd=tempfile.gettempdir(),
                stdout=log,
                stderr=log,
            )
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            said = self._log.read_text(errors="replace")
            if found := re.search(r"http://[\w.:\[\]]+:(\d+)", said):
                self.port = int(found[1])
                return
            if self.uds and _listens(self.uds):
                return
            if self.proc.poll() is not None:
                raise ServerRefusedError(said.strip()[-600:])
            time.sleep(0.05)
        self.stop()
        raise ServerRefusedError(f"no server within {START_S:.0f} s: {said[-600:]}")

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.proc.send_signal(signal.SIGTERM)
        try:
            self.proc.wait(10)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
        self._log.unlink(missing_ok=True)

    def _get_process_termination_timeout(self) -> float:
        return 15.0

    @property
    def url_root(self) -> str:
        return f"http://{'localhost' if self.uds else self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return f"{self.url_root}/{'/'.join(part.strip('/') for part in parts if part)}"

    def _options(self, given: dict[str, Any], *path: str) -> dict[str, Any]:
        common = {"base_url": self.url_for(*path), "api_key": self.DUMMY_API_KEY}
        return {**common, "max_retries": 0, "timeout": TEST_S, **given}

    def get_client(self, **given: Any) -> Any:
        import openai

        return openai.OpenAI(**self._options(given, "v1"))

    def get_async_client(self, **given: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**self._options(given, "v1"))

    def get_client_anthropic(self, **given: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(**self._options(given))

    def get_async_client_anthropic(self, **given: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(**self._options(given))


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as trial:
        return trial.connect_ex(path) == 0


def _as_list(given: list[str] | dict[str, Any]) -> list[str]:
    if isinstance(given, list):
        return [str(one) for one in given]
    flags: list[str] = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


def _ours(flags: list[str]) -> list[str]:
    """Return the flags for the default model: without flags of other models, and with a context of
    at most the default model's."""
    kept: list[str] = []
    leaving = False
    for flag in flags:
        if flag.startswith("--"):
            leaving = flag.partition("=")[0] in LEFT_OUT
        if leaving:
            continue
        is_context = kept and kept[-1] in ("--max-model-len", "--max_model_len")
        too_long = is_context and flag.isdigit() and int(flag) > MAX_MODEL_LEN
        kept.append(str(MAX_MODEL_LEN) if too_long else flag)
    return kept


def _value(flags: list[str], name: str) -> str | None:
    return flags[flags.index(name) + 1] if name in flags else None


def _pair(flags: list[str], name: str) -> list[str]:
    value = _value(flags, name)
    return [] if value is None else [name, value]


class RemoteLaunchRenderServer:
    def __init__(self, *_: Any, **__: Any) -> None:
        RemoteOpenAIServer.num_started += 1
        raise ServerRefusedError("vllm launch render: templates without an engine")


PROVIDED: dict[str, Any] = {
    "RemoteOpenAIServer": RemoteOpenAIServer,
    "RemoteVLLMServer": RemoteOpenAIServer,
    "RemoteLaunchRenderServer": RemoteLaunchRenderServer,
    "get_tokenizer": get_tokenizer,
    "current_platform": NoPlatform(),
    "envs": NoSettings(),
    "version": types.SimpleNamespace(__version__=VERSION, _prev_minor_version=lambda: "0.0"),
    "is_aiter_found_and_supported": lambda: False,
    "ModelConfig": ModelConfig,
    "hf_api": NoHub,
    "VLLMValidationError": VLLMValidationError,
    "BatchRequestOutput": BatchRequestOutput,
    "get_open_port": get_open_port,
    "MiB_bytes": 1024**2,
    "ROCM_EXTRA_ARGS": [],
    "ROCM_ENV_OVERRIDES": {},
    "VLLM_PATH": Path.cwd(),
    "download_weights_from_hf": lambda model, *_, **__: model,
    "requires_fp8": pytest.mark.skip(reason="needs a GPU with fp8"),
    **{
        name: lambda **_: pytest.mark.skip(reason="needs several GPUs, or a large one")
        for name in ("multi_gpu_only", "multi_gpu_test", "large_gpu_mark", "large_gpu_test")
    },
}

sys.meta_path.insert(0, ShimFinder())


# ── pytest ──────────────────────────────────────────────────────────────────────────────────


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("asyncio", "cpu_test", "core_model", "skip_global_cleanup", "slow_test"):
        config.addinivalue_line("markers", f"{mark}: vLLM's")
    subprocess.Popen = Popen  # type: ignore[misc]
    json.JSONEncoder.default = lambda _, name: str(name)  # type: ignore[method-assign]


@pytest.fixture
def local_asset_server() -> None:
    """vLLM's fixture of images."""
    pytest.skip("needs a model that reads images")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = (yield).get_result()
    ended = report.when == "call" or (report.when == "setup" and report.outcome != "passed")
    if not ended:
        return
    outcome, reason = report.outcome, ""
    if outcome == "failed":
        error = call.excinfo.value if call.excinfo is not None else Exception()
        outcome, reason = _judged(error)
    elif outcome == "skipped":
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        reason = reason.removeprefix("Skipped: ")
        outcome = "cannot run" if reason.startswith("needs ") else outcome
    if outcome in ("passed", "different", "missing") and not _has_server(item):
        outcome = "internal"
    _note(item.nodeid, outcome, reason)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome == "failed":
        text = str(report.longrepr)
        _note(report.nodeid, *(_cannot_run(text) or ("not collected", text[-300:])))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Mark all tests as not finished, until they have run."""
    Name.in_test = True
    for item in session.items:
        _note(item.nodeid, "not finished", "")


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[SERVERS_BEFORE] = RemoteOpenAIServer.num_started


SERVERS_BEFORE = pytest.StashKey[int]()


def _has_server(item: pytest.Item) -> bool:
    """Return whether the test has a running server."""
    names = getattr(item, "fixturenames", ())
    if RemoteOpenAIServer.num_started > item.stash.get(SERVERS_BEFORE, 0):
        return True
    given = any("server" in name or "client" in name for name in names)
    return given and RemoteOpenAIServer.num_started > 0


def _cannot_run(text: str) -> tuple[str, str] | None:
    """Return the reason if a test needs a package or files that are missing."""
    if found := re.search(r"No module named '([\w.]+)'|(\w+) package to be installed", text):
        return "cannot run", f"needs the package {found[1] or found[2]}"
    if "huggingface.co" in text:
        return "cannot run", "needs files of another model, from Hugging Face"
    return None


def _judged(error: BaseException) -> tuple[str, str]:
    """Return the outcome of a failed test, and the reason. `missing`: the server does not have a
    route, field or flag. `different`: the answer differs."""
    chain, seen = [], error
    while seen is not None and seen not in chain:
        chain.append(seen)
        seen = seen.__cause__ or seen.__context__  # type: ignore[assignment]
    text = " | ".join(f"{type(one).__name__}: {one}" for one in chain)
    reason = " ".join(text.split())[:500]
    for one in chain:
        if isinstance(one, InternalOfVllmError):
            return "internal", reason
        if isinstance(one, ServerRefusedError):
            return "missing", " ".join(str(one).split())[-300:]
        status = getattr(one, "status_code", None)
        if status in (404, 501):
            return "missing", reason
    if cannot := _cannot_run(text):
        return cannot
    if re.search(r"\bName\b['\"]", text):
        return "internal", reason
    missing = r"is not supported|40[45] Client Error|there is no '/|\bassert \(?40[45] =="
    if re.search(missing, text):
        return "missing", reason
    return "different", reason


def _note(test: str, outcome: str, said: str) -> None:
    # Without ports, addresses and temporary paths, which differ in each run.
    said = re.sub(r"(127\.0\.0\.1|localhost):\d+|0x[0-9a-f]{6,}|/tmp/[\w./-]+", "…", said)[:300]
    with open(OUTCOMES, "a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "said": said}) + "\n")
