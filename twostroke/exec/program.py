"""`StepProgram`: all that the device does in a step, as one run of launches.

    cells ◀── writes           what the plan changed
    cells ──▶ token ids ──▶ decoder ──▶ head ──▶ sample ──▶ tokens
    cells ◀────────────────────────────────────────────────────┘     read there by the next step

It reads only what is on the device, so that a graph can hold it, and the next step can follow
before the host has seen this one's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from twostroke.exec.device_sampling import DeviceSampler
from twostroke.exec.packed import Layout, Shape
from twostroke.exec.rows import DeviceRows
from twostroke.kv.pool import KVPool
from twostroke.model.batch import FusedDecode, FusedInputs, FusedPrefill, FusedWanted
from twostroke.model.fused import FusedDecoder


@dataclass(frozen=True, slots=True)
class DeviceStep:
    shape: Shape
    fields: dict[str, torch.Tensor]  # views of the packed inputs
    largest: tuple[int, int]  # chunks
    splits: tuple[int, int]  # of decode attention: of the slots, of all that is sampled
    keeps_all: bool  # hidden states, not only those that are sampled


Forward = Callable[[DeviceStep], torch.Tensor]


class StepProgram:
    def __init__(
        self,
        decoder: FusedDecoder,
        pool: KVPool,
        rows: DeviceRows,
        sampler: DeviceSampler | None = None,
    ) -> None:
        """`sampler`: one over these rows, if there is one already."""
        spec, device = decoder.spec, decoder.device
        self.decoder, self.rows = decoder, rows
        self.kv = [pool.layer(index) for index in range(spec.num_layers)]
        # Results have places of their own: graphs that share memory would overwrite each other's.
        self.logits = torch.empty(
            rows.max_rows, spec.vocab_size, dtype=decoder.dtype, device=device
        )
        self.tokens = torch.zeros(rows.max_rows, dtype=torch.int32, device=device)
        self.sampler = sampler or DeviceSampler(
            rows.max_rows, spec.vocab_size, rows.tokens, decoder.kernels, device
        )

    def prepare(
        self,
        layout: Layout,
        buffer: torch.Tensor,
        largest: tuple[int, int] = (0, 0),
        longest: tuple[int, int] = (0, 0),
        keeps_all: bool = False,
    ) -> DeviceStep:
        """A step over packed inputs that lie in `buffer` on the device."""
        shape = layout.shape
        splits = self._splits(shape.slots, longest[0]), self._splits(shape.samples, longest[1])
        return DeviceStep(shape, layout.device(buffer), largest, splits, keeps_all)

    def _splits(self, slots: int, longest: int) -> int:
        if not slots:
            return 1
        # By powers of two, so that few different launches ever occur.
        length = min(1 << (longest - 1).bit_length(), self.rows.max_len)
        return self.decoder.kernels.decode_splits(slots, self.decoder.spec.num_kv_heads, length)

    def run(self, step: DeviceStep, forward: Forward | None = None) -> torch.Tensor:
        """The last hidden states that are kept; logits and tokens are in their places. `forward`:
        instead of the decoder's own."""
        fields, cells = step.fields, self.rows.cells
        if step.shape.writes:
            cells.scatter_(0, fields["writes_at"], fields["writes"])
        if forward is None:
            token_ids = cells.index_select(0, fields["read_at"])
            hidden = self.decoder.forward(self.inputs(step, token_ids), self.kv)
        else:
            hidden = forward(step)
        if step.shape.samples:
            self._sample(hidden, step, step.shape.samples)
        return hidden

    def inputs(self, step: DeviceStep, token_ids: torch.Tensor) -> FusedInputs:
        shape, fields = step.shape, step.fields
        decode = prefill = wanted = None
        if shape.slots:
            decode = self._slots(step, shape.slots, step.splits[0])
        if shape.chunks and not step.keeps_all:
            wanted = FusedWanted(
                fields["sampled"], self._slots(step, shape.samples, step.splits[1])
            )
        if shape.chunks:
            prefill = FusedPrefill(
                fields["chunk_rows"],
                fields["chunk_starts"],
                fields["cu_tokens"],
                shape.chunk_tokens,
                *step.largest,
            )
        slots = [fields[f"slots{group}"] for group in range(shape.groups)]
        tables, positions = self.rows.tables, fields["positions"]
        return FusedInputs(token_ids, positions, slots, tables, decode, prefill, wanted)

    def _slots(self, step: DeviceStep, count: int, splits: int) -> FusedDecode:
        """The first of what is sampled, as slots of decode attention."""
        spec, decoder, fields = self.decoder.spec, self.decoder, step.fields
        # Made here, so that the graphs of a pool all use the same memory for it.
        scratch = decoder.kernels.decode_scratch(
            count, spec.num_heads, spec.head_dim, splits, decoder.device
        )
        return FusedDecode(fields["rows"][:count], fields["lengths"][:count], splits, scratch)

    def _sample(self, hidden: torch.Tensor, step: DeviceStep, count: int) -> None:
        fields = step.fields
        if len(hidden) != count:  # all, not only those that are sampled
            hidden = hidden.index_select(0, fields["sampled"])
        logits = self.decoder.head(hidden, out=self.logits[:count])
        self.decoder.kernels.sample(
            logits,
            fields["temperature"],
            fields["top_k"],
            fields["top_p"],
            fields["min_p"],
            fields["key0"],
            fields["key1"],
            out=self.tokens[:count],
            cells=self.rows.cells,
            write_at=fields["write_at"],
        )
