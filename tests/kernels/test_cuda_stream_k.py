"""The stream-K product of 4-bit weights: what each program has, that its parts come together, and
the kernel compiled for an H200.

Triton's interpreter has no Gluon: what a program does with the arguments that `multiply` gives it
is written down here once more, in plain Python.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.runtime import driver  # noqa: E402

from tests.kernels import hgmma  # noqa: E402
from tests.kernels.definitions import DEPENDENT  # noqa: E402
from tests.kernels.no_gpu import NoGPU  # noqa: E402
from tests.kernels.test_cuda_compiles import (  # noqa: E402, F401
    BF16,
    CUOBJDUMP,
    compiled,
    empty,
    spilled_bytes,
)
from twostroke.kernels.cuda import packed, stream_k  # noqa: E402
from twostroke.kernels.cuda.stream_k import BLOCK, WEIGHT_ROWS, StreamKPlan, plan  # noqa: E402
from twostroke.kernels.packed import (  # noqa: E402
    Codes,
    PackedWeight,
    dequantised,
    pack,
    packed_weight,
)
from twostroke.kernels.records import DEFAULT_CONTEXT, StepContext  # noqa: E402

FP16 = torch.float16
of_tested = pytest.mark.skipif(not stream_k.GLUON_IS_TESTED, reason="another Gluon")


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    """Clear the caches of values that a test replaces."""
    cached = (stream_k.is_hopper, stream_k.num_multiprocessors, stream_k._variant)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


# ── what each program has ───────────────────────────────────────────────────────────────────


def place(work: StreamKPlan, blocks: int, program: int, unit: int) -> tuple[int, int]:
    """The tile that a program's unit belongs to, and the block of it."""
    whole = work.whole_tiles * blocks
    if unit < whole:
        return unit // blocks * work.programs + program, unit % blocks
    rest = min(program * work.shared_blocks_each, work.shared_blocks) + unit - whole
    return work.whole_tiles * work.programs + rest // blocks, rest % blocks


def num_units(work: StreamKPlan, blocks: int, program: int) -> int:
    begin = min(program * work.shared_blocks_each, work.shared_blocks)
    return (
        work.whole_tiles * blocks + min(begin + work.shared_blocks_each, work.shared_blocks) - begin
    )


def parts(work: StreamKPlan, blocks: int, program: int) -> Iterator[tuple[int, int, int]]:
    """Yield each tile of a program with its first block there and its number of blocks."""
    unit, end = 0, num_units(work, blocks, program)
    while unit < end:
        tile, start = place(work, blocks, program, unit)
        count = min(blocks - start, end - unit)
        yield tile, start, count
        unit += count


def num_others(work: StreamKPlan, blocks: int, program: int, tile: int) -> int:
    """Parts that the program with a tile's first one waits for."""
    shared = tile - work.whole_tiles * work.programs
    return ((shared + 1) * blocks - 1) // work.shared_blocks_each - program


