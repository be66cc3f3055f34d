"""The files of `fuzz_models.py`: small valid models, and every way to mutate one place."""

from __future__ import annotations

import json
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Files = dict[str, bytes]  # of a model's folder; a GGUF model has one
GGUF_NAME = "model.gguf"


@dataclass(frozen=True)
class Mutation:
    kind: str  # for the statistics
    what: str  # for people
    file: str  # the file that a refusal names
    names: tuple[str, ...]  # the message must contain one of them, too
    files: Callable[[], Files]
    must_fail: bool = False

    def write(self, folder: Path) -> Path:
        """Write the model's files to this folder, and return the MODEL of `twostroke run`."""
        files = self.files()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return folder / GGUF_NAME if GGUF_NAME in files else folder


# ── the sound models ──────────────────────────────────────────────────────────────────────────────

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
YARN |= {"beta_fast": 32, "beta_slow": 1, "attention_factor": 1.1, "mscale": 1, "truncate": True}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
GEMMA2: dict[str, Any] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA2 |= {"query_pre_attn_scalar": 8, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA2 |= {"tie_word_embeddings": True}
GEMMA3: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 8,
}
GEMMA3 |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
GEMMA3 |= {"max_position_embeddings": 256, "sliding_window": 64, "sliding_window_pattern": 2}
GEMMA3 |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 8}
GEMMA3 |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 4.0, 9.0]}
PHI3: dict[str, Any] = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64}
PHI3 |= {"sliding_window": 64}
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.2}
GRANITE |= {"residual_multiplier": 0.22, "logits_scaling": 8.0}
SMOLLM3: dict[str, Any] = {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2}
SMOLLM3 |= {"use_sliding_window": True, "sliding_window": 64}
COHERE2: dict[str, Any] = {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "sliding_window": 64}
COHERE2 |= {"sliding_window_pattern": 2, "tie_word_embeddings": True}
STABLELM: dict[str, Any] = {"layer_norm_eps": 1e-5, "use_qkv_bias": True, "qk_layernorm": False}
STABLELM |= {"partial_rotary_factor": 0.25, "use_parallel_residual": True}
STARCODER2: dict[str, Any] = {"norm_epsilon": 1e-5, "use_bias": True, "sliding_window": 64}
STARCODER2 |= {"hidden_act": "gelu_pytorch_tanh"}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
GPT2 |= {"n_inner": 64, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
GPT2 |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
GPT2 |= {"add_cross_attention": False, "tie_word_embeddings": True, "num_key_value_heads": 4}
GPT_NEOX: dict[str, Any] = {"rotary_pct": 0.25, "rotary_emb_base": 10000, "hidden_act": "gelu"}
GPT_NEOX |= {"use_parallel_residual": True, "layer_norm_eps": 1e-5, "num_key_value_heads": 4}
FALCON: dict[str, Any] = {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False}
FALCON |= {"ffn_hidden_size": 64, "activation": "gelu", "layer_norm_epsilon": 1e-5}
FALCON |= {"num_ln_in_parallel_attn": 2, "alibi": False}
MISTRAL3: dict[str, Any] = {name: GEMMA3[name] for name in list(GEMMA3)[:8]}
MISTRAL3 |= {"model_type": "mistral", "sliding_window": None}
MINISTRAL3_ROPE = YARN | {"mscale_all_dim": 1, "llama_4_scaling_beta": 0.1, "rope_theta": 1e6}
MINISTRAL3: dict[str, Any] = {"head_dim": 8, "rope_parameters": MINISTRAL3_ROPE}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GRANITE4: dict[str, Any] = GRANITE | {"layer_types": ["attention"] * 2, "num_local_experts": 0}
GRANITE4 |= {"shared_intermediate_size": 48, "position_embedding_type": "rope"}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MOE |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0]}
QWEN2_MOE = MOE | {"shared_expert_intermediate_size": 48}
OLMOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": None}
GPT_OSS: dict[str, Any] = LOCAL_EXPERTS | {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
GPT_OSS |= {"head_dim": 8, "sliding_window": 64, "attention_bias": True}
LATENT: dict[str, Any] = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
DEEPSEEK: dict[str, Any] = LATENT | {"first_k_dense_replace": 1, "n_routed_experts": 4}
DEEPSEEK |= {"n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK |= {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "moe_layer_freq": 1}
DEEPSEEK |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True}
MINICPM3 = LATENT | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
PACKED = "gpt_oss-mxfp4"  # its experts are packed after writing
FOLDERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-llama3": {"rope_scaling": LLAMA3},
    "llama-yarn": {"rope_parameters": YARN},
    "llama-linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama-dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "mistral": {"model_type": "mistral", "sliding_window": 64},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, **WINDOW},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "attention_bias": False},
    "gemma": {"model_type": "gemma", "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 64, **GEMMA2},
    "gemma3": {"model_type": "gemma3", "text_config": GEMMA3},
    "olmo2": {"model_type": "olmo2", "rms_norm_eps": 1e-5},
    "phi3": {"model_type": "phi3", "rope_scaling": LONGROPE, **PHI3},
    "ministral": {"model_type": "ministral", "layer_types": ["full_attention"] * 2},
    "ministral3": {"model_type": "ministral3", "sliding_window": None, **MINISTRAL3},
    "mistral3": {"model_type": "mistral3", "text_config": MISTRAL3},
    "smollm3": {"model_type": "smollm3", **SMOLLM3},
    "granite": {"model_type": "granite", **GRANITE},
    "glm4": {"model_type": "glm4", "head_dim": 8, "partial_rotary_factor": 0.5},
    "olmo3": {"model_type": "olmo3", "rope_scaling": YARN, "sliding_window": 64},
    "exaone4": {"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": 2},
    "internlm2": {"model_type": "internlm2", "bias": True},
    "internlm3": {"model_type": "internlm3", "bias": True, "qkv_bias": True},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 8, "use_bias": True},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 8, "attention_out_bias": True},
    "cohere": {"model_type": "cohere", "model_max_length": 256, "use_qk_norm": False},
    "cohere2": {"model_type": "cohere2", **COHERE2},
    "stablelm": {"model_type": "stablelm", **STABLELM},
    "starcoder2": {"model_type": "starcoder2", **STARCODER2},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt_neox": {"model_type": "gpt_neox", **GPT_NEOX},
    "falcon": {"model_type": "falcon", **FALCON},
    "mixtral": {"model_type": "mixtral", **LOCAL_EXPERTS},
    "qwen2_moe": {"model_type": "qwen2_moe", **QWEN2_MOE},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 8, **MOE},
    "olmoe": {"model_type": "olmoe", **OLMOE},
    "granitemoe": {"model_type": "granitemoe", **LOCAL_EXPERTS, **GRANITE},
    "granite4": {"model_type": "granitemoehybrid", **GRANITE4},
    "granite4_experts": {"model_type": "granitemoehybrid", **GRANITE4, **LOCAL_EXPERTS},
    "gpt_oss": {"model_type": "gpt_oss", **GPT_OSS},
    PACKED: {"model_type": "gpt_oss", **GPT_OSS, "quantization_config": MXFP4},
    "deepseek_v3": {"model_type": "deepseek_v3", **DEEPSEEK},
    "minicpm3": {"model_type": "minicpm3", **MINICPM3},
}
OPTIONAL: tuple[str, ...] = (
    "head_dim",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "hidden_act",
)
OPTIONAL += ("attention_bias", "mlp_bias", "sliding_window", "layer_types", "quantization_config")
OPTIONAL += ("num_experts", "final_logit_softcapping", "dtype", "use_sliding_window")
OPTIONAL += ("original_max_position_embeddings", "max_window_layers")
TOKENIZER_FIELDS: tuple[str, ...] = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "chat_template",
)
TOKENIZER_FIELDS += ("additional_special_tokens", "added_tokens_decoder")
GENERATION_FIELDS: tuple[str, ...] = (
    "bos_token_id",
    "eos_token_id",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
)
GENERATION_FIELDS += ("repetition_penalty", "do_sample")

