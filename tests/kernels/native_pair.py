"""`Pair`: the native decoder and a plain reference, given the same steps over caches in fp16."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from tests.kernels.reference_model import MAX_LEN, NUM_ROWS, Floats, Ints, Reference
from tests.kernels.rounding_model import MARGIN, other_order_bound, rounding_model
from tests.loud import Loud
from tests.specs import make_spec as small_spec
from twostroke.kernels import cpu
from twostroke.kv.host_pool import HostPool
from twostroke.model.describe.spec import ModelSpec, RopeSpec
from twostroke.model.native_decoder import NativeDecoder, Packing
from twostroke.model.weights.dummy import DummyWeights

ISAS = cpu.module().isas() if cpu.available() else []
# Slots (row, position) and chunks (row, start, size); each may end with a cache index of its own.
Step = tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]


class SharedReference:
    """A reference model. Pairs of the same model that take the same steps share its logits: the
    reference computes once for all instruction sets. Each kind keeps the logits of one model."""

    # For each kind: the key of the model, and the inputs and the logits of its steps.
    shared: ClassVar[dict[type[Reference], tuple[object, list[tuple[list[bytes], Floats]]]]] = {}

    def __init__(
        self, kind: type[Reference], spec: ModelSpec, source: DummyWeights, int8: bool
    ) -> None:
        """`int8`: the KV cache."""
        self.kind, self.make = kind, functools.partial(kind, spec, source, int8)
        self.key: object = (spec, type(source), source.seed, int8)
        self.steps: list[tuple[Ints, ...]] = []
        self.model: Reference | None = None  # if it exists, it has computed all steps

    def logits(self, *step: Ints) -> Floats:
        number, inputs = len(self.steps), [part.tobytes() for part in step]
        key, shared = self.shared.get(self.kind, (None, []))
        if self.key != key:
            if self.steps:
                self.share_no_more()
            shared = []
            self.shared[self.kind] = self.key, shared
        if number < len(shared) and shared[number][0] != inputs:
            self.share_no_more()
            shared = []
        if number < len(shared) and self.model is None:
            logits = shared[number][1]
        else:
            logits = self.computed().logits(*step)
            if number == len(shared):
                shared.append((inputs, logits))
        self.steps.append(step)
        return logits

    def share_no_more(self) -> None:
        self.key = object()

    def computed(self) -> Reference:
        """Return the model after all steps of this pair."""
        if self.model is None:
            self.model = self.make()
            for step in self.steps:
                self.model.logits(*step)
        return self.model

    @property
    def attended(self) -> dict[tuple[int, int], Floats]:
        """Attention weights of the last step, by layer and row."""
        return self.computed().attended

    def evict(self, row: int, start: int, end: int) -> None:
        """Move what follows `end` in a row's cache to `start`."""
        self.share_no_more()
        for cache in self.computed().cache:
            moved = cache[:, row, end:].copy()
            cache[:, row, start : start + moved.shape[1]] = moved


