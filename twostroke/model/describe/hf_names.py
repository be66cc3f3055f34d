"""The tensor names that each family has in a Hugging Face folder, as `TensorNames`.

`LLAMA_NAMES` is the base; the tables of other families are copies with some names replaced.
"""

from __future__ import annotations

from dataclasses import replace

from twostroke.model.describe.tensor_names import TensorNames

_LAYER = {"attn_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight"}
_LAYER |= {"attn_norm_bias": "input_layernorm.bias"}
_LAYER |= {"mlp_norm_bias": "post_attention_layernorm.bias"}
_LAYER |= {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
for _part in ("q", "k", "v", "o"):
    _LAYER[_part] = f"self_attn.{_part}_proj.weight"
    _LAYER[f"{_part}_bias"] = f"self_attn.{_part}_proj.bias"
_LAYER |= {"q_a": "self_attn.q_a_proj.weight", "q_a_norm": "self_attn.q_a_layernorm.weight"}
_LAYER |= {"q_b": "self_attn.q_b_proj.weight", "kv_a": "self_attn.kv_a_proj_with_mqa.weight"}
_LAYER |= {"kv_a_norm": "self_attn.kv_a_layernorm.weight", "kv_b": "self_attn.kv_b_proj.weight"}
for _part in ("gate", "up", "down"):
    _LAYER[_part] = f"mlp.{_part}_proj.weight"
    _LAYER[f"{_part}_bias"] = f"mlp.{_part}_proj.bias"
for _part in ("gate", "up", "down"):
    _LAYER[f"experts.{_part}"] = f"mlp.experts.{{e}}.{_part}_proj.weight"
    _LAYER[f"shared.{_part}"] = f"mlp.shared_experts.{_part}_proj.weight"
_LAYER |= {"router": "mlp.gate.weight", "router_correction": "mlp.gate.e_score_correction_bias"}
_LAYER |= {"shared_gate": "mlp.shared_expert_gate.weight"}
# One tensor for all experts. transformers has this layout in memory, and saves it by default.
_STACKED = dict.fromkeys(("experts.gate", "experts.up"), "mlp.experts.gate_up_proj")
_STACKED |= {"experts.down": "mlp.experts.down_proj"}
LLAMA_NAMES = TensorNames(
    model={
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "final_norm_bias": "model.norm.bias",
        "head": "lm_head.weight",
    },
    layer=_LAYER,
    layer_prefix="model.layers.{n}.",
    alternatives=_STACKED,
)
QWEN2_MOE_NAMES = LLAMA_NAMES.with_names(
    {f"shared.{part}": f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")}
)
_SPARSE_MOE = "block_sparse_moe"
MIXTRAL_NAMES = replace(
    LLAMA_NAMES.with_names(
        {
            "router": f"{_SPARSE_MOE}.gate.weight",
            "experts.gate": f"{_SPARSE_MOE}.experts.{{e}}.w1.weight",
            "experts.up": f"{_SPARSE_MOE}.experts.{{e}}.w3.weight",
            "experts.down": f"{_SPARSE_MOE}.experts.{{e}}.w2.weight",
        },
    ),
    alternatives=_STACKED | {"router": "mlp.gate.weight"},
)
_MOE_INPUT = f"{_SPARSE_MOE}.input_linear.weight"
GRANITE_MOE_NAMES = replace(
    LLAMA_NAMES.with_names(
        {
            "router": f"{_SPARSE_MOE}.router.layer.weight",
            "experts.gate": _MOE_INPUT,
            "experts.up": _MOE_INPUT,
            "experts.down": f"{_SPARSE_MOE}.output_linear.weight",
        },
    ),
    alternatives={
        "router": f"{_SPARSE_MOE}.router.weight",
        "experts.gate": f"{_SPARSE_MOE}.experts.gate_up_proj",
        "experts.up": f"{_SPARSE_MOE}.experts.gate_up_proj",
        "experts.down": f"{_SPARSE_MOE}.experts.down_proj",
    },
)
# The MLP of a dense layer and the shared expert of a layer with experts have the same names.
_SHARED_MLP = dict.fromkeys(("gate", "up"), "shared_mlp.input_linear.weight")
_SHARED_MLP |= {"down": "shared_mlp.output_linear.weight"}
GRANITE_HYBRID_NAMES = GRANITE_MOE_NAMES.with_names(
    _SHARED_MLP | {f"shared.{part}": tensor for part, tensor in _SHARED_MLP.items()}
)
GEMMA_NAMES = LLAMA_NAMES.with_names(norm_offset=1.0)
GEMMA2_NAMES = LLAMA_NAMES.with_names(
    attn_post_norm="post_attention_layernorm.weight",
    mlp_norm="pre_feedforward_layernorm.weight",
    mlp_post_norm="post_feedforward_layernorm.weight",
    norm_offset=1.0,
)
_QKV, _GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
PHI3_NAMES = LLAMA_NAMES.with_names(q=_QKV, k=_QKV, v=_QKV, gate=_GATE_UP, up=_GATE_UP)
INTERLEAVED_NAMES = LLAMA_NAMES.with_names(rope_interleaved=True)
GLM_NAMES = LLAMA_NAMES.with_names(rope_interleaved=True, gate=_GATE_UP, up=_GATE_UP)
# `with_names` does not copy `rope_interleaved`.
GLM4_NAMES = GLM_NAMES.with_names(
    rope_interleaved=True,
    attn_post_norm="post_self_attn_layernorm.weight",
    mlp_post_norm="post_mlp_layernorm.weight",
)
_WQKV, _WQKV_BIAS = "attention.wqkv.weight", "attention.wqkv.bias"
INTERNLM2_NAMES = replace(
    LLAMA_NAMES.with_names(
        attn_norm="attention_norm.weight",
        mlp_norm="ffn_norm.weight",
        o="attention.wo.weight",
        o_bias="attention.wo.bias",
        gate="feed_forward.w1.weight",
        up="feed_forward.w3.weight",
        down="feed_forward.w2.weight",
        q=_WQKV,
        k=_WQKV,
        v=_WQKV,
        q_bias=_WQKV_BIAS,
        k_bias=_WQKV_BIAS,
        v_bias=_WQKV_BIAS,
    ),
    model={**LLAMA_NAMES.model, "embed": "model.tok_embeddings.weight", "head": "output.weight"},
    grouped_qkv=True,
)
OLMO2_NAMES = LLAMA_NAMES.with_names(
    attn_post_norm="post_attention_layernorm.weight",
    mlp_post_norm="post_feedforward_layernorm.weight",
)
STARCODER2_NAMES = LLAMA_NAMES.with_names(
    up="mlp.c_fc.weight",
    up_bias="mlp.c_fc.bias",
    down="mlp.c_proj.weight",
    down_bias="mlp.c_proj.bias",
)


def _with_biases(**tensors: str) -> dict[str, str]:
    """Return the names of weights and of their biases: for q="attn.q" the names `attn.q.weight` of
    q and `attn.q.bias` of q_bias."""
    weights = {part: f"{tensor}.weight" for part, tensor in tensors.items()}
    return weights | {f"{part}_bias": f"{tensor}.bias" for part, tensor in tensors.items()}


def _outside_layers(
    prefix: str, embed: str, final_norm: str, head: str = "lm_head"
) -> dict[str, str]:
    """Return the names of the weights outside the layers. All but `head` are under `prefix`."""
    names = _with_biases(final_norm=f"{prefix}.{final_norm}", head=head)
    return names | {"embed": f"{prefix}.{embed}.weight"}


_H_TO_4H = {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
_NEOX_QKV = dict.fromkeys("qkv", "attention.query_key_value")
GPT_NEOX_NAMES = replace(
    LLAMA_NAMES.with_names(_with_biases(**_NEOX_QKV, **_H_TO_4H, o="attention.dense")),
    model=_outside_layers("gpt_neox", "embed_in", "final_layer_norm", "embed_out"),
    layer_prefix="gpt_neox.layers.{n}.",
    grouped_qkv=True,
)
_GPT2_LAYER = {"attn_norm": "ln_1", "mlp_norm": "ln_2", "o": "attn.c_proj"}
_GPT2_LAYER |= dict.fromkeys("qkv", "attn.c_attn") | {"up": "mlp.c_fc", "down": "mlp.c_proj"}
GPT2_NAMES = replace(
    LLAMA_NAMES.with_names(_with_biases(**_GPT2_LAYER)),
    model={**_outside_layers("transformer", "wte", "ln_f"), "positions": "transformer.wpe.weight"},
    layer_prefix="transformer.h.{n}.",
    transposed=("q", "k", "v", "o", "up", "down"),
)
_GPTJ_LAYER = {"attn_norm": "ln_1", "o": "attn.out_proj", "up": "mlp.fc_in", "down": "mlp.fc_out"}
GPTJ_NAMES = replace(
    LLAMA_NAMES.with_names(
        {part: f"attn.{part}_proj.weight" for part in "qkv"} | _with_biases(**_GPTJ_LAYER),
        rope_interleaved=True,
    ),
    model=_outside_layers("transformer", "wte", "ln_f"),
    layer_prefix="transformer.h.{n}.",
)
PHI_NAMES = replace(
    LLAMA_NAMES.with_names(_with_biases(o="self_attn.dense", up="mlp.fc1", down="mlp.fc2")),
    model=_outside_layers("model", "embed_tokens", "final_layernorm"),
)
FALCON_NAMES = replace(
    LLAMA_NAMES.with_names(
        _with_biases(
            **dict.fromkeys("qkv", "self_attention.query_key_value"),
            **_H_TO_4H,
            o="self_attention.dense",
        )
    ),
    model=_outside_layers("transformer", "word_embeddings", "ln_f"),
    layer_prefix="transformer.h.{n}.",
    grouped_qkv=True,
)
FALCON_TWO_NORMS_NAMES = FALCON_NAMES.with_names(
    _with_biases(attn_norm="ln_attn", mlp_norm="ln_mlp")
)
# The name of an expert's bias is the name of the expert's matrix and "_bias".
_GPT_OSS_LAYER = {"sinks": "self_attn.sinks"} | _with_biases(router="mlp.router") | _STACKED
_GPT_OSS_LAYER |= {f"{part}_bias": f"{tensor}_bias" for part, tensor in _STACKED.items()}
GPT_OSS_NAMES = replace(
    LLAMA_NAMES.with_names(_GPT_OSS_LAYER),
    gate_up_interleaved=True,
    transposed=tuple(_STACKED),
    alternatives={},
)
# The published files have the experts in MXFP4: blocks in one tensor, scales in another.
GPT_OSS_MXFP4_NAMES = replace(
    GPT_OSS_NAMES.with_names({part: f"{tensor}_blocks" for part, tensor in _STACKED.items()}),
    transposed=(),
)
