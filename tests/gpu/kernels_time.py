"""Times of the CUDA kernels against the limits of the card, and the choices between kernels.

Calls are timed as replays of a CUDA graph that walks over more memory than the L2 holds, as the
layers of a model do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.gpu.report import COPY, FLOPS, READ, Report
from tests.kernels import cuda_cases as cases
from tests.kernels.definitions import DEPENDENT
from twostroke.exec.device_sampling import DeviceSampler
from twostroke.kernels import cuda
from twostroke.kernels.cuda import decode, prefill, product
from twostroke.kernels.cuda.new_token import NewToken
from twostroke.kernels.records import (
    DEFAULT_CONTEXT,
    AttentionRule,
    DecodeWork,
    DrawParams,
    KVView,
    PrefillWork,
    Rope,
    StepContext,
)

CUDA = torch.device("cuda")
SPREAD_BYTES = 256 << 20  # what one round of calls walks over: several times the L2
CONTEXT = 1088


@dataclass(frozen=True)
class Shape:
    name: str
    num_heads: int
    num_kv_heads: int
    hidden: int
    intermediate: int
    qk_norm: bool
    dim: int = 128


SHAPES = [
    Shape("8B", 32, 8, 4096, 14336, False),
    Shape("0.6B", 16, 8, 1024, 3072, True),
]


def random_pool(shape: Shape, layers: int, blocks: int, page: int) -> torch.Tensor:
    """Block-major: keys and values of layer l are [:, l, 0] and [:, l, 1]."""
    size = (blocks, layers, 2, page, shape.num_kv_heads, shape.dim)
    return torch.randn(size, device=CUDA, dtype=torch.bfloat16)


def shuffled_tables(rows: int, blocks: int) -> torch.Tensor:
    return torch.randperm(rows * blocks, device=CUDA).int().view(rows, blocks)


def decode_call(
    shape: Shape,
    batch: int,
    layers: int,
    splits: int | None = None,
    tuned: decode.DecodeTuning | None = None,
    page: int = 16,
    lengths: Sequence[int] = (),
    rope: bool = False,
) -> tuple[Callable[[], torch.Tensor], int]:
    """A call that takes the next layer each time, and the splits it uses. `rope`: it begins with
    the QKV product, and stores each last position."""
    contexts = cases.ints(lengths or [CONTEXT] * batch, CUDA)
    blocks = -(-int(contexts.max()) // page)
    pool = random_pool(shape, layers, batch * blocks, page)
    tables = shuffled_tables(batch, blocks)
    q = torch.randn(batch, shape.num_heads, shape.dim, device=CUDA, dtype=torch.bfloat16)
    splits = splits or cuda.decode_splits(batch, shape.num_kv_heads, 8192, cuda.num_sms(CUDA))
    scratch = cuda.decode_scratch(batch, shape.num_heads, shape.dim, splits, CUDA)
    rows = torch.arange(batch, device=CUDA, dtype=torch.int32)
    out = torch.empty_like(q)
    wide = (shape.num_heads + 2 * shape.num_kv_heads) * shape.dim
    qkv = torch.randn(batch, wide, device=CUDA, dtype=torch.bfloat16)
    weight = qkv[0, : shape.dim].clone() if shape.qk_norm else None
    angles = torch.rand(8192, shape.dim // 2, device=CUDA)
    ends = contexts.long() - 1
    slots = tables[rows.long(), ends // page].long() * page + ends % page
    of_layer = Rope(angles, angles, None, weight, weight, 1e-6)
    rule, work = AttentionRule(shape.dim**-0.5), DecodeWork(rows, contexts, 1, splits, scratch)
    turn = count()

    def call() -> torch.Tensor:
        view = KVView(*pool[:, next(turn) % layers].unbind(1), tables, slots)
        query, new = q, None
        if rope:
            query, new = decode.heads_of_new(qkv, view), NewToken(of_layer, ends)
        decode.make_launch(query, view, rule, work, out, new=new, tuned=tuned)()
        return out

    return call, splits


def time_decode(
    report: Report, shape: Shape, batch: int, ragged: bool = False, rope: bool = False, **how: Any
) -> None:
    """All of one context, or as long as those of nano-vLLM's workload are on the way."""
    lengths = [CONTEXT] * batch
    if ragged:
        lengths = [100 + 7919 * row % 1600 for row in range(batch)]
    kv_bytes = sum(lengths) * 2 * shape.num_kv_heads * shape.dim * 2
    layers = max(1, min(64, -(-SPREAD_BYTES // kv_bytes)))
    call, splits = decode_call(shape, batch, layers, lengths=lengths, rope=rope, **how)
    name = f"decode{'+rope' * rope} {shape.name} batch {batch}{' ragged' * ragged} splits {splits}"
    name += "".join(f" {key} {value}" for key, value in how.items() if key != "splits")
    report.time(name, [call] * layers, kv_bytes, READ)


def time_prefill(
    report: Report,
    shape: Shape,
    size: int,
    start: int = 0,
    tuned: prefill.PrefillTuning | None = None,
    page: int = 16,
) -> None:
    blocks = -(-(start + size) // page)
    pool = random_pool(shape, 1, blocks, page)
    tables = shuffled_tables(1, blocks)
    num, wide = shape.num_heads, shape.num_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(size, wide, shape.dim, device=CUDA, dtype=torch.bfloat16)
    out = torch.empty_like(qkv[:, :num])
    where = [cases.ints(values, CUDA) for values in ([0], [start], [0, size])]
    longest = (0, size) if start else (size, 0)  # of first chunks, of continued ones
    work = PrefillWork(*where, size, *longest, [(start, start + size)])
    rule, view = AttentionRule(shape.dim**-0.5), KVView(*pool[:, 0].unbind(1), tables, where[0])

    def call() -> None:
        q, own = qkv[:, :num], qkv[:, num:]
        for launch in prefill.make_launches(q, view, rule, work, out, own, tuned):
            if launch is not None:
                launch()

    flops = 4 * shape.num_heads * shape.dim * (start * size + size * size / 2)
    name = f"prefill {shape.name} {size} after {start}" + (f" {tuned}" if tuned else "")
    report.time(name, [call] * 2, flops, FLOPS)


def time_small(report: Report, shape: Shape, tokens: int) -> None:
    heads, kv, dim, bf16 = shape.num_heads, shape.num_kv_heads, shape.dim, torch.bfloat16
    wide = (heads + 2 * kv) * dim
    sets = max(1, min(64, SPREAD_BYTES // (tokens * shape.hidden * 2)))

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=CUDA, dtype=bf16)

    def each(make: Callable[[], Callable[[], object]], used: int) -> list[Callable[[], object]]:
        return [make() for _ in range(max(1, min(sets, SPREAD_BYTES // used)))]

    weight, head_weight = random(shape.hidden), random(dim)
    row = tokens * shape.hidden * 2

    def add_norm() -> Callable[[], object]:
        x, residual = random(tokens, shape.hidden), random(tokens, shape.hidden)
        return lambda: cuda.add_rms_norm(x, residual, weight, 1e-5)

    name = f"{shape.name} {tokens} tokens"
    report.time(f"add_rms_norm {name}", each(add_norm, 4 * row), 4 * row, COPY)

    def norm() -> Callable[[], object]:
        x = random(tokens, shape.hidden)
        return lambda: cuda.rms_norm(x, weight, 1e-5)

    report.time(f"rms_norm {name}", each(norm, 2 * row), 2 * row, COPY)

    def act() -> Callable[[], object]:
        x = random(tokens, 2 * shape.intermediate)
        return lambda: cuda.act_and_mul(x, "silu")

    used = tokens * shape.intermediate * 6
    report.time(f"act_and_mul {name}", each(act, used), used, COPY)
    pool = random_pool(shape, 1, -(-tokens // 16), 16)
    angles = torch.rand(8192, dim // 2, device=CUDA)
    positions = torch.arange(tokens, device=CUDA)
    norm_weight = head_weight if shape.qk_norm else None
    of_layer = Rope(angles, angles, None, norm_weight, norm_weight, 1e-6)

    def rope() -> Callable[[], object]:
        qkv = random(tokens, wide)
        view = KVView(*pool[:, 0].unbind(1), positions, positions)
        return lambda: cuda.rope_store(qkv, of_layer, positions, view)

    used = tokens * wide * 4
    report.time(f"rope_store {name}", each(rope, used), used, COPY)


def time_sample(report: Report, batch: int, vocab: int) -> None:
    logits = [torch.randn(batch, vocab, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
    keys = torch.randint(0, 2**32, (2, batch), device=CUDA)
    for spread in (1.0, 4.0):
        for each in logits:
            each *= spread
        for temperature, top_k, top_p in ((0.0, 0, 1), (0.6, 0, 1), (0.6, 0, 0.9), (0.6, 20, 0.95)):
            if spread > 1 and top_k == 0 and top_p == 1:
                continue
            columns = (
                torch.full((batch,), temperature, device=CUDA),
                torch.full((batch,), top_k, device=CUDA, dtype=torch.int32),
                torch.full((batch,), float(top_p), device=CUDA),
                torch.zeros(batch, device=CUDA),
            )
            by = DrawParams(*columns, *keys)
            calls = [lambda x=x, by=by: cuda.sample(x, by) for x in logits]
            name = f"sample {batch}×{vocab} t {temperature} k {top_k} p {top_p} spread {spread}"
            report.time(name, calls, batch * vocab * 2, READ)


def time_adjusted(report: Report, batch: int, vocab: int) -> None:
    """Times of the launches after a graph for rows with penalties, biases and banned tokens."""
    logits = torch.randn(batch, vocab, device=CUDA, dtype=torch.bfloat16)
    tokens = torch.zeros(batch, 64, dtype=torch.int32, device=CUDA)
    sampler = DeviceSampler(batch, vocab, tokens, cuda, CUDA)
    for new in cases.varied_rows(batch, vocab):
        sampler.take(new)
    lines = np.arange(batch)
    params = DrawParams(*(lines,) * 6)
    samples = sampler.draw(logits, lines, lines, lines * 0 + 9, {}, params).samples
    out = torch.empty(batch, vocab, device=CUDA)
    masks = torch.empty(0, -(-vocab // 32), dtype=torch.int32, device=CUDA)
    used = batch * vocab
    call = lambda: cuda.adjust_logits(logits, samples, sampler._state, masks, out)  # noqa: E731
    report.time(f"adjust {batch}×{vocab}", [call], used * 8, COPY)
    which = torch.arange(batch, dtype=torch.int32, device=CUDA)
    chosen = torch.zeros(batch, dtype=torch.int32, device=CUDA)
    for best in (0, 5, 20):
        call = lambda n=best: cuda.token_logprobs(logits, which, chosen, n)  # noqa: E731
        report.time(f"log-probabilities {batch}×{vocab}, {best} best", [call], used * 2, READ)


def time_all(report: Report) -> None:
    for shape in SHAPES:
        for batch in (1, 8, 32, 128, 256):
            time_decode(report, shape, batch)
            if batch <= 128:
                time_decode(report, shape, batch, rope=True)
        time_decode(report, shape, 128, ragged=True)
        for size in (1024, 4096, 8192, 32768):
            time_prefill(report, shape, size)
        time_prefill(report, shape, 512, 4096)
        for tokens in (1, 128, 4096):
            time_small(report, shape, tokens)
    for batch in (1, 256):
        time_sample(report, batch, 151936)
    for batch in (32, 256):
        time_adjusted(report, batch, 151936)


# ── choices ─────────────────────────────────────────────────────────────────────────────────


class Layers:
    """Some layers of a model, decoding."""

    def __init__(self, shape: Shape, num: int, largest: int) -> None:
        wide = (shape.num_heads + 2 * shape.num_kv_heads) * shape.dim
        attended, hidden, inner = shape.num_heads * shape.dim, shape.hidden, shape.intermediate

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, device=CUDA, dtype=torch.bfloat16) * size[-1] ** -0.5

        sizes = ((wide, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner))
        self.weights = [[random(*size) for size in sizes] for _ in range(num)]
        self.norm = torch.ones(hidden, device=CUDA, dtype=torch.bfloat16)
        self.head_norm = self.norm[: shape.dim].clone() if shape.qk_norm else None
        self.angles = torch.rand(8192, shape.dim // 2, device=CUDA)
        self.blocks = -(-CONTEXT // 16)
        pool = random_pool(shape, num, largest * self.blocks, 16)
        self.cache = [pool[:, layer].unbind(1) for layer in range(num)]
        self.tables = shuffled_tables(largest, self.blocks)
        self.x = torch.randn(largest, hidden, device=CUDA, dtype=torch.bfloat16)
        self.shape, self.num = shape, num

    def step(self, batch: int, context: StepContext) -> Callable[[], torch.Tensor]:
        """Each token's last position is where its keys and values go: any call gives the same."""
        heads, kv, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.dim
        splits = cuda.decode_splits(batch, kv, 8192, cuda.num_sms(CUDA))
        scratch = cuda.decode_scratch(batch, heads, dim, splits, CUDA)
        rows = torch.arange(batch, device=CUDA, dtype=torch.int32)
        lengths = torch.full_like(rows, CONTEXT)
        slots = self.tables[:batch, -1].long() * 16 + (CONTEXT - 1) % 16
        rope = Rope(self.angles, self.angles, None, self.head_norm, self.head_norm, 1e-6)
        rule, work = AttentionRule(dim**-0.5), DecodeWork(rows, lengths, 1, splits, scratch)
        ends = lengths.long() - 1

        def call() -> torch.Tensor:
            residual = self.x[:batch].clone()
            normed = cuda.rms_norm(residual, self.norm, 1e-5, context=context)
            for (qkv, o, gate_up, down), cache in zip(self.weights, self.cache, strict=True):
                made = cuda.product(normed, qkv, context=context)
                attended = normed.new_empty(batch, heads, dim)
                view = KVView(*cache, self.tables, slots)
                cuda.rope_decode_attention(
                    made, rope, ends, view, rule, work, context, out=attended
                )
                out = cuda.product(attended.flatten(1), o, context=context)
                normed = cuda.add_rms_norm(out, residual, self.norm, 1e-5, context=context)
                gated = cuda.gated_product(normed, gate_up, "silu", context=context)
                out = cuda.product(gated, down, context=context)
                normed = cuda.add_rms_norm(out, residual, self.norm, 1e-5, context=context)
            return normed

        return call


def check_pdl() -> float:
    """In a graph, where the launches overlap, against launches that do not."""
    layers, error = Layers(SHAPES[1], 4, 8), 0.0
    for batch in (1, 2, 8):
        plain = layers.step(batch, DEFAULT_CONTEXT)().clone()
        call = layers.step(batch, DEPENDENT)
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        for _ in range(20):
            out.fill_(cases.NAN)
            graph.replay()
            error = cases.largest(error, cases.worst(out, plain))
    return error


def time_pdl(report: Report) -> None:
    shape = SHAPES[0]
    layers = Layers(shape, 4, 32)
    wide = (shape.num_heads + 2 * shape.num_kv_heads) * shape.dim
    rows = wide + shape.num_heads * shape.dim + 3 * shape.intermediate
    for batch in (1, 8, 32):
        kv = CONTEXT * batch * 2 * shape.num_kv_heads * shape.dim
        used = 2 * layers.num * (rows * shape.hidden + kv)
        for context in (DEFAULT_CONTEXT, DEPENDENT):
            name = f"{layers.num} layers, batch {batch}{', pdl' * context.dependent_launch}"
            report.time(name, [layers.step(batch, context)], used, READ)


def time_products(report: Report, shape: Shape, rows: int) -> None:
    """The library's, and ours in some sizes."""
    wide = (shape.num_heads + 2 * shape.num_kv_heads) * shape.dim
    attended = shape.num_heads * shape.dim
    for name, columns, inner in (
        ("qkv", wide, shape.hidden),
        ("o", shape.hidden, attended),
        ("gate_up", 2 * shape.intermediate, shape.hidden),
        ("down", shape.hidden, shape.intermediate),
    ):
        gated, used = name == "gate_up", columns * inner * 2
        sets = min(64, max(2, -(-SPREAD_BYTES // used)))
        weights = [torch.randn(columns, inner, device=CUDA).bfloat16() for _ in range(sets)]
        x = torch.randn(rows, inner, device=CUDA).bfloat16()

        def library(weight: torch.Tensor, x: torch.Tensor = x, gated: bool = gated) -> object:
            made = F.linear(x, weight)
            return cuda.act_and_mul(made, "silu") if gated else made

        ways: dict[str, Callable[[torch.Tensor], object]] = {"library": library}
        if rows <= 4:
            for size in ((2, 1024, 4), (4, 1024, 4), (1, 2048, 4)):
                if inner % size[1] == 0:
                    streamed = product.Streaming(*size)
                    activation = "silu" if gated else None
                    ways[f"streamed {size}"] = lambda w, x=x, t=streamed, a=activation: (
                        product.launch_streaming(x, w, t, a, DEPENDENT)
                    )
        if gated:
            for tile in ((32, 256, 4, 3), (32, 128, 4, 4), (64, 128, 4, 3)):
                tiles = product.RowTiling(*tile)
                ways[f"tiled {tile}"] = lambda w, x=x, t=tiles: product.launch_tiled(
                    x, w, t, "silu", DEPENDENT
                )
        for how, way in ways.items():
            calls = [lambda w=w, way=way: way(w) for w in weights]
            report.time(f"{name} {shape.name}, {rows} rows, {how}", calls, used, READ)


def time_library_prefill(report: Report, shape: Shape, size: int) -> None:
    """cuDNN's attention over a first chunk, keys and values taken out of their pages first."""
    blocks = size // 16
    keys, values = random_pool(shape, 1, blocks, 16)[:, 0].unbind(1)
    table = torch.randperm(blocks, device=CUDA)
    q = torch.randn(size, shape.num_heads, shape.dim, device=CUDA, dtype=torch.bfloat16)
    out = torch.empty_like(q)

    def call() -> None:
        found = [cache.index_select(0, table).flatten(0, 1) for cache in (keys, values)]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            heads = [each.transpose(0, 1).unsqueeze(0) for each in (q, *found)]
            made = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        out.copy_(made[0].transpose(0, 1))

    flops = 2 * shape.num_heads * shape.dim * size * size
    report.time(f"prefill {shape.name} {size}, cuDNN with its copies", [call] * 2, flops, FLOPS)


def sweep(report: Report) -> None:
    """Times that the tunings and the choice of a library follow from."""
    report.item("pdl", lambda: time_pdl(report))
    large = SHAPES[0]
    for shape in SHAPES:
        for rows in (1, 4, 16, 64):
            report.item("products", lambda s=shape, r=rows: time_products(report, s, r))
    for batch, splits in ((1, 33), (8, 4), (32, 1), (64, 1), (128, 1), (256, 1)):
        for size in ((64, 4, 3, 2), (64, 4, 4, 2), (64, 2, 2, 2), (32, 4, 4, 4)):
            for rope in (False, True):
                tuned = decode.DecodeTuning(*size)
                time_decode(report, large, batch, splits=splits, tuned=tuned, rope=rope)
    for tokens in (1024, 4096, 32768):
        for chosen in ((64, 64, 4, 3), (128, 64, 8, 4), (128, 128, 8, 3)):
            for start in (0, 512):
                tuning = prefill.PrefillTuning(*chosen)
                time_prefill(report, large, tokens, start, tuned=tuning)
    for tokens in (2048, 4096, 8192):
        time_library_prefill(report, large, tokens)
    time_prefill(report, large, 16, 32768)
