"""What persists from step to step, one row a request: tokens, block tables, sampling settings.

A plan says only what changes (`apply`). Sampled tokens are written here by the device, so the
next step can read them without the host having seen them.
"""

from __future__ import annotations

import torch

from twostroke.plan import NewRow, StepPlan


class RowState:
    def __init__(
        self,
        max_rows: int,
        max_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
    ) -> None:
        blocks = -(-max_len // block_size)
        self.device = device
        self.block_size = block_size
        self.tokens = torch.zeros(max_rows, max_len + 1, dtype=torch.int32, device=device)
        self.tables = [
            torch.zeros(max_rows, blocks, dtype=torch.int32, device=device)
            for _ in range(num_groups)
        ]
        self.rows: dict[int, NewRow] = {}  # what each row was taken with
        self._table_len = [[0] * max_rows for _ in range(num_groups)]

    def reset(self) -> None:
        """No row is taken. What the tensors hold is written anew with each new row."""
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
            ids = torch.tensor(new.tokens, dtype=torch.int32)
            self.tokens[new.row, : len(new.tokens)] = ids.to(self.device)
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
            where = torch.tensor([rows, columns], dtype=torch.int64, device=self.device)
            table[where[0], where[1]] = torch.tensor(blocks, dtype=torch.int32, device=self.device)