def sizes(count: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Rows, lines, blocks, programs, counters: of usual matrices, then at random."""
    rows = (65, 100, 128, 129, 150, 160, 161, 192, 193, 256, 257, 300, 1000, 2048)
    shapes = ((4096, 32), (6144, 32), (28672, 32), (4096, 112), (128256, 32))
    for each, (lines, blocks) in product(rows, shapes):
        yield each, lines, blocks, 132, -(-lines // 32)
    of = Random(1)
    for _ in range(count):
        lines = of.choice((of.randint(1, 400), of.randint(1, 9000)))
        blocks = of.choice((1, 2, 3, 7, 32, of.randint(1, 120)))
        programs = of.choice((1, 2, 3, 7, 20, 78, 132, of.randint(1, 200)))
        counters = of.choice((0, 1, 5, -(-lines // 32), -(-lines // 32)))
        yield of.randint(65, 2048), lines, blocks, programs, counters


def check_plan(rows: int, lines: int, blocks: int, programs: int, counters: int) -> int:
    """The height of a tile."""
    work = plan(rows, lines, blocks, programs, counters)
    assert work.programs == programs
    assert (work.row_tiles - 1) * work.tile_rows < rows <= work.row_tiles * work.tile_rows
    # In the order of programs, as whoever has a tile's first part adds them up.
    found: list[list[tuple[int, int, int]]] = [
        [] for _ in range(work.row_tiles * -(-lines // (2 * WEIGHT_ROWS)))
    ]
    for program in range(programs):
        mine = list(parts(work, blocks, program))
        for tile, start, count in mine:
            found[tile].append((program, start, count))
        shared = [start for _, start, count in mine if count < blocks]
        assert not any(shared[1:]), "nobody waits for what comes after a wait"
    num_shared = 0
    for tile, of_tile in enumerate(found):
        first = of_tile[0][0]
        assert [program for program, _, _ in of_tile] == [*range(first, first + len(of_tile))]
        at = 0
        for _, start, count in of_tile:
            assert start == at
            at += count
        assert at == blocks
        if len(of_tile) > 1:
            num_shared += 1
            assert 0 <= tile - work.whole_tiles * programs < counters
            assert len(of_tile) - 1 == num_others(work, blocks, first, tile) < 1 << 16
    assert num_shared <= counters
    assert work.shares_tiles(blocks) == (num_shared > 0)
    return work.tile_rows


def test_every_block_of_every_tile_is_some_programs_once() -> None:
    heights = {check_plan(*given) for given in sizes(600)}
    assert heights == {*OF_HEIGHT}


@pytest.mark.long
def test_every_block_of_every_tile_is_some_programs_once_of_many_sizes() -> None:
    for given in sizes(20_000):
        check_plan(*given)


def test_what_is_fetched_is_what_is_multiplied() -> None:
    for rows, lines, blocks, programs, counters in list(sizes(50))[::5]:
        work = plan(rows, lines, blocks, programs, counters)
        for program in {0, programs // 2, programs - 1}:
            units = range(num_units(work, blocks, program))
            fetched = [place(work, blocks, program, unit) for unit in units]
            multiplied = [
                (tile, block)
                for tile, start, count in parts(work, blocks, program)
                for block in range(start, start + count)
            ]
            assert fetched == multiplied


# ── how parts come together ─────────────────────────────────────────────────────────────────

Turns = Callable[[list[int]], list[int]]  # programs, in the order in which they come to run


def random_weight(columns: int, inner: int) -> PackedWeight:
    """Return a weight of whole numbers, so that sums are exact."""
    codes = torch.randint(0, 16, (columns, inner), dtype=torch.uint8)
    return pack(Codes(4, codes, torch.ones(columns, inner // 128)))


class Simulated:
    """A variant that runs here, and its programs in a given order, each until it waits."""

    def __init__(self, weight: PackedWeight, turns: Turns, waits: bool = True) -> None:
        self.lines, self.turns, self.waits = dequantised(weight, torch.float32), turns, waits
        self.waited = 0
        self.plan: StreamKPlan | None = None

    def of(self, kernel: Any, **given: Any) -> Callable[..., None]:
        def call(grid: tuple[int], tensors: Any, varying: Any, context: StepContext) -> None:
            values = (*tensors, *varying)
            self.run(grid[0], SimpleNamespace(**dict(zip(kernel.arg_names, values)), **given))  # noqa: B905

        return call

    def run(self, programs: int, of: Any) -> None:
        height = of.ROWS + of.EXTRA
        assert of.x.block_shape == [of.ROWS, BLOCK // 2]
        assert of.EXTRA == 0 or of.x_extra.block_shape == [of.EXTRA, BLOCK // 2]
        work = StreamKPlan(
            programs, height, of.row_tiles, of.whole_tiles, of.shared_blocks, of.shared_blocks_each
        )
        self.plan = work
        if of.partial is not None:
            of.partial.fill_(float("nan"))
        # What is fetched from beyond a matrix is zero.
        x = torch.zeros(of.row_tiles * height, of.BLOCKS * BLOCK)
        x[: of.num_rows] = of.x.base.float()
        lines = torch.zeros(len(self.lines) + 4 * WEIGHT_ROWS, x.shape[1])
        lines[: len(self.lines)] = self.lines
        order = self.turns([*range(programs)])
        running = [self.consume(work, of, x, lines, p, c) for p in order for c in (0, 1)]
        while running:
            before = of.arrived.clone(), len(running)
            running = [each for each in running if next(each, None) is not None]
            assert not torch.equal(before[0], of.arrived) or len(running) < before[1], "they wait"

    def consume(
        self,
        work: StreamKPlan,
        of: Any,
        x: torch.Tensor,
        lines: torch.Tensor,
        program: int,
        consumer: int,
    ) -> Iterator[bool]:
        N, blocks = of.N, of.BLOCKS
        columns = WEIGHT_ROWS // 2 if of.GATED else WEIGHT_ROWS  # of a consumer
        number = torch.arange(WEIGHT_ROWS)
        slots = torch.empty(0) if of.partial is None else of.partial
        slots = slots.view(-1, 2, WEIGHT_ROWS, work.tile_rows)
        for tile, start, count in parts(work, blocks, program):
            row = tile % of.row_tiles * work.tile_rows
            column = (tile // of.row_tiles * 2 + consumer) * columns
            line = column + number
            if of.GATED:
                line = column + number // 16 * 8 + number % 8 + number // 8 % 2 * N
            inner = slice(start * BLOCK, (start + count) * BLOCK)
            sums = lines[line, inner] @ x[row : row + work.tile_rows, inner].t()
            shared, unit = tile - work.whole_tiles * work.programs, 1 << 16 * consumer
            if start > 0:
                assert slots[program, consumer].isnan().all()
                slots[program, consumer] = sums
                of.arrived[shared] += unit
                continue
            if count < blocks:
                others = num_others(work, blocks, program, tile)
                while self.waits and int(of.arrived[shared]) // unit & 0xFFFF < others:
                    self.waited += 1
                    yield True
                for other in range(program + 1, program + 1 + others):
                    sums += slots[other, consumer]
                of.arrived[shared] -= others * unit
            if of.GATED:
                gate, up = sums.view(WEIGHT_ROWS // 16, 2, 8, work.tile_rows).unbind(1)
                sums = (gate * up).flatten(0, 1)
            place = of.out[row : row + work.tile_rows, column : column + columns]
            assert place.isnan().all()
            place.copy_(sums.t()[: place.shape[0], : place.shape[1]])


def simulate(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    columns: int,
    blocks: int,
    programs: int,
    gated: bool,
    turns: Turns,
    **how: bool,
) -> tuple[torch.Tensor, torch.Tensor, Simulated]:
    """Return the product, the expected one and the simulated launch."""
    stream_k._variant.cache_clear()
    weight = random_weight(columns, blocks * BLOCK)
    simulated = Simulated(weight, turns, **how)
    monkeypatch.setattr(stream_k, "Variant", simulated.of)
    monkeypatch.setattr(stream_k, "num_multiprocessors", lambda: programs)
    x = torch.randint(-2, 3, (rows, blocks * BLOCK)).to(BF16)
    right = x.float() @ dequantised(weight, torch.float32).t()
    if gated:
        right = right[:, : columns // 2] * right[:, columns // 2 :]
    out = torch.full_like(right, float("nan"))
    found = stream_k.multiply(x, weight, "silu" if gated else None, DEFAULT_CONTEXT, out)
    assert not weight.arrived.any() or how
    return found, right, simulated


def forwards(programs: list[int]) -> list[int]:
    return programs


def backwards(programs: list[int]) -> list[int]:
    return programs[::-1]


def at_random(programs: list[int]) -> list[int]:
    return Random(2).sample(programs, len(programs))


@pytest.mark.parametrize(
    ("rows", "columns", "blocks", "programs"),
    [
        (65, 66, 1, 132),
        (100, 300, 5, 7),  # one row of tiles, which are shared by all
        (150, 700, 3, 3),
        (180, 1400, 6, 9),
        (256, 1100, 16, 8),  # whole tiles as well
        (300, 1030, 4, 20),
        (600, 330, 7, 132),
        (1000, 258, 2, 1),
    ],
)
def test_parts_come_together(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, blocks: int, programs: int
) -> None:
    torch.manual_seed(rows)
    for gated, turns in product((False, True), (forwards, backwards, at_random)):
        how = (rows, columns, blocks, programs, gated, turns)
        found, right, simulated = simulate(monkeypatch, *how)
        assert torch.equal(found, right)
        assert simulated.plan is not None
        if turns is forwards:
            assert (simulated.waited > 0) == simulated.plan.shares_tiles(blocks)
        elif turns is backwards:
            assert simulated.waited == 0, "all that programs wait for is later ones'"


def test_who_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    how = (100, 300, 5, 7, False, forwards)
    found, right, simulated = simulate(monkeypatch, *how, waits=False)
    assert simulated.waited == 0
    assert not torch.equal(found, right)


# ── compiled ────────────────────────────────────────────────────────────────────────────────

WIDE, INNER = 28672, 4096  # of a weight where all heights of tiles are some rows'
EVEN = 2 * WEIGHT_ROWS * stream_k.H200_MULTIPROCESSORS  # lines of one where no tile is shared
# A number of rows for each of the heights, which fills no tile.
OF_HEIGHT = {
    plan(rows, WIDE, INNER // BLOCK, 132, WIDE // 32).tile_rows: rows
    for rows in range(65, 257)[::-1]
}
FORMATS = [(128, ""), (128, "zero"), (128, "offset"), (64, ""), (32, "zero"), (32, "offset")]


def unread_weight(
    columns: int, inner: int, group: int = 128, kind: str = "", bits: int = 4
) -> PackedWeight:
    shape = (columns, inner // group)
    codes = empty(columns, inner * bits // 8, dtype=torch.uint8)
    zero = empty(*shape, dtype=torch.uint8) if kind == "zero" else None
    offset = empty(*shape, dtype=FP16) if kind == "offset" else None
    return packed_weight(bits, codes, empty(*shape, dtype=FP16), zero, offset)


def product_loops(kernel: Any, folder: Path, name: str = "HGMMA") -> list[list[str]]:
    """The innermost loops that have products; `name`: of these."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [str(CUOBJDUMP), "--dump-sass", str(cubin)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = [(int(address, 16), line) for address, line in hgmma.LINE.findall(shown)]
    place = {address: n for n, (address, _) in enumerate(code)}
    spans = []
    for n, (address, line) in enumerate(code):
        back = hgmma.BACK.match(line)
        if back is not None and int(back[1], 16) < address:
            spans.append(range(place[int(back[1], 16)], n + 1))
    # What tries again where one waits lies behind all else, and returns into the middle of a loop.
    loops = [
        span
        for span in spans
        if not any(other.start < span.start < other.stop < span.stop for other in spans)
        and any(code[at][1].startswith(name) for at in span)
    ]
    found: list[range] = []
    for span in sorted(loops, key=len):
        if all(span.stop <= other.start or other.stop <= span.start for other in found):
            found.append(span)
    return [[code[at][1] for at in span] for span in sorted(found, key=lambda span: span.start)]


def check_kernel(kernel: Any, folder: Path, height: int, dtype: torch.dtype, pdl: bool) -> None:
    code = kernel.asm["ptx"]
    assert ("griddepcontrol.wait" in code) == pdl
    assert bool(kernel.metadata.launch_pdl) == pdl
    assert "cp.async.bulk.tensor" in code
    assert kernel.metadata.shared <= 227 << 10
    loops = product_loops(kernel, folder)
    assert len(loops) == 2, "a consumer each"
    kind = ".F32.BF16" if dtype == BF16 else ".F32"
    for lines in loops:
        products = [line for line in lines if line.startswith("HGMMA")]
        shapes = [re.match(r"HGMMA\.64x(\d+)x16(\S+) R\d+, R\d+, gdesc", line) for line in products]
        assert {found and found[2] for found in shapes} == {kind}
        assert sum(int(found[1]) for found in shapes if found) * 16 == height * BLOCK
        assert not [line for line in lines if line.startswith(("LDL", "STL"))]
        assert hgmma.overwritten(lines) == []
    # Nor between products and the waits for them anywhere else.
    assert hgmma.overwritten(hgmma.loop(kernel, folder)) == []
    assert spilled_bytes(kernel, folder) == 0


@pytest.mark.full
@of_tested
@pytest.mark.parametrize("height", [*OF_HEIGHT])
def test_products_run_while_numbers_are_made(
    compiled: list[Any],  # noqa: F811
    tmp_path: Path,
    height: int,
) -> None:
    weight, x = unread_weight(WIDE, INNER), empty(OF_HEIGHT[height], INNER)
    stream_k.multiply(x, weight, None, DEPENDENT)
    stream_k.multiply(x, weight, "silu", DEFAULT_CONTEXT)
    assert len(compiled) == 2
    for kernel, pdl in zip(compiled, (True, False), strict=True):
        check_kernel(kernel, tmp_path, height, BF16, pdl)


@pytest.mark.full
@of_tested
@pytest.mark.parametrize(
    ("group", "kind", "lines", "gated"),
    [
        (128, "zero", WIDE, False),
        (32, "zero", WIDE, True),
        (32, "offset", WIDE, True),
        (128, "", EVEN, False),
    ],
)
def test_other_formats_in_fp16(
    compiled: list[Any],  # noqa: F811
    tmp_path: Path,
    group: int,
    kind: str,
    lines: int,
    gated: bool,
) -> None:
    height = max(OF_HEIGHT)
    x = empty(OF_HEIGHT[height], INNER, dtype=FP16)
    activation = "gelu_tanh" if gated else None
    stream_k.multiply(x, unread_weight(lines, INNER, group, kind), activation, DEPENDENT)  # type: ignore[arg-type]
    check_kernel(compiled[0], tmp_path, height, FP16, True)


@of_tested
@pytest.mark.long
@pytest.mark.parametrize(("group", "kind"), FORMATS)
@pytest.mark.parametrize("height", [*OF_HEIGHT])
def test_all_of_them(
    compiled: list[Any],  # noqa: F811
    tmp_path: Path,
    group: int,
    kind: str,
    height: int,
) -> None:
    for lines, gated, dtype in ((WIDE, False, FP16), (WIDE, True, BF16), (EVEN, False, BF16)):
        weight = unread_weight(lines, INNER, group, kind)
        x = empty(OF_HEIGHT[height], INNER, dtype=dtype)
        stream_k.multiply(x, weight, "silu" if gated else None, DEFAULT_CONTEXT)
        check_kernel(compiled[-1], tmp_path, height, dtype, False)


@pytest.mark.full
@of_tested
def test_one_kernel_has_all_rows_of_a_height(compiled: list[Any]) -> None:  # noqa: F811
    for rows in (65, 100, 128):
        stream_k.multiply(empty(rows, INNER), unread_weight(WIDE, INNER), None, DEPENDENT)
    assert len({kernel.hash for kernel in compiled}) == 1


# ── who multiplies ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that products chose, on Hopper unless a test says otherwise."""
    found: list[str] = []

    def way(name: str) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor, weight: PackedWeight, *_: object) -> torch.Tensor:
            found.append(name)
            return empty(len(x), weight.shape[0])

        return call

    monkeypatch.setattr(stream_k, "is_hopper", lambda: True)
    monkeypatch.setattr(stream_k, "multiply", way("stream-K"))
    monkeypatch.setattr(packed, "run", way("tiles"))
    monkeypatch.setattr(packed, "library_product", way("library"))
    monkeypatch.setattr(packed, "act_and_mul", lambda x, *_, **__: x)
    return found


