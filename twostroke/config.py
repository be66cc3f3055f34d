"""`EngineConfig`: every setting a user can give, under vLLM's names, validated once.

Settings say what the user wants; what follows from them and the model (how many blocks, how long
a context) is worked out in `exec/memory.py`. docs/CLI.md lists the environment variables that the
package reads.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any, NamedTuple, cast

from twostroke.errors import ConfigError, RequestError, shown
from twostroke.kv.eviction import LEAST_BLOCKS, LEAST_STRETCHES, STRETCH_TOKENS
from twostroke.request import SamplingParams
from twostroke.strict import Strict

GIB = 1024**3
KV_TRANSPORTS = ("auto", "memory", "device", "nixl", "sockets")
RDMA = ("rdma", "ucx", "mooncake")  # what blocks travel by elsewhere
KV_TIMEOUT_EXPECTED = "seconds from 0.01 to 600"
DTYPE_NAMES = {"half": "float16", "float": "float32"}  # vLLM's other names
QUANTIZATIONS = ("int8", "int4", "fp8")
KV_8_BIT = ("fp8_e4m3", "fp8_e5m2", "int8")
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", *KV_8_BIT)  # fp8: fp8_e4m3
# What a model's makers, or `override_generation_config`, may recommend.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
OVERRIDDEN = (*RECOMMENDED, "presence_penalty", "frequency_penalty")


class Mode(NamedTuple):
    """What a performance mode sets where nothing is given."""

    max_num_seqs: int
    budget_gpu: int
    budget_cpu: int
    # Goals in milliseconds, on a GPU and on a CPU; None: none.
    ttft_ms: tuple[float, float] | None = None
    itl_ms: tuple[float, float] | None = None
    decode_stall: float = 0.0  # see EngineConfig.max_decode_stall


MODES = {
    "interactivity": Mode(128, 8192, 512, ttft_ms=(1000.0, 4000.0), itl_ms=(50.0, 100.0)),
    "balanced": Mode(256, 8192, 512, decode_stall=8.0),
    "throughput": Mode(512, 16384, 1024),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Strict):
    model: str | None = None  # a path, a Hugging Face id, or None for the default model
    tokenizer: str | None = None  # where the tokenizer is, if not with the model
    revision: str | None = None
    skip_tokenizer_init: bool = False  # token ids in, token ids out
    chat_template: str | None = None  # a template, or the path of one, instead of the model's own
    load_format: str = "auto"  # auto, safetensors, gguf, dummy
    dtype: str = "auto"  # auto: the model's own on a GPU, float32 on a CPU, which computes in that
    kv_cache_dtype: str = "auto"  # auto: as dtype; see KV_DTYPES
    device: str = "auto"  # auto: cuda if there is one
    seed: int = 0
    max_model_len: int | None = None  # None: as long as model and cache allow
    max_num_seqs: int = cast(int, None)  # None: 256, or by performance_mode; then never None
    max_num_batched_tokens: int | None = None  # tokens in a step
    ttft_slo_ms: float | None = None  # goal for the time to the first token
    itl_slo_ms: float | None = None  # goal for the time between two tokens of a stream
    # How many times its steady gap a stream may wait for a token while prompts are prefilled, where
    # there is no itl_slo_ms; 0: any number, None: by performance_mode.
    max_decode_stall: float | None = None
    performance_mode: str = "balanced"  # interactivity, balanced, throughput
    block_size: int = 16  # tokens in a KV block
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    # Blocks of the KV group that keeps all positions (the first, if all have windows).
    num_gpu_blocks_override: int | None = None
    # While a request writes, the KV blocks it gives up beyond a budget: None, sinks (all but the
    # first block and the newest), or heavy-hitters (those between that got the least attention).
    kv_eviction: str | None = None
    kv_eviction_budget: int = 4096  # tokens that a request keeps, once its prompt is computed
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"  # fcfs, priority
    max_logprobs: int = 20  # that a request may ask for; -1: all of the vocabulary
    override_generation_config: dict[str, Any] | None = None  # over the makers' recommendation
    # Settings that replace those of config.json (`model/describe/overrides.py`).
    hf_overrides: dict[str, Any] | None = None
    enforce_eager: bool = False  # no graphs, no compilation; the tokens stay the same
    max_cudagraph_capture_size: int | None = None  # largest decode batch run as a graph
    cudagraph_capture_sizes: tuple[int, ...] | None = None  # all of them, instead of our choice
    nvtx: bool = False  # name steps and the parts of layers for a profiler of a GPU
    tensor_parallel_size: int = 1  # ranks that share the model: GPUs, or processes of a CPU
    # Of weights that are not: int8, int4, and on torch fp8.
    quantization: str | None = None
    # The same of one phase alone, or "none". Then never one without the other, and never equal:
    # what one of them does not say is `quantization`, which is None where they differ.
    prefill_quantization: str | None = None
    decode_quantization: str | None = None
    # A text that the unquantised model reads first: which inputs of a matrix its rounding favours.
    calibration: str | None = None
    kernels: str = "auto"  # auto: the native ones on a CPU that has them; reference, native
    isa: str = "auto"  # of the native kernels: auto, amx, avx512, avx512bw, avx2, neon, portable
    exact: bool = False  # native kernels: products and attention in floats; slower
    threads: int | None = None  # of a decode step on a CPU; None: one a core
    threads_batch: int | None = None  # of a step with prefill; None: as threads
    measure_ceilings: bool = False  # the device's, at the start, for the metrics
    # What a server with several engines sets for each of them (`route/`):
    engines_on_host: int = 1  # that share its memory and cores
    engine_index: int = 0  # which of them it is: they take GPUs in turn
    kv_sharing: str = "none"  # shared: other engines may fetch KV blocks; checked: by checksums
    kv_receives: bool = False  # blocks of other engines will come: memory is made ready for them
    kv_transport: str = "auto"  # memory, device, nixl or sockets: this way alone
    kv_host: str | None = None  # this machine's address for engines on others; None: there are none
    kv_transfer_timeout_s: float = 3.0  # nothing has come for so long: computed again
    # What their sockets ask of each other (`network_auth.py`); None: they take any peer.
    engine_secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "chat_template", "calibration"):
            if isinstance(getattr(self, name), PathLike):
                object.__setattr__(self, name, fspath(getattr(self, name)))
        names = ("model", "tokenizer", "revision", "chat_template", "calibration")
        for name in (*names, "kv_host", "engine_secret"):
            if not isinstance(getattr(self, name), str | None):
                self._refuse(name, "a string or None")
        self._check_choice("load_format", ("auto", "safetensors", "gguf", "dummy"))
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", DTYPE_NAMES.get(dtype, dtype))
        self._check_choice("dtype", ("auto", "float32", "float16", "bfloat16"))
        self._check_choice("kv_cache_dtype", KV_DTYPES)
        if self.kv_cache_dtype == "fp8":
            object.__setattr__(self, "kv_cache_dtype", "fp8_e4m3")
        self._check_choice("scheduling_policy", ("fcfs", "priority"))
        self._check_choice("performance_mode", tuple(MODES))
        if self.quantization is not None:
            self._check_choice("quantization", QUANTIZATIONS)
        self._settle_phases()
        self._check_choice("kernels", ("auto", "reference", "native"))
        self._check_choice("isa", ("auto", "amx", "avx512", "avx512bw", "avx2", "neon", "portable"))
        self._check_int("threads", 1, 1024, optional=True)
        self._check_int("threads_batch", 1, 1024, optional=True)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            self._refuse("device", "auto, cpu, cuda, or one GPU of several such as cuda:1")
        self._check_int("seed", 0, 2**63 - 1)
        self._check_int("max_model_len", 2, optional=True)
        self._check_int("max_num_batched_tokens", 1, optional=True)
        if self.max_num_seqs is None:
            most = MODES[self.performance_mode].max_num_seqs
            most = min(most, self.max_num_batched_tokens or most)
            object.__setattr__(self, "max_num_seqs", most)
        self._check_int("max_num_seqs", 1, 65536)
        for name in ("ttft_slo_ms", "itl_slo_ms"):
            if getattr(self, name) is not None:
                self._check_number(name, 0.1, 1e7, "milliseconds from 0.1 to 10000000, or None")
        if self.max_decode_stall is not None and self.max_decode_stall != 0:
            self._check_number("max_decode_stall", 1.5, 1e4, "0, a number of at least 1.5, or None")
        self._check_int("block_size", 1, 1024)
        self._check_int("kv_cache_memory_bytes", 1, optional=True)
        self._check_int("num_gpu_blocks_override", 1, optional=True)
        if self.kv_eviction is not None:
            self._check_choice("kv_eviction", ("sinks", "heavy-hitters"))
        self._check_int("kv_eviction_budget", 1)
        self._check_int("max_logprobs", -1)
        self._check_int("max_cudagraph_capture_size", 0, optional=True)
        self._check_capture_sizes()
        self._check_override()
        overrides = self.hf_overrides
        if overrides is not None and not (
            isinstance(overrides, dict) and all(isinstance(name, str) for name in overrides)
        ):
            self._refuse("hf_overrides", 'a dict such as {"rope_theta": 1000000}')
        self._check_number("gpu_memory_utilization", 0.01, 1.0, "a number above 0 and at most 1")
        self._check_bools(
            "skip_tokenizer_init",
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "enforce_eager",
            "nvtx",
            "exact",
            "measure_ceilings",
            "kv_receives",
        )
        self._check_int("tensor_parallel_size", 1, 1024)
        self._check_int("engines_on_host", 1, 1024)
        self._check_int("engine_index", 0, 1023)
        self._check_choice("kv_sharing", ("none", "shared", "checked"))
        check_kv_transport(self.kv_transport)
        self._check_number("kv_transfer_timeout_s", 0.01, 600.0, KV_TIMEOUT_EXPECTED)
        self._check_contradictions()

    def _settle_phases(self) -> None:
        """What the phases' own quantization says, beside that of both."""
        names = ("prefill_quantization", "decode_quantization")
        given = [name for name in names if getattr(self, name) is not None]
        for name in given:
            self._check_choice(name, ("none", *QUANTIZATIONS))
        if len(given) == 2 and self.quantization is not None:
            raise ConfigError(
                f"quantization is {self.quantization!r}, but {' and '.join(names)} say it for each "
                "phase; leave quantization out"
            )
        prefill, decode = (getattr(self, name) or self.quantization or "none" for name in names)
        both = prefill if prefill == decode != "none" else None
        own = (None, None) if prefill == decode else (prefill, decode)
        for name, value in zip(("quantization", *names), (both, *own), strict=True):
            object.__setattr__(self, name, value)

    @property
    def phases_differ(self) -> bool:
        """Prefill and decode keep weights in formats of their own."""
        return self.prefill_quantization is not None

    def of_phase(self, phase: str) -> EngineConfig:
        """For an engine that does one phase: it keeps the weights once, as that phase has them."""
        asked = getattr(self, f"{phase}_quantization")
        if asked is None:
            return self
        own = None if asked == "none" else asked
        return replace(
            self,
            quantization=own,
            prefill_quantization=None,
            decode_quantization=None,
            calibration=own and self.calibration,
        )

    def _check_capture_sizes(self) -> None:
        sizes = self.cudagraph_capture_sizes
        if sizes is None:
            return
        given = isinstance(sizes, list | tuple) and len(sizes) > 0
        if not given or any(type(size) is not int or size < 1 for size in sizes):
            self._refuse("cudagraph_capture_sizes", "a list of whole numbers of at least 1")
        object.__setattr__(self, "cudagraph_capture_sizes", tuple(sorted(set(sizes))))
        if self.max_cudagraph_capture_size is not None:
            raise ConfigError(
                "cudagraph_capture_sizes and max_cudagraph_capture_size both say which batches run "
                "as graphs; give one of them"
            )

    def _check_override(self) -> None:
        given = self.override_generation_config
        if given is None:
            return
        if not isinstance(given, dict) or not given.keys() <= set(OVERRIDDEN):
            self._refuse("override_generation_config", f"a dict of {', '.join(OVERRIDDEN)}")
        try:
            SamplingParams(**given)
        except RequestError as error:
            raise ConfigError(f"override_generation_config: {error}") from None

    def _check_contradictions(self) -> None:
        if self.num_gpu_blocks_override is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                "num_gpu_blocks_override and kv_cache_memory_bytes both set the size of the KV "
                "cache; give one of them"
            )
        if self.kv_eviction is not None:
            self._check_eviction()
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {budget} is below max_num_seqs {self.max_num_seqs}: a "
                "step must have a token for every running request; raise the first or lower "
                "the second"
            )
        for name in ("itl_slo_ms", "max_decode_stall"):
            if getattr(self, name) and not self.enable_chunked_prefill:
                raise ConfigError(
                    f"{name} is kept by cutting prompts in chunks, but enable_chunked_prefill is "
                    "False; leave out one of them"
                )
        if self.calibration is not None and not (self.quantization or self.phases_differ):
            raise ConfigError(
                "calibration says how weights are rounded, and no quantization asks for that; give "
                "quantization, or leave calibration out"
            )
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigError("skip_tokenizer_init and tokenizer contradict each other; give one")

    @property
    def kv_scaled(self) -> bool:
        """The KV cache holds a scale for each head of a token."""
        return self.kv_cache_dtype == "int8"

    def _check_eviction(self) -> None:
        least, of = LEAST_BLOCKS * self.block_size, f"{LEAST_BLOCKS} KV blocks"
        if self.kv_eviction == "heavy-hitters":
            least, of = LEAST_STRETCHES * STRETCH_TOKENS, "what is scored together"
            if STRETCH_TOKENS % self.block_size:
                raise ConfigError(
                    f"kv_eviction heavy-hitters has a score for each {STRETCH_TOKENS} tokens, "
                    f"which block_size {self.block_size} does not divide; use 16, 32 or 64"
                )
        if self.kv_eviction_budget < least:
            raise ConfigError(
                f"kv_eviction_budget {self.kv_eviction_budget} is too small for kv_eviction "
                f"{self.kv_eviction}: the first, the newest and what can go are at least {of}; "
                f"raise it to at least {least}"
            )
        if not self.enable_chunked_prefill:
            raise ConfigError(
                "kv_eviction needs enable_chunked_prefill: what a preempted request had written is "
                "computed anew a block at a time; leave out one of them"
            )

    def goals(self, on_gpu: bool) -> tuple[float | None, float | None]:
        """Seconds to the first token and between two; None: no goal."""
        mode, device = MODES[self.performance_mode], 0 if on_gpu else 1
        ttft, itl = self.ttft_slo_ms, self.itl_slo_ms
        if ttft is None and mode.ttft_ms is not None:
            ttft = mode.ttft_ms[device]
        if itl is None and mode.itl_ms is not None and self.enable_chunked_prefill:
            itl = mode.itl_ms[device]
        return None if ttft is None else ttft / 1e3, None if itl is None else itl / 1e3

    def decode_stall(self) -> float | None:
        """The longest wait for a token beside prefill, in steady gaps; None: no bound."""
        stall = self.max_decode_stall
        if stall is None and self.enable_chunked_prefill:
            stall = MODES[self.performance_mode].decode_stall
        return stall or None

    def token_budget(self, on_gpu: bool, max_model_len: int) -> int:
        """Tokens in a step: enough to fill the device, few enough that streams keep flowing."""
        budget = self.max_num_batched_tokens
        if budget is None:
            mode = MODES[self.performance_mode]
            budget = max(mode.budget_gpu if on_gpu else mode.budget_cpu, self.max_num_seqs)
            if not self.enable_chunked_prefill:
                budget = max(budget, max_model_len)
        if not self.enable_chunked_prefill and budget < max_model_len:
            raise ConfigError(
                f"without chunked prefill a prompt runs in one step, but max_num_batched_tokens "
                f"{budget} is below max_model_len {max_model_len}; raise the first, lower the "
                "second, or set enable_chunked_prefill=True"
            )
        return budget


def check_kv_transport(way: object) -> None:
    """Raise `ConfigError` unless KV blocks can be told to travel this way alone."""
    if way in RDMA:
        raise ConfigError(
            f"kv_transport: KV blocks do not travel by {way}; by RDMA they do with "
            "kv_transport='nixl' (pip install 'twostroke[nixl]')"
        )
    if way not in KV_TRANSPORTS:
        raise ConfigError(
            f"kv_transport must be one of {', '.join(KV_TRANSPORTS)}, not {shown(way)}"
        )


def hides_gpus() -> bool:
    """The environment lets this process see no GPU, even if there is one."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


def visible_gpu(index: int) -> int | str:
    """The driver's number, or its UUID, of the GPU that CUDA calls `index` in this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) else ""
    return int(name or index) if not name or name.isdecimal() else name
