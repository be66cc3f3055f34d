"""`EngineLayout`: the engines that serve a trace, and their settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.kv.cache import GroupLimits
from twostroke.planner.engine import EngineFeatures, Link, SimulatedEngine, StepCost
from twostroke.planner.offload import OffloadHits
from twostroke.planner.simulate import VirtualClock
from twostroke.planner.speculation import Acceptance, measured_acceptance
from twostroke.route.router import Role
from twostroke.sched.step import SchedulerConfig

MIN_KV_TOKENS = 256


class CapacityError(ConfigError):
    """A kind of engine cannot hold the model, or a request of the trace."""


class EngineShape(NamedTuple):
    """The capacity of one engine and the settings of its scheduler."""

    kv_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = 16
    groups: tuple[GroupLimits, ...] = ()  # the KV groups; empty: one group of `kv_tokens`
    prefix_caching: bool = True
    max_decode_stall: float | None = None
    ttft_slo_s: float | None = None
    itl_slo_s: float | None = None
    token_bytes: float = 0.0  # KV bytes of a token; 0: not known
    max_in_flight: int = 1  # steps that are planned and have not ended
    acceptance: Acceptance | None = None  # of speculation; None: no drafts
    offload: OffloadHits | None = None  # None: no offload tier

    def scheduler_config(self) -> SchedulerConfig:
        groups = self.groups or (GroupLimits(self.kv_tokens // self.block_size),)
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            groups=groups,
            prefix_caching=self.prefix_caching,
            max_decode_stall=self.max_decode_stall,
            ttft_slo_s=self.ttft_slo_s,
            itl_slo_s=self.itl_slo_s,
            speculation=None if self.acceptance is None else self.acceptance.config(),
        )


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Engines for both phases, or a pool for each phase with a link between the pools."""

    engines: int
    shape: EngineShape
    prefill: int = 0
    decode: int = 0
    link: Link | None = None

    @property
    def count(self) -> int:
        return self.engines + self.prefill + self.decode

    @property
    def pooled(self) -> bool:
        """Return True if each phase has its own engines."""
        return not self.engines

    @property
    def pools(self) -> dict[Role, int]:
        counts = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.engines}
        return {role: count for role, count in counts.items() if count}

    @property
    def name(self) -> str:
        if self.engines:
            return f"{self.engines} engine{'s' * (self.engines != 1)}"
        return f"{self.prefill} prefill and {self.decode} decode engines"

    def simulated(
        self, cost: StepCost, host_s: float, clock: VirtualClock
    ) -> list[SimulatedEngine]:
        """Return idle engines for a simulation."""
        shape = self.shape
        config = shape.scheduler_config()
        configs = {Role.DECODE: replace(config, receives_requests=True)}
        features = EngineFeatures(
            shape.max_in_flight, shape.acceptance, shape.offload, shape.token_bytes
        )
        return [
            SimulatedEngine(
                f"{role}-{n}",
                configs.get(role, config),
                cost,
                host_s,
                clock,
                role,
                self.link,
                features,
            )
            for role, count in self.pools.items()
            for n in range(count)
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "engines": self.engines,
            "prefill_engines": self.prefill,
            "decode_engines": self.decode,
            "hand_over_bytes_per_s": None if self.link is None else self.link.bytes_per_s,
            "kv_tokens": self.shape.kv_tokens,
            "max_num_seqs": self.shape.max_num_seqs,
            "max_num_batched_tokens": self.shape.max_num_batched_tokens,
            "steps_in_flight": self.shape.max_in_flight,
            "speculation": self.shape.acceptance and self.shape.acceptance._asdict(),
            "offload": self.shape.offload and self.shape.offload._asdict(),
        }


def shape_of_server(records: dict[str, Any], source: str) -> EngineShape:
    """Return the shape of the engine that wrote these records (`/records`)."""
    try:
        pacing = records.get("pacing") or {}
        return EngineShape(
            kv_tokens=int(records["kv_tokens"]),
            max_model_len=int(records.get("max_model_len") or records["kv_tokens"]),
            max_num_seqs=int(records["max_num_seqs"]),
            max_num_batched_tokens=int(records["max_num_batched_tokens"]),
            block_size=int(records["block_size"]),
            groups=tuple(GroupLimits(**one) for one in records.get("kv_groups") or ()),
            prefix_caching=bool(pacing.get("prefix_caching", True)),
            max_decode_stall=pacing.get("max_decode_stall"),
            ttft_slo_s=pacing.get("ttft_slo_s"),
            itl_slo_s=pacing.get("itl_slo_s"),
            token_bytes=float(records.get("kv_bytes") or 0.0) / int(records["kv_tokens"]),
            max_in_flight=2 if str(records.get("device", "")).startswith("cuda") else 1,
            acceptance=measured_acceptance(records.get("steps") or ()),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{source} does not describe an engine in the format of a twostroke server's /records "
            f"(missing or wrong: {error})"
        ) from None


def shape_of_hardware(
    kv_tokens: float | None,
    token_bytes: float,
    max_context: int,
    model: str,
    hardware: str,
    config: EngineConfig,
) -> EngineShape:
    """Return an engine with the server's defaults on a GPU with `kv_tokens` of KV cache."""
    if kv_tokens is None:
        raise ConfigError(
            f"{model}: only the size is known, so the size of the KV cache is not; name a model, a "
            "folder, a config.json or a GGUF file"
        )
    if kv_tokens < MIN_KV_TOKENS:
        raise CapacityError(
            f"{model} does not fit on {hardware}: its weights leave room for {kv_tokens:,.0f} "
            f"tokens of KV cache, and at least {MIN_KV_TOKENS} are needed; use smaller --weights, "
            "a higher --tensor-parallel-size, or other hardware"
        )
    ttft_s, itl_s = config.goals(on_gpu=True)
    length = min(max_context, int(kv_tokens))
    return EngineShape(
        kv_tokens=int(kv_tokens),
        max_model_len=length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget(True, length),
        max_decode_stall=config.decode_stall(),
        ttft_slo_s=ttft_s,
        itl_slo_s=itl_s,
        token_bytes=token_bytes,
        max_in_flight=2,  # on a GPU
    )
