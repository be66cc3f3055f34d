"""`StepProgram`: all that the device does in a step, as one run of launches.

    cells ◀── writes           what the plan changed
    cells ──▶ token ids ──▶ decoder ──▶ head ──▶ sample ──▶ tokens
    cells ◀────────────────────────────────────────────────────┘     read there by the next step

It reads only what is on the device, so that a graph can hold it, and the next step can follow
before the host has seen this one's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from twostroke.exec.packed import Layout, Shape
from twostroke.exec.rows import DeviceRows
from twostroke.kv.pool import KVPool
from twostroke.model.batch import FusedDecode, FusedInputs, FusedPrefill
from twostroke.model.fused import FusedDecoder


@dataclass(frozen=True, slots=True)
class DeviceStep:
    shape: Shape
    fields: dict[str, torch.Tensor]  # views of the packed inputs
    inputs: FusedInputs  # the same, as the decoder wants them, but for the token ids
    sampled: torch.Tensor | None  # which hidden states are sampled from; None: all


class StepProgram:
    def __init__(self, decoder: FusedDecoder, pool: KVPool, rows: DeviceRows) -> None:
        spec, device = decoder.spec, decoder.device
        self.decoder, self.rows = decoder, rows
        # Results have places of their own: graphs that share memory would overwrite each other's.
        self.logits = torch.empty(
            rows.max_rows, spec.vocab_size, dtype=decoder.dtype, device=device
        )
        self.tokens = torch.zeros(rows.max_rows, dtype=torch.int32, device=device)
        self._kv = [pool.layer(index) for index in range(spec.num_layers)]

    def prepare(
        self, layout: Layout, buffer: torch.Tensor, max_chunk: int, longest: int
    ) -> DeviceStep:
        """A step over packed inputs that lie in `buffer` on the device."""
        shape, fields, rows = layout.shape, layout.device(buffer), self.rows
        decode = prefill = None
        if shape.slots:
            splits, scratch = self._splits(shape.slots, longest)
            decode = FusedDecode(fields["rows"], fields["lengths"], splits, scratch)
        if shape.chunks:
            starts, cu_tokens = fields["chunk_starts"], fields["cu_tokens"]
            prefill = FusedPrefill(fields["chunk_rows"], starts, cu_tokens, max_chunk)
        inputs = FusedInputs(
            token_ids=fields["read_at"],
            positions=fields["positions"],
            slots=[fields[f"slots{group}"] for group in range(shape.groups)],
            tables=rows.tables,
            decode=decode,
            prefill=prefill,
        )
        return DeviceStep(shape, fields, inputs, fields["sampled"] if shape.chunks else None)

    def _splits(self, batch: int, longest: int) -> tuple[int, Any]:
        spec, kernels = self.decoder.spec, self.decoder.kernels
        # By powers of two, so that few different launches ever occur.
        length = min(1 << (longest - 1).bit_length(), self.rows.max_len)
        splits = kernels.decode_splits(batch, spec.num_kv_heads, length)
        device = self.decoder.device
        scratch = kernels.decode_scratch(batch, spec.num_heads, spec.head_dim, splits, device)
        return splits, scratch

    def run(self, step: DeviceStep) -> torch.Tensor:
        """The last hidden states; logits and tokens are in their places."""
        fields, cells, given = step.fields, self.rows.cells, step.inputs
        if step.shape.writes:
            cells.scatter_(0, fields["writes_at"], fields["writes"])
        inputs = FusedInputs(
            cells.index_select(0, given.token_ids),
            given.positions,
            given.slots,
            given.tables,
            given.decode,
            given.prefill,
        )
        hidden = self.decoder.forward(inputs, self._kv)
        count = step.shape.samples
        if count:
            self._sample(hidden, step, count)
        return hidden

    def _sample(self, hidden: torch.Tensor, step: DeviceStep, count: int) -> None:
        fields = step.fields
        if step.sampled is not None:
            hidden = hidden.index_select(0, step.sampled)
        logits = self.decoder.head(hidden, out=self.logits[:count])
        tokens = self.tokens[:count]
        tokens.copy_(
            self.decoder.kernels.sample(
                logits,
                fields["temperature"],
                fields["top_k"],
                fields["top_p"],
                fields["min_p"],
                fields["key0"],
                fields["key1"],
            )
        )
        self.rows.cells.scatter_(0, fields["write_at"], tokens)
