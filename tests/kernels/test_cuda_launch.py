"""Launches that skip Triton's dispatch give the driver what it would be given by that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402
from twostroke.exec.cuda import CudaExecutor  # noqa: E402
from twostroke.model.fused import FusedDecoder  # noqa: E402

from tests.equivalence.harness import small_spec  # noqa: E402
from tests.kernels import no_gpu  # noqa: E402
from tests.kernels.test_cuda_compiles import BF16, empty, pool  # noqa: E402
from twostroke.exec import start  # noqa: E402
from twostroke.exec.graphs import DecodeGraphs, PieceGraphs, Run, piece_ladder  # noqa: E402
from twostroke.exec.program import StepProgram  # noqa: E402
from twostroke.exec.rows import DeviceRows  # noqa: E402
from twostroke.kv.pool import KVPool  # noqa: E402
from twostroke.model.weights.dummy import DummyWeights  # noqa: E402

HOOKS = slice(10, 13)  # and what they are given


class Seen:
    """What reached the driver, and how often Triton dispatched."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.dispatched = 0

    def launched(self, *args: Any) -> None:
        pointers = (a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args)
        self.launches.append(tuple(pointers))

    def of(self, run: Callable[[], object]) -> tuple[list[tuple[Any, ...]], int]:
        self.launches, self.dispatched = [], 0
        run()
        found = [each[: HOOKS.start] + each[HOOKS.stop :] for each in self.launches]
        return found, self.dispatched


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Seen:
    from twostroke.kernels.cuda import launch

    found, run = Seen(), JITFunction.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        found.dispatched += 1
        return run(self, *args, **options)

    monkeypatch.setattr(JITFunction, "run", counted)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    no_gpu.install(found.launched, monkeypatch.setattr)
    return found


class Step:
    """64 tokens: 32 slots, then two chunks."""

    def __init__(self) -> None:
        self.qkv, self.out = empty(64, 48, 128), empty(64, 32, 128)
        self.tables, self.ints = empty(40, 64, dtype=torch.int32), empty(33, dtype=torch.int32)
        self.rows = self.ints[1:]  # of no alignment that a kernel may count on
        self.ends = empty(3, dtype=torch.int32)

    def bind(self, keys: torch.Tensor, values: torch.Tensor) -> list[Callable[..., object]]:
        from twostroke.kernels import cuda

        where, two = (keys, values, self.tables), self.rows[:2]
        scratch = cuda.decode_scratch(32, 32, 128, 2, torch.device("cpu"))
        q, prefill, prefill_out = self.qkv[:32, :32], self.qkv[32:], self.out[32:]
        slots = cuda.bind_decode_attention(
            q, *where, self.rows, self.rows, 0.1, None, 2, scratch, self.out[:32]
        )
        chunks = cuda.bind_prefill_attention(
            prefill[:, :32],
            *where,
            two,
            two,
            self.ends,
            16,
            0.1,
            None,
            prefill_out,
            prefill[:, 32:],
            16,
        )
        return [slots, chunks]


def test_layers_after_the_first_are_launched_as_triton_would(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.kernels.cuda import launch

    step, first, second = Step(), pool(8, 128), pool(8, 128)
    bound = step.bind(*first)

    def attend(cache: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], object]:
        return lambda: [attend(*cache) for attend in bound]

    _, dispatched = seen.of(attend(first))
    assert dispatched == 3  # slots, chunks that begin, others
    repeated, dispatched = seen.of(attend(second))
    assert dispatched == 0
    monkeypatch.setattr(launch, "_compiled", {})
    bound = step.bind(*second)
    wanted, dispatched = seen.of(attend(second))
    assert dispatched == 3
    # All but the scratch, which is the step's own.
    assert [_without_scratch(each) for each in repeated] == [_without_scratch(e) for e in wanted]
    bound = step.bind(*first)  # another step, of the same kind
    again, dispatched = seen.of(attend(second))
    assert dispatched == 0
    assert [_without_scratch(each) for each in again] == [_without_scratch(e) for e in wanted]


def _without_scratch(launch: tuple[Any, ...]) -> tuple[Any, ...]:
    slots_only = HOOKS.start + 7
    is_slots = launch[2] == 32
    return launch[:slots_only] + launch[slots_only + 3 :] if is_slots else launch


def test_a_cache_that_is_not_aligned_goes_by_triton(seen: Seen) -> None:
    step, first, second = Step(), pool(8, 128), pool(8, 128)
    odd = empty(2 * first[0].numel() + 1)[1:].view(2, *first[0].shape)
    decode = step.bind(*first)[0]
    # Not even where it comes first, and nothing else was compiled.
    (other,), dispatched = seen.of(lambda: decode(*odd))
    assert dispatched == 1
    (plain,), dispatched = seen.of(lambda: decode(*first))
    assert dispatched == 1
    (repeated,), dispatched = seen.of(lambda: decode(*second))
    assert dispatched == 0
    (also_other,), dispatched = seen.of(lambda: decode(*odd))
    assert dispatched == 1
    assert other == also_other
    cache = slice(HOOKS.start + 1, HOOKS.start + 3)
    assert other[cache] == tuple(part.data_ptr() for part in odd)
    assert repeated[cache] == tuple(part.data_ptr() for part in second)
    assert plain[: cache.start] == repeated[: cache.start]
    assert plain[cache.stop :] == repeated[cache.stop :]
    bound = step.bind(*odd)[0]
    for each in (odd, first, odd):
        assert seen.of(partial(bound, *each))[1] == 1


