"""`CudaKernels`: the operations of a forward, those in Triton in place of the reference ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from twostroke.kernels import cuda
from twostroke.kernels.reference import Kernels


class CudaKernels(Kernels):
    rms_norm = staticmethod(cuda.rms_norm)
    add_rms_norm = staticmethod(cuda.add_rms_norm)
    act_and_mul = staticmethod(cuda.act_and_mul)
    product = staticmethod(cuda.product)
    gated_product = staticmethod(cuda.gated_product)
    fp8_product = staticmethod(cuda.fp8_product)
    fp8_gated_product = staticmethod(cuda.fp8_gated_product)
    fp8_rows = staticmethod(cuda.fp8_rows)
    fp8_rows_product = staticmethod(cuda.fp8_rows_product)
    fp8_rows_gated_product = staticmethod(cuda.fp8_rows_gated_product)
    experts = staticmethod(cuda.mix_experts)
    rope_store = staticmethod(cuda.rope_store)
    prefill_attention = staticmethod(cuda.prefill_attention)
    bind_prefill_attention = staticmethod(cuda.bind_prefill_attention)
    decode_attention = staticmethod(cuda.decode_attention)
    bind_decode_attention = staticmethod(cuda.bind_decode_attention)
    rope_decode_attention = staticmethod(cuda.rope_decode_attention)
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
        **rule: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The router is in fp32: a rounding could choose another expert."""
        logits = F.linear(x.float(), router)
        return cuda.route(logits, bias, correction, **rule)

    def decode_splits(self, batch: int, num_kv_heads: int, max_len: int) -> int:
        return cuda.decode_splits(batch, num_kv_heads, max_len, self._num_sms)
