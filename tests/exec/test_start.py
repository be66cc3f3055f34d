"""Starting on a GPU, as far as it goes without one: the steps that measure, and the sizing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.checked_kernels import CheckedKernels
from tests.equivalence.harness import assert_same, make_core, run, small_spec
from tests.fakes import groups
from tests.gpu.reference_check import PROMPTS
from tests.loud import Loud
from twostroke.config import GIB, EngineConfig
from twostroke.engine.core import EngineCore
from twostroke.errors import ConfigError
from twostroke.exec import start
from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.graphs import EagerReplay, Record, Run
from twostroke.exec.memory import MemoryPlan
from twostroke.exec.pool_sizing import PoolSizing
from twostroke.exec.program import StepProgram
from twostroke.exec.start import fit_pool, graph_sizes, start_executor, time_prefill, warm_plans
from twostroke.exec.torch_executor import TorchExecutor
from twostroke.kv.pool import KVPool
from twostroke.model.describe.cost import cost_model, dense_weight_bytes
from twostroke.model.describe.tensor_parallel import Ranks
from twostroke.model.torch.decoder import Decoder
from twostroke.observe.startup_timer import StartupTimer
from twostroke.plan import PhaseWork
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

CPU = torch.device("cpu")
BLOCK = 2 * 1024**2
ESTIMATE = MemoryPlan(
    total_bytes=78 * GIB,
    weight_bytes=16 * GIB,
    sizing=PoolSizing(16, (None,), (BLOCK,), held=(1,), min_blocks=(1,), max_blocks=(1,)),
    group_blocks=(1,),
    max_model_len=4096,
    shortened=False,
    device_bytes=80 * GIB,
)


def pool(free: int = 60 * GIB, **settings: object) -> MemoryPlan:
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    return fit_pool(config, ESTIMATE, free, activations=4 * GIB, graphs=GIB)


@pytest.mark.parametrize(("rows", "budget", "length"), [(8, 64, 256), (1, 64, 64), (4, 100, 20)])
def test_the_steps_that_measure_run_on_one_block_and_leave_it_empty(
    rows: int, budget: int, length: int
) -> None:
    spec = small_spec()
    decoder = Decoder(spec, Loud(spec), torch.float32, CPU, length, CheckedKernels())
    cache = KVPool(spec, [0], 16, torch.float32, CPU)
    state = DeviceRows(rows, length, 16, 1, CPU)
    executor = TorchExecutor(StepProgram(decoder, cache, state), None)
    plans = list(warm_plans(rows, budget, length))
    for plan in plans:
        assert plan.num_tokens <= budget
        assert len(plan.new) <= rows
        assert len(executor.sample(executor.forward(plan)).wait().tokens) == len(plan.new)
        executor.reset()
    assert max(plan.num_tokens for plan in plans) == min(budget, rows * (length - 1))
    assert not cache.groups[0].any()


def test_engines_that_share_a_gpu_each_take_their_share_of_all_of_it() -> None:
    """The second of two: 36 of 80 GiB are the first one's, 0.45 of 80 are its own."""
    second = replace(ESTIMATE, total_bytes=44 * GIB, others_bytes=36 * GIB)
    config = EngineConfig(gpu_memory_utilization=0.45)
    plan = fit_pool(config, second, 26 * GIB, activations=4 * GIB, graphs=GIB)
    # Of its 36, weights and state have taken 18, and 5 are for steps and graphs.
    assert plan.kv_bytes == 13 * GIB
    with pytest.raises(ConfigError, match="nothing is left for the KV cache"):
        fit_pool(config, replace(second, others_bytes=0), 26 * GIB, 4 * GIB, GIB)


def test_the_pool_is_what_the_rest_leaves_under_the_share() -> None:
    plan = pool(gpu_memory_utilization=0.9)
    # 60 free, less 4 of steps, 1 of graphs, and the tenth of 80 that stays free
    assert plan.kv_bytes == 47 * GIB
    assert plan.state_bytes == 2 * GIB
    assert plan.waterfall() == (
        "78.00 GiB free → weights 16.00 GiB → state 2.00 GiB → activations 4.00 GiB → "
        "graphs 1.00 GiB → KV cache 47.00 GiB → left 8.00 GiB"
    )


def test_settings_decide_the_size_of_the_pool() -> None:
    assert pool(kv_cache_memory_bytes=100 * BLOCK).group_blocks == (99,)
    assert pool(num_gpu_blocks_override=77).group_blocks == (77,)


def test_what_does_not_fit_is_refused_with_the_setting_that_would() -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes to at most {55 * GIB}"):
        pool(kv_cache_memory_bytes=56 * GIB)
    with pytest.raises(ConfigError, match=f"num_gpu_blocks_override to at most {55 * 512 - 1}"):
        pool(num_gpu_blocks_override=10**6)
    with pytest.raises(ConfigError, match=r"raise gpu_memory_utilization from 0\.3 to at least"):
        pool(gpu_memory_utilization=0.3)


