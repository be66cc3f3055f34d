"""Steps planned by hand on the torch executor: rows with given texts, blocks in no order.

What a step samples is forgotten, so that every backend continues the same text and every step can
be compared, whichever token it would have written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tests.rows import put
from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.graphs import DecodeGraphs, PieceGraphs, Record, ladder
from twostroke.exec.program import StepProgram
from twostroke.exec.torch_executor import TorchExecutor
from twostroke.kv.pool import KVPool
from twostroke.model.torch.decoder import Decoder
from twostroke.plan import BlockAppend, Chunk, NewRow, PhaseWork, Slot, StepPlan
from twostroke.request import SamplingParams


class Rig:
    def __init__(
        self,
        decoder: Decoder,
        texts: Sequence[Sequence[int]],
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
        record: Record | None = None,
    ) -> None:
        """`record`: steps run in graphs that it makes."""
        self.decoder, self.texts = decoder, texts
        spec, device, max_rows = decoder.spec, decoder.device, len(texts)
        max_len = max(map(len, texts)) + 16
        groups, per_row = len(spec.kv_groups()), -(-max_len // block_size)
        blocks = [max_rows * per_row] * groups
        self.pool = KVPool(spec, blocks, block_size, kv_dtype or decoder.dtype, device)
        self.rows = DeviceRows(max_rows, max_len, block_size, groups, device)
        graphs = pieces = None
        with torch.inference_mode():
            self.program = StepProgram(decoder, self.pool, self.rows, max_samples=4 * max_rows)
            self.logits = self.program.logits
            if record is not None:
                graphs = DecodeGraphs(self.program, ladder(max_rows), record)
                pieces = PieceGraphs(self.program, [64, 128], record)
        self.executor = TorchExecutor(self.program, graphs, pieces)
        new, appended = [], []
        for row, text in enumerate(texts):
            params = SamplingParams()
            new.append(NewRow(row, f"r{row}", tuple(text), len(text), params, 0, frozenset(), ()))
            for group in range(groups):
                generator = torch.Generator().manual_seed(row + group)
                order = torch.randperm(per_row, generator=generator)
                numbers = tuple(1 + row * per_row + n for n in order.tolist())
                appended.append(BlockAppend(row, group, numbers))
        put(self.rows, self.plan(new=tuple(new), appended=tuple(appended)))

    def plan(self, **what: object) -> StepPlan:
        work = {"prefill_work": PhaseWork(), "decode_work": PhaseWork()}
        empty: dict[str, object] = dict.fromkeys(StepPlan._fields, ()) | work
        return StepPlan(**(empty | {"step": 0} | what))  # type: ignore[arg-type]

    def step(self, decode: Sequence[Slot] = (), prefill: Sequence[Chunk] = ()) -> Tensor:
        """The logits of the step's samples."""
        tokens = sum(1 + slot.drafts for slot in decode)
        plan = self.plan(
            decode=tuple(decode),
            prefill=tuple(prefill),
            decode_work=PhaseWork(len(decode), tokens),
            prefill_work=PhaseWork(len(prefill), sum(chunk.size for chunk in prefill)),
        )
        handle = self.executor.forward(plan)
        logits = self.program.logits[: len(handle.samples.rows)].clone()
        for row, text in enumerate(self.texts):
            self.rows.tokens[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        return logits

    def forced(self, prompts: Sequence[int], chunk: int) -> Iterator[tuple[list[int], Tensor]]:
        """Prompts of these lengths in chunks of at most so many tokens beside the rows that decode
        already; then every row to its text's end. For each step the rows that were sampled, and
        their logits."""
        done = [0] * len(self.texts)
        while any(at < len(text) for at, text in zip(done, self.texts, strict=True)):
            slots, chunks, left = [], [], chunk
            for row, (at, prompt) in enumerate(zip(done, prompts, strict=True)):
                if at >= prompt and at < len(self.texts[row]):
                    slots.append(Slot(row, at))
                elif at < prompt and left:
                    size = min(left, prompt - at)
                    chunks.append(Chunk(row, at, size, at + size == prompt))
                    left -= size
            sampled = [slot.row for slot in slots] + [one.row for one in chunks if one.last]
            yield sampled, self.step(slots, chunks)
            for slot in slots:
                done[slot.row] += 1
            for one in chunks:
                done[one.row] += one.size
