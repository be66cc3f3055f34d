"""Row state that persists between steps, one row per request: tokens, block tables, sampling
settings.

    cells   [ tables of group 0 | tables of group 1 | … | tokens of each row | spare ]      int32

Tables and tokens are views of the same cells. All changes of a plan (new prompts, appended blocks,
blocks that leave a window) are one list of cells and values. The executor writes sampled tokens to
the cells, so that the next step can read the tokens before the scheduler receives them. Padding
reads and writes the spare cell.

The cells are in host memory (`HostRows`, without torch) or in device memory (`device_rows.py`). The
host always has the tables, and the sampling settings of each row in arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twostroke.exec.logits import plain_from
from twostroke.exec.samples import draft_cells
from twostroke.plan import BlockEvict, NewRow, StepPlan

Ints = npt.NDArray[np.int64]


class Writes(NamedTuple):
    """Cells to write before a step runs. Each cell occurs once."""

    at: Ints
    values: npt.NDArray[np.int32]


NO_WRITES = Writes(np.empty(0, np.int64), np.empty(0, np.int32))


class RowState:
    """The rows of all running requests."""

    def __init__(self, max_rows: int, max_len: int, block_size: int, num_groups: int) -> None:
        blocks, width = -(-max_len // block_size), max_len + 1
        self.block_size = block_size
        self.max_rows, self.max_len, self.num_groups = max_rows, max_len, num_groups
        self.num_table_cells = num_groups * max_rows * blocks
        self.spare = self.num_table_cells + max_rows * width
        self.rows: dict[int, NewRow] = {}  # the request of each row
        self._host_cells = self._allocate()
        self._host_tables = self._host_cells[: self.num_table_cells].reshape(
            num_groups, max_rows, blocks
        )
        self._filled = [[0] * max_rows for _ in range(num_groups)]
        self._dropped = [[0] * max_rows for _ in range(num_groups)]
        # Number of evicted cache entries of each row: index = position − evicted.
        self._evicted = np.zeros((num_groups, max_rows), np.int64)
        self._has_evicted = False  # true after the first eviction
        self.temperature = np.zeros(max_rows, np.float32)  # 0: greedy
        self.top_k = np.zeros(max_rows, np.int32)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.logprobs = np.full(max_rows, -1, np.int64)  # requested number; -1: none

    def _allocate(self) -> npt.NDArray[np.int32]:
        """Allocate the cells in host memory: at least the tables."""
        return np.zeros(self.num_table_cells, np.int32)

    def reset(self) -> None:
        """Free all rows. Each new row overwrites its cells."""
        self.rows.clear()
        self._host_tables[:] = 0
        self._evicted[:] = 0
        for lengths in (*self._filled, *self._dropped):
            lengths[:] = [0] * self.max_rows

    # ── applying a plan ─────────────────────────────────────────────────────────────────────

    def apply(self, plan: StepPlan) -> Writes:
        """Apply a plan. Return the cells to write."""
        token_writes = self._token_writes(plan)
        if not (plan.new or plan.appended or plan.dropped or plan.retired or plan.evicted):
            return token_writes
        at: list[int] = []
        values: list[int] = []
        retired = set(plan.retired)
        # One plan may drop blocks of a row, then retire the row, then give it to a new request.
        for drop in plan.dropped:
            if drop.row not in retired:  # the next owner of a retired row writes the whole table
                first, dropped = self._table_cell(drop.group, drop.row), self._dropped[drop.group]
                at += range(first + dropped[drop.row], first + drop.upto)
                values += [0] * (drop.upto - dropped[drop.row])
                dropped[drop.row] = drop.upto
        for row in plan.retired:
            del self.rows[row]
            self._evicted[:, row] = 0
            for lengths in (*self._filled, *self._dropped):
                lengths[row] = 0
        for append in plan.appended:
            filled = self._filled[append.group]
            start, count = filled[append.row], len(append.blocks)
            first = self._table_cell(append.group, append.row) + start
            at += range(first, first + count)
            values += append.blocks
            filled[append.row] = start + count
        places, cells = np.array(at, np.int64), np.array(values, np.int32)
        self._host_cells[places] = cells
        if plan.evicted:
            places, cells = self._remove_evicted(plan.evicted, places)
        if not plan.new and not len(token_writes.at):
            return Writes(places, cells)
        parts, tokens = [places, token_writes.at], [cells, token_writes.values]
        for new in plan.new:
            self._take(new)
            first = self._token_cell(new.row)
            parts.append(np.arange(first, first + len(new.tokens)))
            tokens.append(np.array(new.tokens, np.int32))
        return Writes(np.concatenate(parts), np.concatenate(tokens))

    def _token_writes(self, plan: StepPlan) -> Writes:
        """Return the writes of the plan's tokens for running rows: drafts, which the step reads
        like written tokens, and tokens that another model has written."""
        if not (plan.draft_tokens or plan.written):
            return NO_WRITES
        rows, positions, tokens = draft_cells(plan)
        at, values = [self.token_cells(rows, positions)], [tokens]
        for row, position, written in plan.written:
            first = self._token_cell(row) + position
            at.append(np.arange(first, first + len(written)))
            values.append(np.array(written, np.int32))
        return Writes(np.concatenate(at), np.concatenate(values))

    def _remove_evicted(self, evicted: tuple[BlockEvict, ...], written: Ints) -> Writes:
        """Remove evicted entries from tables. Return `written` and the changed cells."""
        changed = [written]
        for row, start, stop in evicted:
            table, filled = self._host_tables[0, row], self._filled[0]
            table[start : filled[row] - (stop - start)] = table[stop : filled[row]].copy()
            first = self._table_cell(0, row)
            changed.append(np.arange(first + start, first + filled[row]))
            filled[row] -= stop - start
            self._evicted[0, row] += (stop - start) * self.block_size
        self._has_evicted = True
        places = np.unique(np.concatenate(changed))
        return Writes(places, self._host_cells[places])

    def _take(self, new: NewRow) -> None:
        row, params = new.row, new.params
        self.rows[row] = new
        self.temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_k[row] = max(0, min(params.top_k, 2**31 - 1))
        self.top_p[row], self.min_p[row] = params.top_p, params.min_p
        self.seed[row] = new.seed % 2**64
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs

    # ── addresses ───────────────────────────────────────────────────────────────────────────

    def _table_cell(self, group: int, row: int) -> int:
        _, rows, blocks = self._host_tables.shape
        return (group * rows + row) * blocks

    def _token_cell(self, row: int) -> int:
        return self.num_table_cells + row * (self.max_len + 1)

    def token_cells(self, rows: Ints, positions: Ints) -> Ints:
        return self.num_table_cells + rows * (self.max_len + 1) + positions

    def indices(self, group: int, rows: Ints, positions: Ints) -> Ints:
        """Return the cache index of each position."""
        return positions - self._evicted[group, rows] if self._has_evicted else positions

    def slots(self, group: int, rows: Ints, indices: Ints) -> Ints:
        """Return the slot in the pool, block · block_size + offset; -1 for the null block."""
        block, offset = np.divmod(indices, self.block_size)
        number = self._host_tables[group, rows, block].astype(np.int64)
        slots = number * self.block_size + offset
        slots[number == 0] = -1
        return slots


class HostRows(RowState):
    """Rows with all cells in host memory. The system allocates pages at first use."""

    def __init__(self, max_rows: int, max_len: int, block_size: int, num_groups: int) -> None:
        super().__init__(max_rows, max_len, block_size, num_groups)
        self.tables = list(self._host_tables)  # per group: [rows, blocks]
        tokens = self._host_cells[self.num_table_cells : self.spare]
        self.tokens = tokens.reshape(max_rows, max_len + 1)
        self.sampling = np.zeros((max_rows, 7), np.float32)  # `params` of the native sampler
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.plain_from = np.zeros(max_rows, np.int64)  # see `logits.plain_from`

    def _allocate(self) -> npt.NDArray[np.int32]:
        return np.zeros(self.spare + 1, np.int32)

    def apply(self, plan: StepPlan) -> Writes:
        writes = super().apply(plan)
        self._host_cells[writes.at] = writes.values
        return writes

    def _take(self, new: NewRow) -> None:
        super()._take(new)
        row, params = new.row, new.params
        self.sampling[row] = (
            self.temperature[row],
            params.top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        self.num_prompt[row] = new.num_prompt
        self.plain_from[row] = plain_from(new)
