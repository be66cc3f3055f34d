"""Settings of vLLM's that `EngineConfig` does not have, so that its users' programs run unchanged.

Each asks for what happens anyway. Another value is taken with a notice where it changes nothing
that is written (`NOTICES`), and refused where it would (`REFUSED`).
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError, shown

log = logging.getLogger(__name__)

NOTICES = {
    "trust_remote_code": "no code that comes with a model is ever run",
    "tokenizer_mode": "the tokenizer is read from the model's own files",
    "config_format": "a config.json or a GGUF header is read",
    "swap_space": "preempted requests are recomputed, not swapped",
    "distributed_executor_backend": "each rank is a process on this machine",
    "async_scheduling": "how far the engine plans ahead is not a setting",
    "compilation_config": "nothing is compiled; enforce_eager is for graphs",
    "attention_backend": "there is one attention backend",
    "guided_decoding_backend": "llguidance is the one backend of structured outputs",
    "structured_outputs_config": "llguidance is the one backend of structured outputs",
    "max_seq_len_to_capture": "max_cudagraph_capture_size is the one limit of graphs",
    "limit_mm_per_prompt": "models read text only",
}
TEXT_ONLY = "the engine writes text: there are no embeddings, scores or classes"
REFUSED = {
    "runner": TEXT_ONLY,
    "task": TEXT_ONLY,
    "convert": TEXT_ONLY,
    "pipeline_parallel_size": "layers are not spread over devices; tensor_parallel_size splits "
    "each of them",
    "data_parallel_size": "an engine is one copy of a model; start several",
    "cpu_offload_gb": "weights stay on the device",
    "enable_sleep_mode": "weights stay on the device",
    "enable_lora": "LoRA adapters are not supported yet; merge the adapter into the model",
    "speculative_config": "speculative decoding is not supported yet",
    "logits_processors": "code of others does not run in a step",
    "kv_transfer_config": "a server's --prefill-engines and --decode-engines hand KV blocks over",
}
SAME = {"runner": ("generate",), "task": ("generate",), "convert": ("none",)}  # as the defaults


@dataclass(frozen=True, kw_only=True)
class VLLMSettings(EngineConfig):
    """`EngineConfig`, and what vLLM's users give besides."""

    display_name = "EngineConfig"

    trust_remote_code: bool = False
    tokenizer_mode: str = "auto"
    config_format: str = "auto"
    swap_space: float | None = None
    disable_log_stats: bool = True
    disable_log_requests: bool = True
    disable_custom_all_reduce: bool = False
    served_model_name: str | None = None
    distributed_executor_backend: str | None = None
    async_scheduling: bool | None = None
    compilation_config: Any = None
    attention_backend: str | None = None
    guided_decoding_backend: str | None = None
    structured_outputs_config: Any = None
    max_seq_len_to_capture: int | None = None
    limit_mm_per_prompt: Any = None
    runner: str = "auto"
    task: str = "auto"
    convert: str = "auto"
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    cpu_offload_gb: float = 0
    enable_sleep_mode: bool = False
    enable_lora: bool = False
    speculative_config: Any = None
    logits_processors: Any = None
    kv_transfer_config: Any = None

    def __post_init__(self) -> None:
        if self.load_format == "mistral":  # how vLLM is told that the file names are Mistral's
            log.warning("load_format='mistral' is read as 'auto': files have their usual names")
            object.__setattr__(self, "load_format", "auto")
        super().__post_init__()
        for name, value in self.changed().items():
            if name in REFUSED and value not in SAME.get(name, ()):
                raise ConfigError(f"{name} is {shown(value)}, but {REFUSED[name]}; leave it out")

    def engine_config(self) -> EngineConfig:
        """What an engine is built from. Tells of the settings that change nothing."""
        self.__post_init__()  # `EngineArgs` may have been changed
        for name, value in self.changed().items():
            if name in NOTICES:
                log.warning("%s=%s changes nothing: %s", name, shown(value), NOTICES[name])
        names = [field.name for field in dataclasses.fields(EngineConfig)]
        return EngineConfig(**{name: getattr(self, name) for name in names})

    def changed(self) -> dict[str, Any]:
        """The settings that are not at their defaults."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {field.name: value for field, value in values.items() if value != field.default}
