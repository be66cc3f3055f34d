"""An engine as a server sees it, in this process or in another. No torch."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from twostroke.errors import RequestError
from twostroke.kv.cache import GroupLimits, KVUsage
from twostroke.observe.record import Records
from twostroke.observe.totals import TransferTotals
from twostroke.outputs import RequestOutput
from twostroke.request import EngineRequest, SamplingParams

if TYPE_CHECKING:  # the engine's own process needs neither
    from twostroke.engine.input_processor import InputProcessor, Prompt
    from twostroke.engine.output_processor import RequestState


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
    transfers: TransferTotals | None
    num_restarts: int
    asleep: bool

    @property
    def healthy(self) -> bool: ...

    def load(self) -> EngineLoad: ...


class EngineClient(ABC):
    """An engine as a server uses it: in a thread (`AsyncEngine`) or in a process of its own
    (`RemoteEngine`). Called in one event loop, where listeners are called as well."""

    info: EngineInfo
    input_processor: InputProcessor
    records: Records  # outlive the engine, if another is started in its place
    num_restarts: int
    transfers: TransferTotals | None = None  # of an engine among several
    asleep: bool = False  # its process has been ended until `wake_up`

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """Whether requests are being worked on now."""

    @abstractmethod
    def load(self) -> EngineLoad: ...

    def each_engine(self) -> Mapping[str, EngineStatus]:
        """All engines that it has, by name."""
        return {"0": self}

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
