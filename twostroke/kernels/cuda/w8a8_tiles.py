"""The fastest tilings on an H200 of products of int8 with int8, by `w8a8.int8_key`.
`tests.gpu.formats_check --type int8 --tune` writes this file."""

from __future__ import annotations

TILES: dict[str, tuple[int, ...]] = {}
