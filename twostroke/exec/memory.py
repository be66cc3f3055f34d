"""The plan of memory: how many blocks each KV group has and how long a sequence may become.

Made from the spec before anything large is allocated, so that a model that cannot fit is refused
with the numbers instead of dying half-way.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from twostroke.config import GIB, EngineConfig
from twostroke.errors import ConfigError, ModelError
from twostroke.exec.pool_sizing import PoolSizing, pool_sizing
from twostroke.model.describe.spec import ModelSpec

log = logging.getLogger(__name__)

CPU_KV_BYTES = 4 * GIB
CPU_KV_SHARE = 4  # the pools take at most this fraction of the memory: one in …
POSITIONS_SHARE = 32  # … and what every position takes besides, at most one in …
ACTIVATION_COPIES = 6  # tensors as wide as a layer that live at one time in a step


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    total_bytes: int  # what device or cgroup allow
    weight_bytes: int
    sizing: PoolSizing
    group_blocks: tuple[int, ...]  # of each KV group, without its null block
    max_model_len: int
    shortened: bool  # memory, not the model, limits max_model_len
    device_bytes: int = 0  # of a GPU, what others use of it included
    others_bytes: int = 0  # of that, what engines have that it is shared with
    state_bytes: int = 0  # rows, buffers, what the driver keeps for us; measured, as are these:
    activation_bytes: int = 0  # of the largest step
    graph_bytes: int = 0

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Of each KV group's pool, its null block included."""
        sizes = zip(self.group_blocks, self.sizing.block_bytes, strict=True)
        return tuple((blocks + 1) * size for blocks, size in sizes)

    @property
    def kv_bytes(self) -> int:
        return sum(self.group_bytes)

    def waterfall(self) -> str:
        """Where the memory goes, from what was free down to what is left."""
        parts = {
            "weights": self.weight_bytes,
            "state": self.state_bytes,
            "activations": self.activation_bytes,
            "graphs": self.graph_bytes,
            "KV cache": self.kv_bytes,
        }
        left = self.total_bytes - sum(parts.values())
        steps = [f"{name} {gib(size)}" for name, size in parts.items() if size]
        return " → ".join([f"{gib(self.total_bytes)} free", *steps, f"left {gib(left)}"])


def plan_memory(
    config: EngineConfig,
    spec: ModelSpec,
    weight_bytes: int,
    itemsize: int,
    kv_itemsize: int,
    total_bytes: int,
    on_gpu: bool,
) -> MemoryPlan:
    """`weight_bytes`: of all weights as they are stored. `itemsize`, `kv_itemsize`: bytes per
    element of a step's activations and of the KV cache."""
    if weight_bytes > total_bytes:
        wide = weight_bytes > 2 * spec.num_parameters()
        raise ModelError(
            f"the weights need {gib(weight_bytes)}, but {gib(total_bytes)} are there; "
            "take a smaller model" + (", or dtype='bfloat16'" if wide else "")
        )
    wanted = max_len_wanted(config, spec)
    sizing = pool_sizing(config, spec, kv_itemsize, wanted, on_gpu)
    if config.num_gpu_blocks_override is not None:
        blocks = sizing.with_main(config.num_gpu_blocks_override)
    else:
        kv_bytes = _kv_bytes(
            config, spec, weight_bytes, itemsize, sizing, total_bytes, on_gpu, wanted
        )
        if kv_bytes < sizing.least_bytes:
            windowed = any(group.window is not None for group in spec.kv_groups())
            held = ", and what one request holds in layers with a window," if windowed else ""
            raise ConfigError(
                f"the KV cache of {kv_bytes} bytes is too small for one block: a block of "
                f"{config.block_size} tokens and a null block{held} need {sizing.least_bytes} "
                f"bytes; set kv_cache_memory_bytes to at least {sizing.least_bytes}, or lower "
                "block_size"
            )
        blocks = sizing.within(kv_bytes)
    plan = MemoryPlan(total_bytes, weight_bytes, sizing, blocks, wanted, False)
    if weight_bytes + plan.kv_bytes > total_bytes:
        raise ConfigError(
            f"weights ({gib(weight_bytes)}) and KV cache ({gib(plan.kv_bytes)}) need more than "
            f"the {gib(total_bytes)} there are; set "
            f"{cache_setting(config, sizing, total_bytes - weight_bytes, 'at most ')}"
        )
    return fit_length(plan, config, spec)


