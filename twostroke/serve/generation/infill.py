"""Fill in the middle: the prompt of a text that has a gap, for models that were trained on it."""

from __future__ import annotations

from twostroke.model.text.tokenizer import Tokenizer
from twostroke.serve.error_responses import ApiError
from twostroke.serve.generation.prompts import Prompts

# What stands before the prefix, the suffix and the middle, by family.
TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("<PRE>", "<SUF>", "<MID>"),  # CodeLlama
)
FILE_SEPARATORS = ("<|file_sep|>", "<file_sep>")


def infill_tokens(tokenizer: Tokenizer | None) -> tuple[int, int, int] | None:
    """The ids of the three tokens; None if the model has none."""
    if tokenizer is None:
        return None
    for texts in TOKENS:
        ids = [_token_id(tokenizer, text) for text in texts]
        if all(token is not None for token in ids):
            prefix, suffix, middle = ids
            return prefix, suffix, middle  # type: ignore[return-value]
    return None


def infill_prompt(
    prompts: Prompts,
    tokenizer: Tokenizer | None,
    prefix: str,
    suffix: str,
    middle: str = "",
    files: tuple[tuple[str, str], ...] = (),
) -> list[int]:
    """The ids after which a model writes what stands between prefix and suffix.

    `middle` is its beginning; `files` are (name, text) of files to be known beside this one."""
    tokens = infill_tokens(tokenizer)
    if tokens is None or tokenizer is None:
        raise ApiError(
            400,
            "the model has no tokens for filling in the middle (prefix, suffix, middle); use one "
            "that was trained for it, or send a prompt without a suffix",
            code="no_infill",
        )
    parts: list[int | str] = [*tokenizer.encode("")]  # what a text begins with, if anything
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
