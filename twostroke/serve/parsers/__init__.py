"""Parsers that split a model's output into content, reasoning and tool calls.

Each format has a class that inherits from `Scanner`.
"""

from __future__ import annotations

from typing import Final

from twostroke.serve.parsers.calls import CallParser
from twostroke.serve.parsers.harmony import Harmony
from twostroke.serve.parsers.json_formats import (
    DeepSeek,
    DeepSeekV31,
    Granite,
    Hermes,
    InternLm,
    KimiK2,
    Llama,
    Mistral,
    Phi4Mini,
    Xlam,
)
from twostroke.serve.parsers.reasoning import FORMATS, is_harmony
from twostroke.serve.parsers.untyped_formats import (
    FunctionGemma,
    Glm45,
    MiniCpm5,
    Olmo3,
    Pythonic,
    Qwen3Coder,
    SeedOss,
)

# The names are vLLM's.
TOOL_PARSERS: Final[dict[str, type[CallParser]]] = {
    "hermes": Hermes,
    "granite4": Hermes,
    "llama3_json": Llama,
    "llama4_json": Llama,
    "mistral": Mistral,
    "deepseek_v3": DeepSeek,
    "deepseek_v31": DeepSeekV31,
    "qwen3_coder": Qwen3Coder,
    "qwen3_xml": Qwen3Coder,
    "pythonic": Pythonic,
    "llama4_pythonic": Pythonic,
    "granite": Granite,
    "phi4_mini_json": Phi4Mini,
    "glm45": Glm45,
    "glm47": Glm45,
    "kimi_k2": KimiK2,
    "seed_oss": SeedOss,
    "olmo3": Olmo3,
    "internlm": InternLm,
    "xlam": Xlam,
    "minicpm5": MiniCpm5,
    "functiongemma": FunctionGemma,
    "openai": Harmony,
}
REASONING_PARSERS: Final = tuple(FORMATS)
# (text, parser): a chat template that contains the text uses the format of the parser. The first
# match counts, so texts that several formats contain are at the end.
_TEMPLATE_TEXTS: Final = (
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|im_middle|>", "kimi_k2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<function_calls>", "olmo3"),
    ("<|action_start|>", "internlm"),
    ("<start_function_call>", "functiongemma"),
    ("<function name=", "minicpm5"),
    ("<parameter=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("functools[", "phi4_mini_json"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
    ("<|header_start|>", "llama3_json"),
)


def choose_parser(chat_template: str | None) -> str:
    """Return the name of the parser for the tool calls in a chat template; "hermes" if no format is
    recognised."""
    template = chat_template or ""
    if is_harmony(template):
        return "openai"
    name = next((name for text, name in _TEMPLATE_TEXTS if text in template), "hermes")
    # DeepSeek V3 writes the arguments in a fence, V3.1 does not. Both use the same tags.
    if name == "deepseek_v3" and "```json" not in template:
        return "deepseek_v31"
    return name
