"""The tensor names that each architecture has in a GGUF file, as `TensorNames`.

`NAMES` is the base; the tables of other architectures are copies with some names replaced.
"""

from __future__ import annotations

from twostroke.model.describe.tensor_names import TensorNames
from twostroke.model.gguf.gguf_file import GGUFFile

_LAYER = {"attn_norm": "attn_norm.weight", "mlp_norm": "ffn_norm.weight"}
_LAYER |= {"attn_post_norm": "post_attention_norm.weight", "mlp_post_norm": "post_ffw_norm.weight"}
_LAYER |= {"attn_norm_bias": "attn_norm.bias", "mlp_norm_bias": "ffn_norm.bias"}
_LAYER |= {"q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight"}
_LAYER |= {"o": "attn_output.weight", "o_bias": "attn_output.bias"}
_LAYER |= {"q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias"}
_LAYER |= {"q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight"}
_LAYER |= {"sinks": "attn_sinks.weight"}
_LAYER |= {"q_a": "attn_q_a.weight", "q_a_norm": "attn_q_a_norm.weight", "q_b": "attn_q_b.weight"}
_LAYER |= {"kv_a": "attn_kv_a_mqa.weight", "kv_a_norm": "attn_kv_a_norm.weight"}
_LAYER |= {"kv_b": "attn_kv_b.weight", "k_b": "attn_k_b.weight", "v_b": "attn_v_b.weight"}
_LAYER |= {"gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight"}
_LAYER |= {"gate_bias": "ffn_gate.bias", "up_bias": "ffn_up.bias", "down_bias": "ffn_down.bias"}
_LAYER |= {"router": "ffn_gate_inp.weight", "router_bias": "ffn_gate_inp.bias"}
_LAYER |= {"router_correction": "exp_probs_b.bias", "shared_gate": "ffn_gate_inp_shexp.weight"}
for _part in ("gate", "up", "down"):
    _LAYER[f"experts.{_part}"] = f"ffn_{_part}_exps.weight"
    _LAYER[f"experts.{_part}_bias"] = f"ffn_{_part}_exps.bias"
    _LAYER[f"shared.{_part}"] = f"ffn_{_part}_shexp.weight"
NAMES = TensorNames(
    model={
        "embed": "token_embd.weight",
        "final_norm": "output_norm.weight",
        "final_norm_bias": "output_norm.bias",
        "head": "output.weight",
        "head_bias": "output.bias",
        "positions": "position_embd.weight",
    },
    layer=_LAYER,
    layer_prefix="blk.{n}.",
    # The first conversions of Mixtral.
    alternatives={f"experts.{part}": f"ffn_{part}.{{e}}.weight" for part in ("gate", "up", "down")},
)
_QKV, _GATE_UP = "attn_qkv.weight", "ffn_up.weight"
PHI3_NAMES = NAMES.with_names(q=_QKV, k=_QKV, v=_QKV, gate=_GATE_UP, up=_GATE_UP)
# Conversions of Llama reorder the rows of q and k. GLM, Cohere and ERNIE always have this order.
LLAMA_NAMES = NAMES.with_names(rope_interleaved=True)
GLM4_NAMES = NAMES.with_names(rope_interleaved=True, gate=_GATE_UP, up=_GATE_UP)
_QKV_BIAS = "attn_qkv.bias"
CHATGLM_NAMES = GLM4_NAMES.with_names(
    rope_interleaved=True,
    q=_QKV,
    k=_QKV,
    v=_QKV,
    q_bias=_QKV_BIAS,
    k_bias=_QKV_BIAS,
    v_bias=_QKV_BIAS,
)
FUSED_NAMES = NAMES.with_names(
    q=_QKV, k=_QKV, v=_QKV, q_bias=_QKV_BIAS, k_bias=_QKV_BIAS, v_bias=_QKV_BIAS
)
# The norm before the MLP has the name of a norm after attention.
POST_ATTENTION_NAMES = NAMES.with_names(mlp_norm="post_attention_norm.weight")


def phi2_names(file: GGUFFile) -> TensorNames:
    """Return Phi-2's names. Conversions of its first release have q, k and v in one tensor."""
    return FUSED_NAMES if f"blk.0.{_QKV}" in file.tensors else NAMES


def falcon_names(file: GGUFFile) -> TensorNames:
    """Return Falcon's names. In a model with two norms (40B), attention has the second."""
    if "blk.0.attn_norm_2.weight" not in file.tensors:
        return FUSED_NAMES
    norms = {"attn_norm": "attn_norm_2.weight", "attn_norm_bias": "attn_norm_2.bias"}
    return FUSED_NAMES.with_names(
        norms, mlp_norm="attn_norm.weight", mlp_norm_bias="attn_norm.bias"
    )
