"""Models on the Hugging Face Hub. Its own library and cache; only the network is stood in for."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.model.find.model_files import GGUF, refusal, write_files
from twostroke.model.find.hub import ModelFiles, resolve

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
    write_files(snapshot, files)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(commit)
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
    snapshot = put_in_hub_cache(hub_cache, "org/repo-GGUF", {"m.Q4_0.gguf": GGUF})
    expected = ModelFiles("gguf", snapshot / "m.Q4_0.gguf", "org/repo-GGUF:m.Q4_0.gguf")
    assert resolve(model) == expected


SPLIT = [f"Q6_K/big-Q6_K-0000{n}-of-00002.gguf" for n in (1, 2)]
QUANTISED = [
    "m-F16.gguf",
    "a-mmproj-F16.gguf",
    "m-Q4_K_M.gguf",
    "m.Q8_0.gguf",
    "IQ4_XS.gguf",
    *SPLIT,
]


@pytest.mark.parametrize(
    ("quant", "file"),
    [
        ("F16", "m-F16.gguf"),
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q8_0", "m.Q8_0.gguf"),
        ("iq4_xs", "IQ4_XS.gguf"),
    ],
)
def test_a_gguf_file_of_a_hub_model_can_be_named_by_its_quant(
    quant: str, file: str, hub_cache: Path
) -> None:
    snapshot = put_in_hub_cache(hub_cache, "org/repo-GGUF", dict.fromkeys(QUANTISED, GGUF))
    expected = ModelFiles("gguf", snapshot / file, f"org/repo-GGUF:{file}")
    assert resolve(f"org/repo-GGUF:{quant}") == expected


def test_a_quant_that_is_not_cached_is_looked_up_and_one_that_is_not_there_is_told(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_hub_cache(hub_cache, "org/repo-GGUF", {"m-F16.gguf": GGUF})
    (hub_cache / "fetched.gguf").write_bytes(GGUF)
    assert "the Hugging Face Hub" in refusal("org/repo-GGUF:Q8_0"), "it cannot be reached"
    files = [*QUANTISED, "README.md"]
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, revision: files)
    calls = stand_in_for_the_hub(monkeypatch, lambda: str(hub_cache / "fetched.gguf"))
    assert resolve("org/repo-GGUF:Q8_0").path == hub_cache / "fetched.gguf"
    assert [call["file"] for call in calls] == ["m.Q8_0.gguf"]
    message = refusal("org/repo-GGUF:Q5_0")
    assert "holds no GGUF file quantised to Q5_0; name one of those it holds: " in message
    assert "m-Q4_K_M.gguf" in message
    files[:] = ["model.safetensors"]
    assert "it holds none at all" in refusal("org/repo-GGUF:Q4_0")


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
    assert "there is no models/smollm-135 on this disk; did you mean 'smollm-135m'?" in message
    assert "cannot be reached" in refusal("org/repo-GGUF:m.gguf")


@pytest.mark.parametrize("wanted", ["q6_k", *SPLIT])
def test_all_parts_of_a_split_gguf_are_found_by_its_quant_or_any_of_them(
    wanted: str, hub_cache: Path
) -> None:
    snapshot = put_in_hub_cache(hub_cache, "org/repo-GGUF", dict.fromkeys(QUANTISED, GGUF))
    expected = ModelFiles("gguf", snapshot / SPLIT[0], "org/repo-GGUF:Q6_K/big-Q6_K.gguf")
    assert resolve(f"org/repo-GGUF:{wanted}") == expected


def test_parts_of_a_split_gguf_that_are_not_cached_are_fetched(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_hub_cache(hub_cache, "org/repo-GGUF", {SPLIT[0]: GGUF})
    assert "cannot be reached" in refusal(f"org/repo-GGUF:{SPLIT[0]}"), "for the second part"
    (hub_cache / "fetched.gguf").write_bytes(GGUF)
    calls = stand_in_for_the_hub(monkeypatch, lambda: str(hub_cache / "fetched.gguf"))
    files = resolve(f"org/repo-GGUF:{SPLIT[1]}")
    assert files.name == "org/repo-GGUF:Q6_K/big-Q6_K.gguf"
    assert [call["file"] for call in calls] == SPLIT


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "smollm", {"config.json": b"{}", "model.safetensors": b""})
    calls = stand_in_for_the_hub(monkeypatch, lambda: str(tmp_path / "smollm"))
    files = resolve("org/some-model", revision="v2")
    assert files == ModelFiles("folder", tmp_path / "smollm", "org/some-model")
    resolve("org/some-model", allow_config_only=True)
    assert [call["revision"] for call in calls] == ["v2", None]
    with_weights, without = (call["allow_patterns"] for call in calls)
    assert "*.safetensors" in with_weights
    assert "*.safetensors" not in without
    assert {"*.json", "*.jinja", "tokenizer*"} <= set(without)


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"config.json": b"{}"}, "org/some-model holds no *.safetensors"),
        ({"a.gguf": GGUF, "b.gguf": GGUF}, "org/some-model holds no config.json"),
    ],
)
def test_a_hub_model_without_weights_points_to_its_gguf_files(
    held: dict[str, bytes], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "held", held)
    stand_in_for_the_hub(monkeypatch, lambda: str(tmp_path / "held"))
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
