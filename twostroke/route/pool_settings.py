"""Which engines a server has, and what each is set to.

--prefill-engines P --decode-engines D    two pools: each phase has its own engines
--data-parallel-size N                    N engines that do both

They are processes of this machine, or actors of a Ray cluster (`on_ray.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from twostroke.config import KV_TIMEOUT_EXPECTED, EngineConfig, check_kv_transport
from twostroke.engine.spawn import DEFAULT_BUILDER, Launcher, LocalLauncher, Spawned
from twostroke.errors import ConfigError, RequestError, nearest
from twostroke.route.router import Role
from twostroke.strict import StrictSettings

MAX_ENGINES = 64
# What a pool may have of its own: what its phase wants, and nothing that changes the tokens.
OWN = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "threads",
    "threads_batch",
    "ttft_slo_ms",
    "itl_slo_ms",
    "max_decode_stall",
    "performance_mode",
    "scheduling_policy",
)


class PooledEngine(NamedTuple):
    name: str
    role: Role
    config: EngineConfig
    resources: Mapping[str, float] = MappingProxyType({})  # of a Ray node, besides CPUs or GPUs


class Places(Protocol):
    """Where engines may run."""

    def launcher(self, engine: PooledEngine) -> Launcher: ...

    def check_room(self, config: EngineConfig, num_engines: int) -> None:
        """Raise `RequestError` if there cannot be so many, the last of them with this config."""


class ThisMachine:
    """Engines as processes. `spawned`: those that have been started already, by name."""

    def __init__(
        self, builder: str = DEFAULT_BUILDER, spawned: Mapping[str, Spawned] | None = None
    ) -> None:
        self._builder, self._spawned = builder, dict(spawned or {})

    def launcher(self, engine: PooledEngine) -> Launcher:
        return LocalLauncher(engine.config, self._builder, self._spawned.pop(engine.name, None))

    def check_room(self, config: EngineConfig, num_engines: int) -> None:
        fixed = config.kv_cache_memory_bytes or config.num_gpu_blocks_override
        if num_engines > config.engines_on_host and not fixed:
            raise RequestError(
                f"the {config.engines_on_host} engines of the start have this machine's memory "
                f"among them, so there is none left for {num_engines}; start with "
                "--kv-cache-memory-bytes, which each engine has for its KV cache, to leave room"
            )


@dataclass(frozen=True, kw_only=True)
class PoolSettings(StrictSettings):
    prefill_engines: int = 0  # 0 and 0: engines do both phases
    decode_engines: int = 0
    data_parallel_size: int = 1  # engines that do both
    prefill_config: dict[str, Any] | None = None  # settings of the prefill engines alone
    decode_config: dict[str, Any] | None = None
    kv_transfer_checksums: bool = False
    ray: str | None = None  # engines are actors of this cluster: "auto", or HOST:PORT of its head
    ray_timeout_s: float = 60.0  # that an engine may wait for room there
    # What an engine takes of a node that has it, such as {"prefill": 1}: which nodes are for whom.
    prefill_resources: dict[str, float] | None = None
    decode_resources: dict[str, float] | None = None
    kv_transfer_timeout_s: float = 3.0  # nothing has come for so long: computed again
    kv_transport: str = "auto"  # memory, device, nixl or sockets: this way alone

    def __post_init__(self) -> None:
        for name in ("prefill_engines", "decode_engines"):
            self._check_int(name, 0, MAX_ENGINES)
        self._check_int("data_parallel_size", 1, MAX_ENGINES)
        self._check_bools("kv_transfer_checksums")
        if not isinstance(self.ray, str | None) or self.ray == "":
            self._refuse("ray", 'an address, HOST:PORT or "auto"')
        self._check_number("ray_timeout_s", 1.0, 86400.0, "seconds from 1 to 86400")
        self._check_number("kv_transfer_timeout_s", 0.01, 600.0, KV_TIMEOUT_EXPECTED)
        check_kv_transport(self.kv_transport)
        if bool(self.prefill_engines) != bool(self.decode_engines):
            there, missing = ("prefill_engines", "decode_engines")[
                :: 1 if self.prefill_engines else -1
            ]
            raise ConfigError(
                f"{there} is given, and {missing} is not: a request needs both; give both, or "
                "neither for engines that do both phases"
            )
        if self.prefill_engines and self.data_parallel_size > 1:
            raise ConfigError(
                "prefill_engines and data_parallel_size both say how many engines there are; "
                "give one of them"
            )
        for name in ("prefill_config", "decode_config"):
            self._check_own(name)
        for name in ("prefill_resources", "decode_resources"):
            self._check_resources(name)

    def _check_own(self, name: str) -> None:
        given = getattr(self, name)
        if given is None:
            return
        if not self.prefill_engines:
            raise ConfigError(f"{name} is for pools: give prefill_engines and decode_engines")
        if not isinstance(given, dict):
            self._refuse(name, f"a dict of {', '.join(OWN)}")
        for key in given:
            if key not in OWN:
                hint = nearest(str(key), OWN) or f"; a pool has its own {', '.join(OWN)}"
                raise ConfigError(f"{name}: {key!r} is the same for all engines{hint}")

    def _check_resources(self, name: str) -> None:
        given = getattr(self, name)
        if given is None:
            return
        if self.ray is None or not self.prefill_engines:
            raise ConfigError(
                f"{name} says which nodes of a Ray cluster a pool is for: give ray, "
                "prefill_engines and decode_engines with it"
            )
        numbers = isinstance(given, dict) and all(
            type(amount) in (int, float) and 0 < amount < 1e6 for amount in given.values()
        )
        if not numbers:
            self._refuse(name, 'a dict of numbers above 0, such as {"prefill": 1}')

    @property
    def num_engines(self) -> int:
        return self.prefill_engines + self.decode_engines or self.data_parallel_size

    @property
    def summary(self) -> str:
        """How many there are, for people; nothing for one of this machine."""
        where = ", on Ray" if self.ray else ""
        if self.prefill_engines:
            return f"{self.prefill_engines} prefill, {self.decode_engines} decode{where}"
        return f"{self.data_parallel_size}{where}" if self.data_parallel_size > 1 or where else ""

    def engines(self, config: EngineConfig) -> list[PooledEngine]:
        """All of them; one alone is as `config` says."""
        count = self.num_engines
        secret = None  # engines of one machine that share no blocks talk through files of one user
        if self.ray is not None or self.prefill_engines:
            from twostroke.network_auth import engine_secret  # needs ZeroMQ

            secret = engine_secret()
        common = replace(config, engines_on_host=count, engine_secret=secret)
        if not self.prefill_engines:
            return [
                PooledEngine(f"engine-{n}", Role.BOTH, replace(common, engine_index=n))
                for n in range(count)
            ]
        common = replace(
            common,
            kv_transport=self.kv_transport,
            kv_transfer_timeout_s=self.kv_transfer_timeout_s,
        )
        sharing = "checked" if self.kv_transfer_checksums else "shared"
        # A pool keeps the weights as its phase has them, and no others.
        prefill, decode = (common.for_phase(phase) for phase in ("prefill", "decode"))
        prefill = replace(prefill, kv_sharing=sharing, **(self.prefill_config or {}))
        decode = replace(decode, kv_receives=True, **(self.decode_config or {}))
        pools = [
            *(
                PooledEngine(f"prefill-{n}", Role.PREFILL, prefill, self.prefill_resources or {})
                for n in range(self.prefill_engines)
            ),
            *(
                PooledEngine(f"decode-{n}", Role.DECODE, decode, self.decode_resources or {})
                for n in range(self.decode_engines)
            ),
        ]
        return [
            one._replace(config=replace(one.config, engine_index=n)) for n, one in enumerate(pools)
        ]
