"""`PoolSettings`: the number of engines of a server, and the settings of each engine.

--prefill-engines P --decode-engines D    two pools: each phase has its own engines
--data-parallel-size N                    one pool: N engines that do both phases

The engines are processes of this machine, or actors of a Ray cluster (`on_ray.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from twostroke.config import KV_TIMEOUT_EXPECTED, EngineConfig, check_kv_transport
from twostroke.engine.spawn import DEFAULT_BUILDER, Launcher, LocalLauncher, Spawned
from twostroke.errors import ConfigError, RequestError, did_you_mean
from twostroke.route.router import Role
from twostroke.strict import StrictSettings

MAX_ENGINES = 64
# Settings that may differ between the pools, because they do not change the generated tokens.
SETTINGS_PER_POOL = (
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
    resources: Mapping[str, float] = MappingProxyType({})  # custom resources of Ray


class EnginePlacement(Protocol):
    """Decides where engines run: `LocalPlacement`, or `RayCluster` of `on_ray.py`."""

    def launcher(self, engine: PooledEngine) -> Launcher: ...

    def check_capacity(self, config: EngineConfig, num_engines: int) -> None:
        """Raise `RequestError` if an engine with `config` would not fit. `num_engines` counts all
        engines, including the new ones."""


class LocalPlacement:
    """Runs engines as processes of this machine. `spawned`: processes that have been started
    already, by the engine's name."""

    def __init__(
        self, builder: str = DEFAULT_BUILDER, spawned: Mapping[str, Spawned] | None = None
    ) -> None:
        self._builder, self._spawned = builder, dict(spawned or {})

    def launcher(self, engine: PooledEngine) -> Launcher:
        return LocalLauncher(engine.config, self._builder, self._spawned.pop(engine.name, None))

    def check_capacity(self, config: EngineConfig, num_engines: int) -> None:
        has_fixed_cache = config.kv_cache_memory_bytes or config.num_gpu_blocks_override
        if num_engines > config.engines_on_host and not has_fixed_cache:
            raise RequestError(
                f"no memory is left for {num_engines} engines: the server was started with "
                f"{config.engines_on_host}, which use all memory of this machine; start the server "
                "with --kv-cache-memory-bytes, the size of each engine's KV cache, to leave room"
            )


@dataclass(frozen=True, kw_only=True)
class PoolSettings(StrictSettings):
    # Either both numbers are 0, and each engine does both phases, or neither is 0.
    prefill_engines: int = 0
    decode_engines: int = 0
    data_parallel_size: int = 1  # the number of engines that do both phases
    prefill_config: dict[str, Any] | None = None  # settings of the prefill engines alone
    decode_config: dict[str, Any] | None = None
    kv_transfer_checksums: bool = False
    ray: str | None = None  # the Ray cluster: "auto", or HOST:PORT of its head; None: no Ray
    ray_timeout_s: float = 60.0  # how long an engine may wait for a node with free resources
    # Ray's custom resources for each engine, such as {"prefill": 1}. An engine runs only on a node
    # that has these resources.
    prefill_resources: dict[str, float] | None = None
    decode_resources: dict[str, float] | None = None
    kv_transfer_timeout_s: float = 3.0  # time without new data after which blocks are recomputed
    kv_transport: str = "auto"  # "auto", "memory", "device", "nixl" or "sockets"

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
            present, missing = "prefill_engines", "decode_engines"
            if self.decode_engines:
                present, missing = missing, present
            raise ConfigError(
                f"{present} is given, and {missing} is not: a request needs both pools; give both "
                "options, or neither for engines that do both phases"
            )
        if self.prefill_engines and self.data_parallel_size > 1:
            raise ConfigError(
                "prefill_engines and data_parallel_size both say how many engines there are; "
                "give one of them"
            )
        for name in ("prefill_config", "decode_config"):
            self._check_pool_config(name)
        for name in ("prefill_resources", "decode_resources"):
            self._check_resources(name)

    def _check_pool_config(self, name: str) -> None:
        settings = getattr(self, name)
        if settings is None:
            return
        if not self.prefill_engines:
            raise ConfigError(f"{name} is for pools: give prefill_engines and decode_engines")
        if not isinstance(settings, dict):
            self._refuse(name, f"a dict of {', '.join(SETTINGS_PER_POOL)}")
        for key in settings:
            if key not in SETTINGS_PER_POOL:
                names = ", ".join(SETTINGS_PER_POOL)
                hint = (
                    did_you_mean(str(key), SETTINGS_PER_POOL)
                    or f"; settings of one pool are {names}"
                )
                raise ConfigError(f"{name}: {key!r} is the same for all engines{hint}")

    def _check_resources(self, name: str) -> None:
        resources = getattr(self, name)
        if resources is None:
            return
        if self.ray is None or not self.prefill_engines:
            raise ConfigError(
                f"{name} says which nodes of a Ray cluster a pool is for: it needs ray, "
                "prefill_engines and decode_engines"
            )
        valid = isinstance(resources, dict) and all(
            type(amount) in (int, float) and 0 < amount < 1e6 for amount in resources.values()
        )
        if not valid:
            self._refuse(name, 'a dict of numbers above 0, such as {"prefill": 1}')

    @property
    def num_engines(self) -> int:
        return self.prefill_engines + self.decode_engines or self.data_parallel_size

    @property
    def summary(self) -> str:
        """The number of engines as the banner shows it; "" for a single engine of this machine."""
        where = ", on Ray" if self.ray else ""
        if self.prefill_engines:
            return f"{self.prefill_engines} prefill, {self.decode_engines} decode{where}"
        return f"{self.data_parallel_size}{where}" if self.data_parallel_size > 1 or where else ""

    def engines(self, config: EngineConfig) -> list[PooledEngine]:
        """Return the description of each engine. A single engine has the settings of `config`."""
        count = self.num_engines
        # Engines need a secret if they exchange blocks or run on several machines. Otherwise the
        # server and an engine are connected through files that only this user can open.
        secret = None
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
        # Each pool keeps only one copy of the weights, in the format of its phase.
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
            engine._replace(config=replace(engine.config, engine_index=n))
            for n, engine in enumerate(pools)
        ]
