"""A model opened from its files: described, checked, and ready to have its weights read.

    find        `find.hub.find_model`: the name that a user gives → files
    describe    config.json or GGUF metadata → `ModelSpec`
    check       the tensors' names and shapes against the spec, before memory is allocated
    weights     a `WeightSource`, which reads each weight on request

`text/model_text.py` opens the tokenizer and the chat template of the same files.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError, ModelError
from twostroke.model.describe import gguf_config, hf_config
from twostroke.model.describe.overrides import override_metadata
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.find.hub import ModelFiles
from twostroke.model.gguf.gguf_file import GGUFFile
from twostroke.model.weights import WeightSource, check_weights
from twostroke.model.weights.dummy import DummyWeights
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.safetensors import SafetensorsWeights

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose headers have been read and checked. No weights are in memory yet."""

    files: ModelFiles
    spec: ModelSpec
    weights: WeightSource
    dtype: str  # of the weights in the file

    def stored_as(self) -> str:
        """Return the main types of the matrices in the file: "Q8_0", "Q4_K + Q6_K", "bfloat16"."""
        sizes: Counter[str] = Counter()
        for name, shape in self.spec.weight_shapes().items():
            if len(shape) == 2:
                sizes[self._stored_type(name)] += prod(shape)
        min_size = sizes.total() / 20  # a type of a few matrices is not named
        return " + ".join(type for type, size in sizes.most_common() if size >= min_size)

    def _stored_type(self, name: str) -> str:
        weights = self.weights
        if isinstance(weights, SafetensorsWeights) and weights.is_quantized(name):
            return weights.quantized.name if weights.quantized else ""
        return str(weights.stored_type(name) or self.dtype)


def open_model(config: EngineConfig, files: ModelFiles, device: str) -> OpenedModel:
    """Describe and check a model. `device`: where dummy weights are drawn."""
    open_files = _open_gguf if files.kind == "gguf" else _open_folder
    return open_files(config, files, device)


def _open_folder(config: EngineConfig, files: ModelFiles, device: str) -> OpenedModel:
    spec, settings = hf_config.load_hf_config(files.path, config.hf_overrides)
    if config.hf_overrides:
        _warn_without_effect(files, spec, lambda: hf_config.load_hf_config(files.path)[0])
    dtype = hf_config.dtype_of(settings, str(files.path / "config.json"))
    if config.load_format == "dummy":
        return OpenedModel(files, spec, _dummy(spec, config, device), dtype)
    quantized = hf_config.quantized_in_hf(settings, str(files.path / "config.json"))
    if quantized is not None and config.quantization not in (None, quantized.name):
        raise ConfigError(
            f"quantization is {config.quantization!r}, but {files.path} is quantised already "
            f"({quantized.name}); leave quantization out, or use the unquantised model"
        )
    names, variants = (
        hf_config.names_in_hf(settings),
        partial(hf_config.spec_variants, settings),
    )
    weights = SafetensorsWeights(files.path, spec, names, quantized, variants)
    fields = hf_config.fields_in_hf(settings)
    check_weights(spec, weights, str(weights.path), "config.json", fields, variants)
    return OpenedModel(files, spec, weights, dtype)


def _open_gguf(config: EngineConfig, files: ModelFiles, device: str) -> OpenedModel:
    file = GGUFFile.open(files.path)
    if config.hf_overrides:
        file.metadata = override_metadata(file.metadata, config.hf_overrides, str(file.path))
    spec = gguf_config.spec_from_gguf(file)
    if config.hf_overrides:
        path = files.path
        _warn_without_effect(files, spec, lambda: gguf_config.spec_from_gguf(GGUFFile.open(path)))
    if config.load_format == "dummy":
        return OpenedModel(files, spec, _dummy(spec, config, device), "bfloat16")
    weights = GGUFWeights(file, spec)
    check_weights(spec, weights, str(files.path), "the metadata", gguf_config.FIELDS)
    return OpenedModel(files, spec, weights, "bfloat16")


def _warn_without_effect(
    files: ModelFiles, spec: ModelSpec, read_own: Callable[[], ModelSpec]
) -> None:
    try:
        unchanged = read_own() == spec
    except ModelError:  # the overrides correct a setting that is refused
        return
    if unchanged:
        log.warning(
            "hf_overrides change nothing of %s: no setting read from it differs", files.path
        )


def _dummy(spec: ModelSpec, config: EngineConfig, device: str) -> WeightSource:
    return DummyWeights(spec, config.seed, device)
