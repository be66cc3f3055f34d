"""twostroke: an LLM inference engine with separate paths for prefill and decode.

from twostroke import LLM, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from twostroke.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from twostroke.engine.in_process import AsyncEngine
    from twostroke.inputs import PromptType, TextPrompt, TokensPrompt
    from twostroke.llm import LLM
    from twostroke.llm_engine import LLMEngine
    from twostroke.outputs import CompletionOutput, Logprob, RequestOutput
    from twostroke.request import SamplingParams
    from twostroke.v1.engine.async_llm import AsyncLLMEngine

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
]

_MODULES = {
    "LLM": "twostroke.llm",
    "LLMEngine": "twostroke.llm_engine",
    "AsyncEngine": "twostroke.engine.in_process",
    "AsyncLLMEngine": "twostroke.v1.engine.async_llm",
    "EngineArgs": "twostroke.engine.arg_utils",
    "AsyncEngineArgs": "twostroke.engine.arg_utils",
    "SamplingParams": "twostroke.request",
    "RequestOutput": "twostroke.outputs",
    "CompletionOutput": "twostroke.outputs",
    "Logprob": "twostroke.outputs",
    "PromptType": "twostroke.inputs",
    "TextPrompt": "twostroke.inputs",
    "TokensPrompt": "twostroke.inputs",
}
# Names of vLLM that twostroke does not have, and the reasons.
_ABSENT = {
    "PoolingParams": "the engine only generates text: no embeddings, scores or classes",
    "PoolingRequestOutput": "the engine only generates text: no embeddings, scores or classes",
    "ModelRegistry": "supported families are listed in docs/MODELS.md; docs/ADDING_A_FAMILY.md "
    "says how to add one",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, because the command line must not load torch."""
    if name in _ABSENT:
        raise ImportError(f"twostroke has no {name}: {_ABSENT[name]}")
    if name not in _MODULES:
        raise AttributeError(f"module 'twostroke' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
