"""`TensorRows`: the rows of `state.py` as tensors, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twostroke.exec.state import RowState


class TensorRows(RowState[torch.Tensor]):
    def __init__(
        self,
        max_rows: int,
        max_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
    ) -> None:
        self.device = device
        super().__init__(max_rows, max_len, block_size, num_groups)

    def _zeros(self, rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=torch.int32, device=self.device)

    def _ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)
