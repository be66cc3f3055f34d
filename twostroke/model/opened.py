"""From a model's files to its spec and its weights, which are not read yet."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.config import EngineConfig
from twostroke.model import gguf_config, hf_config
from twostroke.model.gguf import GGUFFile
from twostroke.model.hub import ModelFiles
from twostroke.model.spec import ModelSpec
from twostroke.model.weights import WeightSource, check_weights
from twostroke.model.weights.dummy import DummyWeights
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.safetensors import SafetensorsWeights


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose headers have been read and found good; no weights in memory yet."""

    files: ModelFiles
    spec: ModelSpec
    weights: WeightSource
    dtype: str  # the weights' own


def open_model(config: EngineConfig, files: ModelFiles, device: str) -> OpenedModel:
    if files.kind == "gguf":
        return _open_gguf(config, files, device)
    spec, settings = hf_config.load_hf_config(files.path)
    dtype = hf_config.dtype_of(settings, str(files.path / "config.json"))
    if config.load_format == "dummy":
        return OpenedModel(files, spec, _dummy(spec, config, device), dtype)
    weights = SafetensorsWeights(files.path, spec, hf_config.names_in_hf(settings))
    check_weights(spec, weights, str(weights.path), "config.json", hf_config.FIELDS)
    return OpenedModel(files, spec, weights, dtype)


def _open_gguf(config: EngineConfig, files: ModelFiles, device: str) -> OpenedModel:
    file = GGUFFile.open(files.path)
    spec = gguf_config.spec_from_gguf(file)
    if config.load_format == "dummy":
        return OpenedModel(files, spec, _dummy(spec, config, device), "bfloat16")
    weights = GGUFWeights(file, spec)
    check_weights(spec, weights, str(files.path), "the metadata", gguf_config.FIELDS)
    return OpenedModel(files, spec, weights, "bfloat16")


def _dummy(spec: ModelSpec, config: EngineConfig, device: str) -> WeightSource:
    return DummyWeights(spec, config.seed, device)
