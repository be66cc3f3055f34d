"""What was the fastest on an H200, by `packed.table_key`: a `Streaming`, a `Tiling`, or nothing,
where the library was, with the weight dequantised. `tests.gpu.packed_check --tune` writes
this file."""

from __future__ import annotations

TILES: dict[str, tuple[int, ...]] = {}
