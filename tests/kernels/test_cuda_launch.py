"""Launches that skip Triton's dispatch give the driver what it would be given by that."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tests.kernels import no_gpu  # noqa: E402
from tests.kernels.definitions import DEPENDENT  # noqa: E402
from tests.kernels.test_cuda_compiles import BF16, empty, pool  # noqa: E402
from twostroke.kernels.records import (  # noqa: E402
    AttentionRule,
    DecodeWork,
    KVView,
    PrefillWork,
    Rope,
)

HOOKS = slice(10, 13)  # and what they are given


class Seen:
    """The launches that reached the driver, and the number of Triton's dispatches."""

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
def seen(monkeypatch: pytest.MonkeyPatch, triton_cache: Path) -> Iterator[Seen]:
    found, run = Seen(), JITFunction.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        found.dispatched += 1
        return run(self, *args, **options)

    monkeypatch.setattr(JITFunction, "run", counted)
    forget_compiled()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(triton_cache))
    no_gpu.install(found.launched, monkeypatch.setattr)
    yield found
    forget_compiled()


@pytest.fixture
def empty_cache(seen: Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache for one test: `compile_ahead` finds no marks, and Triton finds no kernels, neither on
    the disk nor in this process."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, module in list(sys.modules.items()):
        if name.startswith("twostroke.kernels.cuda."):
            for kernel in vars(module).values():
                if isinstance(kernel, JITFunction):
                    kernel.device_caches.clear()


def forget_compiled() -> None:
    """Variants are made anew, as in another process; Triton still knows what it has compiled."""
    for name, variants in VARIANTS.items():
        module = import_module(f"twostroke.kernels.cuda.{name}")
        for made in variants:
            getattr(module, made).cache_clear()


VARIANTS = {
    "decode": ["_variant"],
    "prefill": ["_variant"],
    "prefill_hopper": ["_variant"],
    "rope_store": ["_variant"],
    "latent": ["_store_variant", "_decode_variant", "_merge_variant"],
    "latent_prefill": ["_variant", "_gather_variant"],
    "elementwise": ["_norm_variant", "_act_variant"],
    "product": ["_stream_variant", "_tiled_variant"],
}


class Step:
    """64 tokens: 32 slots, then two chunks."""

    def __init__(self) -> None:
        self.qkv, self.out = empty(64, 48, 128), empty(64, 32, 128)
        self.tables, self.ints = empty(40, 64, dtype=torch.int32), empty(33, dtype=torch.int32)
        self.rows = self.ints[1:]  # of no alignment that a kernel may count on
        self.ends = empty(3, dtype=torch.int32)

    def bind(
        self, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> list[Callable[..., object]]:
        from twostroke.kernels import cuda

        view = KVView(keys, values, self.tables, self.ints)
        rule, two = AttentionRule(0.1, sinks=sinks), self.rows[:2]
        scratch = cuda.decode_scratch(32, 32, 128, 2, torch.device("cpu"))
        q, prefill, prefill_out = self.qkv[:32, :32], self.qkv[32:], self.out[32:]
        decode_work = DecodeWork(self.rows, self.rows, 1, 2, scratch)
        slots = cuda.bind_decode_attention(q, view, rule, decode_work, out=self.out[:32])
        chunks = cuda.bind_prefill_attention(
            prefill[:, :32],
            view,
            rule,
            PrefillWork(two, two, self.ends, 32, 16, 16, ()),
            out=prefill_out,
            chunk_kv=prefill[:, 32:],
        )
        return [slots, chunks]


def test_layers_after_the_first_are_launched_as_triton_would(seen: Seen) -> None:
    step, first, second = Step(), pool(8, 128), pool(8, 128)
    bound = step.bind(*first)

    def attend(cache: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], object]:
        return lambda: [attend(*cache) for attend in bound]

    _, dispatched = seen.of(attend(first))
    assert dispatched == 3  # decode, first chunks, continued chunks
    repeated, dispatched = seen.of(attend(second))
    assert dispatched == 0
    forget_compiled()
    bound = step.bind(*second)
    wanted, dispatched = seen.of(attend(second))
    assert dispatched == 3
    # All but the scratch, which is the step's own.
    assert [_without_scratch(each) for each in repeated] == [_without_scratch(e) for e in wanted]
    bound = step.bind(*first)  # another step, of the same kind
    again, dispatched = seen.of(attend(second))
    assert dispatched == 0
    assert [_without_scratch(each) for each in again] == [_without_scratch(e) for e in wanted]


def test_the_sinks_of_another_layer_are_given_with_its_cache(seen: Seen) -> None:
    step, first, second = Step(), pool(8, 128), pool(8, 128)
    sinks = [empty(32, dtype=torch.float32), empty(33, dtype=torch.float32)[1:]]
    bound = step.bind(*first, sinks=sinks[0])
    at = HOOKS.start + 3
    for cache, own, dispatches in ((first, sinks[0], 3), (second, sinks[1], 0)):
        launches, dispatched = seen.of(partial(attend_all, bound, *cache, own))
        assert dispatched == dispatches
        assert [launch[at] for launch in launches] == [own.data_ptr()] * 3
        assert [launch[at - 2] for launch in launches[::2]] == [cache[0].data_ptr()] * 2


def attend_all(bound: list[Callable[..., object]], *layer: torch.Tensor) -> None:
    for attend in bound:
        attend(*layer)


def _without_scratch(launch: tuple[Any, ...]) -> tuple[Any, ...]:
    slots_only = HOOKS.start + 8
    is_slots = launch[2] == 32
    return launch[:slots_only] + launch[slots_only + 3 :] if is_slots else launch


@pytest.mark.full
def test_descriptors_of_another_layer_are_given_with_its_cache(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.kernels.cuda import prefill_hopper, stream_k

    if not stream_k.GLUON_IS_TESTED:
        pytest.skip("another Gluon")
    tuned = prefill_hopper.TUNINGS[128]
    monkeypatch.setattr(prefill_hopper, "choose", lambda *_: tuned)
    step, first, second = Step(), pool(8, 128), pool(8, 128)
    chunks = step.bind(*first)[1]
    assert seen.of(partial(chunks, *first))[1] == 2  # first chunks, continued chunks
    (own, repeated), dispatched = seen.of(partial(chunks, *second))
    assert dispatched == 0
    assert seen.of(partial(chunks, *second))[0] == [own, repeated]
    forget_compiled()
    (also_own, wanted), dispatched = seen.of(partial(step.bind(*second)[1], *second))
    assert dispatched == 2
    # All but the counters, which are the launch's own.
    counters = HOOKS.start + 7
    assert own[:counters] == also_own[:counters]
    assert own[counters + 1 :] == also_own[counters + 1 :]
    assert repeated[:counters] == wanted[:counters]
    assert repeated[counters + 1 :] == wanted[counters + 1 :]
    found = [each for each in wanted if isinstance(each, tuple) and "descriptor" in each]
    assert [each[1] for each in found] == [str(part.data_ptr()) for part in second]


def test_a_cache_that_is_not_aligned_goes_by_triton(seen: Seen) -> None:
    step, first, second = Step(), pool(8, 128), pool(8, 128)
    data = empty(9 * 4 * first[0][0].numel() + 1)[1:].view(9, 2, 2, *first[0].shape[1:])
    odd = data[:, 1, 0], data[:, 1, 1]
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


def test_versions_of_triton_that_were_not_tested_go_their_own_way(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.kernels import cuda
    from twostroke.kernels.cuda import launch
    from twostroke.kernels.cuda.decode import _decode

    assert launch.Variant(_decode).can_repeat
    version = triton.__version__
    for other in ("3.5.1", "3.99.0", "4.6.0"):
        monkeypatch.setattr(triton, "__version__", other)
        assert not launch.Variant(_decode).can_repeat
    forget_compiled()
    x, weight = empty(8, 256), empty(256)
    for _ in range(2):
        assert seen.of(lambda: cuda.rms_norm(x, weight, 1e-5))[1] == 1
    monkeypatch.setattr(triton, "__version__", version + "+git")
    assert launch.Variant(_decode).can_repeat


class AllKernels:
    """One of each launch, on tensors of a device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.cache = self.empty(9, 2, 2, 16, 2, 128)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def run(self) -> None:
        from twostroke.kernels import cuda

        keys, values = self.cache[:, 1, 0], self.cache[:, 1, 1]
        tables, row = (self.empty(*size, dtype=torch.int32) for size in ((4, 8), (2,)))
        slots, angles = self.empty(2, dtype=torch.int64), self.empty(99, 64, dtype=torch.float32)
        x, residual = self.empty(2, 512), self.empty(2, 512)
        for weight in (self.empty(512), self.empty(512, dtype=torch.float32)):
            cuda.rms_norm(x, weight, 1e-6)
            cuda.add_rms_norm(x, residual, weight, 1e-6, context=DEPENDENT)
        view, rope = KVView(keys, values, tables, slots), Rope(angles, angles, norm_eps=1e-6)
        qkv, out = self.empty(2, 12 * 128), self.empty(2, 8, 128)
        made = cuda.rope_store(qkv, rope, slots, view)
        scratch = cuda.decode_scratch(2, 8, 128, 2, self.device)
        rule, work = AttentionRule(0.1, 100, 30.0), DecodeWork(row, row, 1, 2, scratch)
        cuda.rope_decode_attention(qkv, rope, slots, view, rule, work, out=out)
        q, one = made[:, :8], row[:1]
        cuda.decode_attention(q, view, rule, DecodeWork(one, one, 2, 2, scratch), out=out)
        chunks = PrefillWork(one, one, row, 2, 2, 2, ())
        bound = cuda.bind_prefill_attention(q, view, rule, chunks, out=out, chunk_kv=made[:, 8:])
        bound(keys, values, None)
        cuda.act_and_mul(self.empty(2, 1024), "gelu_tanh")
        cuda.product(x, self.empty(256, 512), context=DEPENDENT)
        cuda.gated_product(self.empty(16, 512), self.empty(2048, 512), "silu")


def test_a_product_with_a_large_vocabulary_fits_the_grid(seen: Seen) -> None:
    """The second and third dimension of a grid end at 65,535."""
    from twostroke.kernels import cuda

    launches, _ = seen.of(lambda: cuda.product(empty(1, 512), empty(262_144, 512)))
    (grid,) = (launch[:3] for launch in launches)
    assert grid == (131_072, 1, 1)


@pytest.mark.full
def test_what_is_compiled_ahead_is_all_that_is_launched(
    seen: Seen, empty_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.kernels import cuda

    compiled, compile_one = [0], JITFunction._do_compile

    def counted(*args: Any) -> Any:
        compiled[0] += 1
        return compile_one(*args)

    monkeypatch.setattr(JITFunction, "_do_compile", counted)
    built: list[str] = []
    # Before Triton 3.7 each signature has a launcher of its own, which a C compiler builds.
    has_launchers = hasattr(nvidia, "make_launcher")
    if has_launchers:
        build = nvidia.compile_module_from_src

        def noted(**given: Any) -> Any:
            built.append(given["src"])
            return build(**given)

        monkeypatch.setattr(nvidia, "compile_module_from_src", noted)
    launches, _ = seen.of(lambda: cuda.compile_ahead(AllKernels("meta").run, "all of them"))
    assert not launches
    assert compiled == [12]
    launchers = set(built)
    compiled[0] = 0
    built.clear()
    launches, _ = seen.of(AllKernels("cpu").run)
    assert len(launches) == 12
    assert compiled == [0]
    assert launchers.issuperset(built)
    assert bool(built) == has_launchers


def test_others_launch_while_one_compiles_ahead(seen: Seen, empty_cache: None) -> None:
    """Another engine in this process, in a thread of its own."""
    from twostroke.kernels import cuda

    launches: list[int] = []

    def run() -> None:
        _norm(128)()
        other = Thread(target=_norm(128))
        other.start()
        other.join()
        launches.append(len(seen.launches))

    cuda.compile_ahead(run, "two engines")
    assert launches == [1]


def test_what_was_compiled_ahead_once_is_not_looked_at_again(
    empty_cache: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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


def test_no_collection_interrupts_a_parser_while_threads_compile(
    seen: Seen, empty_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a callback of the garbage collector runs Python code (Hypothesis has one), a parser of
    Python 3.11 can be interrupted by another thread's parser, and fails: one of 15 did."""
    from twostroke.kernels import cuda

    collecting, parse = [], JITFunction.parse

    def noted(self: Any) -> Any:
        collecting.append(gc.isenabled())
        return parse(self)

    monkeypatch.setattr(JITFunction, "parse", noted)
    assert _compile_norms("norms", 320, 640) == 2
    assert len(collecting) >= 2
    assert not any(collecting)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        cuda.compile_ahead(lambda: 1 // 0, "a failure")
    assert gc.isenabled()


@pytest.mark.skipif(
    not triton.__version__.startswith("3.6."),
    reason="later ones keep what failed, and raise it again where it is launched",
)
def test_what_fails_ahead_is_compiled_where_it_is_launched(
    seen: Seen, empty_cache: None, monkeypatch: pytest.MonkeyPatch
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
    """Return the number of kernels asked for. The process must not have compiled any of them."""
    from twostroke.kernels import cuda

    asked: list[int] = []

    def run() -> None:
        for width in widths:
            _norm(width)()
            asked.append(width)

    cuda.compile_ahead(run, name)
    return len(asked)


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain", "two groups", "latent", "mixed"])
def test_what_a_start_compiles_ahead_is_all_that_its_steps_launch(
    name: str, seen: Seen, empty_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing compiles while streams run: of a plain model, of a mix of windows and caps, and of
    models with latents."""
    from tests.equivalence.harness import small_spec
    from tests.equivalence.test_latent_matrix import MIXES, latent_spec
    from tests.equivalence.test_window_matrix import mixed_spec
    from tests.specs import changed
    from twostroke.exec import start
    from twostroke.exec.device_rows import DeviceRows
    from twostroke.exec.graphs import DecodeGraphs, EagerReplay, PiecewiseGraphs, piece_ladder
    from twostroke.exec.program import StepProgram
    from twostroke.exec.torch_executor import TorchExecutor
    from twostroke.kernels.cuda import prefill_hopper
    from twostroke.kernels.cuda.backend import CudaKernels
    from twostroke.kv.pool import KVPool
    from twostroke.model.torch.decoder import Decoder
    from twostroke.model.weights.dummy import DummyWeights

    cpu, fp16 = torch.device("cpu"), torch.float16
    if name == "plain":  # a chunk as long as can be has a kernel of its own
        tuned = replace(prefill_hopper.TUNINGS[128], min_tokens=60)
        monkeypatch.setitem(prefill_hopper.TUNINGS, 128, tuned)
    if name in MIXES:
        spec = latent_spec(name)
    else:
        spec = small_spec(windows=(None,) * 2) if name == "plain" else mixed_spec(name)
        spec = changed(spec, head_dim=128)
    how = (fp16, cpu, 64, CudaKernels(cpu))
    decoder = Decoder(spec, DummyWeights(spec), *how, dependent_launch=True)
    groups = len(spec.kv_groups())
    rows, sizes = DeviceRows(2, 64, 16, groups, cpu), [1, 2]
    compiled, compile_one = [0], JITFunction._do_compile

    def counted(*args: Any) -> Any:
        compiled[0] += 1
        return compile_one(*args)

    monkeypatch.setattr(JITFunction, "_do_compile", counted)
    launches, _ = seen.of(lambda: start.compile_kernels(decoder, fp16, rows, 64, sizes))
    assert not launches
    ahead, compiled[0] = compiled[0], 0
    assert ahead >= 10

    class Record(EagerReplay):
        def __call__(self, pieces: Callable[[], Iterator[object]]) -> list[Callable[[], object]]:
            runs = super().__call__(pieces)
            rows.cells.zero_()  # what a kernel that does not run has left there is no token
            return runs

    program = StepProgram(decoder, KVPool(spec, [0] * groups, 16, fp16, cpu), rows)
    for plan in (*start.warm_plans(2, 64, 64), *start.long_plans(64, 64)):
        executor = TorchExecutor(program)
        executor.sample(executor.forward(plan)).wait()
        rows.reset()
        rows.cells.zero_()
    DecodeGraphs(program, sizes, Record())
    PiecewiseGraphs(program, piece_ladder(64), Record())
    assert compiled[0] == 0
