"""A tiny random model folder: an `LLM` over it starts in a moment and writes varied nonsense."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.support import narrow_isa
from twostroke import LLM
from twostroke.kernels import cpu
from twostroke.model.describe.hf_config import names_in_hf, spec_from_hf
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.describe.tensor_names import Place, TensorNames

BOS, EOS, TURN, TURN_END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
BOS_ID, EOS_ID, TURN_ID, TURN_END_ID = range(4)
VOCAB_SIZE = 300
MAX_LEN = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "torch_dtype": "float32",
}
TEXT = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps",
    "a small model writes what it likes and the reader reads it",
    "größer, naïve, 東京 and 12 345 are here to be cut into bytes",
]


def tiny_folder(path: Path, **config: Any) -> Path:
    """Write the model to `path`; `config` changes config.json, and the weights follow it."""
    path.mkdir(parents=True, exist_ok=True)
    settings = CONFIG | config
    write_json(path / "config.json", settings)
    write_json(path / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    names = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    write_json(path / "tokenizer_config.json", names)
    (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    save_file(tiny_weights(settings), path / "model.safetensors")
    return path


def tiny_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Large enough that the next token depends on all that came before; norms stay near one."""
    random = np.random.default_rng(0)
    weights, names, spec = {}, names_in_hf(config), spec_from_hf(config)
    for name, shape in spec.weight_shapes().items():
        values = random.standard_normal(shape).astype(np.float32) * np.float32(0.3)
        weights[name] = values + 1 - names.offset(name) if name.endswith("norm") else values
    return merged(names, spec, weights)


def merged(
    names: TensorNames, spec: ModelSpec, weights: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Weights by their canonical names → as a file has them, some in one tensor."""
    inside: dict[str, list[tuple[Place, np.ndarray]]] = {}
    for name, place in names.places(spec).items():
        inside.setdefault(place.tensor, []).append((place, weights[name]))
    whole = {}
    for tensor, parts in inside.items():
        rows: list[list[np.ndarray]] = [[] for _ in range(max(1, parts[0][0].num_experts))]
        for place, values in sorted(parts, key=lambda part: part[0].first_row):
            rows[place.expert if place.num_experts else 0].append(values)
        each = [np.concatenate(one) for one in rows]
        each = [np.ascontiguousarray(one.T) if parts[0][0].transposed else one for one in each]
        whole[tensor] = np.stack(each) if parts[0][0].num_experts else each[0]
    return whole


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


@cache
def tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, TURN, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer.to_str()


def tiny_llm(path: Path, **settings: Any) -> LLM:
    """An `LLM` over `tiny_folder(path)`, with a cache of 4,096 tokens unless told otherwise."""
    if not (path / "config.json").exists():
        tiny_folder(path)
    if not settings.keys() & {"num_gpu_blocks_override", "kv_cache_memory_bytes"}:
        settings["num_gpu_blocks_override"] = 256
    if settings.get("kernels", "auto") in ("auto", "native"):
        settings = same_rounding() | settings
    return LLM(str(path), **settings)


def same_rounding() -> dict[str, Any]:
    """Settings under which a token's rounding does not depend on the tokens beside it. Matrix units
    round a step of many tokens in another way than a step of few."""
    if not cpu.available() or narrow_isa() == cpu.module().isas()[0]:
        return {}
    return {"isa": narrow_isa()}
