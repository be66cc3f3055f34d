"""From a model's files to its spec and its weights, which are not read yet."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.config import EngineConfig
from twostroke.model import gguf_config, hf_config
from twostroke.model.gguf import GGUFFile
from twostroke.model.gguf_config import spec_from_gguf
from twostroke.model.hf_config import dtype_of, load_hf_config
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
    spec, settings = load_hf_config(files.path)
    dtype = dtype_of(settings, str(files.path))
    if config.load_format == "dummy":
        return OpenedModel(files, spec, _dummy(spec, config, device), dtype)
    weights = SafetensorsWeights(files.path, spec)
    check_weights(spec, weights, str(files.path), hf_config.FIELDS)
    return OpenedModel(files, spec, weights, dtype)


def _open_gguf(config: EngineConfig, files: ModelFiles, device: str) -> OpenedModel:
    file = GGUFFile.open(files.path)
    spec = spec_from_gguf(file)
    if config.load_format == "dummy":
        return OpenedModel(files, spec, _dummy(spec, config, device), "bfloat16")
    weights = GGUFWeights(file, spec)
    check_weights(spec, weights, str(files.path), gguf_config.FIELDS)
    return OpenedModel(files, spec, weights, "bfloat16")


def _dummy(spec: ModelSpec, config: EngineConfig, device: str) -> WeightSource:
    return DummyWeights(spec, config.seed, device)
