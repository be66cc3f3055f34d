"""A plan → the tensors of one step. Built anew each step, apart from the rows that persist."""

from __future__ import annotations

import numpy as np
import torch

from twostroke.exec.tensor_rows import TensorRows
from twostroke.model.batch import ChunkInputs, DecodeInputs, StepInputs
from twostroke.plan import StepPlan


def build_inputs(plan: StepPlan, state: TensorRows) -> StepInputs:
    decode, prefill, size = plan.decode, plan.prefill, state.block_size
    num_decode = len(decode)
    rows = np.array([slot.row for slot in decode], dtype=np.int64)
    positions = np.array([slot.position for slot in decode], dtype=np.int64)
    if prefill:
        sizes = [chunk.size for chunk in prefill]
        rows = np.concatenate([rows, np.repeat([chunk.row for chunk in prefill], sizes)])
        spans = [np.arange(chunk.start, chunk.start + chunk.size) for chunk in prefill]
        positions = np.concatenate([positions, *spans])
    row_ids = torch.from_numpy(rows).to(state.device)
    position_ids = torch.from_numpy(positions).to(state.device)
    block, offset = position_ids // size, position_ids % size
    slots = [table[row_ids, block].long() * size + offset for table in state.tables]
    chunks, sampled = [], list(range(num_decode))
    sampled_rows = [slot.row for slot in decode]
    sampled_positions = [slot.position + 1 for slot in decode]
    first = num_decode
    for chunk in prefill:
        tables = [table[chunk.row] for table in state.tables]
        chunks.append(ChunkInputs(first, chunk.size, chunk.start, tables))
        first += chunk.size
        if chunk.last:
            sampled.append(first - 1)
            sampled_rows.append(chunk.row)
            sampled_positions.append(chunk.start + chunk.size)
    decode_inputs = None
    if num_decode:
        decode_inputs = DecodeInputs(
            num_decode,
            [table[row_ids[:num_decode]] for table in state.tables],
            position_ids[:num_decode] + 1,
            int(positions[:num_decode].max()) + 1,
        )
    return StepInputs(
        token_ids=state.tokens[row_ids, position_ids],
        positions=position_ids,
        slots=slots,
        decode=decode_inputs,
        prefill=chunks,
        sampled=torch.tensor(sampled, dtype=torch.int64, device=state.device),
        sampled_rows=sampled_rows,
        sampled_positions=sampled_positions,
    )
