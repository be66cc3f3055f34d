"""Products of e4m3 with e4m3 whose tiles are cut into parts: what each program has, that parts come
together, and the kernel compiled for an H200.

Triton's interpreter has no Gluon: what a program does with the arguments that `multiply` gives it
is written down here once more, in plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.kernels import hgmma  # noqa: E402
from tests.kernels.definitions import DEPENDENT  # noqa: E402
from tests.kernels.test_cuda_compiles import (  # noqa: E402, F401
    BF16,
    compiled,
    empty,
    spilled_bytes,
)
from tests.kernels.test_cuda_stream_k import product_loops  # noqa: E402
from twostroke.kernels.cuda import elementwise, stream_k, w8a8, w8a8_hopper  # noqa: E402
from twostroke.kernels.cuda.w8a8_hopper import BLOCK, WEIGHT_ROWS, plan  # noqa: E402
from twostroke.kernels.records import DEFAULT_CONTEXT, StepContext  # noqa: E402
from twostroke.kernels.w8a8 import E4M3, INT8, QuantizedActivations, W8Weight, w8_weight  # noqa: E402

of_tested = pytest.mark.skipif(not stream_k.GLUON_IS_TESTED, reason="another Gluon")


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    """Clear the caches of values that a test replaces."""
    cached = (stream_k.is_hopper, stream_k.num_multiprocessors, w8a8_hopper._variant)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def unread_weight(columns: int, inner: int, type: torch.dtype = E4M3, groups: int = 1) -> W8Weight:
    return w8_weight(empty(columns, inner, dtype=type), empty(columns, groups, dtype=torch.float32))


def unread_rows(
    rows: int, inner: int, type: torch.dtype = E4M3, to: torch.dtype = BF16
) -> QuantizedActivations:
    scale = empty(rows, dtype=torch.float32)
    return QuantizedActivations(empty(rows, inner, dtype=type), scale, to)


# ── what each program has ───────────────────────────────────────────────────────────────────


def test_every_block_of_every_tile_is_some_programs_once() -> None:
    of, heights = Random(1), set()
    for _ in range(2000):
        rows = of.choice((of.randint(2, 8), of.randint(65, 256)))
        columns = of.choice((of.randint(1, 400), of.randint(1, 9000)))
        blocks = of.choice((1, 2, 3, 7, 32, 112, of.randint(1, 200)))
        programs = of.choice((1, 7, 78, 114, 132, of.randint(1, 200)))
        work = plan(rows, columns, blocks, programs)
        tiles = -(-columns // (2 * WEIGHT_ROWS))
        if work is None:
            assert (2 if rows > 64 else 1) * tiles > programs
            continue
        heights.add(work.rows)
        assert (work.row_tiles - 1) * work.rows < rows <= work.row_tiles * work.rows
        assert work.tiles == work.row_tiles * tiles
        assert work.tiles * work.parts <= programs
        starts = [part * work.blocks_per_part for part in range(work.parts)]
        assert all(start < blocks for start in starts)
        assert work.parts * work.blocks_per_part >= blocks
    assert heights == {w8a8_hopper.FEW_HEIGHT, *w8a8_hopper.HEIGHTS}


def test_parts_are_even() -> None:
    """Products take longer if programs have parts of two tiles each, though all are busy."""
    assert plan(128, 4096, 112, 132) == w8a8_hopper.SplitKPlan(64, 2, 64, 2, 56)
    assert plan(128, 6144, 32, 132) == w8a8_hopper.SplitKPlan(64, 2, 96, 1, 32)
    assert plan(256, 4096, 112, 132) == w8a8_hopper.SplitKPlan(128, 2, 64, 2, 56)
    assert plan(5, 6144, 32, 132) == w8a8_hopper.SplitKPlan(16, 1, 48, 2, 16)
    assert plan(100, 1024, 32, 132) == w8a8_hopper.SplitKPlan(64, 2, 16, 8, 4)


# ── how parts come together ─────────────────────────────────────────────────────────────────


class Simulated:
    """A variant that runs here, its programs in a given order, each until it waits."""

    def __init__(self, turns: Callable[[list[int]], list[int]], waits: bool = True) -> None:
        self.turns, self.waits, self.waited = turns, waits, 0

    def of(self, kernel: Any, **given: Any) -> Callable[..., None]:
        def call(grid: tuple[int], tensors: Any, varying: Any, context: StepContext) -> None:
            values = (*tensors, *varying)
            self.run(grid[0], SimpleNamespace(**dict(zip(kernel.arg_names, values)), **given))  # noqa: B905

        return call

    def run(self, programs: int, of: Any) -> None:
        assert of.x.block_shape == [of.ROWS, BLOCK]
        assert of.weight.block_shape == [WEIGHT_ROWS, BLOCK]
        assert of.x.base.shape[0] in (of.num_rows, of.row_tiles * of.ROWS)
        if of.partial is not None:
            assert of.partial.numel() == programs * 2 * WEIGHT_ROWS * of.ROWS
            of.partial.fill_(float("nan"))
        order = self.turns([*range(programs)])
        running = [self.consume(of, program, consumer) for program in order for consumer in (0, 1)]
        while running:
            before = of.arrived.clone(), len(running)
            running = [each for each in running if next(each, None) is not None]
            assert not torch.equal(before[0], of.arrived) or len(running) < before[1], "they wait"

    def consume(self, of: Any, program: int, consumer: int) -> Iterator[bool]:
        tile, part = divmod(program, of.parts)
        row = tile % of.row_tiles * of.ROWS
        column = tile // of.row_tiles * 2 * WEIGHT_ROWS + consumer * WEIGHT_ROWS
        at = slice(part * of.blocks_per_part * BLOCK, (part + 1) * of.blocks_per_part * BLOCK)
        # What is fetched from beyond a matrix is zero.
        sums = torch.zeros(WEIGHT_ROWS, of.ROWS)
        lines = of.weight.base[column : column + WEIGHT_ROWS, at].float()
        found = lines @ of.x.base[row : row + of.ROWS, at].float().t()
        sums[: found.shape[0], : found.shape[1]] = found
        if of.partial is not None:
            slots = of.partial.view(-1, of.parts, 2, WEIGHT_ROWS, of.ROWS)[tile, :, consumer]
            if part > 0:
                slots[part] = sums
                of.arrived[tile] += 1 << (16 * consumer)
                return
            while self.waits and of.arrived[tile] >> (16 * consumer) & 0xFFFF < of.parts - 1:
                self.waited += 1
                yield True
            of.arrived[tile] -= (of.parts - 1) << (16 * consumer)
            sums = sums + slots[1:].sum(0)
        place = of.out[row : row + of.ROWS, column : column + WEIGHT_ROWS]
        assert place.isnan().all()
        scaled = sums.t()[: place.shape[0], : place.shape[1]]
        scaled = scaled * of.scale[column : column + WEIGHT_ROWS].flatten()
        place.copy_(scaled * of.x_scale[row : row + of.ROWS].unsqueeze(1))


def simulate(
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int, int],
    simulated: Simulated,
    room: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product and the expected one. Values are whole numbers, so that sums are exact."""
    rows, columns, blocks, programs = sizes
    w8a8_hopper._variant.cache_clear()
    monkeypatch.setattr(w8a8_hopper, "Variant", simulated.of)
    monkeypatch.setattr(w8a8_hopper, "num_multiprocessors", lambda: programs)
    values = torch.randint(-3, 4, (columns, blocks * BLOCK)).to(E4M3)
    weight = w8_weight(values, torch.randint(1, 4, (columns, 1)).float())
    x = elementwise.quantised_values(rows, blocks * BLOCK, E4M3, torch.device("cpu"))
    x.copy_(torch.randint(-3, 4, x.shape).to(E4M3))
    if not room:
        x = x.clone()
    rows8 = QuantizedActivations(x, torch.randint(1, 4, (rows,)).float(), torch.float32)
    right = x.float() @ values.float().t() * weight.scale.t() * rows8.scale.unsqueeze(1)
    found = w8a8_hopper.multiply(
        rows8, weight, DEFAULT_CONTEXT, torch.full_like(right, float("nan"))
    )
    assert not weight.arrived.any() or not simulated.waits
    return found, right


