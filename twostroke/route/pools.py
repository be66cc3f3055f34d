"""Which engines a server has, and what each is set to.

--prefill-engines P --decode-engines D    two pools: each phase has its own engines
--data-parallel-size N                    N engines that do both
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError, nearest
from twostroke.route.router import Role
from twostroke.strict import Strict

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


@dataclass(frozen=True, kw_only=True)
class PoolSettings(Strict):
    prefill_engines: int = 0  # 0 and 0: engines do both phases
    decode_engines: int = 0
    data_parallel_size: int = 1  # engines that do both
    prefill_config: dict[str, Any] | None = None  # settings of the prefill engines alone
    decode_config: dict[str, Any] | None = None
    kv_transfer_checksums: bool = False

    def __post_init__(self) -> None:
        for name in ("prefill_engines", "decode_engines"):
            self._check_int(name, 0, MAX_ENGINES)
        self._check_int("data_parallel_size", 1, MAX_ENGINES)
        self._check_bools("kv_transfer_checksums")
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

    @property
    def num_engines(self) -> int:
        return self.prefill_engines + self.decode_engines or self.data_parallel_size

    @property
    def summary(self) -> str:
        """How many there are, for people; nothing for one."""
        if self.prefill_engines:
            return f"{self.prefill_engines} prefill, {self.decode_engines} decode"
        return f"{self.data_parallel_size}" if self.data_parallel_size > 1 else ""

    def engines(self, config: EngineConfig) -> list[PooledEngine]:
        """All of them; one alone is as `config` says."""
        count = self.num_engines
        common = replace(config, engines_on_host=count)
        if not self.prefill_engines:
            return [PooledEngine(f"engine-{n}", Role.BOTH, common) for n in range(count)]
        sharing = "checked" if self.kv_transfer_checksums else "shared"
        prefill = replace(common, kv_sharing=sharing, **(self.prefill_config or {}))
        decode = replace(common, **(self.decode_config or {}))
        return [
            *(
                PooledEngine(f"prefill-{n}", Role.PREFILL, prefill)
                for n in range(self.prefill_engines)
            ),
            *(PooledEngine(f"decode-{n}", Role.DECODE, decode) for n in range(self.decode_engines)),
        ]
