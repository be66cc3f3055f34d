"""What the files of each family call their weights, in a Hugging Face folder."""

from __future__ import annotations

from dataclasses import replace

from twostroke.model.tensor_names import TensorNames

_LAYER = {"attn_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight"}
_LAYER |= {"attn_norm_bias": "input_layernorm.bias"}
_LAYER |= {"mlp_norm_bias": "post_attention_layernorm.bias"}
_LAYER |= {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
for _part in ("q", "k", "v", "o"):
    _LAYER[_part] = f"self_attn.{_part}_proj.weight"
    _LAYER[f"{_part}_bias"] = f"self_attn.{_part}_proj.bias"
for _part in ("gate", "up", "down"):
    _LAYER[_part] = f"mlp.{_part}_proj.weight"
    _LAYER[f"{_part}_bias"] = f"mlp.{_part}_proj.bias"
for _part in ("gate", "up", "down"):
    _LAYER[f"experts.{_part}"] = f"mlp.experts.{{e}}.{_part}_proj.weight"
    _LAYER[f"shared.{_part}"] = f"mlp.shared_experts.{_part}_proj.weight"
_LAYER |= {"router": "mlp.gate.weight", "router_correction": "mlp.gate.e_score_correction_bias"}
_LAYER |= {"shared_gate": "mlp.shared_expert_gate.weight"}
# As transformers holds experts in memory, and saves them if it is not told to undo that.
_STACKED = dict.fromkeys(("experts.gate", "experts.up"), "mlp.experts.gate_up_proj")
_STACKED |= {"experts.down": "mlp.experts.down_proj"}
NAMES = TensorNames(
    model={
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "final_norm_bias": "model.norm.bias",
        "head": "lm_head.weight",
    },
    layer=_LAYER,
    layer_prefix="model.layers.{n}.",
    otherwise=_STACKED,
)
QWEN2_MOE_NAMES = NAMES.but(
    **{f"shared.{part}": f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")}
)
_SPARSE = "block_sparse_moe"
MIXTRAL_NAMES = replace(
    NAMES.but(
        router=f"{_SPARSE}.gate.weight",
        **{
            "experts.gate": f"{_SPARSE}.experts.{{e}}.w1.weight",
            "experts.up": f"{_SPARSE}.experts.{{e}}.w3.weight",
            "experts.down": f"{_SPARSE}.experts.{{e}}.w2.weight",
        },
    ),
    otherwise=_STACKED | {"router": "mlp.gate.weight"},
)
_INPUT = f"{_SPARSE}.input_linear.weight"
GRANITE_MOE_NAMES = replace(
    NAMES.but(
        router=f"{_SPARSE}.router.layer.weight",
        **{
            "experts.gate": _INPUT,
            "experts.up": _INPUT,
            "experts.down": f"{_SPARSE}.output_linear.weight",
        },
    ),
    otherwise={
        "router": f"{_SPARSE}.router.weight",
        "experts.gate": f"{_SPARSE}.experts.gate_up_proj",
        "experts.up": f"{_SPARSE}.experts.gate_up_proj",
        "experts.down": f"{_SPARSE}.experts.down_proj",
    },
)
GEMMA_NAMES = NAMES.but(
    attn_post_norm="post_attention_layernorm.weight",
    mlp_norm="pre_feedforward_layernorm.weight",
    mlp_post_norm="post_feedforward_layernorm.weight",
    norm_offset=1.0,
)
_QKV, _GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
PHI3_NAMES = NAMES.but(q=_QKV, k=_QKV, v=_QKV, gate=_GATE_UP, up=_GATE_UP)
COHERE_NAMES = NAMES.but(rope_neighbours=True)
GLM_NAMES = NAMES.but(rope_neighbours=True, gate=_GATE_UP, up=_GATE_UP)
GLM4_NAMES = GLM_NAMES.but(
    rope_neighbours=True,
    attn_post_norm="post_self_attn_layernorm.weight",
    mlp_post_norm="post_mlp_layernorm.weight",
)
_WQKV, _WQKV_BIAS = "attention.wqkv.weight", "attention.wqkv.bias"
INTERNLM2_NAMES = replace(
    NAMES.but(
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
    model={**NAMES.model, "embed": "model.tok_embeddings.weight", "head": "output.weight"},
    grouped_qkv=True,
)
OLMO2_NAMES = NAMES.but(
    attn_post_norm="post_attention_layernorm.weight",
    mlp_post_norm="post_feedforward_layernorm.weight",
)
STARCODER2_NAMES = NAMES.but(
    up="mlp.c_fc.weight",
    up_bias="mlp.c_fc.bias",
    down="mlp.c_proj.weight",
    down_bias="mlp.c_proj.bias",
)
