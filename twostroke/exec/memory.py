"""The memory plan: the number of blocks of each KV group and the maximum length of a sequence.

The plan is made from the spec before large allocations. A model that does not fit is refused with
the numbers, before loading.
"""

from __future__ import annotations

import contextlib
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
CPU_KV_SHARE = 4  # the pools take at most 1 / 4 of the memory
POSITIONS_SHARE = 32  # tables with an entry per position take at most 1 / 32
ACTIVATION_COPIES = 6  # tensors of a layer's width alive at one time in a step


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of each use of the memory, and the blocks of each KV group."""

    total_bytes: int  # limit of the device or the cgroup
    weight_bytes: int
    sizing: PoolSizing
    group_blocks: tuple[int, ...]  # per KV group, without the null block
    max_model_len: int
    shortened: bool  # memory, not the model, limits max_model_len
    device_bytes: int = 0  # of a GPU, including the memory that other processes use
    others_bytes: int = 0  # used by engines that share the GPU
    state_bytes: int = 0  # rows, buffers, driver; measured, like the next two fields
    activation_bytes: int = 0  # of the largest step
    graph_bytes: int = 0
    draft_bytes: int = 0  # weights and KV cache of the draft model

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Bytes of the pool of each KV group, including the null block."""
        sizes = zip(self.group_blocks, self.sizing.block_bytes, strict=True)
        return tuple((blocks + 1) * size for blocks, size in sizes)

    @property
    def kv_bytes(self) -> int:
        return sum(self.group_bytes)

    def waterfall(self) -> str:
        """Return the uses of the memory as text, from the total to the rest."""
        parts = {
            "weights": self.weight_bytes,
            "state": self.state_bytes,
            "activations": self.activation_bytes,
            "graphs": self.graph_bytes,
            "KV cache": self.kv_bytes,
            "draft model": self.draft_bytes,
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
    """Return a plan that fits `total_bytes`. `weight_bytes`: of all weights as stored. `itemsize`,
    `kv_itemsize`: bytes per element of activations and of the KV cache."""
    if weight_bytes > total_bytes:
        wide = weight_bytes > 2 * spec.num_parameters()
        raise ModelError(
            f"the weights need {gib(weight_bytes)}, but {gib(total_bytes)} are available; "
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
        if kv_bytes < sizing.min_bytes:
            windowed = any(group.window is not None for group in spec.kv_groups())
            held = ", and what one request holds in layers with a window," if windowed else ""
            raise ConfigError(
                f"the KV cache of {kv_bytes} bytes is too small for one block: a block of "
                f"{config.block_size} tokens and a null block{held} need {sizing.min_bytes} "
                f"bytes; set kv_cache_memory_bytes to at least {sizing.min_bytes}, or lower "
                "block_size"
            )
        blocks = sizing.within(kv_bytes)
    plan = MemoryPlan(total_bytes, weight_bytes, sizing, blocks, wanted, False)
    if weight_bytes + plan.kv_bytes > total_bytes:
        raise ConfigError(
            f"weights ({gib(weight_bytes)}) and KV cache ({gib(plan.kv_bytes)}) need more than "
            f"the {gib(total_bytes)} that are available; set "
            f"{cache_setting(config, sizing, total_bytes - weight_bytes, 'at most ')}"
        )
    return fit_length(plan, config, spec)


def max_len_wanted(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        # A longer context changes the angles of dynamic rope, so the user must request it.
        dynamic = [rope.original_context for rope in spec.ropes() if rope.kind == "dynamic"]
        return min([spec.max_context, *dynamic])
    if config.max_model_len > spec.max_context and config.kv_eviction is not None:
        log.warning(
            "max_model_len %s is above the %s tokens that the model supports; text beyond "
            "that length may be of poor quality",
            f"{config.max_model_len:,}",
            f"{spec.max_context:,}",
        )
    elif config.max_model_len > spec.max_context:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the {spec.max_context} tokens that "
            f"the model supports; lower it to at most {spec.max_context}"
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
    """Return the bytes of the pools of all groups."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if not on_gpu:
        # Without a limit a small model would get more than all its sequences and prefixes can fill.
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
    """Shorten the context so that one sequence fits the cache. Raise if the user has set the
    context."""
    plan = _bound_positions(plan, config, spec)
    sizing = plan.sizing
    if sizing.all_slide or config.kv_eviction is not None:
        return plan  # a sequence holds a bounded number of blocks
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
    """Limit the context so that tables with an entry per position fit the memory.

    A config may declare any context. Each position has rope angles (and a query scale), and in
    every row a token and a share of a block table.
    """
    if config.max_model_len is not None:
        return plan
    angles = 4 * sum(rope.dim + bool(rope.query_beta) for rope in spec.ropes())
    tables = 4 * len(plan.group_blocks) / config.block_size
    position_bytes = angles + config.max_num_seqs * (4 + tables)
    max_len = int(plan.total_bytes / POSITIONS_SHARE / position_bytes)
    if plan.max_model_len <= max_len:
        return plan
    return replace(plan, max_model_len=max_len, shortened=True)


def cache_setting(config: EngineConfig, sizing: PoolSizing, kv_bytes: int, bound: str = "") -> str:
    """Return the setting for a cache of `kv_bytes`, with the flag that the user has set."""
    if config.num_gpu_blocks_override is None:
        return f"kv_cache_memory_bytes to {bound}{max(0, kv_bytes)}"
    return f"num_gpu_blocks_override to {bound}{sizing.main_within(kv_bytes)}"


def host_memory_bytes() -> int:
    """Return the memory that this process may use: of the machine, or the limit of the cgroup."""
    if sys.platform == "win32":
        return _windows_memory_bytes()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_cgroup_limits()])


def available_memory_bytes() -> int:
    """Return the memory that this process could take now, by the system's estimate."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(host_memory_bytes(), 1024 * int(line.split()[1]))
    return host_memory_bytes()


def _windows_memory_bytes() -> int:
    """Call GlobalMemoryStatusEx, whose structure has two 32-bit and seven 64-bit numbers."""
    import ctypes

    status = (ctypes.c_uint64 * 8)(64)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status[1])


def _cgroup_limits(root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yield the limits of this process's cgroup and its parents, version 2 and 1."""
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