def max_len_wanted(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        # A longer context changes the angles of dynamic rope, so it must be asked for.
        dynamic = [rope.original_context for rope in spec.ropes() if rope.kind == "dynamic"]
        return min([spec.max_context, *dynamic])
    if config.max_model_len > spec.max_context and config.kv_eviction is not None:
        log.warning(
            "max_model_len %s is above the %s tokens that the model was made for: what it writes "
            "beyond them may be worth little",
            f"{config.max_model_len:,}",
            f"{spec.max_context:,}",
        )
    elif config.max_model_len > spec.max_context:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the {spec.max_context} tokens that "
            f"the model was made for; lower it to at most {spec.max_context}"
        )
    return config.max_model_len


def _kv_bytes(
    config: EngineConfig,
    spec: ModelSpec,
    weight_bytes: int,
    itemsize: int,
    sizing: PoolSizing,
    total_bytes: int,
    on_gpu: bool,
    max_len: int,
) -> int:
    """Of the pools of all groups together."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if not on_gpu:
        # A small model would get more than all its sequences, and their prefixes, can ever fill.
        fillable = 2 * config.max_num_seqs * (max_len + config.block_size)
        fillable = int(fillable * sizing.token_bytes)
        return min(CPU_KV_BYTES, total_bytes // CPU_KV_SHARE, fillable)
    tokens = config.token_budget(on_gpu, max_len)
    widest = max(
        2 * layer.mlp.width + layer.attention.q_size + 2 * layer.attention.kv_size
        for layer in spec.layers
    )
    activations = ACTIVATION_COPIES * tokens * (widest + 2 * spec.hidden_size) * itemsize
    logits = 3 * 4 * config.max_num_seqs * spec.vocab_size
    room = int(total_bytes * config.gpu_memory_utilization)
    return max(0, room - weight_bytes - activations - logits)


def fit_length(plan: MemoryPlan, config: EngineConfig, spec: ModelSpec) -> MemoryPlan:
    """A sequence must fit the cache alone; shorten the context unless the user insists."""
    plan = _bound_positions(plan, config, spec)
    sizing = plan.sizing
    if sizing.all_slide or config.kv_eviction is not None:
        return plan  # what a sequence holds has a bound; `Scheduler.add` checks the rest
    tokens = plan.group_blocks[sizing.main] * config.block_size
    if plan.max_model_len <= tokens:
        return plan
    if config.max_model_len is not None:
        blocks = -(-config.max_model_len // config.block_size)
        needed = sizing.num_bytes(sizing.with_main(blocks))
        raise ConfigError(
            f"max_model_len {config.max_model_len} does not fit the KV cache, which holds "
            f"{tokens} tokens; lower max_model_len to {tokens} or raise "
            f"{cache_setting(config, sizing, needed)}"
        )
    if tokens < 2:
        needed = sizing.num_bytes(sizing.with_main(2))
        raise ConfigError(
            f"the KV cache holds {tokens} token, and a request needs at least 2; raise block_size "
            f"or {cache_setting(config, sizing, needed)}"
        )
    return replace(plan, max_model_len=tokens, shortened=True)


def _bound_positions(plan: MemoryPlan, config: EngineConfig, spec: ModelSpec) -> MemoryPlan:
    """A config may promise any context: its tables must not take the memory before a request does.

    Each position has its angles (and a scale of queries), and in every row a token and its part of
    a block table.
    """
    if config.max_model_len is not None:
        return plan
    angles = 4 * sum(rope.dim + bool(rope.query_beta) for rope in spec.ropes())
    tables = 4 * len(plan.group_blocks) / config.block_size
    each = angles + config.max_num_seqs * (4 + tables)
    most = int(plan.total_bytes / POSITIONS_SHARE / each)
    if plan.max_model_len <= most:
        return plan
    return replace(plan, max_model_len=most, shortened=True)


def cache_setting(config: EngineConfig, sizing: PoolSizing, kv_bytes: int, bound: str = "") -> str:
    """The setting that gives the cache this many bytes: the one that the user is using."""
    if config.num_gpu_blocks_override is None:
        return f"kv_cache_memory_bytes to {bound}{max(0, kv_bytes)}"
    return f"num_gpu_blocks_override to {bound}{sizing.main_within(kv_bytes)}"


def host_memory_bytes() -> int:
    """What this process may use: the machine's memory, or less if a cgroup says so."""
    if sys.platform == "win32":
        return _windows_memory_bytes()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_cgroup_limits()])


def _windows_memory_bytes() -> int:
    """GlobalMemoryStatusEx: a structure of two 32-bit and seven 64-bit numbers, size first."""
    import ctypes

    status = (ctypes.c_uint64 * 8)(64)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status[1])


def _cgroup_limits(root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Limits of this process's cgroup and of those around it, version 2 and 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root, "memory.max") if not controllers else (root / "memory", _V1_LIMIT)
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            limit = _read_limit(place / name)
            if limit is not None:
                yield limit
            if place == base:
                break


_V1_LIMIT = "memory.limit_in_bytes"


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) > 0 else None


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
