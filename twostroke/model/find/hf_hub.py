"""Models on the Hugging Face Hub. A complete cached copy is used without network access."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from twostroke.errors import ModelError
from twostroke.model.find.on_disk import DISK_FULL, names_for_message, nearest_on_disk

CONFIG_FILES = ["*.json", "*.jinja", "tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges*"]
# Subfolders and `consolidated` files hold copies of the weights in formats we do not read.
IGNORED_FILES = ["*/*", "consolidated*.safetensors"]


def fetch_folder(repo: str, revision: str | None, allow_config_only: bool) -> Path:
    """Return the folder of a model's complete snapshot."""
    wanted_files = CONFIG_FILES if allow_config_only else [*CONFIG_FILES, "*.safetensors"]
    with _hub_errors(repo, None, revision):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        def snapshot(local_files_only: bool) -> Path:
            return Path(
                snapshot_download(
                    repo,
                    revision=revision,
                    allow_patterns=wanted_files,
                    ignore_patterns=IGNORED_FILES,
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
        return folder
    if missing := _missing_shards(folder):
        raise ModelError(
            f"{repo} is only partly downloaded: {names_for_message(missing)} missing. Try again "
            "with a network connection"
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
        return []  # no index: one file. The loader refuses a damaged index.
    return sorted(shard for shard in shards if not (snapshot / shard).exists())


def fetch_file(repo: str, file: str, revision: str | None) -> Path:
    """Return the path of one file of a model."""
    with _hub_errors(repo, file, revision):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(repo, file, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            return Path(hf_hub_download(repo, file, revision=revision))


def file_of_quant(repo: str, quant: str, revision: str | None) -> str:
    """Return the name of the GGUF file with the quantisation `quant` in its name."""
    with _hub_errors(repo, None, revision):
        from huggingface_hub import list_repo_files, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        # A file called mmproj has a vision encoder.
        name = rf"(?!.*mmproj)(^|.*[-._/]){re.escape(quant)}(-\d+-of-\d+)?\.gguf"
        pattern = re.compile(name, re.IGNORECASE)
        with contextlib.suppress(LocalEntryNotFoundError):
            folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
            cached = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
            if found := sorted(filter(pattern.fullmatch, cached)):
                return found[0]
        files = list_repo_files(repo, revision=revision)
    ggufs = [file for file in files if file.lower().endswith(".gguf")]
    if found := sorted(filter(pattern.fullmatch, ggufs)):
        return found[0]
    raise ModelError(
        f"{repo} holds no GGUF file quantised to {quant}; "
        + (
            f"name one of those it holds: {names_for_message(ggufs)}"
            if ggufs
            else "it holds none at all"
        )
    )


@contextlib.contextmanager
def _hub_errors(repo: str, file: str | None, revision: str | None) -> Iterator[None]:
    """Translate the exceptions of huggingface_hub into `ModelError`."""
    wanted = f"{repo}:{file}" if file else repo
    # A name such as `models/smollm` may have been meant as a path.
    path = Path(repo, file or "")
    local = f"there is no {path} on this disk{nearest_on_disk(path)}"
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
        # huggingface_hub can neither reach the Hub nor find a cached copy.
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
        # The HTTP library below huggingface_hub differs between versions, and so do its
        # exceptions. All of them mean that the download failed.
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
