"""`DeviceRows`: rows with cells in device memory, written by one scatter per step."""

from __future__ import annotations

import torch

from twostroke.exec.rows import RowState


class DeviceRows(RowState):
    """Row state with tables and tokens in device memory."""

    def __init__(
        self, max_rows: int, max_len: int, block_size: int, num_groups: int, device: torch.device
    ) -> None:
        super().__init__(max_rows, max_len, block_size, num_groups)
        self.device = device
        self.cells = torch.zeros(self.spare + 1, dtype=torch.int32, device=device)
        tables = self.cells[: self.num_table_cells].view(self._host_tables.shape)
        self.tables = list(tables)  # per group: [rows, blocks]
        self.tokens = self.cells[self.num_table_cells : self.spare].view(max_rows, max_len + 1)
