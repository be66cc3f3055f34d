"""Opens the tiers of the KV cache that the settings ask for. Blocks on a disk are kept under the
identity of the engine (`kv_identity`), so that only an engine with the same weights reads them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from twostroke.config import GIB, EngineConfig
from twostroke.errors import ConfigError
from twostroke.exec.memory import available_memory_bytes
from twostroke.kv.cache import blocks_held
from twostroke.kv.tiers.disk import DiskFolder, DiskTier
from twostroke.kv.tiers.disk_settings import disk_bytes, read_disk_cache
from twostroke.kv.tiers.piece_file import PieceLayout, identity_of
from twostroke.kv.tiers.tier import Tier, TierBlocks, piece_span
from twostroke.kv.tiers.tiers import Tiers
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.find.on_disk import split_files
from twostroke.model.load import OpenedModel
from twostroke.sched.step import SchedulerConfig

log = logging.getLogger(__name__)

SAMPLES, SAMPLE_BYTES = 256, 4096  # samples of a weight file for its digest
CONVERSATION_TOKENS = 4096  # tokens of a conversation, the unit of the capacity in the log


class OpenTiers(Protocol):
    """A function that opens the tiers of an engine with these blocks."""

    def __call__(self, blocks: TierBlocks, limits: SchedulerConfig, spec: ModelSpec) -> Tiers: ...


def tiers_of(config: EngineConfig, model: OpenedModel, on_gpu: bool) -> OpenTiers | None:
    """Return a function that opens the tiers of the settings; None if the settings have none."""
    host_gib = config.kv_offloading_size or 0.0
    if host_gib and not on_gpu:
        log.warning(
            "kv_offloading_size has no effect on a CPU: the KV cache itself is in host memory; "
            "kv_cache_memory_bytes is its size, and kv_disk_cache keeps prefixes in a folder"
        )
        host_gib = 0.0
    if not host_gib and config.kv_disk_cache is None:
        return None
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            "kv_offloading_size and kv_disk_cache do not support several ranks yet, and "
            f"tensor_parallel_size is {config.tensor_parallel_size}; leave one of them out"
        )
    return partial(_open, config, model, int(host_gib * GIB) // config.engines_on_host)


def _open(
    config: EngineConfig,
    model: OpenedModel,
    host_bytes: int,
    blocks: TierBlocks,
    limits: SchedulerConfig,
    spec: ModelSpec,
) -> Tiers:
    size, windows = limits.block_size, [group.window for group in limits.groups]
    span = piece_span(blocks.block_bytes, size, windows)
    tiers: list[Tier] = []
    if host_bytes:
        tiers.append(host_tier(blocks, span, host_bytes))
    if config.kv_disk_cache is not None:
        layout = PieceLayout(
            kv_identity(config, model, blocks, windows),
            4 * span * size,
            blocks.block_bytes,
            span,
        )
        settings = read_disk_cache(config.kv_disk_cache)
        folder = DiskFolder(settings.folder, layout, disk_bytes(settings))
        tiers.append(DiskTier(folder, blocks))
    for tier in tiers:
        _log_capacity(tier, limits, span)
    return Tiers(tiers, size, span)


def host_tier(blocks: TierBlocks, span: int, num_bytes: int) -> Tier:
    """Open the tier in host memory. Imports it here, because only blocks of torch have it."""
    from twostroke.kv.device_memory import DeviceBlocks
    from twostroke.kv.tiers.host import HostTier

    available = available_memory_bytes()
    if num_bytes > available:
        # All of it is pinned at the start: the system would end this process, or another.
        raise ConfigError(
            f"kv_offloading_size: {num_bytes / GIB:.1f} GiB were asked for, and "
            f"{available / GIB:.1f} GiB of host memory are available; lower it"
        )
    assert isinstance(blocks, DeviceBlocks)
    return HostTier(blocks, span, num_bytes)


def _log_capacity(tier: Tier, limits: SchedulerConfig, span: int) -> None:
    tokens = tier.capacity * span * limits.block_size
    length = min(CONVERSATION_TOKENS, limits.max_model_len)
    per_conversation = -(-blocks_held(length, None, 1, limits.block_size) // span)
    log.info(
        "KV cache on %s: %s tokens, or %s conversations of %s tokens; %s tokens are stored; reads "
        "run at %.1f GB/s",
        {"host": "host memory", "disk": "disk"}[tier.name],
        f"{tokens:,}",
        f"{tier.capacity // per_conversation:,}",
        f"{length:,}",
        f"{len(tier.names()) * span * limits.block_size:,}",
        tier.speed.bytes_per_s / 1e9,
    )


def kv_identity(
    config: EngineConfig, model: OpenedModel, blocks: TierBlocks, windows: Sequence[int | None]
) -> bytes:
    """Return the digest of everything that determines the contents of a block: the weights, the
    arithmetic, and the layout."""
    dummy = config.seed if config.load_format == "dummy" else None
    weights = (weights_digest(model.files.path).hex(), dummy, model.spec, model.dtype)
    return identity_of(
        weights,
        (config.dtype, config.quantization),
        (config.prefill_quantization, config.decode_quantization, config.calibration),
        (config.kernels, config.exact, config.kv_cache_dtype),
        (blocks.layout, blocks.block_size, blocks.block_bytes, tuple(windows)),
        ("rank", 0, "of", config.tensor_parallel_size),
    )


def weights_digest(path: Path) -> bytes:
    """Return a digest of a model's files: their sizes, modification times, and samples of their
    contents. Reading large files completely would take minutes."""
    if path.is_dir():
        files = sorted([*path.glob("*.safetensors"), *path.glob("*.json")])
    else:
        files = [path.parent / name for name in split_files(path.name)]
    hasher = blake2b(digest_size=16)
    for file in files:
        status = file.stat()
        hasher.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        with file.open("rb", buffering=0) as opened:
            for n in range(SAMPLES):
                opened.seek(n * max(0, status.st_size - SAMPLE_BYTES) // max(1, SAMPLES - 1))
                hasher.update(opened.read(SAMPLE_BYTES))
                if status.st_size <= SAMPLE_BYTES:
                    break
    return hasher.digest()
