"""What was faster than the library on an H200, by `rows.table_key`: a `Tiling`. Empty: nothing was
timed yet, and the library has it all. `tests.gpu.rows_check --tune` writes this file."""

from __future__ import annotations

TILES: dict[str, tuple[int, ...]] = {}
