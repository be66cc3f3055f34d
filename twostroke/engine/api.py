"""`EngineClient`: the interface of an engine in this process or in another. Imports no torch."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from twostroke.errors import RequestError
from twostroke.kv.cache import GroupLimits
from twostroke.kv.tiers.tiers import TierStatus
from twostroke.kv.usage import KVUsage
from twostroke.model.describe.cost import NO_FIGURES, ModelFigures
from twostroke.observe.record import Records
from twostroke.observe.totals import Totals, TransferTotals
from twostroke.outputs import RequestOutput
from twostroke.request import EngineRequest, SamplingParams

if TYPE_CHECKING:  # the engine's own process must not import them
    from twostroke.engine.input_processor import InputProcessor, Prompt
    from twostroke.engine.output_processor import RequestState


SINGLE_ENGINE = (
    "this server has one engine; start it with --data-parallel-size of 2 or more, or with "
    "--prefill-engines and --decode-engines, for pools that grow and shrink"
)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The properties of an engine, known once it is up."""

    model_name: str
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    dtype: str
    device: str
    total_bytes: int  # memory that the device or the cgroup allows
    weight_bytes: int
    kv_bytes: int
    kv_tokens: int  # capacity of all KV groups together
    load_s: float
    sampling: SamplingParams  # the recommendation of the model's makers
    weights: str = ""  # type of the weights: "Q8_0", "int8, from bfloat16"; "": the dtype
    kv_groups: tuple[GroupLimits, ...] = ()
    # Measured on a GPU:
    state_bytes: int = 0
    activation_bytes: int = 0
    graph_bytes: int = 0
    read_bytes_per_s: float = 0.0  # the machine's ceilings, if they were measured
    ops_per_s: float = 0.0
    threads: int = 0  # for a decode step on a CPU
    family: str = ""  # the model's architecture, as its file names it
    num_parameters: int = 0
    file_format: str = ""  # "gguf" or "safetensors"
    kv_layout: str = ""  # the layout of a KV block; engines exchange blocks of one layout
    figures: ModelFigures = NO_FIGURES
    isa: str = ""  # instruction set of the native kernels; "": the engine does not use them
    isas: tuple[str, ...] = ()  # instruction sets that kernels can use here, the fastest first
    speculative: bool = False  # the engine uses speculative decoding
    draft_bytes: int = 0  # weights and KV cache of the draft model


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine at its last report."""

    waiting: int
    running: int
    kv: KVUsage
    # Messages on the engine's sockets that were dropped, by reason.
    dropped: dict[str, int] = field(default_factory=dict)
    tiers: tuple[TierStatus, ...] = ()


class EngineStatus(Protocol):
    """The state of an engine for the metrics, besides its records."""

    info: EngineInfo
    records: Records
    totals: Totals | None  # None for a single engine
    transfers: TransferTotals | None  # None for a single engine
    num_restarts: int
    asleep: bool

    @property
    def dropped(self) -> Mapping[str, int]:
        """The number of messages between processes that were dropped, by reason."""

    @property
    def phase(self) -> str:
        """The phase of the engine's pool: prefill, decode or both; "" for a single engine."""

    @property
    def healthy(self) -> bool: ...

    def load(self) -> EngineLoad: ...


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """The status of one engine of several."""

    name: str
    phase: str  # prefill, decode, both
    state: str  # up, leaving, down (being restarted), stopped
    host: str
    pid: int
    restarts: int
    requests: int  # requests in the engine


@dataclass(frozen=True, slots=True)
class PoolsStatus:
    counts: dict[str, int]  # engines of each pool, without those that are leaving
    scaling: bool  # the pools are being changed
    engines: list[MemberStatus]


class EngineClient(ABC):
    """An engine in a thread (`AsyncEngine`), in a process (`RemoteEngine`), or several engines
    (`RoutedEngine`). All calls and all callbacks are in one event loop."""

    info: EngineInfo
    input_processor: InputProcessor
    records: Records  # kept when the engine's process ends
    num_restarts: int
    totals: Totals | None = None  # None for a single engine
    transfers: TransferTotals | None = None  # None for a single engine
    phase: str = ""
    asleep: bool = False  # `sleep` has ended the engine's process

    @property
    def dropped(self) -> Mapping[str, int]:
        """The number of messages between processes that were dropped, by reason."""
        return {}

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """Return whether the engine runs requests now."""

    @abstractmethod
    def load(self) -> EngineLoad: ...

    def transfers_by_engine_pair(self) -> Mapping[tuple[str, str], TransferTotals]:
        """Return the totals of fetched KV blocks, by the names of sender and receiver."""
        return {}

    def engines_by_name(self) -> Mapping[str, EngineStatus]:
        """Return all engines, by name."""
        return {"0": self}

    def pools(self) -> PoolsStatus:
        """Return the status of the pools; raise `RequestError` if there is a single engine."""
        raise RequestError(SINGLE_ENGINE)

    def open_requests(self) -> list[EngineRequest]:
        """Return the requests that have not ended, if there are several engines."""
        return []

    async def scale(self, counts: Mapping[str, int], drain_timeout_s: float) -> None:
        """Change the number of engines in each pool (prefill, decode, data_parallel_size), and wait
        for the end of the change. An engine that leaves first finishes its requests. Requests that
        run longer than `drain_timeout_s` continue in another engine."""
        raise RequestError(SINGLE_ENGINE)

    @abstractmethod
    def submit(
        self,
        request: EngineRequest,
        on_output: Callable[[RequestOutput], None],
        on_error: Callable[[Exception], None],
        request_id: str | None = None,
    ) -> RequestState:
        """Run a request. `on_output` gets each output in the form of `params.output_kind`.
        `on_error` gets the error that ends the request: a `RequestError` if the engine refuses the
        request, an `EngineError` if the engine has died."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context. An idle engine plans all requests that are submitted in the context
        for the same step. Code in the context must not await. Pools of engines ignore it."""
        return nullcontext()

    @abstractmethod
    def leave(self, state: RequestState) -> None:
        """Stop listening to a request; abort it if it has not ended."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request; its last output has the finish_reason "abort"."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Drop every cached prefix. Running requests keep their blocks."""

    async def start_profile(self) -> None:
        """Start a profile; raises `RequestError` while a profile runs."""
        raise RequestError("this engine cannot be profiled")

    async def stop_profile(self) -> bytes:
        """End the profile and return it as JSON; raises `RequestError` if none was started."""
        raise RequestError("this engine cannot be profiled")

    async def sleep(self, drain: bool = False) -> None:
        """Free all memory of the engine until `wake_up`. `drain`: wait for open requests instead of
        aborting them. Only for an engine in a separate process."""
        raise RequestError("this engine shares its process with the server, so it cannot sleep")

    async def wake_up(self) -> None:
        """Start the engine again; return when it runs requests."""
        return

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Process a prompt and stream its outputs. Raise at once if the prompt is refused."""
        request = self.input_processor.process(prompt, sampling_params, priority)
        return self.stream(request, request_id)

    async def stream(
        self, request: EngineRequest, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Submit a request and iterate over its outputs. Leaving early aborts the request."""
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
