"""Prefill attention at the rate of Hopper's matrix units, for long chunks.

    first chunks       read the step's own keys and values, which lie side by side
    continued chunks   read the pages of the cache, each page fetched on its own

A program has a multiprocessor for itself and takes one tile of queries after another, the longest
ones of a KV head first: while it stores one tile, keys of the next are under way. Programs take
their tiles from a counter.

Lines behind a chunk's end come as zeros, because the copy engine sees them outside of the tensor: a
coordinate says where the end is, and lines are counted so that the end is the tensor's own end. The
coordinates add up to 2⁶⁴ bytes too much, which is nothing. (A tensor that began as many lines
before its memory would have these coordinates too; but the engine faults where the beginning itself
is no memory.)

`prefill_hopper_kernels.py` has the program, `prefill.py` the kernel for everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from twostroke.kernels.cuda.launch import ALIGNED, Launch, Variant
from twostroke.kernels.cuda.sizes import ceil_div
from twostroke.kernels.cuda.stream_k import GLUON_IS_TESTED, is_hopper, num_multiprocessors
from twostroke.kernels.records import AttentionRule, KVView, PrefillWork

if GLUON_IS_TESTED:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from twostroke.kernels.cuda import prefill_hopper_kernels as kernels

ROWS = 64  # of queries: tokens × heads of a group, of a consumer
PIECE = 64  # channels that are fetched of a page at one time


@dataclass(frozen=True, slots=True)
class HopperTuning:
    keys: int  # of a tile
    stages: int  # tiles of keys and of values in shared memory
    min_tokens: int  # of the longest chunk: below, `prefill.py` has more tiles to share out
    consumers: int = 2  # warpgroups
    consumer_registers: int = 240
    producer_registers: int = 24


class HopperShape(NamedTuple):
    """The sizes and features that the kernel is compiled for, besides its tuning."""

    chunks: int
    group: int
    num_kv_heads: int
    dim: int
    page: int  # 0: keys and values lie side by side
    window: bool
    softcap: bool


# By head size; measured on an H200.
TUNINGS = {
    64: HopperTuning(128, 4, 4096, consumers=3, consumer_registers=160),
    128: HopperTuning(128, 2, 2048),
    256: HopperTuning(64, 2, 512),
}
MIN_CONTINUED = 2048  # tokens of the longest continued chunk
# A number of lines that no chunk has. So many times FAR_STRIDE numbers of 16 bits are 2⁶⁴ bytes.
FAR, FAR_STRIDE = 2**30, 2**33


def choose(
    longest: int, q: torch.Tensor, kv: KVView, own: torch.Tensor | None
) -> HopperTuning | None:
    """Return the tuning for chunks of at most `longest` tokens, if this kernel computes their
    attention faster than `prefill.py`; otherwise None. Continued chunks (`own` is None) gain at
    fewer tokens, because pages cost `prefill.py` more than this kernel."""
    tuned = TUNINGS.get(q.shape[2])
    if tuned is None:
        return None
    min_tokens = tuned.min_tokens if own is not None else min(tuned.min_tokens, MIN_CONTINUED)
    if longest < min_tokens:
        return None
    return tuned if can_attend(tuned, q, kv, own) else None


def can_attend(tuned: HopperTuning, q: torch.Tensor, kv: KVView, own: torch.Tensor | None) -> bool:
    """Return True if this kernel can compute the attention. `own`: as for `HopperLaunch`."""
    (_, num_heads, dim), (_, page, num_kv_heads, _) = q.shape, kv.keys.shape
    if not is_hopper() or q.itemsize != 2 or num_heads // num_kv_heads > ROWS:
        return False
    read = (kv.keys, kv.values) if own is None else (own,)
    if not all(each.dtype == q.dtype and _is_aligned(each) for each in (q, *read)):
        return False
    if own is not None:
        return True
    return kv.keys.stride(2) == dim and page >= 8 and tuned.keys % page == 0


def _is_aligned(tensor: torch.Tensor) -> bool:
    strides = [stride * tensor.itemsize for stride in tensor.stride()[:-1]]
    return all(offset % ALIGNED == 0 for offset in (tensor.data_ptr(), *strides))


def own_descriptor(own: torch.Tensor, dim: int, keys: int) -> Any:
    """Return a descriptor of tiles of `own`, [T, columns]. Coordinates: FAR; the line where the
    chunk ends; the tile's first line, counted so that the chunk's end is line FAR; column."""
    (lines, columns), stride = own.shape, own.stride(0)
    shape, strides = [FAR + 1, lines + 1, FAR, columns], [FAR_STRIDE - stride, stride, stride, 1]
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    return TensorDescriptor(own, shape, strides, [1, 1, keys, dim], layout)


def page_descriptor(cached: torch.Tensor) -> Any:
    """Return a descriptor of pages of the cache. Coordinates: the page; FAR; FAR less the number of
    its lines that are not in use; the first line, counted so that the first unused line is line
    `page`; column."""
    blocks, page, heads, dim = cached.shape
    of_block, of_line, of_head, _ = cached.stride()
    assert of_head == dim
    shape = [blocks, FAR + 1, FAR + 1, page, heads * dim]
    strides = [of_block, FAR_STRIDE - of_line, of_line, of_line, 1]
    layout = gl.NVMMASharedLayout(128, 16, rank=5)
    return TensorDescriptor(cached, shape, strides, [1, 1, 1, page, PIECE], layout)


class HopperLaunch:
    """The launch of a step's chunks: `prefill.Launch` for any layer."""

    def __init__(
        self,
        tuned: HopperTuning,
        chunks: int,
        longest: int,
        q: torch.Tensor,
        kv: KVView,
        rule: AttentionRule,
        work: PrefillWork,
        out: torch.Tensor,
        own: torch.Tensor | None,
    ) -> None:
        """`chunks` and `longest`: the chunks of the launch, and the tokens of the longest. `own`:
        their keys and values, if the launch does not read the cache."""
        (_, num_heads, dim), num_kv_heads = q.shape, kv.keys.shape[2]
        group = num_heads // num_kv_heads
        tiles = ceil_div(longest, ROWS // group * tuned.consumers)
        items = tiles * num_kv_heads * work.rows.shape[0]
        self._programs = min(items, num_multiprocessors())
        # What programs take next, and how many have ended: each launch leaves zeros.
        taken = torch.zeros(2, dtype=torch.int32, device=q.device)
        self._q, self._kv, self._sinks, self._own = q, kv, rule.sinks, None
        if own is not None:
            self._own = own_descriptor(own.flatten(1), dim, tuned.keys)
        self._variant = _variant(
            HopperShape(
                chunks,
                group,
                num_kv_heads,
                dim,
                0 if own is not None else kv.keys.shape[1],
                rule.window is not None,
                rule.softcap > 0,
            ),
            tuned,
        )
        self._tensors = (kv.tables, work.rows, work.starts, work.cu_tokens, out, taken)
        self._numbers = (items, tiles, rule.window or 0)
        strides = (*q.stride()[:2], *out.stride()[:2], kv.tables.stride(0))
        self._fixed = (float(rule.scale), float(rule.softcap), *strides)
        self._launch: Launch | None = None  # over the step's own keys and values

    def __call__(self) -> None:
        self.over(self._kv.keys, self._kv.values, self._sinks)

    def with_sinks(self, sinks: torch.Tensor | None) -> None:
        self.over(self._kv.keys, self._kv.values, sinks)

    def over(
        self, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        """Launch over the cache of a layer, or over the step's own keys and values, with the
        layer's sinks."""
        if self._own is None:
            self._over(page_descriptor(keys), page_descriptor(values), sinks)()
        elif sinks is not None:
            self._over(self._own, self._own, sinks)()
        else:  # the same for every layer
            if self._launch is None:
                self._launch = self._over(self._own, self._own, None)
            self._launch()

    def _over(self, keys: Any, values: Any, sinks: torch.Tensor | None) -> Launch:
        sinks = self._sinks if sinks is None else sinks
        tensors, varying = (self._q, sinks, *self._tensors), (keys, values, *self._numbers)
        return Launch(self._variant, (self._programs,), tensors, varying, self._fixed)


@cache
def _variant(shape: HopperShape, tuned: HopperTuning) -> Variant:
    return Variant(
        kernels.attend,
        GROUP=shape.group,
        NUM_KV_HEADS=shape.num_kv_heads,
        DIM=shape.dim,
        PAGE=shape.page,
        KEYS=tuned.keys,
        STAGES=tuned.stages,
        CONSUMERS=tuned.consumers,
        WINDOW=shape.window,
        SOFTCAP=shape.softcap,
        CHUNKS=shape.chunks,
        PRODUCER_REGISTERS=tuned.producer_registers,
        CONSUMER_REGISTERS=tuned.consumer_registers,
        num_warps=4,
    )
