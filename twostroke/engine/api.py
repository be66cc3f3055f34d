"""What a server needs of an engine, wherever it runs: in this process or in another. No torch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from twostroke.kv.cache import GroupLimits, KVUsage
from twostroke.observe.record import Records
from twostroke.outputs import RequestOutput
from twostroke.request import SamplingParams

if TYPE_CHECKING:
    from twostroke.engine.intake import Intake, Prepared


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself once it is up."""

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
    kv_groups: tuple[GroupLimits, ...] = ()
    state_bytes: int = 0  # measured on a GPU, as are the next two
    activation_bytes: int = 0
    graph_bytes: int = 0
    read_bytes_per_s: float = 0.0  # the machine's ceilings, where they were measured
    ops_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine was when it last said so."""

    waiting: int
    running: int
    kv: KVUsage


class EngineClient(Protocol):
    info: EngineInfo
    intake: Intake
    records: Records  # outlive the engine, if another is started in its place
    num_restarts: int

    @property
    def healthy(self) -> bool:
        """Whether requests are being worked on now."""
        ...

    def load(self) -> EngineLoad: ...

    def stream(
        self, prepared: Prepared, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Run a request; outputs in the kind its parameters ask for. Leaving early aborts it.

        Raises `RequestError` if the engine refuses it, `EngineError` if the engine is lost.
        """
        ...

    def abort(self, request_id: str) -> None: ...