def test_the_share_an_error_names_is_enough() -> None:
    with pytest.raises(ConfigError) as refused:
        pool(gpu_memory_utilization=0.3)
    named = float(str(refused.value).split("at least ")[1].split(",")[0])
    assert pool(gpu_memory_utilization=named + 0.01).group_blocks >= (1,)


def test_graphs_can_be_fewer_or_none() -> None:
    config = EngineConfig(max_num_seqs=16)
    assert graph_sizes(config) == [1, 2, 4, 8, 16]
    assert graph_sizes(replace(config, max_cudagraph_capture_size=4)) == [1, 2, 4]
    assert graph_sizes(replace(config, cudagraph_capture_sizes=(32, 3, 1))) == [1, 3, 16]
    assert graph_sizes(replace(config, enforce_eager=True)) == []


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """All but the GPU: what it says of its memory is made up, a replay runs again."""
    answers: dict[str, object] = {
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_reserved": GIB,
        "max_memory_reserved": 2 * GIB,
        "mem_get_info": (60 * GIB, 80 * GIB),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(start.gc, "freeze", lambda: None)
    recorded: list[Run] = []

    def recorder(device: torch.device, ranks: Ranks) -> Record:
        again = EagerReplay()

        def record(pieces: Callable[[], Iterator[object]]) -> list[Run]:
            runs = again(pieces)
            recorded.extend(runs)
            return runs

        return record

    monkeypatch.setattr(start, "CudaRecorder", recorder)
    return recorded


def started(
    timer: StartupTimer | None = None, **settings: object
) -> tuple[TorchExecutor, MemoryPlan]:
    spec = small_spec()
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 96, "num_gpu_blocks_override": 64}
    config = EngineConfig(**(given | settings))  # type: ignore[arg-type]
    decoder = Decoder(spec, Loud(spec), torch.float32, CPU, 512, CheckedKernels())
    sizing = replace(ESTIMATE.sizing, block_bytes=(16 * 1024,))
    estimate = replace(ESTIMATE, sizing=sizing, max_model_len=512)
    return start_executor(config, decoder, torch.float32, estimate, timer)


def test_an_executor_started_that_way_writes_the_tokens_of_another(recorded: list[Run]) -> None:
    spec = small_spec()
    timer = StartupTimer(iter([10.0, 11.5, 12.0, 14.0, 14.25]).__next__)
    executor, plan = started(timer)
    assert str(timer) == "kernels 1.5 s, measuring 0.5 s, graphs 2.0 s, largest step 0.2 s"
    assert (plan.group_blocks, plan.activation_bytes) == ((64,), GIB)
    # On trial two of each, then [1, 2, 4] rows and [64, 128] tokens, those in three pieces.
    assert len(recorded) == (2 + 2 * 3) + (3 + 2 * 3)
    limits = SchedulerConfig(4, 96, plan.max_model_len, 16, groups(64))
    core = EngineCore(Scheduler(limits), executor, cost_model(spec, dense_weight_bytes(spec, 4), 4))
    plain = Decoder(spec, Loud(spec), torch.float32, CPU, 1024, CheckedKernels())
    assert_same(run(make_core(plain), PROMPTS, 8), run(core, PROMPTS, 8))


def test_steps_at_the_start_tell_the_time_of_a_prefill(recorded: list[Run]) -> None:
    executor, plan = started()
    steps = list(time_prefill(executor, 96))
    assert [step[:2] for step in steps] == [(0, 96), (0, 48), (415, 96)]
    assert all(seconds > 0 for _, _, seconds in steps)
    pacer = Scheduler(SchedulerConfig(4, 96, plan.max_model_len, 16, groups(64))).pacer
    assert pacer.prefill_s(0, 100) == 0.0
    for start_at, count, _ in steps:
        pacer.note_start_step(start_at, count, 1e-3 * count)
    assert pacer.prefill_s(0, 100) == pytest.approx(0.1, rel=0.05)
    for _ in range(3):
        pacer.times.add(PhaseWork(1, 100, 5050, 100), PhaseWork(), 0.4)
    assert pacer.prefill_s(0, 100) == pytest.approx(0.4, rel=0.05)  # of the requests


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.usefixtures("recorded")
def test_a_step_that_does_not_fit_is_refused_with_smaller_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Decoder, "forward", out_of_memory)
    with pytest.raises(ConfigError, match="max_num_batched_tokens to at most 48 or max_num_seqs"):
        started()


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "num_gpu_blocks_override to 57"),
        ({"num_gpu_blocks_override": None}, "gpu_memory_utilization from 0.9 to 0.85"),
    ],
)
def test_a_plan_that_did_not_hold_is_told_with_what_to_lower(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], named: str
) -> None:
    """Memory was there when it was measured, and is not when the pool is made."""
    make = KVPool.__init__

    def make_small(pool: KVPool, spec: object, num_blocks: list[int], *rest: object) -> None:
        if any(num_blocks):
            out_of_memory()
        make(pool, spec, num_blocks, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(KVPool, "__init__", make_small)
    with pytest.raises(ConfigError) as refused:
        started(**settings)
    assert named in str(refused.value)
    assert "60.00 GiB are free now" in str(refused.value)
