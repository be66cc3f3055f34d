"""`Pair`: the native decoder and the reference, given the same steps over caches of halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.equivalence.harness import Loud, small_spec
from twostroke.exec.inputs import build_inputs
from twostroke.exec.tensor_rows import TensorRows
from twostroke.kernels import cpu, reference
from twostroke.kv.halves import HalfPool
from twostroke.kv.pool import KVPool
from twostroke.model.decoder import Decoder
from twostroke.model.native import NativeDecoder, Packing
from twostroke.model.spec import ModelSpec, RopeSpec
from twostroke.model.weights.dummy import DummyWeights
from twostroke.plan import Chunk, PhaseWork, Slot, StepPlan

ISAS = cpu.module().isas() if cpu.available() else []
CPU = torch.device("cpu")
MAX_LEN = 320
NUM_ROWS = 6

# On logits, whose standard deviation is about 1.5: twice the largest difference found, 3.8e-3. Sums
# are taken in another order, and a key or a value that this moves past the middle between two
# halves moves by one part in 2048.
TOLERANCE = 8e-3

Logits = npt.NDArray[np.float32]
Step = tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int, int]]]  # slots, chunks


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
    ) -> None:
        self.spec, source = spec, source or Loud(spec)
        packing = Packing(spec, source, dtype, None, isa)
        self.native = NativeDecoder(packing, MAX_LEN, *threads, isa, exact)
        self.reference = Decoder(spec, source, torch.float32, CPU, MAX_LEN, reference)
        per_row = -(-MAX_LEN // block_size)
        self.num_blocks = NUM_ROWS * per_row
        self.cache = HalfPool(spec, self.num_blocks, block_size).data
        self.pool = KVPool(spec, self.num_blocks, block_size, torch.float16, CPU)
        self.state = TensorRows(NUM_ROWS, MAX_LEN, block_size, 1, CPU)
        random = np.random.default_rng(seed)
        self.tokens, self.tables = self.state.tokens.numpy(), self.state.tables[0].numpy()
        self.tokens[:] = random.integers(0, spec.vocab_size, self.tokens.shape)
        # Every row has blocks of its own, in no order.
        self.tables[:] = 1 + random.permutation(self.num_blocks).reshape(self.tables.shape)

    def step(self, slots: Any = (), chunks: Any = (), which: Any = None) -> Logits:
        """Logits of every token of the step, or of some, by the native decoder."""
        count = len(slots) + sum(size for _, _, size in chunks)
        wanted = range(count) if which is None else which
        logits = self.native.forward(
            self.tokens,
            self.tables,
            self.cache,
            np.array(slots, np.int32).reshape(-1, 2),
            np.array(chunks, np.int32).reshape(-1, 3),
            np.array(wanted, np.int32),
            keep_all=which is None,
        )
        return logits.copy()

    @torch.inference_mode()
    def expected(self, slots: Any = (), chunks: Any = ()) -> Logits:
        work = PhaseWork()
        prefill = tuple(Chunk(*chunk, False) for chunk in chunks)
        decode = tuple(Slot(*slot) for slot in slots)
        plan = StepPlan(0, (), (), (), (), prefill, decode, work, work)
        inputs = build_inputs(plan, self.state)
        return self.reference.head(self.reference.forward(inputs, self.pool)).numpy()

    def difference(self, slots: Any = (), chunks: Any = ()) -> float:
        got, expected = self.step(slots, chunks), self.expected(slots, chunks)
        assert np.isfinite(got).all()
        return float(np.abs(got - expected).max())


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
        slots, chunks = [], []
        rows = self.random.permutation(NUM_ROWS)[: self.random.integers(1, NUM_ROWS + 1)]
        for row in map(int, rows):
            done = self.lengths[row]
            if done > 250:
                done = self.lengths[row] = 0
            if done and self.random.random() < 0.6:
                slots.append((row, done))
                self.lengths[row] += 1
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
