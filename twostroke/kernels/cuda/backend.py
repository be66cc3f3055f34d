"""`CudaKernels`: the reference operations, most of them overridden by Triton kernels."""

from __future__ import annotations

import torch

from twostroke.kernels import cuda
from twostroke.kernels.records import DEFAULT_CONTEXT, RoutingRule, StepContext
from twostroke.kernels.reference import Kernels


class CudaKernels(Kernels):
    rms_norm = staticmethod(cuda.rms_norm)
    add_rms_norm = staticmethod(cuda.add_rms_norm)
    act_and_mul = staticmethod(cuda.act_and_mul)
    product = staticmethod(cuda.product)
    gated_product = staticmethod(cuda.gated_product)
    w8_product = staticmethod(cuda.w8_product)
    w8_gated_product = staticmethod(cuda.w8_gated_product)
    quantise_activations = staticmethod(cuda.quantise_activations)
    w8a8_product = staticmethod(cuda.w8a8_product)
    w8a8_gated_product = staticmethod(cuda.w8a8_gated_product)
    packed_product = staticmethod(cuda.packed_product)
    packed_gated_product = staticmethod(cuda.packed_gated_product)
    experts = staticmethod(cuda.mix_experts)
    rope_store = staticmethod(cuda.rope_store)
    prefill_attention = staticmethod(cuda.prefill_attention)
    bind_prefill_attention = staticmethod(cuda.bind_prefill_attention)
    decode_attention = staticmethod(cuda.decode_attention)
    bind_decode_attention = staticmethod(cuda.bind_decode_attention)
    rope_decode_attention = staticmethod(cuda.rope_decode_attention)
    latent_rope_store = staticmethod(cuda.latent_rope_store)
    latent_prefill_attention = staticmethod(cuda.latent_prefill_attention)
    latent_decode_attention = staticmethod(cuda.latent_decode_attention)
    decode_scratch = staticmethod(cuda.decode_scratch)
    adjust_logits = staticmethod(cuda.adjust_logits)
    sample = staticmethod(cuda.sample)
    advance_tokens = staticmethod(cuda.advance_tokens)
    token_logprobs = staticmethod(cuda.token_logprobs)
    compile_ahead = staticmethod(cuda.compile_ahead)

    def __init__(self, device: torch.device) -> None:
        self._num_sms = cuda.num_sms(device)

    def route(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        correction: torch.Tensor | None,
        rule: RoutingRule,
        context: StepContext = DEFAULT_CONTEXT,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = cuda.exact_product(x, router, context)
        return cuda.route(logits, bias, correction, rule, context)

    def decode_splits(self, batch: int, num_kv_heads: int, max_len: int) -> int:
        return cuda.decode_splits(batch, num_kv_heads, max_len, self._num_sms)

    def latent_decode_splits(self, batch: int, num_heads: int, width: int, max_len: int) -> int:
        return cuda.latent_decode_splits(batch, num_heads, width, max_len, self._num_sms)
