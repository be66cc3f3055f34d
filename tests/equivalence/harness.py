"""Runs the same prompts through differently set engines around one decoder, and compares.

Rounding changes with the number of rows in a product, so two runs are equal when they write the
same tokens up to the first step whose two best logits lie closer together than τ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from tests.specs import make_spec
from tests.support import default_model_path
from twostroke.engine.assembly import group_limits
from twostroke.engine.build_native import assemble_native
from twostroke.engine.build_torch import assemble
from twostroke.engine.core import EngineCore
from twostroke.engine.open_tiers import OpenTiers
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.cost import dense_weight_bytes
from twostroke.model.describe.gguf_config import spec_from_gguf
from twostroke.model.gguf.gguf_file import GGUFFile
from twostroke.model.native_decoder import NativeDecoder, Packing
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.model.torch.decoder import Decoder
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.plan import TokenLogprobs
from twostroke.request import EngineRequest, SamplingParams
from twostroke.sched.step import SchedulerConfig

# The reference backend in fp32. Log-probabilities of the default model move by up to 5.3e-5 between
# the ways to compute them (measured over the matrix); two that lie closer than twice what each may
# move can trade places.
MOVES = 1e-4
TAU = 2 * MOVES
LEAST_COMPARED = 0.9

MAX_LEN = 1024


@dataclass
class Written:
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    num_cached: int = 0
    num_preempted: int = 0
    num_chunks: int = 0

    def gap(self, step: int) -> float:
        """Return the distance of the two best logits."""
        _, best, second = self.logprobs[step].logprobs[:3]
        return best - second


small_spec = make_spec


@cache
def default_decoder() -> Decoder:
    file = GGUFFile.open(default_model_path())
    spec = spec_from_gguf(file)
    weights = GGUFWeights(file, spec)
    return Decoder(spec, weights, torch.float32, torch.device("cpu"), MAX_LEN, Kernels())


def default_native_decoder(exact: bool = False, isa: str = "auto") -> NativeDecoder:
    file = GGUFFile.open(default_model_path())
    spec = spec_from_gguf(file)
    packing = Packing(spec, GGUFWeights(file, spec), "float32", None, isa)
    return NativeDecoder(packing, MAX_LEN, 2, 2, isa, exact)


@cache
def default_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile.open(default_model_path()).metadata)


def make_core(
    decoder: Decoder | NativeDecoder,
    in_flight: int = 1,
    kv_dtype: torch.dtype = torch.float32,
    open_tiers: OpenTiers | None = None,
    **settings: object,
) -> EngineCore:
    """`kv_dtype`: of the cache; that of a native decoder is fp16, or int8."""
    limits: dict[str, object] = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "max_model_len": MAX_LEN,
        "block_size": 16,
        "prefix_caching": False,
    }
    each = [settings.pop("num_blocks", 512)] * len(decoder.spec.kv_groups())
    limits["groups"] = group_limits(decoder.spec, each)  # type: ignore[arg-type]
    config = SchedulerConfig(**(limits | settings))  # type: ignore[arg-type]
    if isinstance(decoder, NativeDecoder):
        int8 = kv_dtype == torch.int8
        sizes = dense_weight_bytes(decoder.spec, 1)
        return assemble_native(decoder, config, None, sizes, int8=int8, open_tiers=open_tiers)
    return assemble(decoder, config, kv_dtype, in_flight, open_tiers=open_tiers)


def run(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 20,
    **params: object,
) -> list[Written]:
    """All prompts at once, greedily, with the two best log-probabilities of every step."""
    settings = SamplingParams(  # type: ignore[arg-type]
        **({"temperature": 0, "max_tokens": max_tokens, "logprobs": 2} | params)
    )
    written = {f"r{n}": Written([], []) for n in range(len(prompts))}
    for name, prompt in zip(written, prompts, strict=True):
        core.add(EngineRequest(name, tuple(prompt), settings, seed=0))
    while core.has_work:
        for update in core.step():
            assert not update.error, update.error
            one = written[update.request_id]
            one.tokens += update.tokens
            one.logprobs += update.logprobs
            if update.record is not None:
                one.num_cached = update.record.num_cached
                one.num_preempted = len(update.record.preempted)
                one.num_chunks = len(update.record.chunks)
        core.scheduler.audit()
    return list(written.values())


def assert_same(expected: Sequence[Written], got: Sequence[Written], tau: float = TAU) -> None:
    compared = total = 0
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        total += len(one.tokens)
        assert len(one.tokens) == len(other.tokens)
        for step, (token, its) in enumerate(zip(one.tokens, other.tokens, strict=True)):
            if one.gap(step) < tau:
                break
            assert token == its, f"prompt {number} differs at step {step}: {token} and {its}"
            moved = abs(one.logprobs[step].logprobs[0] - other.logprobs[step].logprobs[0])
            assert moved < tau / 2, f"prompt {number}: a log-probability moved by {moved}"
            compared += 1
    assert compared >= LEAST_COMPARED * total, f"only {compared} of {total} steps compared"
