"""GGUF files of every architecture and block type give transformers' log-probabilities.

The files are written here as converters write them, with the `gguf` package. The reference is
transformers with the weights that the package itself reads from the same bytes, so nothing of our
reader, our dequantisation or our row order is on both sides of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import (
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MiniCPM3Config,
    Ministral3Config,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from tests.equivalence.gguf_reading import (
    architecture,
    as_the_package_reads,
    gguf_name,
    heads_reordered,
    norm_offset,
)
from tests.equivalence.rows import (
    SPREAD,
    TOLERANCE,
    Written,
    largest_difference,
    random_model,
    random_prompts,
    same_weights_under,
    write_with_ours,
)
from tests.model.gguf.gguf_files import put_scales
from twostroke.model.gguf.block_types import BlockType

# A model that differs in the thing a test is about differs by more than this. The least that was
# found is 0.023, with one matrix of fourteen wrong by one part in a hundred.
VISIBLE = 0.01

VOCAB = 272
MAX_TOKENS = 4
PROMPT_LENGTHS = (3, 41)
CHUNKS = {"max_num_batched_tokens": 16, "max_num_seqs": 2}
SIZES = {  # every row is a whole number of blocks of 256
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2.0**-17,  # exact in the file's float32
    "pad_token_id": None,
}
GEMMA = {"head_dim": 128, "query_pre_attn_scalar": 128, "sliding_window": 9}
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
GEMMA3 = GEMMA | {"num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPES}
CAPS = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES | {"head_dim": 128}),
    "gemma2": Gemma2Config(**SIZES | GEMMA | CAPS),
    "gemma3": Gemma3TextConfig(**SIZES | GEMMA3),
    "olmo2": Olmo2Config(**SIZES),
    "phi3": Phi3Config(**SIZES),
}
FIVE = {"num_hidden_layers": 5, "intermediate_size": 256}
WINDOWS = FIVE | {"sliding_window": 9}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.125}
GRANITE |= {"residual_multiplier": 0.5, "logits_scaling": 0.5}
LAYER_NORMS = {"layer_norm_eps": SIZES["rms_norm_eps"]}
COHERE = LAYER_NORMS | {"logit_scale": 0.75}
STABLELM = LAYER_NORMS | {"use_qkv_bias": True}
# Types of blocks are tried with the families above; these are held to the model in float32.
FAMILIES |= {
    "smollm3": SmolLM3Config(**SIZES | FIVE),
    "gemma": GemmaConfig(**SIZES | {"head_dim": 128}),
    "granite": GraniteConfig(**SIZES | GRANITE),
    "chatglm": GlmConfig(**SIZES | {"head_dim": 64}),
    "glm4": Glm4Config(**SIZES | {"head_dim": 64}),
    "olmo3": Olmo3Config(**SIZES | WINDOWS),
    "exaone4": Exaone4Config(**SIZES | WINDOWS),
    "seed_oss": SeedOssConfig(**SIZES | {"head_dim": 128}),
    "ernie4_5": Ernie4_5Config(**SIZES | {"head_dim": 128}),
    "command-r": CohereConfig(**SIZES | COHERE),
    "cohere2": Cohere2Config(**SIZES | WINDOWS | COHERE),
    "stablelm": StableLmConfig(**SIZES | STABLELM),
    "stablelm_parallel": StableLmConfig(**SIZES | STABLELM, use_parallel_residual=True),
    "starcoder2": Starcoder2Config(**SIZES | {"norm_epsilon": SIZES["rms_norm_eps"]}),
}
GPT = SIZES | {"num_key_value_heads": 4} | LAYER_NORMS
GPT |= {"n_inner": 512, "ffn_hidden_size": 512, "layer_norm_epsilon": SIZES["rms_norm_eps"]}
FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 2, "num_key_value_heads": 2}
FAMILIES |= {
    "gptneox": GPTNeoXConfig(**GPT),
    "gptneox_one_after_another": GPTNeoXConfig(**GPT, use_parallel_residual=False),
    "gpt2": GPT2Config(**GPT),
    "phi2": PhiConfig(**GPT),
    "falcon": FalconConfig(**GPT | {"num_key_value_heads": 1}),
    "falcon_two_norms": FalconConfig(**GPT | FALCON_40B),
}
GPTS = ("gptneox", "gpt2", "phi2", "falcon")
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MOE |= {"num_hidden_layers": 2}
FAMILIES |= {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2moe": Qwen2MoeConfig(**SIZES | MOE, shared_expert_intermediate_size=256),
    "qwen3moe": Qwen3MoeConfig(**SIZES | MOE | {"head_dim": 64, "norm_topk_prob": True}),
    "olmoe": OlmoeConfig(**SIZES | MOE | {"eos_token_id": None}),
}
GRANITE_MOE = SIZES | GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}
GRANITE4 = {"layer_types": ["attention"] * 2, "position_embedding_type": "rope"}
FAMILIES |= {
    "granitemoe": GraniteMoeConfig(**GRANITE_MOE),
    "granite4": GraniteMoeHybridConfig(
        **SIZES | GRANITE | GRANITE4, num_local_experts=0, shared_intermediate_size=512
    ),
    "granite4_experts": GraniteMoeHybridConfig(
        **GRANITE_MOE | GRANITE4, shared_intermediate_size=256
    ),
}
# Rows are whole blocks of 32 here. Files of V2 have kv_b in one piece, those of V3 in two.
LATENT = SIZES | {"num_key_value_heads": 4, "kv_lora_rank": 96, "q_lora_rank": 64}
LATENT |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
DEEPSEEK = LATENT | {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3}
DEEPSEEK |= {"moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
DEEPSEEK |= {"routed_scaling_factor": 1.5}
MSCALE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7}
MSCALE |= {"mscale_all_dim": 0.7, "original_max_position_embeddings": 32}
FAMILIES |= {
    "deepseek_v2": DeepseekV2Config(**DEEPSEEK, topk_method="group_limited_greedy"),
    "deepseek_v2_lite": DeepseekV2Config(**DEEPSEEK | {"q_lora_rank": None}, topk_method="greedy"),
    "deepseek_v3": DeepseekV3Config(**DEEPSEEK, rope_parameters=MSCALE),
    "minicpm3": MiniCPM3Config(**LATENT | {"v_head_dim": 64}),
}
UNTRUNCATED = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False}
UNTRUNCATED |= {"original_max_position_embeddings": 32}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 9}
FAMILIES["gpt-oss"] = GptOssConfig(**SIZES | GPT_OSS, rope_parameters=UNTRUNCATED)
# Within the longest prompt queries have four scales.
MINISTRAL3 = MSCALE | {"mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.5}
MINISTRAL3 |= {"original_max_position_embeddings": 13}
FAMILIES["mistral3"] = Ministral3Config(**SIZES | {"head_dim": 128}, rope_parameters=MINISTRAL3)
BLOCK_TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]
BLOCK_TYPES += [Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K]
LATER_TYPES = [Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4, Type.IQ3_S, Type.IQ3_XXS, Type.IQ2_XXS]
LATER_TYPES += [Type.IQ2_XS, Type.IQ2_S, Type.IQ1_S, Type.IQ1_M, Type.TQ1_0, Type.TQ2_0]
KINDS = [(family, type) for family in ("llama", "qwen2", "qwen3") for type in BLOCK_TYPES]
KINDS += [
    (family, type)
    for family in ("gemma2", "gemma3", "olmo2", "phi3")
    for type in (Type.BF16, Type.Q4_0, Type.Q6_K)
]
NEW = list(FAMILIES)[list(FAMILIES).index("smollm3") :]
KINDS += [(family, Type.Q4_0) for family in ("smollm3", "glm4", "stablelm")]
KINDS += [("llama", Type.IQ4_XS), ("qwen2", Type.IQ2_XXS)]
# Where a block of 256 has its half-precision scales, and how large each is in proportion: the
# second one shifts the values, and this much of it centres them.
K_SCALES = {
    Type.Q2_K: {80: 1.0, 82: 1.5},
    Type.Q3_K: {108: 1.0},
    Type.Q4_K: {0: 1.0, 2: 7.5},
    Type.Q5_K: {0: 1.0, 2: 15.5},
    Type.Q6_K: {208: 1.0},
    Type.IQ1_M: {48: 1.0},
}
K_SCALES |= {
    type: {0: 1.0} for type in LATER_TYPES if type.name.startswith("IQ") and type != Type.IQ1_M
}

Edit = Callable[[gguf.GGUFWriter], None]


def nothing(writer: gguf.GGUFWriter) -> None:
    """A plain file."""


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    type: Type,
    edit: Edit = nothing,
    others: Mapping[str, Type] = MappingProxyType({}),
) -> None:
    """Matrices are of that type, but for `others` by their name in the file."""
    config = model.config
    arch = architecture(config)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    split = config.model_type == "deepseek_v3"  # as files have it since 2025
    hybrid = config.model_type == "granitemoehybrid"  # said of each layer: 0 if it is mamba's
    kv_heads = [config.num_key_value_heads] * config.num_hidden_layers
    writer.add_head_count_kv(1 if split else kv_heads if hybrid else kv_heads[0])
    if arch in ("command-r", "cohere2", "stablelm", "starcoder2", *GPTS):
        writer.add_layer_norm_eps(SIZES["rms_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if arch == "gptneox":
        writer.add_parallel_residual(config.use_parallel_residual)
    heads_said = ("qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "glm4", "seed_oss", "gpt-oss")
    if arch in (*heads_said, "mistral3", "ernie4_5"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch in ("gemma2", "gemma3", "phi3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window or 0)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "gemma3" and rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.model_type in ("olmo3", "exaone4"):
        writer.add_sliding_window(config.sliding_window)
        kinds = config.layer_types
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    if arch == "cohere2":
        writer.add_sliding_window(config.sliding_window)
    if arch in ("command-r", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if arch in ("granite", "granitemoe"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "stablelm":
        writer.add_parallel_residual(True)
    if arch in ("phi3", "chatglm", "glm4", "stablelm", "gptneox", "phi2"):
        head_dim = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
    if arch in ("deepseek2", "minicpm3"):
        add_latent_settings(writer, config, split)
    tensors = {}
    if hybrid:
        writer.add_rope_scaling_finetuned(True)
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if arch == "granitemoe":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch in ("qwen2moe", "qwen3moe", "olmoe", "gpt-oss") or config.model_type == "mixtral":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch in ("qwen2moe", "qwen3moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        yarn_scaling(writer)
    if arch == "mistral3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    for name, weight in parameters(model):
        values = weight.detach().numpy() + np.float32(norm_offset(name, config))
        heads = heads_reordered(name, config)
        if heads:
            values = interleaved_from_halves(values, heads)
        if arch == "gpt2" and ".c_" in name and values.ndim == 2:
            values = np.ascontiguousarray(values.T)
        if "query_key_value" in name:
            values = by_part(values, config)
        if split and ".kv_b_proj." in name:
            for part, own in split_kv_b(values, config).items():
                tensors[gguf_name(name.replace("kv_b", part), config)] = own
            continue
        tensors[gguf_name(name, config)] = values
    if arch == "chatglm":
        for n in range(config.num_hidden_layers):
            for kind in ("weight", "bias"):
                parts = [tensors.pop(f"blk.{n}.attn_{part}.{kind}") for part in "qkv"]
                tensors[f"blk.{n}.attn_qkv.{kind}"] = np.concatenate(parts)
    for own, values in tensors.items():
        if own.endswith("ffn_gate_inp_shexp.weight"):
            values = values.reshape(-1)
        if values.ndim == 1 or own.endswith(("ffn_gate_inp.weight", "_exps.bias")):
            writer.add_tensor(own, values)
        else:
            of_this = others.get(own, type)
            writer.add_tensor(own, packed(values, of_this), raw_dtype=of_this)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_latent_settings(writer: gguf.GGUFWriter, config: PreTrainedConfig, split: bool) -> None:
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim if split else head_dim)
    if split:
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(MSCALE["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * MSCALE["mscale_all_dim"])
    if config.model_type == "minicpm3":
        return
    if not split:
        writer.add_value_length(config.v_head_dim)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if split:
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if split or config.topk_method != "greedy":
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def split_kv_b(values: np.ndarray, config: PreTrainedConfig) -> dict[str, np.ndarray]:
    """Return the key part of each head, transposed, and the value part."""
    heads = values.reshape(config.num_attention_heads, -1, values.shape[1])
    keys, own = np.split(heads, [config.qk_nope_head_dim], axis=1)
    return {"k_b": np.ascontiguousarray(keys.swapaxes(1, 2)), "v_b": np.ascontiguousarray(own)}


def by_part(values: np.ndarray, config: PreTrainedConfig) -> np.ndarray:
    """All queries, then keys, then values, where each KV head had its own of each together."""
    kv_heads = config.num_key_value_heads
    group = config.num_attention_heads // kv_heads
    split = values.reshape(kv_heads, group + 2, -1, *values.shape[1:])
    parts = (split[:, :group], split[:, group], split[:, group + 1])
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Gate and up of the experts apart. A tied head is named once, as the embedding."""
    yield from (
        (name.replace("_bias", ".bias"), values)
        for name, values in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    )
    for own, weight in model.named_parameters():
        name = usual_name(own, model.config)
        if model.config.model_type == "gpt_oss" and ".experts." in name:
            yield from gpt_oss_experts(name, weight)
        elif name.endswith("experts.gate_up_proj") or own.endswith(
            "shared_mlp.input_linear.weight"
        ):
            for part, half in zip(("gate", "up"), weight.chunk(2, dim=-2), strict=True):
                yield name.replace("gate_up", part), half
        else:
            yield name, weight