def at_random(programs: list[int]) -> list[int]:
    return Random(2).sample(programs, len(programs))


@of_tested
@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 300, 9, 12),
        (65, 66, 1, 132),
        (100, 300, 5, 132),  # parts that are not all as long
        (128, 384, 7, 12),
        (150, 700, 3, 40),
        (256, 256, 16, 4),  # nothing is cut
    ],
)
def test_parts_come_together(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int, int], room: bool
) -> None:
    torch.manual_seed(sizes[0])
    orders: list[Callable[[list[int]], list[int]]] = [list, lambda of: of[::-1], at_random]
    for turns in orders:
        found, right = simulate(monkeypatch, sizes, Simulated(turns), room)
        assert torch.equal(found, right)


@of_tested
def test_who_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, right = simulate(monkeypatch, (100, 300, 5, 132), Simulated(list, waits=False))
    assert not torch.equal(found, right)


# ── compiled ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.full
@of_tested
@pytest.mark.parametrize(("rows", "height"), [(8, 16), (100, 64), (200, 128)])
def test_products_run_one_after_another(
    compiled: list[Any],  # noqa: F811
    tmp_path: Path,
    rows: int,
    height: int,
) -> None:
    x = unread_rows(rows, 14336)
    w8a8_hopper.multiply(x, unread_weight(4096, 14336), DEFAULT_CONTEXT)  # in parts
    w8a8_hopper.multiply(x, unread_weight(8192, 14336), DEPENDENT)  # whole
    assert len({kernel.hash for kernel in compiled}) == 2
    for kernel, pdl in zip(compiled, (False, True), strict=True):
        code = kernel.asm["ptx"]
        assert "cp.async.bulk.tensor" in code
        before, *behind = code.split("griddepcontrol.wait")
        assert bool(behind) == pdl
        assert "cp.async.bulk.tensor" in before, "the weight's, at the least"
        assert kernel.metadata.shared <= 227 << 10
        assert spilled_bytes(kernel, tmp_path) == 0
        loops = product_loops(kernel, tmp_path, "QGMMA")
        assert len(loops) == 2, "a consumer each"
        for lines in loops:
            products = [line.split()[0] for line in lines if line.startswith("QGMMA")]
            assert products == 4 * [f"QGMMA.64x{height}x32.F32.E4M3.E4M3"]
            assert hgmma.waits(lines) == [1], "the one before"


