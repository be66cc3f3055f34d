"""The asynchronous engine, with vLLM's names."""

from twostroke.engine.client import AsyncEngine as AsyncLLM

AsyncLLMEngine = AsyncLLM

__all__ = ["AsyncLLM", "AsyncLLMEngine"]
