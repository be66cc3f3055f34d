"""`twostroke quality`: compares the next-token distributions of a format with those of a base.

The engines run one after the other and read the same windows of a text. The base's distributions
are written to a temporary file as 16-bit codes of log-probabilities. The distributions of every
other engine are compared with the file during their computation, 64 positions at a time.
"""

from __future__ import annotations

import gc
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from twostroke.errors import ConfigError, EngineError
from twostroke.measure.load.result import SCHEMA, environment
from twostroke.request import EngineRequest, Resumed, SamplingParams

if TYPE_CHECKING:
    from twostroke.llm import LLM

DEFINITIONS = {
    "perplexity": "exp of the mean of -log p(token) over the scored tokens, which are all tokens "
    "except the first of each window",
    "ratio": "perplexity divided by the base's perplexity",
    "KL": "sum over the vocabulary of p log(p / q) in nats, where p is the base's distribution of "
    "the next token and q the format's; one value for each scored token",
    "same token": "share of scored tokens where both distributions have the same most likely token",
    "phases": "if prefill and decode have different formats: the difference between the "
    "log-probability of a generated token in decode and in a prefill of the same text; all other "
    "figures are then figures of prefill",
}
# The comparison of the phases: prompts, maximum of generated tokens, minimum of --context.
PHASE_PROMPTS, MAX_PHASE_TOKENS, MIN_PHASE_CONTEXT = 8, 64, 8
# A log-probability is stored as a 16-bit code: steps of 1/2048 down to -32. This changes a
# probability, and its part of the KL divergence, by a factor of 1 ± 1/4096 at most.
STEPS, MAX_CODE = 2048, 65535
PERCENTILES = (*range(1, 100), 99.9)  # of KL, for the report's chart

Floats = npt.NDArray[np.float32]


class Setup(NamedTuple):
    """The settings of an engine, and their name in the report."""

    name: str
    settings: dict[str, Any]


@dataclass
class Reading:
    """The values of one engine for each scored token, in order."""

    logprobs: list[float] = field(default_factory=list)  # of the tokens of the text
    best: list[int] = field(default_factory=list)  # most likely tokens
    kl: list[float] = field(default_factory=list)  # from the base; empty for the base


class BaseFile:
    """The base's distributions, [scored tokens, vocabulary], in a temporary file."""

    def __init__(self, num_tokens: int, vocab_size: int) -> None:
        needed, folder = 2 * num_tokens * vocab_size, tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise ConfigError(
                f"the base's distributions of {num_tokens:,} tokens take {needed / 1e9:.1f} GB in "
                f"{folder}, where {free / 1e9:.1f} GB are free; lower --tokens or set TMPDIR"
            )
        self.vocab_size = vocab_size
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - see `close`

    def append(self, logprobs: Floats) -> None:
        codes = np.rint(np.minimum(logprobs * np.float32(-STEPS), MAX_CODE))
        self._file.write(codes.astype(np.uint16).tobytes())

    def read(self, first: int, count: int) -> Floats:
        """Return the log-probabilities of `count` tokens, normalised again."""
        self._file.seek(2 * first * self.vocab_size)
        data = self._file.read(2 * count * self.vocab_size)
        lines = np.frombuffer(data, np.uint16).reshape(count, -1).astype(np.float32)
        return log_softmax(lines / np.float32(-STEPS))

    def close(self) -> None:
        self._file.close()


def log_softmax(lines: Floats) -> Floats:
    lines = lines - lines.max(axis=1, keepdims=True)
    # In double precision, because two sums of 100,000 numbers are subtracted later.
    sums = np.exp(lines).sum(axis=1, dtype=np.float64, keepdims=True)
    return lines - np.log(sums).astype(np.float32)


def divergence(base: Floats, other: Floats) -> list[float]:
    """Return KL(base ‖ other) of each row of log-probabilities."""
    # A probability of 0 in `other` counts as e⁻¹⁰⁰, which keeps the sum finite.
    terms = np.exp(base) * (base - np.maximum(other, np.float32(-100)))
    found: list[float] = terms.sum(axis=1, dtype=np.float64).tolist()
    return found


def shipped_text() -> str:
    return (
        files("twostroke.measure.quality").joinpath("quality_text.txt").read_text(encoding="utf-8")
    )