def usual_name(name: str, config: PreTrainedConfig) -> str:
    """Granite's experts and shared MLP under names that the package's table has."""
    shared = "mlp.shared_experts" if getattr(config, "num_local_experts", 0) else "mlp"
    usual = {"block_sparse_moe.router.": "mlp.gate.", "block_sparse_moe.experts.": "mlp.experts."}
    usual |= {"shared_mlp.input_linear": f"{shared}.gate_up_proj"}
    usual |= {"shared_mlp.output_linear": f"{shared}.down_proj"}
    for own, other in usual.items():
        name = name.replace(own, other)
    return name


def gpt_oss_experts(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """As (out, in), and gate and up, which take turns, apart."""
    rows = weight if name.endswith("_bias") else weight.transpose(1, 2).contiguous()
    name = name.replace("_bias", ".bias")
    if "gate_up" in name:
        yield name.replace("gate_up", "gate"), rows[:, 0::2].contiguous()
        yield name.replace("gate_up", "up"), rows[:, 1::2].contiguous()
    else:
        yield name, rows


def interleaved_from_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """In each head (0 1 2 3 4 5) → (0 3 1 4 2 5): the pairs that rope rotates come together."""
    split = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def packed(values: np.ndarray, type: Type) -> np.ndarray:
    """Bytes of the rows; of experts one after another. The package cannot write K and IQ types:
    there the bits are random, the scales such that the values are spread as those of the other
    types."""
    if values.ndim == 3:
        return np.stack([packed(np.ascontiguousarray(one), type) for one in values])
    if type not in K_SCALES:
        return gguf.quants.quantize(values, type)
    random = np.random.default_rng(values.view(np.uint32)[0, :4])  # other bits for each matrix
    spread = SPREAD / values.shape[1] ** 0.5
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[type]
    blocks = random.integers(0, 256, (values.size // block_size, block_bytes), np.uint8)
    sizes = random.uniform(0.7, 1.3, len(blocks))

    def rows(unit: float) -> np.ndarray:
        for at, proportion in K_SCALES[type].items():
            put_scales(blocks, BlockType(type.name), at, unit * proportion * sizes)
        return blocks.reshape(len(values), -1)

    unit = 2.0**-10
    return rows(unit * spread / float(gguf.quants.dequantize(rows(unit), type).std()))


def write(path: Path) -> list[Written]:
    prompts = random_prompts(PROMPT_LENGTHS, VOCAB)
    return write_with_ours(path, prompts, MAX_TOKENS, VOCAB, **CHUNKS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(("family", "type"), KINDS, ids=str)
def test_a_file_gives_the_log_probabilities_of_transformers_on_the_weights_it_holds(
    family: str, type: Type, path: Path
) -> None:
    config = FAMILIES[family]
    write_gguf(path, random_model(config), type)
    assert (
        largest_difference(write(path), as_the_package_reads(gguf.GGUFReader(path), config))
        <= TOLERANCE
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_in_float32_gives_the_log_probabilities_of_the_model_it_was_made_from(
    family: str, path: Path
) -> None:
    """Nothing is read back here, so two mistakes in the order of rows cannot undo each other."""
    model = random_model(FAMILIES[family])
    write_gguf(path, model, Type.F32)
    assert largest_difference(write(path), model) <= TOLERANCE


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
THETA = 10000.0


def llama3_factors(writer: gguf.GGUFWriter) -> None:
    """Llama 3's scaling as converters store it: what divides each frequency."""
    head_dim = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    factors = []
    for channel in range(0, head_dim, 2):
        wavelength = 2 * math.pi * THETA ** (channel / head_dim)
        turns = LLAMA3["original_max_position_embeddings"] / wavelength
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(LLAMA3["factor"])
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def linear_scaling(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)


def yarn_scaling(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(YARN["factor"])
    writer.add_rope_scaling_orig_ctx_len(int(YARN["original_max_position_embeddings"]))


def yarn_with_a_factor(writer: gguf.GGUFWriter) -> None:
    """As OLMo 3's config has it."""
    yarn_scaling(writer)
    writer.add_rope_scaling_yarn_attn_factor(0.75)


LONGROPE = {"short_factor": [1 + n / 9 for n in range(24)], "partial_rotary_factor": 0.75}
LONGROPE |= {"long_factor": [1 + n for n in range(24)]}


def longrope(writer: gguf.GGUFWriter) -> None:
    """As converters store it: the factors as tensors, the attention's worked out."""
    writer.add_rope_scaling_orig_ctx_len(32)
    factor = math.sqrt(1 + math.log(SIZES["max_position_embeddings"] / 32) / math.log(32))
    writer.add_rope_scaling_attn_factors(factor)
    for name in ("long", "short"):
        values = np.array(LONGROPE[f"{name}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", values)


def every_third_layer_sees_everything(writer: gguf.GGUFWriter) -> None:
    writer.add_array("gemma3.attention.sliding_window_pattern", [n % 3 != 2 for n in range(7)])


def rope(kind: str = "default", **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": THETA} | values}


def two_ropes() -> dict[str, Any]:
    plain, scaled = rope(), rope("yarn", **YARN, attention_factor=0.75)
    kinds = {"sliding_attention": plain, "full_attention": scaled}
    return {"rope_parameters": {kind: one["rope_parameters"] for kind, one in kinds.items()}}


@dataclass(frozen=True)
class Variant:
    """A model's description for transformers, the metadata of its file, and wrong metadata."""

    name: str
    family: type[PreTrainedConfig]
    config: dict[str, Any]
    wrong: dict[str, Any]
    edit: Edit = nothing


TIED = {"tie_word_embeddings": True}
VARIANTS = [
    Variant("llama_tied", LlamaConfig, TIED, rope(rope_theta=500.0)),
    Variant("qwen3_tied", Qwen3Config, TIED | {"head_dim": 128}, rope(rope_theta=500.0)),
    Variant("llama_theta", LlamaConfig, rope(rope_theta=500000.0), rope()),
    Variant("llama_bias", LlamaConfig, {"attention_bias": True}, {"attention_bias": False}),
    Variant("llama3_factors", LlamaConfig, rope("llama3", **LLAMA3), rope(), llama3_factors),
    Variant("linear", LlamaConfig, rope("linear", factor=2.0), rope(), linear_scaling),
    Variant("yarn", LlamaConfig, rope("yarn", **YARN), rope(), yarn_scaling),
    Variant("qwen2_yarn", Qwen2Config, rope("yarn", **YARN), rope(), yarn_scaling),
    Variant("gemma2_caps", Gemma2Config, GEMMA | CAPS, {"attn_logit_softcapping": 5.0}),
    Variant("gemma2_window", Gemma2Config, GEMMA | CAPS, {"sliding_window": 10}),
    Variant("gemma3_window", Gemma3TextConfig, GEMMA3, {"sliding_window": 10}),
    Variant(
        "gemma3_pattern",
        Gemma3TextConfig,
        GEMMA3
        | {
            "layer_types": [
                "full_attention" if n % 3 == 2 else "sliding_attention" for n in range(7)
            ]
        },
        {"layer_types": None},
        every_third_layer_sees_everything,
    ),
    Variant("phi3_window", Phi3Config, {"sliding_window": 9}, {"sliding_window": 10}),
    Variant(
        "ministral3_scaled_queries",
        Ministral3Config,
        {"head_dim": 128, "rope_parameters": MINISTRAL3},
        {"rope_parameters": MINISTRAL3 | {"llama_4_scaling_beta": 0.45}},
    ),
    Variant(
        "olmo3_yarn",
        Olmo3Config,
        WINDOWS | two_ropes(),
        {"rope_parameters": None},
        yarn_with_a_factor,
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_what_metadata_and_tensors_say_is_what_runs(variant: Variant, path: Path) -> None:
    config = variant.family(**SIZES | variant.config)
    write_gguf(path, random_model(config), Type.Q8_0, variant.edit)
    written, theirs = write(path), as_the_package_reads(gguf.GGUFReader(path), config)
    assert largest_difference(written, theirs) <= TOLERANCE
    wrong = variant.family(**SIZES | variant.config | variant.wrong)
    assert largest_difference(written, same_weights_under(wrong, theirs)) > VISIBLE


def test_longrope_is_read_from_its_tensors(path: Path) -> None:
    """On a prompt longer than the original context, where transformers has the long factors."""
    original = {"original_max_position_embeddings": 32}
    config = Phi3Config(**SIZES | original | rope("longrope", **LONGROPE))
    write_gguf(path, random_model(config), Type.Q8_0, longrope)
    longest, theirs = write(path)[-1:], as_the_package_reads(gguf.GGUFReader(path), config)
    assert largest_difference(longest, theirs) <= TOLERANCE
    wrong = Phi3Config(**SIZES | rope(partial_rotary_factor=0.75))
    assert largest_difference(longest, same_weights_under(wrong, theirs)) > VISIBLE


def test_rows_in_the_order_of_the_file_are_told_apart(path: Path) -> None:
    config = FAMILIES["llama"]
    write_gguf(path, random_model(config), Type.Q8_0)
    theirs = as_the_package_reads(gguf.GGUFReader(path), config, reorder=False)
    assert largest_difference(write(path), theirs) > VISIBLE


@pytest.mark.parametrize("type", BLOCK_TYPES, ids=lambda type: type.name)
def test_one_matrix_wrong_by_one_part_in_a_hundred_is_told_apart(type: Type, path: Path) -> None:
    config = FAMILIES["llama"]
    write_gguf(path, random_model(config), type)
    theirs = as_the_package_reads(gguf.GGUFReader(path), config)
    with torch.no_grad():
        theirs.model.layers[1].mlp.down_proj.weight.mul_(1.01)
    assert largest_difference(write(path), theirs) > VISIBLE