class Pair:
    """The native decoder and the reference, each with a cache of its own."""

    def __init__(
        self,
        spec: ModelSpec,
        isa: str = "auto",
        *,
        block_size: int = 16,
        threads: tuple[int, int] = (1, 1),
        exact: bool = True,
        seed: int = 0,
        source: DummyWeights | None = None,
        dtype: str = "float32",
        int8: bool = False,
    ) -> None:
        """`int8`: the cache."""
        self.spec, self.source, self.int8 = spec, source or Loud(spec), int8
        source = self.source
        packing = Packing(spec, source, dtype, None, isa)
        self.native = NativeDecoder(packing, MAX_LEN, *threads, isa, exact)
        self.reference: Reference | SharedReference = SharedReference(Reference, spec, source, int8)
        self.rounding = None
        if not exact:
            kind = rounding_model(isa, dtype, int8)
            self.rounding = SharedReference(kind, spec, source, int8)
        self.block_size, groups = block_size, len(spec.kv_groups())
        per_row = -(-MAX_LEN // block_size)
        # Block numbers are each group's own: no two groups have as many.
        self.num_blocks = [NUM_ROWS * per_row + group for group in range(groups)]
        self.caches = HostPool(spec, self.num_blocks, block_size, int8=int8).data
        random = np.random.default_rng(seed)
        shape = (NUM_ROWS, MAX_LEN + 1)
        self.tokens: Ints = random.integers(0, spec.vocab_size, shape, dtype=np.int32)
        # Every row has blocks of its own, in no order.
        self.tables: list[Ints] = [
            (1 + random.permutation(count)[: NUM_ROWS * per_row])
            .reshape(NUM_ROWS, per_row)
            .astype(np.int32)
            for count in self.num_blocks
        ]

    @property
    def tolerance(self) -> float:
        """The largest difference of a logit that sums in another order may cause."""
        return other_order_bound(self.spec, self.source, self.int8)

    def step(self, slots: Any = (), chunks: Any = (), which: Any = None) -> Floats:
        """Logits of every token of the step, or of some, by the native decoder."""
        count = len(slots) + sum(size for _, _, size, *_ in chunks)
        wanted = range(count) if which is None else which
        logits = self.native.forward(
            self.tokens,
            self.tables,
            self.caches,
            with_indices(slots, 3),
            with_indices(chunks, 4),
            np.array(wanted, np.int32),
            keep_all=which is None,
        )
        return logits.copy()

    def expected(self, slots: Any = (), chunks: Any = ()) -> Floats:
        """Logits of every token of the step, by the reference."""
        return self._by(self.reference, slots, chunks)

    def rounding_error(self, slots: Any, chunks: Any, expected: Floats) -> float:
        """Return the bound of the mean error of the step's logits, where arithmetic is rounded."""
        assert self.rounding is not None
        error = np.abs(self._by(self.rounding, slots, chunks) - expected).mean()
        return MARGIN * float(error)

    def _by(self, model: Reference | SharedReference, slots: Any, chunks: Any) -> Floats:
        runs = [(row, at, 1, index) for row, at, index in with_indices(slots, 3)]
        runs += [tuple(chunk) for chunk in with_indices(chunks, 4)]
        rows = [row for row, _, size, _ in runs for _ in range(size)]
        positions = [start + n for _, start, size, _ in runs for n in range(size)]
        indices = [index + n for _, _, size, index in runs for n in range(size)]
        where = [np.array(one, np.int32) for one in (rows, positions, indices)]
        return model.logits(self.tokens[rows, positions], *where)

    def difference(self, slots: Any = (), chunks: Any = ()) -> float:
        got, expected = self.step(slots, chunks), self.expected(slots, chunks)
        assert np.isfinite(got).all()
        return float(np.abs(got - expected).max())

    def evict(self, row: int, first: int, last: int) -> None:
        """Take blocks [first, last) out of a row's cache: what came after them moves forward."""
        for table in self.tables:
            freed = table[row, first:last].copy()
            table[row] = np.concatenate([table[row, :first], table[row, last:], freed])
        start, end = first * self.block_size, last * self.block_size
        for model in (self.reference, self.rounding):
            if isinstance(model, SharedReference):
                model.evict(row, start, end)


def with_indices(given: Any, width: int) -> Ints:
    """Slots or chunks as the decoder wants them; without an index it is the position."""
    full = [one if len(one) == width else (*one, one[1]) for one in given]
    return np.array(full, np.int32).reshape(-1, width)


def heads(num_heads: int, num_kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    rope = RopeSpec(1e4, head_dim)
    common = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return common | {"rope": rope, "windows": (None,) * 2} | more


class Life:
    """Rows that grow by random steps, in blocks that may be shared where nothing is written."""

    def __init__(self, pair: Pair, random: np.random.Generator) -> None:
        self.pair, self.random = pair, random
        self.lengths = [0] * NUM_ROWS

    def step(self) -> Step:
        slots: list[tuple[int, ...]] = []
        chunks: list[tuple[int, ...]] = []
        rows = self.random.permutation(NUM_ROWS)[: self.random.integers(1, NUM_ROWS + 1)]
        for row in map(int, rows):
            done = self.lengths[row]
            if done > 250:
                done = self.lengths[row] = 0
            if done and self.random.random() < 0.6:
                count = int(self.random.choice([1, 1, 1, 2, 4]))  # with drafts now and then
                slots += [(row, done + n) for n in range(count)]
                self.lengths[row] += count
            else:
                size = int(self.random.choice([1, 2, 3, 8, 15, 16, 17, 40]))
                chunks.append((row, done, size))
                self.lengths[row] += size
        return slots, chunks


TWO = (None,) * 2
FUZZ_SPECS = [
    small_spec(windows=TWO, vocab_size=64),
    small_spec(windows=(11, None), vocab_size=64, intermediate_size=50),
    small_spec(**heads(6, 2, 24, vocab_size=64, qk_norm="head")),
]
