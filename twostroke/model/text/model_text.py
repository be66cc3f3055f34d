"""The text side of a model: its tokenizer, its chat template and its recommended sampling.

Processes without torch and numpy, such as the HTTP server, import this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.config import RECOMMENDED, EngineConfig
from twostroke.errors import ModelError, RequestError
from twostroke.model.fields import Fields, read_json
from twostroke.model.find.hub import ModelFiles, resolve
from twostroke.model.find.packaged import DEFAULT_MODEL
from twostroke.model.gguf.gguf_file import GGUFFile
from twostroke.model.text.template_source import NAMED_TEMPLATES
from twostroke.request import SamplingParams

if TYPE_CHECKING:
    from twostroke.model.text.tokenizer import Tokenizer


def open_tokenizer(config: EngineConfig, files: ModelFiles) -> Tokenizer | None:
    """Return the tokenizer of the model or of `config.tokenizer`; None if it is skipped."""
    if config.skip_tokenizer_init:
        return None
    from twostroke.model.text.tokenizer import Tokenizer

    if config.tokenizer is not None:
        files = resolve(config.tokenizer, allow_config_only=True)
    if files.kind == "gguf":
        return Tokenizer.from_gguf(GGUFFile.open(files.path).metadata, str(files.path))
    folder = files.path if files.path.is_dir() else files.path.parent
    if config.load_format == "dummy" and not (folder / "tokenizer.json").exists():
        return None  # dummy weights can be measured with token ids alone
    return Tokenizer.from_folder(folder)


def recommended_sampling(config: EngineConfig, files: ModelFiles) -> dict[str, Any]:
    """Return the sampling parameters that the model's authors recommend, with the overrides of
    `config.override_generation_config`."""
    return _generation_config(files) | (config.override_generation_config or {})


def _generation_config(files: ModelFiles) -> dict[str, Any]:
    """Return the sampling parameters of generation_config.json, or of the default model."""
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
    """Return `config.chat_template` (a text, a name or a path), or the model's template."""
    chosen: Any = config.chat_template
    if chosen is None:
        return tokenizer.chat_template
    if "{" in chosen:
        return str(chosen)
    if chosen in NAMED_TEMPLATES and not Path(chosen).is_file():
        return NAMED_TEMPLATES[chosen]
    try:
        return Path(chosen).read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(
            f"chat_template: {chosen!r} is neither a template (no {{ in it) nor a readable file "
            f"({error.strerror}) nor one of {', '.join(NAMED_TEMPLATES)}"
        ) from None
