"""The five lines that `serve` prints when it is ready: model, memory, KV cache, address, keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke import __version__
from twostroke.config import GIB
from twostroke.exec import pool_sizing
from twostroke.kv.cache import GroupLimits

if TYPE_CHECKING:
    from twostroke.engine.api import EngineInfo

INDENT = " " * 12  # of the text after a line's label
TYPICAL_TOKENS = 1024  # the length of an example request


def banner(
    info: EngineInfo, url: str, num_keys: int, exposed: bool, ready_s: float, engines: str = ""
) -> str:
    """Return the banner. `exposed`: other machines can reach the server. `engines`: a summary of
    several engines."""
    return "\n".join(
        (
            f"twostroke {__version__}: {info.model_name}, {info.weights or info.dtype} on "
            f"{info.device}",
            *([f"  engines   {engines}"] if engines else []),
            f"  memory    {_waterfall(info)}",
            f"  KV cache  {_capacity(info)}",
            f"  serving   {url}",
            f"  key       {_key(num_keys, exposed)}; ready in {ready_s:.1f} s",
        )
    )


def concurrent_requests(info: EngineInfo, tokens: int) -> int:
    """Return how many requests of `tokens` tokens can run at the same time."""
    fit = pool_sizing.concurrent_requests(_groups(info), tokens, info.block_size)
    return min(fit, info.max_num_seqs)


def _groups(info: EngineInfo) -> tuple[GroupLimits, ...]:
    return info.kv_groups or (GroupLimits(info.kv_tokens // info.block_size),)


def _waterfall(info: EngineInfo) -> str:
    parts = {"weights": info.weight_bytes}
    measured = {
        "state": info.state_bytes,
        "activations": info.activation_bytes,
        "graphs": info.graph_bytes,
    }
    parts |= {name: size for name, size in measured.items() if size}
    parts["KV cache"] = info.kv_bytes
    if info.draft_bytes:
        parts["draft model"] = info.draft_bytes
    parts["left"] = info.total_bytes - sum(parts.values())
    steps = [f"{name} {size / GIB:.2f} GiB" for name, size in parts.items()]
    return " → ".join([f"{info.total_bytes / GIB:.2f} GiB", *steps])


def _capacity(info: EngineInfo) -> str:
    lengths = [info.max_model_len]
    if info.max_model_len > TYPICAL_TOKENS:
        lengths.append(TYPICAL_TOKENS)
    fitting = " or ".join(f"{concurrent_requests(info, n):,} of {n:,} tokens" for n in lengths)
    capacity = pool_sizing.capacity(_groups(info), info.block_size)
    return f"{capacity}; requests at the same time: {fitting} (at most {info.max_num_seqs})"


def _key(num_keys: int, exposed: bool) -> str:
    if num_keys:
        return "required" + (f" (one of {num_keys})" if num_keys > 1 else "")
    if exposed:
        return "NONE: any client of the network can use the server; set a key with --api-key"
    return "none, so only this machine can connect; set a key with --api-key to open the network"
