"""`VLLMSettings` accepts settings of vLLM that `EngineConfig` does not have, so that programs for
vLLM run.

The defaults describe what twostroke does. Another value causes a warning if it would not change the
output (`NOTICES`), and an error if it would (`REFUSED`).
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
    "trust_remote_code": "code from a model's repository is never run",
    "tokenizer_mode": "the tokenizer is read from the model's files",
    "config_format": "a config.json or a GGUF header is read",
    "swap_space": "preempted requests are recomputed, not swapped",
    "distributed_executor_backend": "each rank is a process on this machine",
    "async_scheduling": "the engine decides how far it plans ahead",
    "compilation_config": "models are not compiled; enforce_eager switches graphs off",
    "attention_backend": "there is one attention backend",
    "guided_decoding_backend": "llguidance is the only backend of structured outputs",
    "structured_outputs_config": "llguidance is the only backend of structured outputs",
    "max_seq_len_to_capture": "max_cudagraph_capture_size is the only limit of graphs",
    "limit_mm_per_prompt": "models read text only",
}
TEXT_ONLY = "the engine only generates text: no embeddings, scores or classes"
REFUSED = {
    "runner": TEXT_ONLY,
    "task": TEXT_ONLY,
    "convert": TEXT_ONLY,
    "pipeline_parallel_size": "layers are not spread over devices; tensor_parallel_size splits "
    "every layer",
    "data_parallel_size": "an engine has one copy of a model; start several engines",
    "cpu_offload_gb": "weights stay on the device",
    "enable_sleep_mode": "weights stay on the device",
    "enable_lora": "LoRA adapters are not supported yet; merge the adapter into the model",
    "logits_processors": "a step runs no code of other packages",
    "kv_transfer_config": "a server with --prefill-engines and --decode-engines transfers KV "
    "blocks, and kv_offloading_size keeps them in host memory",
}
SAME_AS_DEFAULT = {"runner": ("generate",), "task": ("generate",), "convert": ("none",)}


@dataclass(frozen=True, kw_only=True)
class VLLMSettings(EngineConfig):
    """`EngineConfig` with further settings of vLLM."""

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
    logits_processors: Any = None
    kv_transfer_config: Any = None

    def __post_init__(self) -> None:
        if self.load_format == "mistral":  # in vLLM: the files have Mistral's names
            log.warning("load_format='mistral' is read as 'auto': Hugging Face's files are read")
            object.__setattr__(self, "load_format", "auto")
        super().__post_init__()
        for name, value in self.changed().items():
            if name in REFUSED and value not in SAME_AS_DEFAULT.get(name, ()):
                raise ConfigError(f"{name} is {shown(value)}, but {REFUSED[name]}; leave it out")

    def engine_config(self) -> EngineConfig:
        """Return the settings of an engine. Log a warning for each setting without effect."""
        self.__post_init__()  # check again: the user may have changed `EngineArgs`
        for name, value in self.changed().items():
            if name in NOTICES:
                log.warning("%s=%s has no effect: %s", name, shown(value), NOTICES[name])
        names = [field.name for field in dataclasses.fields(EngineConfig)]
        return EngineConfig(**{name: getattr(self, name) for name in names})

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {field.name: value for field, value in values.items() if value != field.default}
