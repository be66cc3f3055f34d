"""The Triton kernels. `kernels/reference.py` defines their results. This package imports triton.

Every launch may be captured in a CUDA graph: grids depend only on shapes and on numbers that the
host knows, and kernels read lengths on the device. No kernel is specialised on a value that changes
from step to step, so that no step compiles a kernel after the start.
"""

from __future__ import annotations

from twostroke.kernels.cuda.adjust import adjust_logits, advance_tokens
from twostroke.kernels.cuda.decode import (
    bind_decode_attention,
    decode_attention,
    rope_decode_attention,
)
from twostroke.kernels.cuda.elementwise import act_and_mul, add_rms_norm, rms_norm
from twostroke.kernels.cuda.experts import mix_experts, route
from twostroke.kernels.cuda.latent import (
    latent_decode_attention,
    latent_decode_splits,
    latent_rope_store,
)
from twostroke.kernels.cuda.latent_prefill import latent_prefill_attention
from twostroke.kernels.cuda.launch import compile_ahead
from twostroke.kernels.cuda.logprobs import token_logprobs
from twostroke.kernels.cuda.packed import packed_gated_product, packed_product
from twostroke.kernels.cuda.prefill import bind_prefill_attention, prefill_attention
from twostroke.kernels.cuda.product import exact_product, gated_product, product
from twostroke.kernels.cuda.rope_store import rope_store
from twostroke.kernels.cuda.sampling import sample
from twostroke.kernels.cuda.splits import (
    DecodeScratch,
    decode_scratch,
    decode_splits,
    num_sms,
)
from twostroke.kernels.cuda.w8a8 import (
    quantise_activations,
    w8_gated_product,
    w8_product,
    w8a8_gated_product,
    w8a8_product,
)

__all__ = [
    "DecodeScratch",
    "act_and_mul",
    "add_rms_norm",
    "adjust_logits",
    "advance_tokens",
    "bind_decode_attention",
    "bind_prefill_attention",
    "compile_ahead",
    "decode_attention",
    "decode_scratch",
    "decode_splits",
    "exact_product",
    "gated_product",
    "latent_decode_attention",
    "latent_decode_splits",
    "latent_prefill_attention",
    "latent_rope_store",
    "mix_experts",
    "num_sms",
    "packed_gated_product",
    "packed_product",
    "prefill_attention",
    "product",
    "quantise_activations",
    "rms_norm",
    "rope_decode_attention",
    "rope_store",
    "route",
    "sample",
    "token_logprobs",
    "w8_gated_product",
    "w8_product",
    "w8a8_gated_product",
    "w8a8_product",
]