@pytest.mark.full
@of_tested
def test_one_kernel_has_all_rows_of_a_height(compiled: list[Any]) -> None:  # noqa: F811
    for rows in (65, 100, 128):
        w8a8_hopper.multiply(unread_rows(rows, 4096), unread_weight(4096, 4096), DEFAULT_CONTEXT)
    assert len({kernel.hash for kernel in compiled}) == 1


# ── who multiplies ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that products chose, on a Hopper card with 132 multiprocessors."""
    found: list[str] = []

    def way(name: str) -> Callable[..., torch.Tensor]:
        def call(*_: object) -> torch.Tensor:
            found.append(name)
            return empty(1)

        return call

    monkeypatch.setattr(w8a8_hopper, "is_hopper", lambda: True)
    monkeypatch.setattr(w8a8_hopper, "num_multiprocessors", lambda: 132)
    monkeypatch.setattr(w8a8_hopper, "multiply", way("parts"))
    monkeypatch.setattr(w8a8, "launch_tiled", way("tiles"))
    monkeypatch.setattr(w8a8, "library_product", way("library"))
    return found


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "way"),
    [
        (2, 4096, 4096, "parts"),
        (8, 16896, 4096, "parts"),
        (8, 17024, 4096, "tiles"),
        (9, 4096, 4096, "tiles"),
        (64, 4096, 4096, "tiles"),
        (65, 4096, 4096, "parts"),
        (128, 6144, 4096, "parts"),
        (128, 8448, 4096, "parts"),
        (128, 8576, 4096, "library"),  # a tile more than two for each column of programs
        (129, 4096, 4096, "library"),
        (129, 4096, 14336, "parts"),
        (256, 4096, 14336, "parts"),
        (256, 6144, 14336, "library"),  # parts of one
        (257, 4096, 14336, "library"),
        (100, 4096, 4160, "library"),
    ],
)
def test_some_products_are_multiplied_in_parts(
    ways: list[str], rows: int, columns: int, inner: int, way: str
) -> None:
    weight, x = unread_weight(columns, inner).to_meta(), unread_rows(rows, inner)
    w8a8.w8a8_product(x, weight)
    assert ways == [way]


def test_others_are_not(ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = unread_weight(256, 512)
    values = empty(100 * 512 + 1, dtype=E4M3)[1:].view(100, 512)  # not aligned
    w8a8.w8a8_product(QuantizedActivations(values, empty(100, dtype=torch.float32), BF16), weight)
    w8a8.w8a8_product(unread_rows(100, 512, to=torch.float32), weight)
    w8a8.w8a8_product(unread_rows(100, 512), weight, out=empty(100, 256, dtype=torch.float32))
    assert ways == 3 * ["library"]
    w8a8.w8a8_product(unread_rows(100, 512, INT8), unread_weight(256, 512, INT8))
    assert ways[3:] == ["tiles"]
    w8a8.w8a8_product(unread_rows(100, 512), weight)
    assert ways[4:] == ["parts"]
    monkeypatch.setattr(w8a8_hopper, "is_hopper", lambda: False)
    w8a8.w8a8_product(unread_rows(100, 512), weight)
    assert ways[5:] == ["library"]


def test_rows_have_room_for_whole_tiles() -> None:
    for rows, room in ((1, 1), (64, 64), (65, 128), (128, 128), (129, 256), (300, 384)):
        values = elementwise.quantised_values(rows, 256, E4M3, torch.device("cpu"))
        assert values.shape == (rows, 256)
        assert values.is_contiguous()
        assert w8a8_hopper._with_room(values, room).shape == (room, 256)
        assert w8a8_hopper._with_room(values, room + 1).shape == (rows, 256)
