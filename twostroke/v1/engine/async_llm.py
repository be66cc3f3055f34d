"""The asynchronous engine under vLLM's name."""

from twostroke.engine.client import AsyncEngine as AsyncLLM

__all__ = ["AsyncLLM"]