def both(x: torch.Tensor, weight: PackedWeight) -> None:
    packed.packed_product(x, weight)
    packed.packed_gated_product(x, weight, "silu")


@pytest.mark.parametrize(
    ("rows", "way"),
    [
        (1, "tiles"),
        (64, "tiles"),
        (65, "stream-K"),
        (300, "stream-K"),
        (2048, "stream-K"),
        (2049, "library"),
    ],
)
def test_some_rows_are_multiplied_here(ways: list[str], rows: int, way: str) -> None:
    for kind in ("", "zero", "offset"):
        both(empty(rows, 512), unread_weight(256, 512, 128, kind))
    assert ways == 6 * [way]


@pytest.mark.parametrize("group", [32, 64, 128, 256, 512])
def test_groups_that_are_multiplied_here(ways: list[str], group: int) -> None:
    both(empty(100, 512), unread_weight(256, 512, group))
    assert ways == 2 * ["stream-K"]


@pytest.mark.parametrize(
    ("inner", "group", "bits"), [(512, 128, 8), (512, 16, 4), (320, 64, 4), (384, 96, 4)]
)
def test_weights_that_are_not(ways: list[str], inner: int, group: int, bits: int) -> None:
    both(empty(100, inner), unread_weight(256, inner, group, bits=bits))
    assert len(ways) == 2
    assert "stream-K" not in ways


