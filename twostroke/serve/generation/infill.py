"""Fill in the middle (FIM): the prompt for a gap between a prefix and a suffix."""

from __future__ import annotations

from twostroke.model.text.tokenizer import Tokenizer
from twostroke.serve.error_responses import ApiError
from twostroke.serve.generation.prompts import PromptProcessor

# The tokens before the prefix, the suffix and the middle, by model family.
TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("<PRE>", "<SUF>", "<MID>"),  # CodeLlama
)
FILE_SEPARATORS = ("<|file_sep|>", "<file_sep>")


def infill_tokens(tokenizer: Tokenizer | None) -> tuple[int, int, int] | None:
    """Return the ids of the three FIM tokens; None if the model has none."""
    if tokenizer is None:
        return None
    for texts in TOKENS:
        ids = [_token_id(tokenizer, text) for text in texts]
        if all(token is not None for token in ids):
            prefix, suffix, middle = ids
            return prefix, suffix, middle  # type: ignore[return-value]
    return None


def infill_prompt(
    prompts: PromptProcessor,
    tokenizer: Tokenizer | None,
    prefix: str,
    suffix: str,
    middle: str = "",
    files: tuple[tuple[str, str], ...] = (),
) -> list[int]:
    """Return the prompt for the text between prefix and suffix.

    `middle`: the beginning of this text. `files`: (name, text) of other files, for context."""
    tokens = infill_tokens(tokenizer)
    if tokens is None or tokenizer is None:
        raise ApiError(
            400,
            "the model has no tokens for filling in the middle (prefix, suffix, middle); use one "
            "that was trained for it, or send a prompt without a suffix",
            code="no_infill",
        )
    parts: list[int | str] = [*tokenizer.encode("")]  # BOS, if the model has one
    separators = [_token_id(tokenizer, text) for text in FILE_SEPARATORS]
    separator = next((token for token in separators if token is not None), None)
    for name, text in files:
        parts += [f"{name}\n{text}\n"] if separator is None else [separator, f"{name}\n{text}\n"]
    for token, text in zip(tokens, (prefix, suffix, middle), strict=True):
        parts += [token, text]
    return prompts.encode_parts(parts, add_special_tokens=False)


def _token_id(tokenizer: Tokenizer, text: str) -> int | None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
