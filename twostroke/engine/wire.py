"""The messages between the engine's process and its parent process, in msgpack. Does not import
torch.

    Add, Abort, FetchAhead, Release, ResetPrefixes, Audit, StartProfile, StopProfile, Shutdown
        ──▶ engine
    engine ──▶ Ready | Failed; Step, Refused, FetchedOffer, Audited, Profiled, Heartbeat

Messages name a request by a number, its handle. A handle is never used again, so that a late
message about an old request cannot reach a new request with the same id. The tokens of a step are
sent as two columns, handles and tokens. The few updates with more fields are sent in full.

The engine does not trust the sender: decoding checks types and constructs `SamplingParams`, whose
constructor checks the values.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from twostroke import errors
from twostroke.engine.api import EngineInfo, EngineLoad
from twostroke.errors import EngineError, TwostrokeError
from twostroke.kv.transfer import Offer
from twostroke.observe.record import Causes, RequestRecord, StepRecord, TierFetchRecord
from twostroke.plan import TokenLogprobs
from twostroke.request import EngineRequest, FinishReason, Resumed
from twostroke.sched.updates import Update

# ── to the engine ───────────────────────────────────────────────────────────────────────────────


class OtherCompletion(msgspec.Struct, array_like=True, frozen=True):
    """The fields in which another completion of a request differs from its first completion."""

    request_id: str
    seed: int
    resumed: Resumed | None


class Add(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Add the completions of one request, all or none; their handles are `first`, `first` + 1, …
    Fields that all completions share are sent and checked once: a request may list thousands of
    tokens, and all streams wait while they are checked."""

    first: int
    request: EngineRequest
    others: list[OtherCompletion]