def test_rows_that_are_not(ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = unread_weight(256, 512)
    both(empty(100 * 512 + 1)[1:].view(100, 512), weight)  # not aligned
    assert ways == 2 * ["tiles"]
    both(empty(512, 100).t(), weight)
    both(empty(100, 512, dtype=torch.float32), weight)
    assert ways[2:] == 4 * ["library"]
    both(empty(100, 512), weight)
    assert ways[6:] == 2 * ["stream-K"]
    monkeypatch.setattr(stream_k, "is_hopper", lambda: False)
    both(empty(100, 512), weight)
    both(empty(300, 512), weight)
    assert ways[8:] == [*2 * ["tiles"], *2 * ["library"]]


def test_an_out_of_another_type_is_not(ways: list[str]) -> None:
    x, weight = empty(100, 512), unread_weight(256, 512)
    packed.packed_product(x, weight, out=empty(100, 256, dtype=torch.float32))
    packed.packed_product(x, weight, out=empty(100, 256))
    assert ways == ["tiles", "stream-K"]


@pytest.mark.parametrize(
    ("arch", "known", "interpreted", "expected"),
    [
        (90, True, "0", True),
        (80, True, "0", False),
        (100, True, "0", False),
        (90, False, "0", False),
        (90, True, "1", False),
    ],
)
def test_a_gpu_and_a_triton_that_can(
    monkeypatch: pytest.MonkeyPatch, arch: int, known: bool, interpreted: str, expected: bool
) -> None:
    gpu = NoGPU(pytest.fail)
    monkeypatch.setattr(gpu, "get_current_target", lambda: SimpleNamespace(arch=arch))
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr(stream_k, "GLUON_IS_TESTED", known)
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    assert stream_k.is_hopper() == expected
