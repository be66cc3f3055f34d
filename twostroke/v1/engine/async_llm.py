"""The asynchronous engine under vLLM's names."""

from twostroke.engine.in_process import AsyncEngine as AsyncLLM

AsyncLLMEngine = AsyncLLM

__all__ = ["AsyncLLM", "AsyncLLMEngine"]
