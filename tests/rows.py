"""`put`: applies a plan to device rows, like the program of a step."""

from __future__ import annotations

import torch

from twostroke.exec.device_rows import DeviceRows
from twostroke.plan import StepPlan


def put(rows: DeviceRows, plan: StepPlan) -> None:
    writes = rows.apply(plan)
    assert len(set(writes.at.tolist())) == len(writes.at)
    at, values = (torch.from_numpy(part).to(rows.cells.device) for part in writes[:2])
    rows.cells.scatter_(0, at, values)
