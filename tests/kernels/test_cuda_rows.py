"""The Triton products of 65 to 256 rows: interpreted, against products in fp64; and compiled for an
H200.

As in `test_cuda_interpreted.py`, what is interpreted runs in a pytest of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from twostroke.kernels import cuda
from twostroke.kernels.cuda import rows
from twostroke.kernels.cuda.backend import CudaKernels
from twostroke.kernels.cuda.rows import Tiling
from twostroke.model.linear import DenseLinear

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).parents[2]
# Whole tiles, tiles of 128 and 64 rows, and tiles that programs share.
WHOLE = Tiling(128, 64, 64, 4, False, False, 4, 3)
WAYS = [
    WHOLE,
    replace(WHOLE, rows=192, programs=1),
    replace(WHOLE, specialised=True),
    replace(WHOLE, split=True, programs=10),
    replace(WHOLE, rows=192, split=True, programs=7),
    replace(WHOLE, rows=256, columns=128, split=True, programs=1000),
]

if INTERPRETED:
    from tests.kernels.cuda_cases import BOUNDS, largest, poisoned, worst
    from tests.kernels.test_cuda_interpreted import (  # noqa: F401
        seeded,
        unwritten_memory_is_nan,
    )

    HALF, SINGLE = torch.float16, torch.float32  # the interpreter is faster in fp32

    def given(
        num_rows: int, columns: int, inner: int, dtype: torch.dtype = HALF
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = torch.randn(num_rows, inner), torch.randn(columns, inner) * inner**-0.5
        return x.to(dtype), weight.to(dtype)

    SIZES = [(200, 48, 144), (70, 48, 256)]

    @pytest.mark.parametrize(
        ("way", "num_rows", "columns", "inner", "dtype"),
        [(way, *SIZES[n % 2], SINGLE) for n, way in enumerate(WAYS)]
        + [(WAYS[4], 200, 48, 80, HALF), (replace(WHOLE, rows=64), 1100, 40, 64, SINGLE)],
        ids=str,
    )
    def test_products_equal_those_in_fp64(
        way: Tiling, num_rows: int, columns: int, inner: int, dtype: torch.dtype
    ) -> None:
        """Twice: the first must leave the counters as they were."""
        x, weight = given(num_rows, 2 * columns, inner, dtype)
        arrived = rows.make_arrivals(weight)
        right = x.double() @ weight.double().t()
        out = poisoned(num_rows, 2 * columns, like=x)
        assert rows.run(x, weight, way, None, arrived, False, out) is out
        error = worst(out, right)
        assert torch.equal(rows.run(x, weight, way, None, arrived, False), out)
        gated = F.silu(right[:, :columns]) * right[:, columns:]
        # Two roundings more: of each half, and of what the activation makes of them.
        acted = worst(rows.run(x, weight, way, "silu", arrived, False), gated)
        assert largest(error, acted / 2) < BOUNDS[dtype]
        assert not arrived.any()

    def test_a_row_is_the_same_whatever_the_number_of_rows(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Of one entry of the table, and whatever is in the other rows."""
        x, weight = given(160, 144, 256)
        way, ways = replace(WHOLE, split=True, programs=11), []
        monkeypatch.setattr(rows, "TILES", {"144×256, 160": tuple(map(int, astuple(way)))})
        run = rows.run

        def noted(*args: Any) -> torch.Tensor:
            ways.append(args[2])
            return run(*args)

        monkeypatch.setattr(rows, "run", noted)
        linear = DenseLinear(weight, None, CudaKernels(torch.device("cpu")))
        whole = linear.product(x)
        assert worst(whole, x.double() @ weight.double().t()) < BOUNDS[HALF]
        assert torch.equal(linear.product(x[:130].clone()), whole[:130])
        assert ways == [way, way]

    def test_a_part_that_is_not_there_yet_is_noticed() -> None:
        x, weight = given(128, 128, 512, SINGLE)
        way, arrived = replace(WHOLE, split=True, programs=8), rows.make_arrivals(weight)
        arrived[0] = 1  # the last part of the first tile is added up before it is there
        found = rows.run(x, weight, way, None, arrived, False)
        assert not worst(found, x.double() @ weight.double().t()) < 0.01

