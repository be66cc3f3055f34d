"""The fastest tilings of int8 products on an H200, by `w8a8.int8_key`.
`tests.gpu.formats_check --type int8 --tune` writes this file."""

from __future__ import annotations

TILES: dict[str, tuple[int, ...]] = {}
