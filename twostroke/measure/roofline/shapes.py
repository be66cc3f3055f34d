"""Shapes of common models, so that a roofline needs no model files."""

from __future__ import annotations

import math
import re
from pathlib import Path

from twostroke.errors import ConfigError, ModelError, did_you_mean
from twostroke.model.describe.spec import ModelSpec

# hidden, intermediate, layers, heads, KV heads, head size, vocabulary, tied embeddings
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, 128, 32000, False),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 128, 32000, False),
    "llama-2-70b": (8192, 28672, 80, 64, 8, 128, 32000, False),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
    "llama-3.1-70b": (8192, 28672, 80, 64, 8, 128, 128256, False),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "mistral-7b": (4096, 14336, 32, 32, 8, 128, 32768, False),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 128, 152064, False),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151936, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, 128, 151936, False),
}


def parameter_count(name: str) -> float | None:
    """Return the number of parameters of a name such as "7B", or None for other names."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([BbMm])", name)
    if found is None:
        return None
    return float(found[1]) * (1e9 if found[2] in "Bb" else 1e6)


def find_spec(model: str) -> ModelSpec:
    """Return the spec of a known name, a folder, a config.json, a GGUF file or a Hub model."""
    from twostroke.model.describe.hf_config import spec_from_hf

    if (shape := SHAPES.get(model.lower())) is not None:
        hidden, inner, layers, heads, kv_heads, head, vocab, tied = shape
        return spec_from_hf(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": hidden,
                "intermediate_size": inner,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": head,
                "vocab_size": vocab,
                "tie_word_embeddings": tied,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
            }
        )
    path = Path(model)
    if path.suffix == ".json" and path.is_file():
        import json

        try:
            return spec_from_hf(json.loads(path.read_text()), str(path))
        except ValueError as error:
            if isinstance(error, ModelError):
                raise
            raise ConfigError(f"{path} is not JSON: {error}") from None
    from twostroke.config import EngineConfig
    from twostroke.model.find.hub import find_model
    from twostroke.model.load import open_model

    try:
        config = EngineConfig(model=model, load_format="dummy")
        return open_model(config, find_model(config), "cpu").spec
    except ModelError as error:
        meant = did_you_mean(model.lower(), SHAPES) or "."
        raise ModelError(
            f"{error}{meant} Known names: {', '.join(SHAPES)}; or give only a size, such as 7B"
        ) from None


def stored_bytes(model: str) -> dict[str, float] | None:
    """Return the bytes of each weight in a GGUF file, or None for other models."""
    path = Path(model)
    if path.suffix != ".gguf" or not path.is_file():
        return None
    from twostroke.model.describe.gguf_config import spec_from_gguf
    from twostroke.model.gguf.block_types import num_bytes
    from twostroke.model.gguf.gguf_file import GGUFFile
    from twostroke.model.weights.gguf import GGUFWeights

    file = GGUFFile.open(path)
    spec = spec_from_gguf(file)
    weights = GGUFWeights(file, spec)
    return {
        name: float(num_bytes(weights.stored_type(name), math.prod(shape)))
        for name, shape in spec.weight_shapes().items()
    }