else:
    from tests.kernels.test_cuda_compiles import BF16, compiled, empty, spilled_bytes  # noqa: F401

    def test_products_equal_those_in_fp64_when_interpreted() -> None:
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__]
        env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
        child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]

    def test_tiles_compile_for_the_copy_engine_and_fit_in_registers(
        compiled: list[Any],  # noqa: F811
        tmp_path: Path,
    ) -> None:
        """Whole tiles, gated ones, and those that programs share: the next step is fetched, and the
        one before still multiplied, while one begins."""
        plain, pair = empty(4096, 4096), empty(28672, 4096)
        wide = Tiling(128, 256, 64, 132, False, False, 8, 3)
        rows.run(empty(256, 4096), plain, wide, None, None, False)
        split = replace(wide, split=True, num_stages=4)
        rows.run(empty(256, 4096), plain, split, None, rows.make_arrivals(plain), True)
        gated = replace(wide, columns=128)
        rows.run(empty(192, 4096), pair, gated, "silu", None, False)
        for kernel in compiled:
            code = kernel.asm["ptx"]
            assert "cp.async.bulk.tensor" in code
            assert "wgmma.mma_async.sync.aligned.m64n" in code
            assert re.search(r"wgmma.wait_group.sync.aligned [12]", code)
            assert kernel.metadata.shared <= 227 << 10
            assert spilled_bytes(kernel, tmp_path) == 0
        assert ["griddepcontrol.wait" in kernel.asm["ptx"] for kernel in compiled] == [
            False,
            True,
            False,
        ]

    def test_one_kernel_serves_all_shapes_of_a_tiling(compiled: list[Any]) -> None:  # noqa: F811
        way = Tiling(128, 128, 64, 128, False, False, 8, 3)
        for num_rows, columns, inner in ((72, 4096, 4096), (128, 6144, 4096), (256, 1024, 2048)):
            rows.run(empty(num_rows, inner), empty(columns, inner), way, None, None, False)
        assert len({kernel.hash for kernel in compiled}) == 1

    def test_an_empty_table_leaves_all_to_the_library() -> None:
        x, weight = torch.randn(128, 64).half(), torch.randn(48, 64).half()
        assert not rows.TILES or rows.choice(x, weight, False, None) is None
        assert torch.equal(cuda.product(x, weight), F.linear(x, weight))

    def test_what_the_table_says_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
        """Up to the rows of an entry, and where the copy engine takes what there is."""
        weight, way = empty(96, 64), replace(WHOLE, split=True)
        table = {"96×64, 96": tuple(map(int, astuple(way)))}
        monkeypatch.setattr(rows, "TILES", table)
        arrived = cuda.arrivals(weight)
        assert arrived is not None
        assert cuda.arrivals(empty(96, 6)) is None
        found = [rows.choice(empty(n, 64), weight, False, arrived) for n in (64, 72, 73, 96, 97)]
        assert found == [None, None, way, way, None]
        many = {"96×64, 4096": tuple(map(int, astuple(WHOLE)))}
        monkeypatch.setattr(rows, "TILES", table | many)
        sizes = (256, 300, 1024, 2048, 2049, 9000)
        found = [rows.choice(empty(n, 64), weight, False, None) for n in sizes]
        assert found == [None, None, None, None, WHOLE, WHOLE]
        x = empty(80, 64)
        assert rows.choice(x, weight, True, arrived) is None
        assert rows.choice(x, weight, False, None) is None
        assert rows.choice(x.float(), weight, False, arrived) is None
        assert rows.choice(empty(80 * 64 + 1)[1:].view(80, 64), weight, False, arrived) is None
        wide = empty(80, 96, dtype=torch.float32)
        assert rows.choice(x, weight, False, arrived, wide) is None
