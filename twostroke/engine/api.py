"""An engine as a server sees it, in this process or in another. No torch."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from twostroke.errors import RequestError
from twostroke.kv.cache import GroupLimits, KVUsage
from twostroke.model.describe.cost import NO_FIGURES, ModelFigures
from twostroke.observe.record import Records
from twostroke.observe.totals import Totals, TransferTotals
from twostroke.outputs import RequestOutput
from twostroke.request import EngineRequest, SamplingParams

if TYPE_CHECKING:  # the engine's own process needs neither
    from twostroke.engine.input_processor import InputProcessor, Prompt
    from twostroke.engine.output_processor import RequestState


ONE_ALONE = (
    "this server has one engine; start it with --data-parallel-size of 2 or more, or with "
    "--prefill-engines and --decode-engines, for pools that grow and shrink"
)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's properties, known once it is up."""

    model_name: str
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    dtype: str
    device: str
    total_bytes: int  # what device or cgroup allow
    weight_bytes: int
    kv_bytes: int
    kv_tokens: int  # of all KV groups together
    load_s: float
    sampling: SamplingParams  # what the model's makers recommend
    weights: str = ""  # what they are kept in: "Q8_0", "int8, from bfloat16"; none: the dtype
    kv_groups: tuple[GroupLimits, ...] = ()
    state_bytes: int = 0  # measured on a GPU, as are the next two
    activation_bytes: int = 0
    graph_bytes: int = 0
    read_bytes_per_s: float = 0.0  # the machine's ceilings, where they were measured
    ops_per_s: float = 0.0
    threads: int = 0  # of a decode step on a CPU
    family: str = ""  # the model's architecture, as its file names it
    num_parameters: int = 0
    file_format: str = ""  # "gguf" or "safetensors"
    kv_layout: str = ""  # of a block: the same where blocks travel between engines
    figures: ModelFigures = NO_FIGURES


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine was when it last reported."""

    waiting: int
    running: int
    kv: KVUsage


class EngineStatus(Protocol):
    """What the metrics say of an engine besides its records."""

    info: EngineInfo
    records: Records
    totals: Totals | None  # of an engine among several, as is the next
    transfers: TransferTotals | None
    num_restarts: int
    asleep: bool

    @property
    def phase(self) -> str:
        """Of its pool: prefill, decode or both; "" of an engine alone."""

    @property
    def healthy(self) -> bool: ...

    def load(self) -> EngineLoad: ...


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One of several engines."""

    name: str
    phase: str  # prefill, decode, both
    state: str  # up, leaving, down (another is being started), stopped
    host: str
    pid: int
    restarts: int
    requests: int  # that are in it


@dataclass(frozen=True, slots=True)
class PoolsStatus:
    counts: dict[str, int]  # of engines that are there to stay
    scaling: bool  # they are being changed
    engines: list[MemberStatus]


class EngineClient(ABC):
    """An engine as a server uses it: in a thread (`AsyncEngine`) or in a process of its own
    (`RemoteEngine`). Called in one event loop, where listeners are called as well."""

    info: EngineInfo
    input_processor: InputProcessor
    records: Records  # outlive the engine, if another is started in its place
    num_restarts: int
    totals: Totals | None = None  # of an engine among several, as is the next
    transfers: TransferTotals | None = None
    phase: str = ""
    asleep: bool = False  # its process has been ended until `wake_up`

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """Whether requests are being worked on now."""

    @abstractmethod
    def load(self) -> EngineLoad: ...

    def transfers_between(self) -> Mapping[tuple[str, str], TransferTotals]:
        """KV blocks that went from one engine to another, by their names."""
        return {}

    def each_engine(self) -> Mapping[str, EngineStatus]:
        """All engines that it has, by name."""
        return {"0": self}

    def pools(self) -> PoolsStatus:
        """Raises `RequestError` if there is one engine alone."""
        raise RequestError(ONE_ALONE)

    async def scale(self, counts: Mapping[str, int], drain_timeout_s: float) -> None:
        """Have so many engines in each pool, by its name (prefill, decode, data_parallel_size);
        returns when it is so. What is in an engine that leaves ends there, or after so long goes
        on in another."""
        raise RequestError(ONE_ALONE)

    @abstractmethod
    def submit(
        self,
        request: EngineRequest,
        on_output: Callable[[RequestOutput], None],
        on_error: Callable[[Exception], None],
        request_id: str | None = None,
    ) -> RequestState:
        """Run a request. Its outputs, in the kind its parameters ask for, or the one error that
        ends it are given to the callbacks, with no task between.

        The error is a `RequestError` if the engine refuses it, an `EngineError` if the engine is
        lost."""

    @abstractmethod
    def leave(self, state: RequestState) -> None:
        """Listen no more: a request that has not ended is aborted."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request; its last output has the finish_reason "abort"."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, so that requests submitted from now on find none. Those that
        run keep their blocks."""

    async def start_profile(self) -> None:
        """Gather what steps are made of; refused (`RequestError`) while a profile runs."""
        raise RequestError("this engine cannot be profiled")

    async def stop_profile(self) -> bytes:
        """What was found since, as JSON; refused if no profile was started."""
        raise RequestError("this engine cannot be profiled")

    async def sleep(self, drain: bool = False) -> None:
        """Free all memory of the engine until `wake_up`. Open requests are aborted, or waited for
        (`drain`). Only an engine in a process of its own can."""
        raise RequestError("this engine shares its process with the server, so it cannot sleep")

    async def wake_up(self) -> None:
        """Returns when requests are worked on again."""
        return

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """`stream`, from a prompt that has not been read yet; a refusal is raised at once."""
        request = self.input_processor.process(prompt, sampling_params, priority)
        return self.stream(request, request_id)

    async def stream(
        self, request: EngineRequest, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """`submit` as an async iterator. Leaving it early aborts the request."""
        outputs: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        state = self.submit(request, outputs.put_nowait, outputs.put_nowait, request_id)
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            self.leave(state)
