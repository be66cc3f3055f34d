"""What a user may call a model, and the files it means."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.model.find.model_files import GGUF, refusal, write_files
from twostroke.model.find import hub
from twostroke.model.find.hub import ModelFiles, resolve


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


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with one of each kind of model in it."""
    monkeypatch.chdir(tmp_path)
    for name, files in {
        "smollm": {"config.json": b"{}", "model.safetensors": b""},
        "config-only": {"config.json": b"{}"},
        "pickled": {"config.json": b"{}", "pytorch_model.bin": b""},
        "one-gguf": {"Qwen3-0.6B-Q8_0.gguf": GGUF, "README.md": b""},
        "two-ggufs": {"a.gguf": GGUF, "b.gguf": GGUF},
        "split": {f"big-0000{n}-of-00003.gguf": GGUF for n in (1, 2, 3)},
        "split-numbers": {"big-00004-of-00003.gguf": GGUF},
        "split-second": {"big-00002-of-00003.gguf": GGUF},
        "models--org--some-model/snapshots/0123abc": {"config.json": b"{}", "a.safetensors": b""},
        "empty": {},
    }.items():
        write_files(tmp_path / name, files)
    (tmp_path / "plain").write_bytes(GGUF)
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


@pytest.mark.parametrize(
    "model", ["split", *(f"split/big-0000{n}-of-00003.gguf" for n in (1, 2, 3))]
)
def test_any_part_of_a_split_gguf_and_their_folder_mean_the_first(model: str, models: Path) -> None:
    assert resolve(model) == ModelFiles("gguf", Path("split/big-00001-of-00003.gguf"), "big")


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
        ("split-numbers/big-00004-of-00003.gguf", "there is no part 4 of 3"),
        ("split-second/big-00002-of-00003.gguf", "big-00001-of-00003.gguf: cannot read this file"),
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
        ("org/name:Q4 K", "such as org/name, org/name:FILE.gguf or org/name:Q4_K_M"),
    ],
)
def test_what_is_no_model_is_refused(model: str, says: str, models: Path) -> None:
    assert says in refusal(model)


def test_a_revision_is_refused_where_there_are_none(models: Path) -> None:
    assert "revision 'v2' was given" in refusal("smollm", revision="v2")
    assert "leave the revision out" in refusal(None, revision="v2")
