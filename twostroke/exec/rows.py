"""`DeviceRows`: what persists on a device from step to step, written by one scatter a step.

    cells   [ tables of group 0 | … | tokens, a row each | spare ]       one tensor of int32

Tables and tokens are views of the same cells, so that everything a plan changes in them (new
prompts, blocks appended, blocks passed by a window) is one list of places and values. The device
writes the tokens it samples there itself. The spare cell is what padding reads and writes.

The host keeps what it needs to build a step without asking the device: a copy of the tables, and
each row's sampling settings as arrays that a step gathers from.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from twostroke.plan import NewRow, StepPlan

Ints = npt.NDArray[np.int64]


class Writes(NamedTuple):
    """Cells to change before a step runs. No cell is named twice."""

    at: Ints
    values: npt.NDArray[np.int32]


NOTHING = Writes(np.empty(0, np.int64), np.empty(0, np.int32))


class DeviceRows:
    def __init__(
        self, max_rows: int, max_len: int, block_size: int, num_groups: int, device: torch.device
    ) -> None:
        blocks, width = -(-max_len // block_size), max_len + 1
        self.device, self.block_size = device, block_size
        self.max_rows, self.max_len, self.num_groups = max_rows, max_len, num_groups
        self._first_token = num_groups * max_rows * blocks
        self.spare = self._first_token + max_rows * width
        self.cells = torch.zeros(self.spare + 1, dtype=torch.int32, device=device)
        tables = self.cells[: self._first_token].view(num_groups, max_rows, blocks)
        self.tables = list(tables)
        self.tokens = self.cells[self._first_token : self.spare].view(max_rows, width)
        self.rows: dict[int, NewRow] = {}  # what each row was taken with
        self._host_cells = np.zeros(self._first_token, np.int32)
        self._host_tables = self._host_cells.reshape(num_groups, max_rows, blocks)
        self._filled = [[0] * max_rows for _ in range(num_groups)]
        self._dropped = [[0] * max_rows for _ in range(num_groups)]
        self.temperature = np.zeros(max_rows, np.float32)  # 0: greedy
        self.top_k = np.zeros(max_rows, np.int32)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.logprobs = np.full(max_rows, -1, np.int64)  # how many are asked for; -1: none

    def reset(self) -> None:
        """No row is taken. What the tensors hold is written anew with each new row."""
        self.rows.clear()
        self._host_cells[:] = 0
        for lengths in (*self._filled, *self._dropped):
            lengths[:] = [0] * self.max_rows

    # ── what a plan changes ─────────────────────────────────────────────────────────────────

    def apply(self, plan: StepPlan) -> Writes:
        """Take in a plan; what the device is to be told of it."""
        if not (plan.new or plan.appended or plan.dropped or plan.retired):
            return NOTHING
        at: list[int] = []
        values: list[int] = []
        retired = set(plan.retired)
        for drop in plan.dropped:
            if drop.row not in retired:  # else whoever takes the row writes the table anew
                first, dropped = self._cell(drop.group, drop.row), self._dropped[drop.group]
                at += range(first + dropped[drop.row], first + drop.upto)
                values += [0] * (drop.upto - dropped[drop.row])
                dropped[drop.row] = drop.upto
        for row in plan.retired:
            del self.rows[row]
            for lengths in (*self._filled, *self._dropped):
                lengths[row] = 0
        for append in plan.appended:
            filled = self._filled[append.group]
            start, count = filled[append.row], len(append.blocks)
            first = self._cell(append.group, append.row) + start
            at += range(first, first + count)
            values += append.blocks
            filled[append.row] = start + count
        places, cells = np.array(at, np.int64), np.array(values, np.int32)
        self._host_cells[places] = cells
        if not plan.new:
            return Writes(places, cells)
        parts, tokens = [places], [cells]
        for new in plan.new:
            self._take(new)
            first = self._first_token + new.row * (self.max_len + 1)
            parts.append(np.arange(first, first + len(new.tokens)))
            tokens.append(np.array(new.tokens, np.int32))
        return Writes(np.concatenate(parts), np.concatenate(tokens))

    def _cell(self, group: int, row: int) -> int:
        """Where a row's table begins."""
        _, rows, blocks = self._host_tables.shape
        return (group * rows + row) * blocks

    def _take(self, new: NewRow) -> None:
        row, params = new.row, new.params
        self.rows[row] = new
        self.temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_k[row] = max(0, min(params.top_k, 2**31 - 1))
        self.top_p[row], self.min_p[row] = params.top_p, params.min_p
        self.seed[row] = new.seed % 2**64
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs

    # ── where things are ────────────────────────────────────────────────────────────────────

    def token_cells(self, rows: Ints, positions: Ints) -> Ints:
        return self._first_token + rows * (self.max_len + 1) + positions

    def slots(self, group: int, rows: Ints, positions: Ints) -> Ints:
        """Where keys and values go: block · block_size + offset; -1 for the null block."""
        block, offset = np.divmod(positions, self.block_size)
        number = self._host_tables[group, rows, block].astype(np.int64)
        slots = number * self.block_size + offset
        slots[number == 0] = -1
        return slots