def measure_quality(
    base: Setup,
    others: Sequence[Setup],
    text: str,
    context: int,
    num_tokens: int,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure the base and every other setup on the first `num_tokens` of the text, in windows of
    `context` tokens."""
    rows, reference, windows = [], None, None
    kept: BaseFile | None = None
    try:
        for setup in (base, *others):
            tell(f"{setup.name} …")
            begun = perf_counter()
            llm = _open(setup, context)
            cut = _windows(llm, text, context, num_tokens)
            vocabulary = llm.engine.info().vocab_size
            if windows is None or kept is None:
                windows = cut
                scored = sum(len(window) - 1 for window in windows)
                kept = BaseFile(scored, vocabulary)
            elif (windows, kept.vocab_size) != (cut, vocabulary):
                raise ConfigError(
                    f"{setup.name} and {base.name} cut the text into different tokens: "
                    "the comparison needs the same vocabulary"
                )
            reading = _read(llm, windows, kept, is_base=reference is None)
            reference = reference or reading
            row = _row(setup, llm, reading, reference)
            if llm.engine.config.phases_differ and context >= MIN_PHASE_CONTEXT:
                prompts = [window[: context // 2] for window in windows[:PHASE_PROMPTS]]
                row["phases"] = phase_difference(llm, prompts, min(MAX_PHASE_TOKENS, context // 4))
            row["seconds"] = perf_counter() - begun
            rows.append(row)
            del llm
            _free_memory()  # before the next engine allocates
    finally:
        if kept is not None:
            kept.close()
    assert windows is not None
    return {
        "schema_version": SCHEMA,
        "context": context,
        "tokens": sum(map(len, windows)),
        "scored": rows[0]["scored"],
        "base": rows[0],
        "formats": rows[1:],
        "definitions": DEFINITIONS,
        "environment": environment(),
    }


def _open(setup: Setup, context: int) -> LLM:
    from twostroke.llm import LLM

    if setup.settings.get("kv_eviction") == "heavy-hitters":
        raise ConfigError(
            "the quality of heavy-hitters eviction cannot be measured here, because it needs "
            "decode and the text is computed by prefill; see docs/EVICTION.md for figures"
        )
    size = setup.settings.get("block_size", 16)
    sizes = {"max_model_len": context + 1, "max_num_seqs": 1, "enable_prefix_caching": False}
    if not setup.settings.keys() & {"kv_cache_memory_bytes", "num_gpu_blocks_override"}:
        sizes["num_gpu_blocks_override"] = -(-(context + 1) // size) + 1
    return LLM(**{**sizes, **setup.settings})


def _windows(llm: LLM, text: str, context: int, num_tokens: int) -> list[list[int]]:
    """Return the tokens of the text in windows that begin with the model's start tokens."""
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise ConfigError("the quality measurement needs a tokenizer")
    begin = tokenizer.encode("")[:1]
    ids = tokenizer.encode(text, add_special_tokens=False)[:num_tokens]
    size = context - len(begin)
    cut = [begin + ids[start : start + size] for start in range(0, len(ids), size)]
    windows = [window for window in cut if len(window) > len(begin) + 1]
    if not windows:
        raise ConfigError("the text has fewer than two tokens")
    return windows


def _read(llm: LLM, windows: Sequence[list[int]], kept: BaseFile, is_base: bool) -> Reading:
    found = Reading()

    def take(targets: list[int], logits: Floats) -> None:
        logprobs, first = log_softmax(logits), len(found.best)
        found.logprobs += logprobs[np.arange(len(targets)), targets].tolist()
        found.best += logprobs.argmax(axis=1).tolist()
        if is_base:
            kept.append(logprobs)
        else:
            found.kl += divergence(kept.read(first, len(targets)), logprobs)

    for window in windows:
        read_window(llm, window, take)
    llm.engine.core.on_chunk_logits(None)
    return found


def read_window(llm: LLM, window: list[int], take: Callable[[list[int], Floats], None]) -> None:
    """Call `take` with chunks of the window's tokens, without the first, and their logits.

    Prefill computes the tokens, but the request counts them as generated, so that settings for
    generated tokens (`kv_eviction`) take effect.
    """

    def on_logits(start: int, logits: Floats) -> None:
        targets = window[start + 1 : start + 1 + len(logits)]
        if targets:  # the last position has no target
            take(targets, logits[: len(targets)])

    core = llm.engine.core
    core.on_chunk_logits(on_logits)
    params = SamplingParams(temperature=0, max_tokens=len(window))
    resumed = Resumed(tuple(window[1:]), 0.0)
    core.add(EngineRequest("window", window[:1], params, 0, resumed=resumed))
    while core.has_work:
        for update in core.step():
            if update.error:
                raise EngineError(update.error)


def _row(setup: Setup, llm: LLM, found: Reading, base: Reading) -> dict[str, Any]:
    info, sizing, count = llm.engine.info(), llm.engine.memory.sizing, len(found.best)
    perplexity = math.exp(-math.fsum(found.logprobs) / count)
    row = {
        "name": setup.name,
        "settings": {name: str(value) for name, value in setup.settings.items()},
        "model": info.model_name,
        "device": info.device,
        "weights": info.weights,
        "weight_bytes": info.weight_bytes,
        "kv_bytes_per_token": sizing.token_bytes,
        "scored": count,
        "perplexity": perplexity,
    }
    if found is base:
        return row
    kl = np.array(found.kl)
    # The paired difference on the same tokens cancels the variance that both formats share.
    ratios = np.array(found.logprobs) - np.array(base.logprobs)
    error = float(ratios.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf
    return row | {
        "perplexity_ratio": math.exp(-float(ratios.mean())),
        "perplexity_ratio_error": error,
        "kl_mean": float(kl.mean()),
        "kl_mean_error": float(kl.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf,
        "kl_p99": float(np.percentile(kl, 99)),
        "kl_max": float(kl.max()),
        "kl_percentiles": [[share, float(np.percentile(kl, share))] for share in PERCENTILES],
        "same_token": float(np.mean(np.array(found.best) == np.array(base.best))),
    }


def phase_difference(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> dict[str, Any]:
    """Return the difference between the log-probabilities of generated tokens in decode and in a
    prefill of the same text."""
    write = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    read = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found: list[float] = []
    for prompt in prompts:
        (written,) = llm.generate([prompt], write, use_tqdm=False)
        ids, decoded = written.outputs[0].token_ids, written.outputs[0].logprobs
        (again,) = llm.generate([[*prompt, *ids]], read, use_tqdm=False)
        assert decoded is not None
        assert again.prompt_logprobs is not None
        for n in range(1, len(ids)):  # prefill samples the first token
            scored = again.prompt_logprobs[len(prompt) + n]
            assert scored is not None
            found.append(abs(decoded[n][ids[n]].logprob - scored[ids[n]].logprob))
    return {"tokens": len(found), "mean": math.fsum(found) / len(found), "max": max(found)}


def _free_memory() -> None:
    gc.collect()
    torch: Any = sys.modules.get("torch")  # do not import torch only for this
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
