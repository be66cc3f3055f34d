"""`StepProgram`: the launches of a step, in order.

    cells ◀── writes           changes by the plan
    cells ──▶ token ids ──▶ decoder ──▶ head ──▶ sample ──▶ tokens
    cells ◀────────────────────────────────────────────────────┘     input of the next step

The launches read only tensors on the device. So a CUDA graph can contain them, and the next step
can be launched before the host has received the tokens of this step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.device_sampling import DeviceSampler
from twostroke.exec.step_buffer import Layout, Longest, Shape, Spans
from twostroke.kernels.records import DecodeWork, DrawParams, PrefillWork
from twostroke.kv.pool import KVPool
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.torch.decoder import Decoder
from twostroke.model.torch.step_inputs import KeptTokens, StepInputs


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step whose inputs are on the device. `StepBuffer` explains the fields."""

    shape: Shape
    fields: dict[str, torch.Tensor]  # views of the step buffer
    max_first: int
    max_continued: int
    longest: Sequence[Longest]  # per KV group
    spans: Sequence[Spans]  # per KV group
    keeps_all: bool  # keep the hidden states of all tokens, not only of the sampled tokens


class _Group(NamedTuple):
    """The sizes of decode attention over a KV group."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # channels of the output
    latent_width: int  # cached channels of a token with latents (latent and rope key); otherwise 0
    window: int | None


def _attention_groups(spec: ModelSpec) -> list[_Group]:
    return [
        _Group(
            max(spec.layers[index].attention.num_heads for index in group.layers),
            group.num_kv_heads,
            group.latent_dim or group.head_dim,
            group.head_dim if group.latent_dim else 0,
            group.window,
        )
        for group in spec.kv_groups()
    ]


Forward = Callable[[DeviceStep], torch.Tensor]


class StepProgram:
    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        rows: DeviceRows,
        sampler: DeviceSampler | None = None,
        max_samples: int = 0,
    ) -> None:
        """`sampler`: an existing sampler for these rows. `max_samples`: maximum samples of a step;
        by default one for each row."""
        spec, device = decoder.spec, decoder.device
        self.decoder, self.pool, self.rows = decoder, pool, rows
        self._groups = _attention_groups(spec)
        # The results have their own memory, because graphs share their memory pool and would
        # overwrite each other's results.
        count, dtype = max_samples or rows.max_rows, decoder.dtype
        self.logits = torch.empty(count, spec.vocab_size, dtype=dtype, device=device)
        self.tokens = torch.zeros(count, dtype=torch.int32, device=device)
        self.sampler = sampler or DeviceSampler(
            rows.max_rows, spec.vocab_size, rows.tokens, decoder.kernels, device
        )

    def prepare(
        self,
        layout: Layout,
        buffer: torch.Tensor,
        max_first: int = 0,
        max_continued: int = 0,
        longest: Sequence[Longest] | None = None,
        spans: Sequence[Spans] = (),
        keeps_all: bool = False,
    ) -> DeviceStep:
        """Return a step whose inputs are in `buffer` on the device. `longest`: by default the
        maximum context length."""
        longest = longest or [Longest(self.rows.max_len, self.rows.max_len)] * len(self._groups)
        fields = layout.device(buffer)
        largest = (max_first, max_continued)
        return DeviceStep(layout.shape, fields, *largest, longest, spans, keeps_all)

    def run(self, step: DeviceStep, forward: Forward | None = None) -> torch.Tensor:
        """Run the step, and return the kept hidden states. Logits and tokens are written to
        `self.logits` and `self.tokens`. `forward`: replaces the decoder's forward."""
        fields, cells = step.fields, self.rows.cells
        if step.shape.writes:
            cells.scatter_(0, fields["writes_at"], fields["writes"])
        if forward is None:
            hidden = self.decoder.forward(self.inputs(step), self.pool)
        else:
            hidden = forward(step)
        if step.shape.samples:
            self._sample(hidden, step, step.shape.samples)
        return hidden

    def inputs(self, step: DeviceStep, token_ids: torch.Tensor | None = None) -> StepInputs:
        """Return the inputs of the decoder. `token_ids`: by default the tokens in the rows."""
        shape, fields, groups = step.shape, step.fields, range(len(self._groups))
        if token_ids is None:
            token_ids = self.rows.cells.index_select(0, fields["read_at"])
        decode: Sequence[DecodeWork] = ()
        prefill: Sequence[PrefillWork] = ()
        kept = None
        if shape.decode_tokens:
            longest = [group.decode for group in step.longest]
            decode = self._decode_rows(step, shape.decode_tokens, shape.queries, longest)
        if shape.chunks and not step.keeps_all:
            longest = [group.samples for group in step.longest]
            kept = KeptTokens(fields["sampled"], self._decode_rows(step, shape.samples, 1, longest))
        if shape.chunks:
            prefill = [
                PrefillWork(
                    fields["chunk_rows"],
                    fields[f"chunk_starts{group}"],
                    fields["cu_tokens"],
                    shape.chunk_tokens,
                    step.max_first,
                    step.max_continued,
                    step.spans[group],
                )
                for group in groups
            ]
        slots = [fields[f"slots{group}"] for group in groups]
        tables, positions = self.rows.tables, fields["positions"]
        return StepInputs(token_ids, positions, slots, tables, decode, prefill, kept)

    def _decode_rows(
        self, step: DeviceStep, tokens: int, queries: int, longest: Sequence[int]
    ) -> list[DecodeWork]:
        """Return the first `tokens` samples as rows of decode attention, for each KV group."""
        decoder, count = self.decoder, tokens // queries
        fields = ["rows", *(f"lengths{group}" for group in range(len(self._groups)))]
        rows, *lengths = (step.fields[name][:tokens] for name in fields)
        if queries > 1:  # the length of a row is the length at its last token
            last = slice(queries - 1, None, queries)
            rows, lengths = rows[last].contiguous(), [part[last].contiguous() for part in lengths]
        found = []
        for group, max_length, seen in zip(self._groups, longest, lengths, strict=True):
            splits = self._splits(group, max_length, count, queries)
            # Allocated here, so that all graphs of a memory pool use the same memory.
            scratch = decoder.kernels.decode_scratch(
                count * queries, group.num_heads, group.head_dim, splits, decoder.device
            )
            found.append(DecodeWork(rows, seen, queries, splits, scratch))
        return found

    def _splits(self, group: _Group, longest: int, count: int, queries: int) -> int:
        if not count:
            return 1
        # Rounded up to a power of two, so that few different launches occur.
        length = min(1 << max(0, longest - 1).bit_length(), self.rows.max_len)
        length = length if group.window is None else min(length, group.window)
        kernels = self.decoder.kernels
        if group.latent_width:
            heads = group.num_heads * queries
            return kernels.latent_decode_splits(count, heads, group.latent_width, length)
        return kernels.decode_splits(count, group.num_kv_heads, length)

    def _sample(self, hidden: torch.Tensor, step: DeviceStep, count: int) -> None:
        fields = step.fields
        if len(hidden) != count:  # the hidden states of all tokens
            hidden = hidden.index_select(0, fields["sampled"])
        logits = self.decoder.head(hidden, out=self.logits[:count])
        if self.decoder.ranks.rank:
            return  # rank 0 samples for all ranks (`TorchExecutor.follow`)
        self.decoder.kernels.sample(
            logits,
            DrawParams(
                temperature=fields["temperature"],
                top_k=fields["top_k"],
                top_p=fields["top_p"],
                min_p=fields["min_p"],
                key0=fields["key0"],
                key1=fields["key1"],
            ),
            out=self.tokens[:count],
            cells=self.rows.cells,
            write_at=fields["write_at"],
        )
