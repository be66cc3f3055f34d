"""From a user's word for a model to its files, its tokenizer and what its makers recommend.

All that a process needs which only talks to users; `opened.py` has spec and weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.config import RECOMMENDED, EngineConfig
from twostroke.errors import ConfigError, ModelError, RequestError
from twostroke.model.fields import Fields, read_json
from twostroke.model.find.hub import ModelFiles, resolve
from twostroke.model.find.packaged import DEFAULT_MODEL
from twostroke.model.gguf.gguf_file import GGUFFile
from twostroke.model.text.template_names import NAMED_TEMPLATES
from twostroke.request import SamplingParams

if TYPE_CHECKING:
    from twostroke.model.text.tokenizer import Tokenizer


def find_model(config: EngineConfig) -> ModelFiles:
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


def open_tokenizer(config: EngineConfig, files: ModelFiles) -> Tokenizer | None:
    """The model's own tokenizer or the one asked for; None if the user wants none."""
    if config.skip_tokenizer_init:
        return None
    from twostroke.model.text.tokenizer import Tokenizer

    if config.tokenizer is not None:
        files = resolve(config.tokenizer, allow_config_only=True)
    if files.kind == "gguf":
        return Tokenizer.from_gguf(GGUFFile.open(files.path).metadata, str(files.path))
    folder = files.path if files.path.is_dir() else files.path.parent
    if config.load_format == "dummy" and not (folder / "tokenizer.json").exists():
        return None  # a shape without a tokenizer can still be measured, in token ids
    return Tokenizer.from_folder(folder)


def recommended_sampling(config: EngineConfig, files: ModelFiles) -> dict[str, Any]:
    """The sampling that the model's makers recommend, under what the user gave for it."""
    return _of_its_makers(files) | (config.override_generation_config or {})


def _of_its_makers(files: ModelFiles) -> dict[str, Any]:
    """Empty if they say nothing."""
    if files.kind == "gguf":
        return dict(DEFAULT_MODEL.sampling) if files.name == DEFAULT_MODEL.name else {}
    path = files.path / "generation_config.json"
    fields = Fields(str(path), read_json(path, missing_ok=True) if files.path.is_dir() else {})
    if not fields.boolean("do_sample", True):
        return {}
    settings = {name: fields.value(name) for name in RECOMMENDED if name in fields}
    try:
        SamplingParams(**settings)
    except RequestError as error:
        raise ModelError(f"{path}: {error}. Correct it, or delete the file.") from None
    return settings


def chat_template_source(config: EngineConfig, tokenizer: Tokenizer) -> str | None:
    """The user's template, given as text, as a name or as a path, or the model's."""
    given: Any = config.chat_template
    if given is None:
        return tokenizer.chat_template
    if "{" in given:
        return str(given)
    if given in NAMED_TEMPLATES and not Path(given).is_file():
        return NAMED_TEMPLATES[given]
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(
            f"chat_template: {given!r} is neither a template (no {{ in it) nor a readable file "
            f"({error.strerror}) nor one of {', '.join(NAMED_TEMPLATES)}"
        ) from None
