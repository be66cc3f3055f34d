"""Ranks on a GPU: two over gloo, whose collectives cut the graphs; one over NCCL, whose graphs hold
them.

    python -m tests.gpu.ranks_check [--device cuda] [--limit-s 280] [--part-limit-s 70]

Two ranks are two processes, this one and one that it starts for each part; before them, one of the
two alone, which compiles what they launch. In fp32 the tokens are those of one rank; in bf16 every
step's log-probabilities are compared with fp32, as `cuda_check` does. One line a check, the last
says how many passed; figures go to $OUT/ranks.json. On a CPU (`--device cpu`) the kernels are the
reference ones, nothing is recorded, and gloo stands in for NCCL.

A part that does not end within its limit is ended: every rank writes what its threads were doing,
then rank 1 is killed, which fails the collective that rank 0 is in, and the next part begins. If
rank 0 does not come back from it, that is the end of all of it. `--fault` rehearses this: rank 1
`throws` or `stalls` in its first collective, or is `absent`; `first-throws` is rank 0.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch

from tests.equivalence.harness import assert_same, make_core, run, small_spec
from tests.gpu import cuda_check
from tests.gpu.__main__ import waits_of
from tests.gpu.cuda_check import Rounded, kernels_of
from tests.gpu.report import tally
from tests.loud import Loud
from tests.rig import Rig
from tests.tiny import tiny_folder
from twostroke import LLM
from twostroke.config import EngineConfig
from twostroke.distributed import cleanup_dist_env_and_memory
from twostroke.engine import rank_processes
from twostroke.engine.assembly import group_limits
from twostroke.engine.build_torch import ExecutorShape, build_executor, make_executor
from twostroke.engine.core import EngineCore
from twostroke.engine.rank_processes import HEADER_BYTES, read_frame
from twostroke.exec import collectives
from twostroke.exec.collectives import GlooRanks, NcclRanks, join_group
from twostroke.exec.graphs import CudaRecorder, EagerReplay, Record, ladder, piece_ladder
from twostroke.exec.ranks_executor import RanksExecutor, follow
from twostroke.exec.start import warm_plan
from twostroke.exec.torch_executor import TorchExecutor
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.cost import cost_model, dense_weight_bytes, ring_bytes
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.describe.tensor_parallel import ONE_RANK, Ranks
from twostroke.model.find.hub import find_model
from twostroke.model.load import open_model
from twostroke.model.torch.decoder import Decoder
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

SIZE = 2
MODELS = ("post norm, full q/k norm", "two groups", "llama, biases")
FEW_ROWS, BUDGET, MAX_LEN = 4, 128, 1024
PROMPTS = [[(7 * n * n + 3 * n + size) % 512 for n in range(size)] for size in (5, 40, 90)]
OUTPUT = 10
BEGUN = perf_counter()
DEBUGGER_S, ABORT_S, BACK_S = 20, 3.0, 20.0  # for what is done once a part has taken too long
FAULTS = ("throws", "stalls", "absent", "first-throws")
# Each rank's part of a sum is rounded to bf16 before they are added: the error against fp32 may be
# this many times that of one rank's reference.
ERROR_SHARE = 1.4
TINY = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "max_position_embeddings": MAX_LEN,
}
SMALL: dict[str, Any] = {
    "max_num_seqs": FEW_ROWS,
    "max_num_batched_tokens": BUDGET,
    "gpu_memory_utilization": 0.06,
    "enable_prefix_caching": False,
}


@dataclass
class Checks:
    begun: float = field(default_factory=perf_counter)
    passed: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def each(self, name: str, checks: Callable[[], Iterator[str]], limit_s: float) -> None:
        """A line for each that passes; the first that does not ends these, and so does the limit,
        with what both ranks were doing."""
        begun, is_over = perf_counter(), threading.Event()
        say(0, f"{name} begins")
        watch = partial(self._watch, name, limit_s, is_over)
        threading.Thread(target=watch, daemon=True).start()
        # Should the thread above not come to run. This one is not of Python's.
        worst_s = limit_s + 3 * DEBUGGER_S + ABORT_S + BACK_S
        faulthandler.dump_traceback_later(worst_s, exit=True)
        try:
            for said in checks():
                now = perf_counter()
                self.passed[f"{name}: {said}"] = round(now - begun, 2)
                print(f"passed  {name}: {said} ({now - begun:.1f} s)", flush=True)
                begun = now
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}"[:1000]
            print(f"FAILED  {name}\n{traceback.format_exc()[-3000:]}", flush=True)
        finally:
            is_over.set()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, name: str, limit_s: float, is_over: threading.Event) -> None:
        if is_over.wait(limit_s):
            return
        say(0, f"{name}: no end after {limit_s:.0f} s; what each rank is doing:")
        dump_stacks()
        end_others()
        if not is_over.wait(BACK_S):
            say(0, "rank 0 does not come back, though rank 1 is gone")
            debug(os.getpid())
            self.end(f"{name}: no end after {limit_s:.0f} s")
            os._exit(1)

    def end(self, why: str = "") -> int:
        if why:
            self.failed["all"] = why
        result = {"passed": self.passed, "failed": self.failed, "figures": self.figures}
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "ranks.json").write_text(json.dumps(result, indent=1))
        print(json.dumps(self.figures))
        return tally(len(self.passed), len(self.failed))


def say(rank: int, what: str) -> None:
    print(f"[{perf_counter() - BEGUN:6.1f} s] rank {rank}: {what}", file=sys.stderr, flush=True)


def dump_stacks() -> None:
    """Write the stacks of this process (Python), of all processes (the kernel's view) and of the
    others (a debugger). `end_others` has the others write their Python stacks."""
    faulthandler.dump_traceback(sys.stderr)
    others = [process.pid for process in OTHERS if process.poll() is None]
    for pid in (os.getpid(), *others):
        print(f"process {pid}", *waits_of(pid), sep="\n", file=sys.stderr, flush=True)
    for pid in others:
        debug(pid)


def debug(pid: int) -> None:
    """Attach a debugger, if there is one. Only for processes that are ended next: a debugger may
    leave them in any state."""
    debugger, timeout = shutil.which("cuda-gdb"), shutil.which("timeout")
    if debugger is None or timeout is None:
        return
    # Not by `subprocess`'s own time-out: this process, if it is the one, stands still meanwhile.
    limited = [timeout, "-s", "KILL", str(DEBUGGER_S)]
    command = [debugger, "-nx", "-batch", "-p", str(pid), "-ex", "thread apply all bt 16"]
    subprocess.run([*limited, *command], stdin=subprocess.DEVNULL, stdout=sys.stderr)


def end_others() -> None:
    """By SIGABRT, at which Python writes down what every thread was doing."""
    others = list(OTHERS)  # without those of the next part, which may begin meanwhile
    for number in (signal.SIGABRT, signal.SIGKILL):
        for process in others:
            if process.poll() is None:
                process.send_signal(number)
        until = perf_counter() + ABORT_S
        while perf_counter() < until and any(process.poll() is None for process in others):
            sleep(0.05)


# ── two ranks, over gloo ────────────────────────────────────────────────────────────────────


class OtherRank:
    """A process that does the same part of this script as rank 1."""

    def __init__(self, part: str, device: str, store: str, fault: str) -> None:
        given = ["--part", part, "--device", device, "--store", store]
        given += ["--fault", fault] if fault else []
        command = [sys.executable, "-m", "tests.gpu.ranks_check", *given]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        OTHERS.append(self._process)

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(HEADER_BYTES, "little") + data)
        self._process.stdin.flush()

    def failure(self, wait_s: float = 0.0) -> str:
        """Return how it ended, or "" if it has not ended within so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return f"rank 1 ended with exit code {self._process.wait(wait_s)}"
        return ""

    def end(self) -> None:
        code = self._process.wait(20)
        assert code == 0, self.failure()


OTHERS: list[subprocess.Popen[bytes]] = []  # of all parts
os.environ["PYTHONFAULTHANDLER"] = "1"  # of those


def two_ranks(part: str, device: torch.device, fault: str = "") -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        other = OtherRank(part, str(device), store, fault)
        try:
            yield from PARTS[part](join_two(0, store, device, other, fault), device, other)
            other.end()
        except Exception as error:
            reason = other.failure(ABORT_S) or "rank 1 still runs, and writes where"
            raise AssertionError(f"{reason}; rank 0: {error}") from error
        finally:
            end_others()


def join_two(
    rank: int, store: str, device: torch.device, other: OtherRank | None, fault: str = ""
) -> Ranks:
    parent = os.getppid()
    say(rank, "joins")
    while rank and fault == "absent":
        sleep(1)
    Path(f"{store}.{rank}").touch()
    while not Path(f"{store}.{1 - rank}").exists():
        assert other is None or not other.failure(), other.failure()
        assert os.getppid() == parent, "the process that started this one has ended"
        sleep(0.05)
    ranks = GlooRanks(rank, SIZE, store, device, staged=True)
    say(rank, "has joined")
    if fault == ("throws" if rank else "first-throws"):
        ranks._reduce = throw  # type: ignore[method-assign]
    elif rank and fault == "stalls":
        ranks._reduce = stall  # type: ignore[method-assign]
    return ranks


def throw(x: torch.Tensor) -> None:
    raise ValueError("a fault, as asked for")


def stall(x: torch.Tensor) -> None:
    while True:
        sleep(1)


def recorder_of(device: torch.device, ranks: Ranks) -> Record:
    return CudaRecorder(device, ranks) if device.type == "cuda" else EagerReplay()


def executor_of(decoder: Decoder) -> TorchExecutor:
    record = recorder_of(decoder.device, decoder.ranks)
    blocks = [512] * len(decoder.spec.kv_groups())
    shape = ExecutorShape(blocks, FEW_ROWS, MAX_LEN, 16, BUDGET, decoder.dtype)
    return make_executor(decoder, shape, 2, graph_sizes=ladder(FEW_ROWS), record=record)


def core_of(executor: TorchExecutor, spec: ModelSpec, other: OtherRank | None) -> EngineCore:
    limits = SchedulerConfig(
        max_num_seqs=FEW_ROWS,
        max_num_batched_tokens=BUDGET,
        max_model_len=MAX_LEN,
        block_size=16,
        groups=group_limits(executor.program.decoder.spec, [512] * len(spec.kv_groups())),
        prefix_caching=False,
    )
    cost = cost_model(spec, dense_weight_bytes(spec, 4), 4)
    runs: Any = executor if other is None else RanksExecutor(executor, other)
    return EngineCore(Scheduler(limits), runs, cost)


class Replays:
    """Counts the uses of graphs."""

    def __init__(self, executor: TorchExecutor) -> None:
        self.decode = self.pieces = 0
        graphs, pieces = executor._graphs, executor._pieces
        assert graphs is not None
        assert pieces is not None
        replay, forward = graphs.replay, pieces.forward

        def count_decode(step: Any) -> None:
            self.decode += 1
            replay(step)

        def count_pieces(step: Any) -> torch.Tensor:
            self.pieces += 1
            return forward(step)

        graphs.replay, pieces.forward = count_decode, count_pieces  # type: ignore[method-assign]


def one_of_two(device: torch.device) -> Iterator[str]:
    """A rank's part of each model, with nobody to talk to: what it launches is compiled and
    recorded here, so that the parts below wait for collectives alone."""
    models = dict(cuda_check.small_models())
    for name in MODELS:
        spec, begun = models[name], perf_counter()
        dtype = torch.bfloat16 if name in MODELS[2:] else torch.float32
        source = Rounded(Loud(spec), spec)
        how = (dtype, device, MAX_LEN, kernels_of(device))
        executor = executor_of(Decoder(spec, source, *how, ranks=Ranks(0, SIZE)))
        for plan in (warm_plan(2, [5, 40], 100), warm_plan(3, [], 100)):
            executor.run(plan)
        yield f"{name}, {perf_counter() - begun:.1f} s"


def same_tokens(ranks: Ranks, device: torch.device, other: OtherRank | None) -> Iterator[str]:
    """In fp32: prompts in chunks beside others' decoding, against one rank's reference."""
    models = dict(cuda_check.small_models())
    for name in MODELS[:2]:
        spec = models[name]
        say(ranks.rank, f"{name}: loads")
        decoder = Decoder(
            spec, Loud(spec), torch.float32, device, MAX_LEN, kernels_of(device), ranks=ranks
        )
        say(ranks.rank, f"{name}: records")
        executor = executor_of(decoder)
        say(ranks.rank, f"{name}: runs")
        if other is None:
            follow(executor, iter(lambda: read_frame(sys.stdin.buffer), b""))
            continue
        reference = Decoder(spec, Loud(spec), torch.float32, device, MAX_LEN, Kernels())
        expected, replays = run(make_core(reference), PROMPTS, OUTPUT), Replays(executor)
        say(0, f"{name}: one rank has run")
        core = core_of(executor, spec, other)
        try:
            got = run(core, PROMPTS, OUTPUT)
            drawn = run(core, PROMPTS, OUTPUT, logit_bias={0: 0.0})  # drawn apart from the graph
        finally:
            other.send(b"")
        assert_same(expected, got)
        assert_same(expected, drawn)
        assert replays.decode > 10, "decode steps ran without graphs"
        assert replays.pieces > 1, "steps with prefill ran without pieces"
        if device.type == "cuda":
            check_cuts(executor, spec)
        steps = core.records.steps
        assert all(step.comm_s > 0 and step.comm_bytes > 0 for step in steps)
        said = f"{replays.decode} decode graphs, {replays.pieces} steps in pieces"
        yield f"{name}, fp32, tokens equal: {said}"


def check_cuts(executor: TorchExecutor, spec: ModelSpec) -> None:
    graphs: Any = executor._graphs
    full = sum(layer.attention.qk_norm == "full" for layer in spec.layers)
    cuts = 2 + 2 * spec.num_layers + 2 * full
    for replay in graphs._replays.values():
        (runs,) = replay.args
        assert len(runs) == 2 * cuts + 1, f"{len(runs)} runs for {cuts} collectives"


def same_logprobs(ranks: Ranks, device: torch.device, other: OtherRank | None) -> Iterator[str]:
    """In bf16: every step of the same texts, against fp32."""
    models = dict(cuda_check.small_models())
    texts = [[(7 * n * n + 3 * n + size) % 512 for n in range(size)] for size in (40, 75, 120)]
    prompts, length = [len(text) - OUTPUT for text in texts], 136

    def forced(rig: Rig) -> torch.Tensor:
        steps = [logits for _, logits in rig.forced(prompts, 60)]
        return torch.cat(steps).float().log_softmax(-1)

    for name in MODELS[2:]:
        spec = models[name]
        source = Rounded(Loud(spec), spec)

        def rig_of(dtype: torch.dtype, kernels: Kernels, ranks: Ranks) -> Rig:
            record = None if ranks.alone else recorder_of(device, ranks)
            decoder = Decoder(spec, source, dtype, device, length, kernels, ranks=ranks)  # noqa: B023
            return Rig(decoder, texts, record=record)

        say(ranks.rank, f"{name}: records")
        rig = rig_of(torch.bfloat16, kernels_of(device), ranks)
        say(ranks.rank, f"{name}: runs")
        shared = forced(rig)
        say(ranks.rank, f"{name}: has run")
        if other is None:
            continue
        exact = forced(rig_of(torch.float32, Kernels(), ONE_RANK))
        plain = forced(rig_of(torch.bfloat16, Kernels(), ONE_RANK))
        errors = [float((one - exact).pow(2).mean().sqrt()) for one in (shared, plain)]
        share, steps = errors[0] / errors[1], len(exact)
        assert errors[1] < 0.2 * float(exact.std()), "the weights are too quiet"
        same = int((shared.argmax(-1) == plain.argmax(-1)).sum())
        said = f"{name}, bf16, {steps} steps: error {share:.2f} of one rank's reference"
        assert share < ERROR_SHARE, said
        yield f"{said}; the same best token in {same}"


Part = Callable[[Ranks, torch.device, "OtherRank | None"], Iterator[str]]
PARTS: dict[str, Part] = {"tokens": same_tokens, "logprobs": same_logprobs}


def engines(device: torch.device, figures: dict[str, Any]) -> Iterator[str]:
    """As a user starts them: memory planned and measured, graphs recorded, on both ranks."""
    on_gpu = device.type == "cuda"
    how: dict[str, Any] = SMALL | ({} if on_gpu else {"kernels": "reference"})
    how |= {"device": "cuda:0" if on_gpu else "cpu", "dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        path = str(tiny_folder(Path(folder), **TINY))
        prompts = [[5 + n % 290 for n in range(size)] for size in (5, 40, 90)]
        one = LLM(path, num_gpu_blocks_override=256, **how)
        expected = run(one.engine.core, prompts, OUTPUT)
        del one
        cleanup_dist_env_and_memory()
        free = torch.cuda.mem_get_info(device) if on_gpu else (0, 1)
        say(0, "one rank has run")
        begun = perf_counter()
        two = LLM(path, tensor_parallel_size=SIZE, **how)
        start_s = perf_counter() - begun
        core, memory = two.engine.core, two.engine.memory
        yield f"{SIZE} ranks started in {start_s:.1f} s: {memory.waterfall()}"
        assert_same(expected, run(core, prompts, OUTPUT))
        yield "an engine's tokens equal those of one rank, fp32"
        if on_gpu:
            own: Any = core._executor
            replays = Replays(own._own)
            run(core, prompts, OUTPUT)
            assert replays.decode > 0
            assert replays.pieces > 0
            used = 1 - torch.cuda.mem_get_info(device)[0] / free[1]
            before = 1 - free[0] / free[1]
            share = how["gpu_memory_utilization"]
            assert abs(used - share) < 0.015, f"{used:.3f} of the GPU is used, for {share}"
            figures["two_ranks_memory"] = {"before": before, "used": used, "allowed": share}
            yield f"graphs and pieces in use; both ranks together use {used:.1%} of the GPU"
        steps = list(core.records.steps)
        decode = [step for step in steps if step.decode.rows == 3 and not step.prefill.rows]
        device_s = median(step.device_s for step in decode)
        comm_s = median(step.comm_s for step in decode)
        figures["two_ranks_gloo"] = {"start_s": start_s, "step_s": device_s, "comm_s": comm_s}
        yield f"a decode step {1e3 * device_s:.2f} ms, of it {1e3 * comm_s:.2f} ms in collectives"
        del core, two
        cleanup_dist_env_and_memory()


# ── one rank, over NCCL ─────────────────────────────────────────────────────────────────────


def one_rank(device: torch.device, figures: dict[str, Any]) -> Iterator[str]:
    """The same graphs, with collectives inside that have nobody to talk to."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        on_gpu = device.type == "cuda"
        ranks: Any
        if on_gpu:
            ranks = join_group(0, 1, store, device, own=True)
            assert isinstance(ranks, NcclRanks)
            figures["nccl_all_reduce_us"] = [round(1e6 * one, 2) for one in ranks._times_s]
        else:
            ranks = GlooRanks(0, 1, store, device, staged=True)
        for dtype in (torch.float32, torch.bfloat16):
            spec = small_spec(qk_norm="head", tie_embeddings=True)
            yield from compare_with_no_group(spec, dtype, device, ranks)
        path = tiny_folder(Path(folder, "model"), **TINY)
        config = EngineConfig(model=str(path), device="cuda" if on_gpu else "cpu", **SMALL)
        model = open_model(config, find_model(config), str(device))
        place = "cuda:0" if on_gpu else "cpu"
        before = ranks.num_recorded if on_gpu else 0
        built = build_executor(config, model, place, ranks)
        built.executor.run(warm_plan(2, [5, 7], 100))
        if on_gpu:
            assert ranks.num_recorded > before
            assert built.executor._pieces is not None
        yield f"started as an engine is: {built.memory.waterfall()}"
        if on_gpu:
            lines = Path(f"{store}.nccl.0").read_text().splitlines()
            assert any("NCCL INFO" in line for line in lines), lines[:3]
            figures["nccl_log"] = [line for line in lines if "Pattern" in line or "coll ch" in line]
            yield f"NCCL's log was written where it is read: {len(lines)} lines"


def compare_with_no_group(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, ranks: Any
) -> Iterator[str]:
    """To the bit: nothing is computed otherwise."""
    source, kernels = Rounded(Loud(spec), spec), kernels_of(device)
    plain = executor_of(Decoder(spec, source, dtype, device, MAX_LEN, kernels))
    expected = run(core_of(plain, spec, None), PROMPTS, OUTPUT)
    before = getattr(ranks, "num_recorded", 0)
    executor = executor_of(Decoder(spec, source, dtype, device, MAX_LEN, kernels, ranks=ranks))
    layers, name = spec.num_layers, str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        # Embedding, o and down, head; pieces end before the last layer's attention.
        in_decode, in_pieces = 2 + 2 * layers, 1 + 2 * (layers - 1)
        recorded = len(ladder(FEW_ROWS)) * in_decode + len(piece_ladder(BUDGET)) * in_pieces
        assert ranks.num_recorded - before == recorded, f"{ranks.num_recorded - before} recorded"
    replays, core = Replays(executor), core_of(executor, spec, None)
    comm = ranks.comm
    got = run(core, PROMPTS, OUTPUT)
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    assert replays.decode > 0
    assert replays.pieces > 0
    yield f"{name}, tokens equal with {ranks.all_gather_numbers([0])} in the group"
    spent = ranks.comm.since(comm)
    formula = sum(step_bytes(executor, spec, dtype.itemsize, step) for step in core.records.steps)
    assert spent.ring_bytes == formula, f"{spent.ring_bytes} bytes counted, {formula} expected"
    assert spent.sent_bytes(1) == 0
    assert spent.seconds > 0
    yield f"{name}, {formula:,} bytes in collectives, as the formula says"


def step_bytes(executor: TorchExecutor, spec: ModelSpec, itemsize: int, step: Any) -> int:
    """By the formula, of a step as it was padded."""
    graphs, pieces = executor._graphs, executor._pieces
    assert graphs is not None
    assert pieces is not None
    tokens, samples = step.prefill.tokens + step.decode.tokens, step.num_written
    if step.prefill.rows:
        padded = pieces.size_for(tokens) or tokens
        return ring_bytes(spec, 1, itemsize, padded, samples, samples)
    padded = graphs.size_for(tokens) or tokens
    return ring_bytes(spec, 1, itemsize, padded, padded) - 4 * (padded - samples)


# ── all of it ───────────────────────────────────────────────────────────────────────────────


def be_other_rank(part: str, device: torch.device, store: str, fault: str) -> None:
    """Rank 1 of a part. It ends at once, whatever it leaves behind: rank 0 is to notice, and what
    takes a process down in order may wait for it."""
    try:
        for _ in PARTS[part](join_two(1, store, device, None, fault), device, None):
            pass
    except BaseException:
        say(1, f"ends: {traceback.format_exc()[-3000:]}")
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit-s", type=float, default=280.0)
    parser.add_argument("--part-limit-s", type=float, default=70.0)
    parser.add_argument("--fault", default="", choices=("", *FAULTS), help="rehearse it")
    parser.add_argument("--part", help="be rank 1 of this part")
    parser.add_argument("--store")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of processes that are aborted
    device = torch.device("cuda:0" if args.device == "cuda" else args.device)
    # Before the limits here: they name the collective, and the rank that waited in vain.
    collectives.STEP_TIMEOUT = timedelta(seconds=0.6 * args.part_limit_s)
    if args.part:
        be_other_rank(args.part, device, args.store, args.fault)
    checks = Checks()
    spawn = rank_processes._spawn

    def noted(module: str) -> subprocess.Popen[bytes]:
        OTHERS.append(spawn(module))
        return OTHERS[-1]

    rank_processes._spawn = noted

    def out_of_time() -> None:
        dump_stacks()
        end_others()
        checks.end(f"no end after {args.limit_s:.0f} s")
        os._exit(1)

    timer = threading.Timer(args.limit_s, out_of_time)
    timer.daemon = True
    timer.start()
    if not args.fault:
        work = partial(one_of_two, device)
        checks.each("a rank of two, alone", work, 1.5 * args.part_limit_s)
    for part in PARTS:
        work = partial(two_ranks, part, device, args.fault)
        checks.each(f"two ranks, {part}", work, args.part_limit_s)
    if not args.fault:
        work = partial(engines, device, checks.figures)
        checks.each("two ranks, engines", work, 1.5 * args.part_limit_s)
        nccl = "one rank, NCCL" if device.type == "cuda" else "one rank"
        checks.each(nccl, partial(one_rank, device, checks.figures), args.part_limit_s)
    checks.figures["all_s"] = round(perf_counter() - checks.begun, 1)
    code = checks.end()
    timer.cancel()
    os._exit(code)  # nothing is taken down that could wait for somebody


if __name__ == "__main__":
    sys.exit(main())