class AddAll(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """Add requests that arrived together, so that they can run in one step."""

    adds: list[Add]


class Abort(msgspec.Struct, tag=2, array_like=True, frozen=True):
    handles: list[int]


class Shutdown(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Finish the running step and end."""


class Audit(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Check that every block and row has its owners; answered by `Audited`."""


class ResetPrefixes(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Drop every cached prefix."""


class StartProfile(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Answered by `Profiled`, without data."""


class StopProfile(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Answered by `Profiled`."""


class Release(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """Free blocks that were offered to other engines and are not needed any more."""

    offers: list[int]


class FetchAhead(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """Fetch the first blocks of a prompt while another engine computes the others. Answered by
    `FetchedOffer`."""

    handle: int
    request: EngineRequest  # the computed part of the prompt, with the offer


ToEngine = (
    Add
    | AddAll
    | Abort
    | Shutdown
    | Audit
    | ResetPrefixes
    | StartProfile
    | StopProfile
    | Release
    | FetchAhead
)

# ── from the engine ─────────────────────────────────────────────────────────────────────────────


class Ready(msgspec.Struct, tag=1, array_like=True, frozen=True):
    info: EngineInfo
    load: EngineLoad
    endpoint: str  # the address of the engine's inbox
    pid: int
    host: str  # the name of the engine's machine
    clock: str  # the identifier of the engine's clock (`clocks.py`)
    now_s: float  # by that clock


class Failed(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The engine could not start, or cannot continue; the process ends."""

    kind: str  # the class of the error; "" for an unexpected error
    message: str


class PackedRecord(msgspec.Struct, array_like=True, frozen=True):
    """`RequestRecord` with its arrays as bytes."""

    request_id: str
    num_prompt: int
    received_s: float
    tokenised_s: float
    queued_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float
    sent_s: float
    num_cached: int
    chunks: list[tuple[float, int, int, int]]
    preempted: list[tuple[float, int]]
    token_s: bytes
    token_step: bytes
    finish_reason: str
    max_tokens: int
    n: int
    family: str
    gaps: Causes
    worst_gap_s: float
    worst_gap: Causes | None
    kv_evicted_tokens: int
    gap_causes: bytes | None
    drafted: int
    accepted: int
    predicted: int
    predicted_accepted: int
    num_fetched: int
    tier_fetch: TierFetchRecord | None


class FullUpdate(msgspec.Struct, array_like=True, frozen=True):
    """An `Update` with more than plain tokens."""

    handle: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: int | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    record: PackedRecord | None
    error: str
    progress: int
    impossible: bool
    offer: Offer | None


class Step(msgspec.Struct, tag=3, array_like=True, frozen=True):
    handles: list[int]
    tokens: list[int]  # one for each of `handles`
    full: list[FullUpdate]
    load: EngineLoad
    steps: list[StepRecord]  # committed since the last message, without their slots


class Refused(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """An `Add` was refused; the engine has none of its requests."""

    first: int
    count: int  # of requests
    kind: str
    message: str


class Audited(msgspec.Struct, tag=5, array_like=True, frozen=True):
    problem: str  # "" if there is none


class Heartbeat(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """The process is alive. Sent every `HEARTBEAT_S` by a thread that does nothing else."""

    step_s: float  # how long the current step has been running; 0: no step runs
    now_s: float  # by the engine's clock


class Profiled(msgspec.Struct, tag=7, array_like=True, frozen=True):
    kind: str  # the class of the error, if the profile was refused
    problem: str  # "" if there is none
    data: bytes  # the profile, as JSON


class FetchedOffer(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """The fetch of an offer has ended, for a request or ahead of one. The offer can be released."""

    handle: int
    num_bytes: int
    seconds: float
    problem: str  # why the blocks must be recomputed; "": they were fetched
    waited_s: float = 0.0  # wait for free blocks in the receiving engine, before the fetch
    transport: str = ""  # memory, device, nixl or sockets


FromEngine = Ready | Failed | Step | Refused | Audited | Profiled | Heartbeat | FetchedOffer
HEARTBEAT_S = 0.5

# An engine that has sent this number of unread steps waits. Without this limit, a slow parent would
# get a long queue of messages, and new requests would wait behind the queue.
STEPS_AHEAD = 8

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode

# ── updates ⇄ columns ───────────────────────────────────────────────────────────────────────────


def pack_add(first: int, requests: Sequence[EngineRequest]) -> Add:
    """`requests`: the completions of one request. `first`: the handle of the first of them."""
    request, *others = requests
    return Add(first, request, [OtherCompletion(other.request_id, other.seed, other.resumed)
                                for other in others])  # fmt: skip


def unpack_add(add: Add) -> list[EngineRequest]:
    request, params = add.request, add.request.params
    # The log-probabilities of the prompt are computed once, for the first completion.
    if add.others and params.prompt_logprobs is not None:
        params = replace(params, prompt_logprobs=None)
    others = [
        replace(request, request_id=other.request_id, params=params, seed=other.seed,
                resumed=other.resumed)
        for other in add.others
    ]  # fmt: skip
    return [request, *others]


def pack_step(
    updates: Sequence[Update],
    handles: Mapping[str, int],
    load: EngineLoad,
    steps: list[StepRecord],
) -> Step:
    named: list[int] = []
    plain: list[int] = []
    full: list[FullUpdate] = []
    for update in updates:
        (
            name, tokens, logprobs, finish, stop, prompt_logprobs, record, error, progress,
            impossible, offer,
        ) = update  # fmt: skip
        handle = handles[name]
        more = logprobs or progress or error or offer is not None
        if finish is None and not more and prompt_logprobs is None:
            for token in tokens:
                named.append(handle)
                plain.append(token)
        else:
            packed = None if record is None else _pack_record(record)
            full.append(
                FullUpdate(
                    handle=handle,
                    tokens=tokens,
                    logprobs=logprobs,
                    finish_reason=finish,
                    stop_reason=stop,
                    prompt_logprobs=prompt_logprobs,
                    record=packed,
                    error=error,
                    progress=progress,
                    impossible=impossible,
                    offer=offer,
                )
            )
    return Step(named, plain, full, load, steps)


def unpack_step(step: Step, names: Mapping[int, str]) -> list[Update]:
    """Return the updates of the requests in `names`."""
    name_of, new = names.get, tuple.__new__  # `Update(…)` takes twice as long
    updates: list[Update] = [
        new(Update, (name, (token,), (), None, None, None, None, "", 0, False, None))
        for handle, token in zip(step.handles, step.tokens, strict=True)
        if (name := name_of(handle)) is not None
    ]
    for full in step.full:
        if full.handle in names:
            updates.append(
                Update(
                    request_id=names[full.handle],
                    tokens=full.tokens,
                    logprobs=full.logprobs,
                    finish_reason=full.finish_reason,
                    stop_reason=full.stop_reason,
                    prompt_logprobs=full.prompt_logprobs,
                    record=None if full.record is None else _unpack_record(full.record),
                    error=full.error,
                    progress=full.progress,
                    impossible=full.impossible,
                    offer=full.offer,
                )
            )
    return updates


_RECORD_FIELDS = PackedRecord.__struct_fields__


def _pack_record(record: RequestRecord) -> PackedRecord:
    values = {name: getattr(record, name) for name in _RECORD_FIELDS}
    values["token_s"] = record.token_s.tobytes()
    values["token_step"] = record.token_step.tobytes()
    if record.gap_causes is not None:
        values["gap_causes"] = record.gap_causes.tobytes()
    return PackedRecord(**values)


def _unpack_record(packed: PackedRecord) -> RequestRecord:
    values = {name: getattr(packed, name) for name in _RECORD_FIELDS}
    values["token_s"] = array("d", packed.token_s)
    values["token_step"] = array("q", packed.token_step)
    if packed.gap_causes is not None:
        values["gap_causes"] = array("f", packed.gap_causes)
    return RequestRecord(**values)


# ── errors ──────────────────────────────────────────────────────────────────────────────────────


def pack_error(error: Exception) -> tuple[str, str]:
    """Return the class name and message of an error. The name is "" for an unexpected error."""
    if isinstance(error, TwostrokeError):
        return type(error).__name__, str(error)
    return "", f"{type(error).__name__}: {error}"


def unpack_error(kind: str, message: str, otherwise: str) -> TwostrokeError:
    """Make an error of the class `kind`. `otherwise`: begins the message of an unexpected error."""
    known = getattr(errors, kind, None) if kind else None
    if isinstance(known, type) and issubclass(known, TwostrokeError):
        return known(message)
    return EngineError(f"{otherwise} ({message})")