def test_what_a_kernel_is_specialised_on_is_not_mixed_up(seen: Seen) -> None:
    """Other strides and types are other kernels; numbers that are not specialised are not."""
    from twostroke.kernels import cuda

    weight = empty(256)

    def norm(x: torch.Tensor) -> Callable[[], object]:
        return lambda: cuda.rms_norm(x, weight, 1e-5)

    wide = empty(8, 512)
    for x, dispatched in (
        (empty(8, 256), 1),
        (empty(9, 256), 0),
        (wide[:, :256], 1),
        (wide[:, 8:264], 0),
        (wide[:, 1:257], 1),
        (wide[:, 1:257], 1),
        (empty(8, 256, dtype=torch.float32), 1),
        (empty(1, 256, dtype=BF16), 0),
    ):
        launches, found = seen.of(norm(x))
        assert found == dispatched
        assert launches[0][HOOKS.start] == x.data_ptr()


def test_other_versions_of_triton_go_their_own_way(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.kernels.cuda import launch
    from twostroke.kernels.cuda.decode import _decode

    monkeypatch.setattr(triton, "__version__", "4.0.0")
    assert not launch.Variant(_decode).can_repeat
    monkeypatch.setattr(triton, "__version__", "3.7.1+git")
    assert launch.Variant(_decode).can_repeat


def test_what_is_compiled_ahead_is_all_that_a_start_launches(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.kernels import cuda
    from twostroke.kernels.cuda import launch

    cpu, spec = torch.device("cpu"), small_spec(head_dim=128, windows=(None,) * 2)
    kernels: Any = cuda
    decoder = FusedDecoder(spec, DummyWeights(spec), torch.float16, cpu, 64, kernels, True)
    rows, sizes = DeviceRows(2, 64, 16, 1, cpu), [1, 2]
    compiled, compile_one = [0], JITFunction._do_compile

    def counted(*args: Any) -> Any:
        compiled[0] += 1
        return compile_one(*args)

    built: list[str] = []
    build = nvidia.compile_module_from_src

    def noted(**given: Any) -> Any:
        built.append(given["src"])
        return build(**given)

    monkeypatch.setattr(nvidia, "compile_module_from_src", noted)
    monkeypatch.setattr(JITFunction, "_do_compile", counted)
    launches, _ = seen.of(lambda: start.compile_kernels(decoder, torch.float16, rows, 64, sizes))
    assert not launches
    assert not launch._compiled
    ahead, compiled[0] = compiled[0], 0
    assert ahead > 10
    launchers = set(built)
    built.clear()

    program = StepProgram(decoder, KVPool(spec, 0, 16, torch.float16, cpu), rows)

    def record(run: Run) -> Run:
        run()
        rows.cells.zero_()  # what a kernel that does not run has left there is no token
        return run

    for plan in start.warm_plans(2, 64, 64):
        executor = CudaExecutor(program, None)
        executor.sample(executor.forward(plan)).wait()
        rows.reset()
        rows.cells.zero_()
    program.sampler.logprobs(program.logits, np.arange(2), program.tokens, 20)
    DecodeGraphs(program, sizes, record)
    PieceGraphs(program, piece_ladder(64), record)
    assert compiled[0] == 0
    assert built
    assert launchers.issuperset(built)


def test_what_was_compiled_ahead_once_is_not_looked_at_again(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from twostroke.kernels import cuda

    ran: list[str] = []
    cuda.compile_ahead(lambda: ran.append("one"), ("a model", [1, 2]))
    cuda.compile_ahead(lambda: ran.append("again"), ("a model", [1, 2]))
    cuda.compile_ahead(lambda: ran.append("other"), ("a model", [1, 2, 4]))
    assert ran == ["one", "other"]
    with pytest.raises(ZeroDivisionError):
        cuda.compile_ahead(lambda: 1 // 0, "a failure")
    cuda.compile_ahead(lambda: ran.append("after a failure"), "a failure")
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    cuda.compile_ahead(lambda: ran.append("other version"), ("a model", [1, 2]))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
    cuda.compile_ahead(lambda: ran.append("other place"), ("a model", [1, 2]))
    assert ran[2:] == ["after a failure", "other version", "other place"]


def test_sources_are_parsed_one_at_a_time(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Python fails now and then: `AST constructor recursion depth mismatch`."""
    now, most, parse = [0], [0], JITFunction.parse

    def counted(self: Any) -> Any:
        now[0] += 1
        most[0] = max(most[0], now[0])
        sleep(0.01)  # where two are in here at all, they meet
        tree = parse(self)
        now[0] -= 1
        return tree

    monkeypatch.setattr(JITFunction, "parse", counted)
    assert _compile_norms("norms", 256, 512, 1024) == 3
    assert most == [1]
    assert JITFunction.parse is counted
    assert _compile_norms("norms", 256, 512, 1024) == 0


def test_what_fails_ahead_is_compiled_where_it_is_launched(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Any) -> Any:
        if current_thread() is not main_thread():
            raise SystemError("no luck")
        return parse(self)

    parse = JITFunction.parse
    with monkeypatch.context() as patched:
        patched.setattr(JITFunction, "parse", failing)
        assert _compile_norms("failing", 2048, 4096) == 2
    assert _norm(2048)().shape == (8, 2048)
    assert _compile_norms("failing", 2048, 4096) == 2  # that it failed was not noted as done
    assert _compile_norms("failing", 2048, 4096) == 0


def _norm(width: int) -> Callable[[], torch.Tensor]:
    from twostroke.kernels import cuda

    return lambda: cuda.rms_norm(empty(8, width), empty(width), 1e-5)


def _compile_norms(name: str, *widths: int) -> int:
    """How many kernels were asked for. None may be one that this process has compiled before."""
    from twostroke.kernels import cuda

    asked: list[int] = []

    def run() -> None:
        for width in widths:
            _norm(width)()
            asked.append(width)

    cuda.compile_ahead(run, name)
    return len(asked)
