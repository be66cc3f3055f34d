"""Prompts as dicts, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]  # only prompts with the same salt share cached prefixes


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]  # the text of the ids, for `RequestOutput.prompt`
    cache_salt: NotRequired[str]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt
