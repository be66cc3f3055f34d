"""`EngineConfig`: the settings of an engine, with vLLM's names. The constructor validates them.

`exec/memory.py` derives the number of KV blocks and the length of the context from the settings and
the model. `environment.py` reads settings from environment variables.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any, NamedTuple, cast

from twostroke.draft.speculation_config import SpeculationConfig, read_speculative_config
from twostroke.errors import ConfigError, RequestError, shown
from twostroke.kv.eviction import MIN_BLOCKS, MIN_SEGMENTS, SEGMENT_TOKENS
from twostroke.kv.tiers.disk_settings import read_disk_cache
from twostroke.request import SamplingParams
from twostroke.strict import StrictSettings

GIB = 1024**3
KV_TRANSPORTS = ("auto", "memory", "device", "nixl", "sockets")
RDMA = ("rdma", "ucx", "mooncake")  # names of RDMA transports in other inference engines
KV_TIMEOUT_EXPECTED = "seconds from 0.01 to 600"
DTYPE_NAMES = {"half": "float16", "float": "float32"}  # vLLM's other names
QUANTIZATIONS = ("int8", "int4", "fp8")
KV_8_BIT = ("fp8_e4m3", "fp8_e5m2", "int8")
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", *KV_8_BIT)  # fp8: fp8_e4m3
# The sampling parameters that generation_config.json may set, and those that
# `override_generation_config` may set.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
OVERRIDDEN = (*RECOMMENDED, "presence_penalty", "frequency_penalty")


class PerformanceMode(NamedTuple):
    """A set of defaults for other settings."""

    max_num_seqs: int
    budget_gpu: int  # maximum number of tokens in a step
    budget_cpu: int
    # Goals in milliseconds, on a GPU and on a CPU; None: no goal.
    ttft_ms: tuple[float, float] | None = None
    itl_ms: tuple[float, float] | None = None
    decode_stall: float = 0.0  # see EngineConfig.max_decode_stall


MODES = {
    "interactivity": PerformanceMode(
        128, 8192, 512, ttft_ms=(1000.0, 4000.0), itl_ms=(50.0, 100.0)
    ),
    "balanced": PerformanceMode(256, 8192, 512, decode_stall=8.0),
    "throughput": PerformanceMode(512, 16384, 1024),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig(StrictSettings):
    model: str | None = None  # a path, a Hugging Face id, or None for the default model
    tokenizer: str | None = None  # a folder or a Hugging Face id; None: the model's
    revision: str | None = None
    skip_tokenizer_init: bool = False  # token ids in, token ids out
    chat_template: str | None = None  # a template or its path; None: the model's
    load_format: str = "auto"  # auto, safetensors, gguf, dummy
    dtype: str = "auto"  # auto: the model's dtype on a GPU, float32 on a CPU
    kv_cache_dtype: str = "auto"  # auto: dtype; see KV_DTYPES
    device: str = "auto"  # auto: cuda if the machine has a GPU
    seed: int = 0
    max_model_len: int | None = None  # None: as long as model and KV cache allow
    max_num_seqs: int = cast(int, None)  # None: by performance_mode, 256 in the balanced mode
    max_num_batched_tokens: int | None = None  # maximum number of tokens in a step
    ttft_slo_ms: float | None = None  # goal for the time to the first token
    itl_slo_ms: float | None = None  # goal for the time between two tokens of a stream
    # Without itl_slo_ms: the longest time between two tokens of a stream while prompts are
    # prefilled, as a multiple of the time without prefill; 0: no limit, None: by performance_mode.
    max_decode_stall: float | None = None
    performance_mode: str = "balanced"  # interactivity, balanced, throughput
    block_size: int = 16  # tokens in a KV block
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    # Blocks of the KV group that stores all positions (the first group, if all have windows).
    num_gpu_blocks_override: int | None = None
    # Tiers for prefixes that the KV cache evicts: GiB of host memory, and a folder, "DIR[:SIZE]".
    kv_offloading_size: float | None = None
    kv_disk_cache: str | None = None
    # The KV blocks that a decoding request evicts when it exceeds its budget: None, sinks (all but
    # the first and the newest blocks) or heavy-hitters (the blocks in between that get the least
    # attention).
    kv_eviction: str | None = None
    kv_eviction_budget: int = 4096  # tokens that a request keeps after its prefill
    # Speculative decoding, with vLLM's keys (`draft/speculation_config.py`); None: no drafts.
    speculative_config: dict[str, Any] | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"  # fcfs, priority
    max_logprobs: int = 20  # maximum for a request; -1: the vocabulary
    override_generation_config: dict[str, Any] | None = None  # default sampling of requests
    # Values that replace values of config.json (`model/describe/overrides.py`).
    hf_overrides: dict[str, Any] | None = None
    enforce_eager: bool = False  # no graphs, no compilation; the tokens stay the same
    max_cudagraph_capture_size: int | None = None  # largest decode batch that runs as a graph
    cudagraph_capture_sizes: tuple[int, ...] | None = None  # None: chosen by the engine
    nvtx: bool = False  # name steps and the parts of layers for a GPU profiler
    tensor_parallel_size: int = 1  # ranks that share the model: GPUs, or processes of a CPU
    # The format to which unquantised weights are rounded: int8, int4, and with torch fp8.
    quantization: str | None = None
    # The formats of the two phases, or "none"; the default is `quantization`. After validation
    # these two differ, or both are None and `quantization` is the format of both phases.
    prefill_quantization: str | None = None
    decode_quantization: str | None = None
    # The path of a text. The unquantised model reads it to measure which weights matter most.
    calibration: str | None = None
    kernels: str = "auto"  # reference, native; auto: native on a CPU that supports it
    # Instruction set of the native kernels: auto, amx, avx512, avx512bw, avx2, neon, portable.
    isa: str = "auto"
    exact: bool = False  # native kernels compute linear layers and attention in floats; slower
    threads: int | None = None  # threads of a decode step on a CPU; None: one for each core
    threads_batch: int | None = None  # threads of a step with prefill; None: threads
    measure_ceilings: bool = False  # measure the device's FLOP/s and bytes/s, for the metrics
    # A server with several engines sets these for each engine (`route/`):
    engines_on_host: int = 1  # engines that share the machine's memory and cores
    engine_index: int = 0  # index of the engine on its machine, which selects its GPU
    kv_sharing: str = "none"  # shared: other engines may fetch KV blocks; checked: with checksums
    kv_receives: bool = False  # the engine reserves memory to fetch KV blocks of other engines
    kv_transport: str = "auto"  # memory, device, nixl or sockets
    kv_host: str | None = None  # this machine's address for other machines; None: there are none
    kv_transfer_timeout_s: float = 3.0  # blocks are recomputed if none has arrived for this time
    hang_timeout_s: float = 30.0  # a rank that is silent for this time is killed; 0: never
    start_timeout_s: float = 3600.0  # a process that is not ready then is killed; 0: never
    # The secret of the engines' sockets (`network_auth.py`); None: sockets accept any peer.
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
        self._resolve_phases()
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
            rows = MODES[self.performance_mode].max_num_seqs
            rows = min(rows, self.max_num_batched_tokens or rows)
            object.__setattr__(self, "max_num_seqs", rows)
        self._check_int("max_num_seqs", 1, 65536)
        for name in ("ttft_slo_ms", "itl_slo_ms"):
            if getattr(self, name) is not None:
                self._check_number(name, 0.1, 1e7, "milliseconds from 0.1 to 10000000, or None")
        if self.max_decode_stall is not None and self.max_decode_stall != 0:
            self._check_number("max_decode_stall", 1.5, 1e4, "0, a number of at least 1.5, or None")
        self._check_int("block_size", 1, 1024)
        self._check_int("kv_cache_memory_bytes", 1, optional=True)
        self._check_int("num_gpu_blocks_override", 1, optional=True)
        self._check_tiers()
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
        if self.speculative_config is not None:
            if not isinstance(self.speculative_config, dict):
                self._refuse("speculative_config", 'a dict such as {"method": "suffix"}, or None')
            self._check_draft_model(read_speculative_config(self.speculative_config))
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
        for name in ("hang_timeout_s", "start_timeout_s"):
            self._check_number(name, 0.0, 1e6, "a number of seconds, or 0 for no limit")
        self._check_contradictions()

    def _resolve_phases(self) -> None:
        """Resolve the quantization of both phases and of each phase."""
        names = ("prefill_quantization", "decode_quantization")
        chosen = [name for name in names if getattr(self, name) is not None]
        for name in chosen:
            self._check_choice(name, ("none", *QUANTIZATIONS))
        if len(chosen) == 2 and self.quantization is not None:
            raise ConfigError(
                f"quantization is {self.quantization!r}, but {' and '.join(names)} set it for each "
                "phase; leave quantization out"
            )
        prefill, decode = (getattr(self, name) or self.quantization or "none" for name in names)
        both = prefill if prefill == decode != "none" else None
        own = (None, None) if prefill == decode else (prefill, decode)
        for name, value in zip(("quantization", *names), (both, *own), strict=True):
            object.__setattr__(self, name, value)

    @property
    def phases_differ(self) -> bool:
        """True if prefill and decode have weights in different formats."""
        return self.prefill_quantization is not None

    def for_phase(self, phase: str) -> EngineConfig:
        """Return the settings of an engine for one phase, with the weights in that phase's
        format."""
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

    def speculation(self) -> SpeculationConfig | None:
        """Return the settings of speculative decoding; None: no drafts."""
        given = self.speculative_config
        return None if given is None else read_speculative_config(given)

    def _check_draft_model(self, speculation: SpeculationConfig) -> None:
        if speculation.draft_model is None:
            return
        if self.tensor_parallel_size > 1:
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, but a draft model does not "
                "support several ranks yet; leave one of them out, or use the method 'suffix'"
            )
        if self.kv_sharing != "none":
            raise ConfigError(
                "a draft model does not work with engines for one phase yet (prefill_engines, "
                "decode_engines), because its KV cache cannot be sent between engines; leave one "
                "of them out, or use the method 'suffix'"
            )

    def _check_capture_sizes(self) -> None:
        sizes = self.cudagraph_capture_sizes
        if sizes is None:
            return
        is_list = isinstance(sizes, list | tuple) and len(sizes) > 0
        if not is_list or any(type(size) is not int or size < 1 for size in sizes):
            self._refuse("cudagraph_capture_sizes", "a list of whole numbers of at least 1")
        object.__setattr__(self, "cudagraph_capture_sizes", tuple(sorted(set(sizes))))
        if self.max_cudagraph_capture_size is not None:
            raise ConfigError(
                "cudagraph_capture_sizes and max_cudagraph_capture_size both select the batches "
                "that run as graphs; give one of them"
            )

    def _check_override(self) -> None:
        override = self.override_generation_config
        if override is None:
            return
        if not isinstance(override, dict) or not override.keys() <= set(OVERRIDDEN):
            self._refuse("override_generation_config", f"a dict of {', '.join(OVERRIDDEN)}")
        try:
            SamplingParams(**override)
        except RequestError as error:
            raise ConfigError(f"override_generation_config: {error}") from None

    def _check_tiers(self) -> None:
        if self.kv_offloading_size is not None:
            self._check_number("kv_offloading_size", 0.0, 1e6, "GiB of host memory from 0, or None")
        if not isinstance(self.kv_disk_cache, str | None):
            self._refuse("kv_disk_cache", "a string or None")
        if self.kv_disk_cache is not None:
            read_disk_cache(self.kv_disk_cache)
        for name in ("kv_offloading_size", "kv_disk_cache"):
            if getattr(self, name) and self.enable_prefix_caching is False:
                raise ConfigError(
                    f"{name} keeps cached prefixes, but enable_prefix_caching is False; leave one "
                    "of them out"
                )

    def _check_contradictions(self) -> None:
        if self.num_gpu_blocks_override is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                "num_gpu_blocks_override and kv_cache_memory_bytes both set the size of the KV "
                "cache; give one of them"
            )
        if self.kv_eviction is not None:
            self._check_eviction()
            if self.speculative_config is not None:
                raise ConfigError(
                    "speculative_config and kv_eviction exclude each other: rejected drafts would "
                    "decide which blocks are evicted; leave one of them out"
                )
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {budget} is below max_num_seqs {self.max_num_seqs}: a "
                "step must have a token for every running request; raise max_num_batched_tokens or "
                "lower max_num_seqs"
            )
        for name in ("itl_slo_ms", "max_decode_stall"):
            if getattr(self, name) and not self.enable_chunked_prefill:
                raise ConfigError(
                    f"{name} needs prompts that are prefilled in chunks, but "
                    "enable_chunked_prefill is False; leave out one of them"
                )
        if self.calibration is not None and not (self.quantization or self.phases_differ):
            raise ConfigError(
                "calibration changes how weights are rounded, but there is no quantization; give "
                "quantization, or leave calibration out"
            )
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigError("skip_tokenizer_init and tokenizer contradict each other; give one")

    @property
    def kv_scaled(self) -> bool:
        """True if the KV cache has a scale for each head of a token."""
        return self.kv_cache_dtype == "int8"

    def _check_eviction(self) -> None:
        min_tokens = MIN_BLOCKS * self.block_size
        if self.kv_eviction == "heavy-hitters":
            min_tokens = MIN_SEGMENTS * SEGMENT_TOKENS
            if SEGMENT_TOKENS % self.block_size:
                raise ConfigError(
                    f"kv_eviction heavy-hitters scores {SEGMENT_TOKENS} tokens together, and "
                    f"block_size {self.block_size} does not divide them; use 16, 32 or 64"
                )
        if self.kv_eviction_budget < min_tokens:
            raise ConfigError(
                f"kv_eviction_budget {self.kv_eviction_budget} is too small for kv_eviction "
                f"{self.kv_eviction} with block_size {self.block_size}; raise the budget to at "
                f"least {min_tokens}"
            )
        if not self.enable_chunked_prefill:
            raise ConfigError(
                "kv_eviction needs enable_chunked_prefill, because a preempted request is "
                "recomputed block by block; leave out one of them"
            )

    def goals(self, on_gpu: bool) -> tuple[float | None, float | None]:
        """Return the goals for TTFT and ITL in seconds; None: no goal."""
        mode, device = MODES[self.performance_mode], 0 if on_gpu else 1
        ttft, itl = self.ttft_slo_ms, self.itl_slo_ms
        if ttft is None and mode.ttft_ms is not None:
            ttft = mode.ttft_ms[device]
        if itl is None and mode.itl_ms is not None and self.enable_chunked_prefill:
            itl = mode.itl_ms[device]
        return None if ttft is None else ttft / 1e3, None if itl is None else itl / 1e3

    def decode_stall(self) -> float | None:
        """Return `max_decode_stall`, or the default of the performance mode; None: no limit."""
        stall = self.max_decode_stall
        if stall is None and self.enable_chunked_prefill:
            stall = MODES[self.performance_mode].decode_stall
        return stall or None

    def token_budget(self, on_gpu: bool, max_model_len: int) -> int:
        """Return the maximum number of tokens in a step: enough to use the device fully, but so few
        that streams do not wait long."""
        budget = self.max_num_batched_tokens
        if budget is None:
            mode = MODES[self.performance_mode]
            budget = max(mode.budget_gpu if on_gpu else mode.budget_cpu, self.max_num_seqs)
            if not self.enable_chunked_prefill:
                budget = max(budget, max_model_len)
        if not self.enable_chunked_prefill and budget < max_model_len:
            raise ConfigError(
                f"without chunked prefill a prompt runs in one step, but max_num_batched_tokens "
                f"{budget} is below max_model_len {max_model_len}; raise max_num_batched_tokens, "
                "lower max_model_len, or set enable_chunked_prefill=True"
            )
        return budget


def check_kv_transport(transport: object) -> None:
    """Raise `ConfigError` unless the name of a KV transport is known."""
    if transport in RDMA:
        raise ConfigError(
            f"kv_transport {transport!r} is not supported; for RDMA use kv_transport='nixl' "
            "(pip install 'twostroke[nixl]')"
        )
    if transport not in KV_TRANSPORTS:
        raise ConfigError(
            f"kv_transport must be one of {', '.join(KV_TRANSPORTS)}, not {shown(transport)}"
        )
