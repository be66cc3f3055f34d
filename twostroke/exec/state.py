"""What persists from step to step, one row a request: tokens, block tables, sampling settings.

A plan says only what changes (`apply`). Sampled tokens are written here by the executor, so that
the next step can read them without the scheduler having seen them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from twostroke.plan import NewRow, StepPlan

# Arrays or tensors of int32: what is asked of them here, both do.
Array = TypeVar("Array", bound=Any)
Ints = npt.NDArray[np.int32]


class RowState(ABC, Generic[Array]):
    def __init__(self, max_rows: int, max_len: int, block_size: int, num_groups: int) -> None:
        blocks = -(-max_len // block_size)
        self.block_size = block_size
        self.tokens = self._zeros(max_rows, max_len + 1)
        self.tables = [self._zeros(max_rows, blocks) for _ in range(num_groups)]
        self.rows: dict[int, NewRow] = {}  # what each row was taken with
        self._table_len = [[0] * max_rows for _ in range(num_groups)]

    @abstractmethod
    def _zeros(self, rows: int, columns: int) -> Array: ...

    @abstractmethod
    def _ints(self, values: Sequence[int]) -> Array: ...

    def reset(self) -> None:
        """No row is taken. What the arrays hold is written anew with each new row."""
        self.rows.clear()
        for lengths in self._table_len:
            lengths[:] = [0] * len(lengths)

    def apply(self, plan: StepPlan) -> None:
        # A row may be dropped from, retired and taken anew in one plan: in this order.
        for drop in plan.dropped:
            self.tables[drop.group][drop.row, : drop.upto] = 0
        for row in plan.retired:
            del self.rows[row]
            for lengths in self._table_len:
                lengths[row] = 0
        for new in plan.new:
            self.rows[new.row] = new
            self.tokens[new.row, : len(new.tokens)] = self._ints(new.tokens)
        if plan.appended:
            self._append_blocks(plan)

    def _append_blocks(self, plan: StepPlan) -> None:
        for group, table in enumerate(self.tables):
            rows: list[int] = []
            columns: list[int] = []
            blocks: list[int] = []
            lengths = self._table_len[group]
            for append in plan.appended:
                if append.group == group:
                    start, added = lengths[append.row], len(append.blocks)
                    rows += [append.row] * added
                    columns += range(start, start + added)
                    blocks += append.blocks
                    lengths[append.row] = start + added
            table[rows, columns] = self._ints(blocks)


class HostRows(RowState[Ints]):
    """In the host's memory, without torch. Pages are taken when a row first reaches them."""

    def _zeros(self, rows: int, columns: int) -> Ints:
        return np.zeros((rows, columns), np.int32)

    def _ints(self, values: Sequence[int]) -> Ints:
        return np.array(values, np.int32)