U32, I32, F32, BOOL, STRING, ARRAY, U64, F64 = 4, 5, 6, 7, 8, 9, 10, 12
CODES = {U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", F64: "d"}
F32_BLOCKS, Q8_0_BLOCKS = 0, 8
LONG_SHORT = ("long", "short")
HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, EXPERTS = 64, 96, 4, 2, 2, 3


@dataclass
class GGUF:
    """The parts of a GGUF file, in order."""

    pairs: dict[str, bytes]  # type and value, encoded for the file
    tensors: dict[str, tuple[list[int], int, bytes]]  # dimensions as the file has them, type, data

    def data(self, infos: dict[str, bytes] | None = None) -> bytes:
        """Return the bytes of the file. `infos` replace the entries of some tensors."""
        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.pairs))]
        for key, value in self.pairs.items():
            parts += [text(key), value]
        body = b""
        for name, (dims, kind, data) in self.tensors.items():
            parts.append((infos or {}).get(name) or info(name, dims, kind, len(body)))
            body += data + bytes(-len(data) % 32)
        head = b"".join(parts)
        return head + bytes(-len(head) % 32) + body

    def files(self, infos: dict[str, bytes] | None = None) -> Files:
        return {GGUF_NAME: self.data(infos)}

    def with_pair(self, key: str, value: bytes | None) -> GGUF:
        pairs = {k: v for k, v in self.pairs.items() if k != key}
        return GGUF(pairs if value is None else pairs | {key: value}, self.tensors)


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def info(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def typed(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return struct.pack("<I", kind) + text(value)
    return struct.pack(f"<I{CODES[kind]}", kind, value)


def array(kind: int, values: list[Any]) -> bytes:
    head = struct.pack("<IIQ", ARRAY, kind, len(values))
    if kind == STRING:
        return head + b"".join(map(text, values))
    return head + struct.pack(f"<{len(values)}{CODES[kind]}", *values)


def write_bases(root: Path) -> None:
    from tests.model.text import vocabularies as made
    from tests.tiny import tiny_folder
    from twostroke.model.text.pre_tokenizers import QWEN2, pre_tokenizer_of

    for name, config in FOLDERS.items():
        tiny_folder(root / name, **config)
    _pack_experts(root / PACKED)
    vocabularies = {
        "llama": made.sentencepiece_metadata(),
        "qwen2": made.byte_level_metadata(made.train_byte_level(pre_tokenizer_of(QWEN2)), "qwen2"),
    }
    vocabularies["qwen3"] = vocabularies["qwen2"]
    vocabularies["gemma3"] = made.gemma_metadata()
    vocabularies["phi3"] = vocabularies["llama"]
    vocabularies["granite"] = vocabularies["mistral3"] = vocabularies["qwen2"]
    vocabularies["qwen3moe"] = vocabularies["gpt-oss"] = vocabularies["qwen2"]
    for arch, vocabulary in vocabularies.items():
        model = _gguf(arch, vocabulary, F32_BLOCKS if arch != "qwen2" else Q8_0_BLOCKS)
        (root / f"{arch}.pickle").write_bytes(pickle.dumps(model))


def _pack_experts(folder: Path) -> None:
    """Return the experts of a gpt-oss model as MXFP4 with random codes."""
    from safetensors.numpy import load_file, save_file

    draw, path = np.random.default_rng(0), folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        experts, rows, width = tensors[name].shape
        shape = experts, rows, width // 32
        tensors[name] = draw.integers(0, 256, (*shape, 16), np.uint8)
        tensors[name.replace("_blocks", "_scales")] = np.full(shape, 124, np.uint8)
    save_file(tensors, path)


def _gguf(arch: str, vocabulary: dict[str, Any], kind: int) -> GGUF:
    pairs = {"general.architecture": typed(STRING, arch)}
    whole = {"block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN}
    whole |= {"feed_forward_length": INNER, "attention.head_count": HEADS}
    whole |= {"attention.head_count_kv": KV_HEADS, "rope.dimension_count": HIDDEN // HEADS}
    pairs |= {f"{arch}.{key}": typed(U32, value) for key, value in whole.items()}
    pairs[f"{arch}.attention.layer_norm_rms_epsilon"] = typed(F32, 1e-5)
    pairs[f"{arch}.rope.freq_base"] = typed(F32, 10000.0)
    if arch == "gemma3":
        pairs[f"{arch}.attention.sliding_window"] = typed(U32, 64)
        pairs[f"{arch}.rope.freq_base_swa"] = typed(F32, 500.0)
    if arch == "granite":
        scales = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
        pairs |= {f"{arch}.{key}": typed(F32, 0.5) for key in scales}
    if arch == "mistral3":
        pairs[f"{arch}.rope.scaling.type"] = typed(STRING, "yarn")
        pairs[f"{arch}.rope.scaling.original_context_length"] = typed(U32, 64)
        for key in ("factor", "yarn_log_multiplier"):
            pairs[f"{arch}.rope.scaling.{key}"] = typed(F32, 2.0)
        pairs[f"{arch}.attention.temperature_scale"] = typed(F32, 0.5)
    if arch in ("qwen3moe", "gpt-oss"):
        whole = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 32}
        pairs |= {f"{arch}.{key}": typed(U32, value) for key, value in whole.items()}
    if arch == "gpt-oss":
        pairs[f"{arch}.attention.sliding_window"] = typed(U32, 64)
    if arch == "phi3":
        pairs[f"{arch}.rope.scaling.original_context_length"] = typed(U32, 64)
        pairs[f"{arch}.rope.scaling.attn_factor"] = typed(F32, 1.2)
    kinds = {str: STRING, int: I32, float: F32}
    for key, value in vocabulary.items():
        if isinstance(value, list):
            pairs[key] = array(kinds[type(value[0])], value)
        else:
            one = {bool: BOOL, int: U32, str: STRING}[type(value)]
            pairs[key] = typed(one, value)
    pairs["tokenizer.chat_template"] = typed(STRING, "{{ messages[0].content }}")
    return GGUF(pairs, _tensors(arch, len(vocabulary["tokenizer.ggml.tokens"]), kind))


def _tensors(arch: str, vocab: int, kind: int) -> dict[str, tuple[list[int], int, bytes]]:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, list[int]] = {"token_embd.weight": [HIDDEN, vocab]}
    shapes |= {"output_norm.weight": [HIDDEN], "output.weight": [HIDDEN, vocab]}
    for n in range(LAYERS):
        at = f"blk.{n}."
        shapes |= {f"{at}attn_norm.weight": [HIDDEN], f"{at}ffn_norm.weight": [HIDDEN]}
        shapes |= {f"{at}attn_q.weight": [HIDDEN, HIDDEN], f"{at}attn_k.weight": [HIDDEN, kv]}
        shapes |= {f"{at}attn_v.weight": [HIDDEN, kv], f"{at}attn_output.weight": [HIDDEN, HIDDEN]}
        shapes |= {f"{at}ffn_{part}.weight": [HIDDEN, INNER] for part in ("gate", "up")}
        shapes[f"{at}ffn_down.weight"] = [INNER, HIDDEN]
        if arch in ("qwen3", "gemma3"):
            width = HIDDEN // HEADS
            shapes |= {f"{at}attn_{part}_norm.weight": [width] for part in ("q", "k")}
        if arch == "gemma3":
            shapes |= {f"{at}post_{part}_norm.weight": [HIDDEN] for part in ("attention", "ffw")}
        if arch == "phi3":
            for part in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
                del shapes[f"{at}{part}.weight"]
            shapes |= {f"{at}attn_qkv.weight": [HIDDEN, HIDDEN + 2 * kv]}
            shapes |= {f"{at}ffn_up.weight": [HIDDEN, 2 * INNER]}
        if arch in ("qwen3moe", "gpt-oss"):
            _add_experts(arch, at, shapes)
        if arch in ("qwen2", "gpt-oss"):
            shapes |= {f"{at}attn_q.bias": [HIDDEN]}
            shapes |= {f"{at}attn_{part}.bias": [kv] for part in ("k", "v")}
    if arch == "phi3":
        shapes |= {f"rope_factors_{part}.weight": [HIDDEN // HEADS // 2] for part in LONG_SHORT}
    draw = np.random.default_rng(0)
    tensors = {}
    for name, dims in shapes.items():
        values = 0.3 * draw.standard_normal(dims[::-1], np.float32)
        if kind == Q8_0_BLOCKS and len(dims) == 2:
            tensors[name] = (dims, kind, _q8_0(values))
        else:
            norm = values + 1 if "norm" in name else np.exp(values) if "rope" in name else values
            tensors[name] = (dims, F32_BLOCKS, norm.astype("<f4").tobytes())
    return tensors


def _add_experts(arch: str, at: str, shapes: dict[str, list[int]]) -> None:
    """Return the tensors that replace the MLP in this architecture."""
    for part, dims in {"gate": [HIDDEN, 32], "up": [HIDDEN, 32], "down": [32, HIDDEN]}.items():
        del shapes[f"{at}ffn_{part}.weight"]
        shapes[f"{at}ffn_{part}_exps.weight"] = [*dims, EXPERTS]
        if arch == "gpt-oss":
            shapes[f"{at}ffn_{part}_exps.bias"] = [dims[1], EXPERTS]
    shapes[f"{at}ffn_gate_inp.weight"] = [HIDDEN, EXPERTS]
    if arch == "qwen3moe":
        shapes |= {f"{at}attn_{part}_norm.weight": [HIDDEN // HEADS] for part in ("q", "k")}
    else:
        del shapes[f"{at}ffn_norm.weight"]
        shapes |= {f"{at}post_attention_norm.weight": [HIDDEN], f"{at}attn_sinks.weight": [HEADS]}
        shapes |= {f"{at}attn_output.bias": [HIDDEN], f"{at}ffn_gate_inp.bias": [EXPERTS]}


def _q8_0(values: np.ndarray) -> bytes:
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype("<f2")
    codes = np.round(blocks / scales.astype(np.float32)).astype(np.int8)
    return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1).tobytes()


# ── the mutations ─────────────────────────────────────────────────────────────────────────────────

REMOVED = object()
NASTY: dict[str, Any] = {"removed": REMOVED, "null": None, "true": True, "'x'": "x", "''": ""}
NASTY |= {str(n): n for n in (-1, 0, 1, 3, 0.5, 2**31, 2**60, 10**30, 1e308, 1e-30)}
NASTY |= {"NaN": float("nan"), "∞": float("inf"), "−∞": float("-inf"), "[]": [], "{}": {}}
NASTY |= {"[1]": [1], "['x']": ["x"], "{'a': 1}": {"a": 1}, "100,000 x": "x" * 100_000}
NASTY |= {"[[[…]]]": [[[[[[[[1]]]]]]]], "[null] × 1000": [None] * 1000}


def all_mutations(bases: Path, seed: int) -> Iterator[Mutation]:
    folders = {name: _read(bases / name) for name in FOLDERS}
    ggufs = {path.stem: pickle.loads(path.read_bytes()) for path in sorted(bases.glob("*.pickle"))}
    for name, files in folders.items():
        yield Mutation("sound", f"{name} as it is", "", (), partial(dict, files))
        yield from _config(name, files)
    for name, model in ggufs.items():
        yield Mutation("sound", f"{name} GGUF as it is", "", (), model.files)
        yield from _metadata(name, model)
        yield from _tensor_entries(name, model)
    sound = folders["llama"]
    yield from _json_fields(sound, "tokenizer_config.json", TOKENIZER_FIELDS)
    yield from _json_fields(sound, "special_tokens_map.json", TOKENIZER_FIELDS[:4])
    yield from _json_fields(sound, "generation_config.json", GENERATION_FIELDS)
    yield from _tokenizer(sound)
    yield from _index(_sharded(sound))
    yield from _weights(folders, ggufs)
    yield from _bombs(sound, ggufs)
    yield from _damaged_bytes(folders, ggufs, random.Random(seed))


def _read(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _dump(content: Any) -> bytes:
    return json.dumps(content).encode()


def _with(files: Files, name: str, content: Any) -> Callable[[], Files]:
    """Return the files with one replaced: by bytes, by JSON content, or removed by None."""

    def made() -> Files:
        rest = {file: data for file, data in files.items() if file != name}
        if content is None:
            return rest
        return rest | {name: content if isinstance(content, bytes) else _dump(content)}

    return made


def _changed(content: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return a copy of a JSON document with another value at a path."""
    if not path:
        return value
    copy = list(content) if isinstance(content, list) else dict(content)
    first, rest = path[0], path[1:]
    if value is REMOVED and not rest:
        if isinstance(copy, list):
            del copy[first]  # type: ignore[arg-type]
        else:
            copy.pop(first, None)
        return copy
    copy[first] = _changed(copy[first] if rest else None, rest, value)  # type: ignore[index]
    return copy


def _field(
    files: Files, file: str, path: tuple[str | int, ...], label: str, value: Any, name: str = ""
) -> Mutation:
    def made() -> Files:
        content = json.loads(files.get(file, b"{}"))
        return files | {file: _dump(_changed(content, path, value))}

    names = tuple(part for part in path if isinstance(part, str))
    what = f"{name} {file} {'.'.join(map(str, path))} = {label}"
    return Mutation(file, what, file, names, made)


def _json_fields(files: Files, file: str, fields: tuple[str, ...]) -> Iterator[Mutation]:
    for field in fields:
        for label, value in NASTY.items():
            yield _field(files, file, (field,), label, value)
    for label, value in NASTY.items():
        if value is not REMOVED:
            what = f"{file} is {label}"
            yield Mutation(file, what, file, (), _with(files, file, _dump(value)))


def _config(name: str, files: Files) -> Iterator[Mutation]:
    """Yield every field of the first model, and the fields that only other models have."""
    from twostroke.model.describe.hf_families import FAMILIES

    config = json.loads(files["config.json"])
    own = list(FOLDERS[name]) if FOLDERS[name] else [*config, *OPTIONAL]
    for field in dict.fromkeys(own):
        if field == "architectures":
            continue
        for label, value in NASTY.items():
            yield _field(files, "config.json", (field,), label, value, name)
        if isinstance(config.get(field), dict):
            for inner in config[field]:
                for label, value in NASTY.items():
                    yield _field(files, "config.json", (field, inner), label, value, name)
    for family in (*FAMILIES, "gemma3n"):
        yield _field(files, "config.json", ("model_type",), family, family, name)


GGUF_NASTY: dict[str, bytes | None] = {"removed": None}
GGUF_NASTY |= {f"u32 {n}": typed(U32, n) for n in (0, 1, 3, 2**31)}
GGUF_NASTY |= {"u64 2⁶⁰": typed(U64, 2**60), "i32 −1": typed(I32, -1), "true": typed(BOOL, True)}
GGUF_NASTY |= {f"f32 {x}": typed(F32, x) for x in (float("nan"), float("inf"), -1.0, 0.0, 0.5)}
GGUF_NASTY |= {"f64 1e300": typed(F64, 1e300), "'x'": typed(STRING, "x"), "''": typed(STRING, "")}
GGUF_NASTY |= {"100,000 x": typed(STRING, "x" * 100_000), "[]": array(U32, [])}
GGUF_NASTY |= {"[1, 2]": array(U32, [1, 2]), "['a']": array(STRING, ["a"])}
GGUF_NASTY |= {"[[1]]": struct.pack("<IIQIQI", ARRAY, ARRAY, 1, U32, 1, 1)}
GGUF_OPTIONAL: tuple[str, ...] = (
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
)
GGUF_OPTIONAL += ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "vocab_size")
GGUF_OPTIONAL += ("attention.sliding_window_pattern", "expert_count", "attention.causal")
GGUF_GENERAL: tuple[str, ...] = (
    "general.alignment",
    "general.type",
    "split.count",
    "tokenizer.ggml.eot_token_id",
)
GGUF_GENERAL += ("tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_eos_token")


def _metadata(arch: str, model: GGUF) -> Iterator[Mutation]:
    yarn = {"type": typed(STRING, "yarn"), "factor": typed(F32, 2.0)}
    yarn |= {"original_context_length": typed(U32, 64), "yarn_beta_fast": typed(F32, 32.0)}
    stretched = GGUF(
        model.pairs | {f"{arch}.rope.scaling.{k}": value for k, value in yarn.items()},
        model.tensors,
    )
    optional = [f"{arch}.{key}" for key in GGUF_OPTIONAL]
    for key in dict.fromkeys([*model.pairs, *optional, *GGUF_GENERAL]):
        if arch in ("qwen3", "phi3", "granite", "qwen3moe", "gpt-oss") and not key.startswith(arch):
            continue  # the vocabulary is that of another
        for label, value in GGUF_NASTY.items():
            yield _pair(arch, model, key, label, value)
    for key in (f"{arch}.rope.scaling.{k}" for k in yarn):
        for label, value in GGUF_NASTY.items():
            yield _pair(f"{arch} yarn", stretched, key, label, value)


def _pair(name: str, model: GGUF, key: str, label: str, value: bytes | None) -> Mutation:
    changed = model.with_pair(key, value)
    short = key.partition(".")[2]
    what = f"{name} GGUF {key} = {label}"
    return Mutation("metadata", what, GGUF_NAME, (short,), changed.files)


def _tensor_entries(arch: str, model: GGUF) -> Iterator[Mutation]:
    for name in list(model.tensors)[:12]:
        dims, kind, _ = model.tensors[name]
        others = {"no such type": info(name, dims, 99, 0), "0 dimensions": info(name, [], kind, 0)}
        others |= {"an empty dimension": info(name, [0, *dims[1:]], kind, 0)}
        others |= {"2⁶⁰ rows": info(name, [dims[0], 2**60], kind, 0)}
        others |= {"one row more": info(name, [*dims[:-1], dims[-1] + 32], kind, 0)}
        others |= {"an odd offset": info(name, dims, kind, 5)}
        others |= {"an offset of 2⁶²": info(name, dims, kind, 2**62)}
        others |= {"another name": info(f"{name}x", dims, kind, 0)}
        others |= {"the name of another": info("blk.0.ffn_norm.weight", dims, kind, 0)}
        others |= {"a long name": info("x" * 100_000, dims, kind, 0)}
        others |= {"Q4_K blocks": info(name, dims, 12, 0)}
        for label, entry in others.items():
            yield Mutation(
                "tensor entries",
                f"{arch} GGUF {name}: {label}",
                GGUF_NAME,
                (),
                partial(model.files, {name: entry}),
            )
        less = GGUF(
            model.pairs, {key: value for key, value in model.tensors.items() if key != name}
        )
        yield Mutation(
            "tensor entries",
            f"{arch} GGUF without {name}",
            GGUF_NAME,
            (),
            less.files,
        )


def _tokenizer(files: Files) -> Iterator[Mutation]:
    file = "tokenizer.json"
    content = json.loads(files[file])
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = {"type": "Sequence", "normalizers": [{"type": "NFC"}, replace]}
    content["normalizer"] = steps
    files = files | {file: _dump(content)}
    labels = ("removed", "null", "'x'", "-1", str(2**31), "[]", "{}", "[1]", "100,000 x")
    for path in _paths(content):
        for label in labels:
            yield _field(files, file, path, label, NASTY[label])
    last = content["added_tokens"][-1]
    for label, token in {
        "with the id of another": last | {"id": 0, "content": "<new>"},
        "with the text of another": last | {"id": 299, "content": "<s>"},
        "with an id of 10⁹": last | {"id": 10**9, "content": "<new>"},
        "with an id of 2⁶⁴": last | {"id": 2**64, "content": "<new>"},
        "again": last,
    }.items():
        more = content | {"added_tokens": [*content["added_tokens"], token]}
        yield Mutation(file, f"a token {label}", file, ("added_tokens",), _with(files, file, more))
    for label, merges in {
        "of tokens that are not there": [["zz", "qq"]],
        "of three": [["a", "b", "c"]],
        "of nothing": [["", ""]],
        "in one text": ["ab"],
    }.items():
        broken = _changed(content, ("model", "merges"), merges)
        yield Mutation(file, f"merges {label}", file, ("model",), _with(files, file, broken))


def _paths(content: dict[str, Any]) -> Iterator[tuple[str | int, ...]]:
    """Yield every place of a tokenizer.json except entries of its vocabulary, merges and tokens."""

    def walk(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
        if path:
            yield path
        if path in (("model", "vocab"), ("model", "merges")) or len(path) > 4:
            return
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(inner, (*path, key))
        elif isinstance(value, list) and value:
            yield from walk(value[0], (*path, 0))

    return walk(content, ())


def _sharded(files: Files) -> Files:
    """Return the same model in two shards with an index."""
    from safetensors.numpy import load, save

    tensors = load(files["model.safetensors"])
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    shards = {file: save({name: tensors[name] for name in part}) for file, part in halves.items()}
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    rest = {name: data for name, data in files.items() if name != "model.safetensors"}
    return rest | shards | {"model.safetensors.index.json": _dump(index)}


def _index(files: Files) -> Iterator[Mutation]:
    file = "model.safetensors.index.json"
    yield from _json_fields(files, file, ("weight_map",))
    odd = {f"{label}": value for label, value in NASTY.items()}
    odd |= {"'..'": "..", "a path": "../b.safetensors", "NUL": "\x00", "a surrogate": "\ud800"}
    odd |= {
        "another shard": "b.safetensors",
        "300 letters": "x" * 300,
        "config.json": "config.json",
    }
    for label, value in odd.items():
        # The message may name the index or the file in the index.
        mutation = _field(files, file, ("weight_map", "model.embed_tokens.weight"), label, value)
        names = (file, "config.json: cannot be read as safetensors")
        yield Mutation("index", mutation.what, "", names, mutation.files)
    for shard in ("a.safetensors", "b.safetensors"):
        yield Mutation("index", f"without {shard}", shard, (), _with(files, shard, None))


def _weights(folders: dict[str, Files], ggufs: dict[str, GGUF]) -> Iterator[Mutation]:
    """Yield models with NaN or infinity in a tensor, none of which may load."""
    from safetensors.numpy import load, save

    values = {"NaN": np.nan, "∞": np.inf, "−∞": -np.inf}
    for family in ("llama", "qwen2", "gemma2", "phi3", "qwen2_moe", PACKED, "deepseek_v3"):
        files = folders[family]
        tensors = load(files["model.safetensors"])
        for name, tensor in tensors.items():
            for label, value in values.items():
                if family != "llama" and label != "NaN":
                    continue
                spoilt = tensor.copy()
                if tensor.dtype == np.uint8 and not name.endswith("_scales"):
                    continue  # every code is a number
                spoilt.flat[-1] = 255 if tensor.dtype == np.uint8 else value
                data = save(tensors | {name: spoilt})
                what = f"{family} {name} holds {label}"
                made = _with(files, "model.safetensors", data)
                yield Mutation("weights", what, "model.safetensors", (name,), made, must_fail=True)
    for arch, model in ggufs.items():
        for name, (dims, kind, data) in model.tensors.items():
            # The last number of float32, the scale of the last block of Q8_0.
            at, number = (-4, b"\x00\x00\xc0\x7f") if kind == F32_BLOCKS else (-34, b"\x00\x7c")
            end = at + len(number)
            broken = data[:at] + number + (data[end:] if end else b"")
            spoilt_model = GGUF(model.pairs, model.tensors | {name: (dims, kind, broken)})
            yield Mutation(
                "weights",
                f"{arch} GGUF {name} is not finite",
                GGUF_NAME,
                (name,),
                spoilt_model.files,
                must_fail=True,
            )


def _bombs(files: Files, ggufs: dict[str, GGUF]) -> Iterator[Mutation]:
    """Yield files that would take for ever or need all memory."""
    llama, qwen = ggufs["llama"], ggufs["qwen2"]

    def pair(model: GGUF, key: str, value: bytes, what: str, must_fail: bool = True) -> Mutation:
        changed = model.with_pair(key, value)
        short = key.rpartition(".")[2]
        return Mutation("bombs", what, GGUF_NAME, (short,), changed.files, must_fail)

    key = "tokenizer.ggml.tokens"
    long = ["a" * 200_000, *(f"{n}" for n in range(599))]
    yield pair(llama, key, array(STRING, long), "a SentencePiece token of 200,000 characters")
    many = ["a" * 1000 + str(n) for n in range(20_000)]
    yield pair(llama, key, array(STRING, many), "20,000 SentencePiece tokens of 1,000 characters")
    yield pair(qwen, key, array(STRING, long), "a token of 200,000 characters")
    empty = struct.pack("<IQ", U32, 0)
    nested = struct.pack("<IIQ", ARRAY, ARRAY, 10**6) + empty * 10**6
    yield pair(llama, "llama.x", nested, "a million empty arrays")
    deep = struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 10_000
    yield pair(llama, "llama.x", deep, "10,000 arrays in each other")
    zeros = struct.pack("<IIQ", ARRAY, 0, 20_000_000) + bytes(20_000_000)
    yield pair(llama, "llama.x", zeros, "20 million numbers in an array")
    yield pair(llama, "tokenizer.chat_template", typed(STRING, "{" * 10**7), "a huge template")
    announced = b"GGUF" + struct.pack("<IQQ", 3, 10**6, 0)
    padded = lambda: {GGUF_NAME: announced + bytes(10**8)}  # noqa: E731
    yield Mutation("bombs", "a million tensors", GGUF_NAME, (), padded, must_fail=True)

    file = "tokenizer.json"
    content = json.loads(files[file])

    def step(pattern: dict[str, str], text: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": pattern, "content": text}

    chains = {
        "a letter that becomes a million": [step({"String": "a"}, "a" * 10**6)],
        "letters that double 30 times": [step({"String": "a"}, "aa")] * 30,
        "letters that become 50, five times": [step({"String": "a"}, "a" * 50)] * 5,
        "an empty match, 40 times": [step({"Regex": ""}, "a")] * 40,
        "two letters in turn": [step({"String": x}, y * 40) for x, y in ("ab", "ba") * 4],
        "1,000 steps": [step({"String": "a"}, "a")] * 1000,
    }
    for part, steps_key in (("normalizer", "normalizers"), ("decoder", "decoders")):
        for what, chain in chains.items():
            bomb = content | {part: {"type": "Sequence", steps_key: chain}}
            bombed = _with(files, file, bomb)
            yield Mutation("bombs", f"{part}: {what}", file, (part,), bombed, must_fail=True)
    within: dict[str, Any] = {"type": "NFC"}
    for _ in range(60):
        within = {"type": "Sequence", "normalizers": [within, within]}
        if len(json.dumps(within)) > 10**6:
            break
    bombed = _with(files, file, content | {"normalizer": within})
    yield Mutation("bombs", "a normalizer of many more", file, ("normalizer",), bombed, True)
    around = {"id": "X", "ids": [5] * 10**6, "tokens": ["x"] * 10**6}
    single = [{"SpecialToken": {"id": "X", "type_id": 0}}]
    post: dict[str, Any] = {"type": "TemplateProcessing", "special_tokens": {"X": around}}
    post |= {"single": single, "pair": []}
    bombed = _with(files, file, content | {"post_processor": post})
    yield Mutation("bombs", "a million tokens around", file, ("post_processor",), bombed, True)
    vocab = content["model"]["vocab"] | {"zz": 10**9}
    bombed = _with(files, file, _changed(content, ("model", "vocab"), vocab))
    yield Mutation("bombs", "an id of 10⁹ in the vocabulary", file, ("vocab",), bombed, True)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json", file):
        deep_json = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
        bombed = _with(files, name, deep_json)
        yield Mutation("bombs", f"{name}: 100,000 objects in each other", name, (), bombed, True)
    for template in ("{{ 'x' * 10**9 }}", "{" * 10**6, "x" * 3 * 10**6):
        settings = json.loads(files["tokenizer_config.json"]) | {"chat_template": template}
        bombed = _with(files, "tokenizer_config.json", settings)
        names = ("chat_template", "chat template")
        yield Mutation("bombs", "a chat template", "", names, bombed)
    jinja = files | {"chat_template.jinja": b"\xff\xfe{{ x }}"}
    yield Mutation(
        "bombs", "a chat template of no text", "chat_template.jinja", (), lambda: jinja, True
    )


def _damaged_bytes(
    folders: dict[str, Files], ggufs: dict[str, GGUF], draw: random.Random
) -> Iterator[Mutation]:
    whole = {arch: model.data() for arch, model in ggufs.items()}
    for arch, data in whole.items():
        head = data.index(b"blk.1.ffn_down") + 64
        for _ in range(120):
            yield _flipped(f"{arch} GGUF", {}, GGUF_NAME, data, draw, head)
        for _ in range(40):
            yield _cut(f"{arch} GGUF", {}, GGUF_NAME, data, draw, len(data))
    for name in ("llama", "qwen3"):
        files = folders[name]
        for file, times in {
            "model.safetensors": 120,
            "tokenizer.json": 60,
            "config.json": 60,
        }.items():
            data = files[file]
            head = 8 + int.from_bytes(data[:8], "little") if file.endswith("tensors") else len(data)
            for _ in range(times):
                yield _flipped(name, files, file, data, draw, head)
            for _ in range(times // 3):
                yield _cut(name, files, file, data, draw, len(data))


def _flipped(
    name: str, files: Files, file: str, data: bytes, draw: random.Random, head: int
) -> Mutation:
    count = draw.choice((1, 1, 2, 8))
    bits = [(draw.randrange(head), draw.randrange(8)) for _ in range(count)]

    def made() -> Files:
        changed = bytearray(data)
        for place, bit in bits:
            changed[place] ^= 1 << bit
        return files | {file: bytes(changed)}

    return Mutation("bytes", f"{name} {file}: bits flipped at {bits}", file, (), made)


def _cut(
    name: str, files: Files, file: str, data: bytes, draw: random.Random, size: int
) -> Mutation:
    end = draw.choice((draw.randrange(64), draw.randrange(size), size - 1 - draw.randrange(64)))
    what = f"{name} {file}: cut after {end} bytes"
    return Mutation("bytes", what, file, (), lambda: files | {file: data[: max(0, end)]}, True)
