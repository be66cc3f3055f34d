"""What `serve` says in five lines when it is up: model, memory, how much it holds, where, for whom.

Written from what the engine says of itself, so that the numbers are those it works with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke import __version__
from twostroke.config import GIB
from twostroke.exec import pool_sizing
from twostroke.kv.cache import GroupLimits

if TYPE_CHECKING:
    from twostroke.engine.api import EngineInfo

INDENT = " " * 12  # of a line's text, after what it is about
TYPICAL_TOKENS = 1024  # a request to give the cache's size a meaning


def banner(
    info: EngineInfo, url: str, num_keys: int, exposed: bool, ready_s: float, engines: str = ""
) -> str:
    """`exposed`: others than this machine can reach the server. `engines`: how many, if several."""
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
    """How many requests that grow to `tokens` tokens can run at one time."""
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
    parts["left"] = info.total_bytes - sum(parts.values())
    steps = [f"{name} {size / GIB:.2f} GiB" for name, size in parts.items()]
    return " → ".join([f"{info.total_bytes / GIB:.2f} GiB", *steps])


def _capacity(info: EngineInfo) -> str:
    lengths = [info.max_model_len]
    if info.max_model_len > TYPICAL_TOKENS:
        lengths.append(TYPICAL_TOKENS)
    holds = " or ".join(f"{concurrent_requests(info, n):,} of {n:,} tokens" for n in lengths)
    held = pool_sizing.capacity(_groups(info), info.block_size)
    return f"{held}; requests at one time: {holds} (at most {info.max_num_seqs})"


def _key(num_keys: int, exposed: bool) -> str:
    if num_keys:
        return "required" + (f" (one of {num_keys})" if num_keys > 1 else "")
    if exposed:
        return "NONE: whoever reaches this address may use it; set one with --api-key"
    return "none, for this machine only; --api-key sets one and opens the network"
