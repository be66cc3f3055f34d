"""The source text of chat templates: built-in templates, and the choice among a model's templates.

`--chat-template` accepts the same names as llama-server. This module does not import Jinja.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# auto: by the template; openai: contents are lists of parts; string: contents are texts
CONTENT_FORMATS: Final = ("auto", "openai", "string")


def template_name(of_request: bool) -> str:
    """Return the name that messages use for a template."""
    return "the request's chat template" if of_request else "the model's chat template"


def choose_template(named: Mapping[str, str]) -> str | None:
    """Return the template named 'default'; without it, the first by name."""
    if not named:
        return None
    return named["default"] if "default" in named else named[min(named)]


BOS: Final = "{{ bos_token }}"
EOS: Final = "{{ eos_token }}"


def _turns(turn: str, open_turn: str, start: str = BOS) -> str:
    """Return a template whose turns all have the same form. In `turn`, TEXT is replaced by the
    message's content, TRIMMED by the content without white space around it, ROLE by the role."""
    names = {"TEXT": "m.content", "TRIMMED": "m.content | trim", "ROLE": "m.role"}
    for name, value in names.items():
        turn = turn.replace(name, "{{ " + value + " }}")
    return (
        f"{start}{{% for m in messages %}}{turn}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{open_turn}{{% endif %}}"
    )


def _by_role(
    user: str, assistant: str, system: str, open_turn: str, exchange: str = "", start: str = BOS
) -> str:
    """Return a template with a turn for each role.

    `exchange`: begins the first message and each message after an answer.
    """
    if exchange:
        after_answer = "{% if loop.first or loop.previtem.role == 'assistant' %}"
        exchange = f"{after_answer}{exchange}{{% endif %}}"
    turn = (
        f"{exchange}{{% if m.role == 'user' %}}{user}{{% elif m.role == 'assistant' %}}{assistant}"
        f"{{% else %}}{system}{{% endif %}}"
    )
    return _turns(turn, open_turn, start)


def _llama2(system: str, text: str = "TEXT", begin: str = "") -> str:
    return _by_role(
        f"{text} [/INST]", text + EOS, system.replace("TEXT", text), "", f"{begin}[INST] "
    )


def _command_r(role: str, content: str = "TRIMMED<|END_OF_TURN_TOKEN|>") -> str:
    return f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>{content}"


def _kimi_k2(kind: str, role: str = "") -> str:
    return f"<|im_{kind}|>{role or kind}<|im_middle|>TEXT<|im_end|>"


_GEMMA_ROLE = "{{ 'model' if m.role == 'assistant' else 'user' }}"
_BOS_LATER = "{% if not loop.first %}{{ bos_token }}{% endif %}"
_LLAMA2_SYSTEM = "<<SYS>>\nTEXT\n<</SYS>>\n\n"
_VICUNA = ("USER: TEXT\n", f"ASSISTANT: TEXT{EOS}\n")
_BAILING = "<role>{{ 'HUMAN' if m.role == 'user' else m.role | upper }}</role>TEXT"
_EXAONE_END = "{{ '' if m.role == 'user' else '[|endofturn|]' }}"
_EXAONE = _turns(f"[|ROLE|]TRIMMED{_EXAONE_END}\n", "[|assistant|]", "")
NAMED_TEMPLATES: Final[dict[str, str]] = {
    "bailing": _turns(_BAILING, "<role>ASSISTANT</role>", ""),
    "bailing-think": _turns(_BAILING, "<role>ASSISTANT</role><think>", ""),
    "chatglm3": _turns("<|ROLE|>\n TEXT", "<|assistant|>", "[gMASK]sop"),
    "chatglm4": _turns("<|ROLE|>\nTEXT", "<|assistant|>\n", "[gMASK]<sop>"),
    "chatml": _turns("<|im_start|>ROLE\nTEXT<|im_end|>\n", "<|im_start|>assistant\n", ""),
    "command-r": _by_role(
        _command_r("USER"), _command_r("CHATBOT"), _command_r("SYSTEM"), _command_r("CHATBOT", "")
    ),
    "deepseek": _by_role(
        "### Instruction:\nTEXT\n",
        "### Response:\nTEXT\n<|EOT|>\n",
        "TEXT",
        "### Response:\n",
    ),
    "deepseek2": _by_role("User: TEXT\n\n", f"Assistant: TEXT{EOS}", "TEXT\n\n", "Assistant:"),
    "deepseek3": _by_role(
        "<｜User｜>TEXT", f"<｜Assistant｜>TEXT{EOS}", "TEXT\n\n", "<｜Assistant｜>"
    ),
    "exaone3": _EXAONE,
    "exaone4": _EXAONE,
    "falcon3": _turns("<|ROLE|>\nTEXT\n", "<|assistant|>\n", ""),
    "gemma": _turns(f"<start_of_turn>{_GEMMA_ROLE}\nTEXT<end_of_turn>\n", "<start_of_turn>model\n"),
    "gigachat": _by_role(
        "user<|role_sep|>TEXT<|message_sep|>available functions<|role_sep|>[]<|message_sep|>",
        "assistant<|role_sep|>TEXT<|message_sep|>",
        "TEXT<|message_sep|>",
        "assistant<|role_sep|>",
    ),
    "glmedge": _turns("<|ROLE|>\nTEXT", "<|assistant|>", ""),
    "granite": _turns(
        "<|start_of_role|>ROLE<|end_of_role|>TEXT<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
        "",
    ),
    "grok-2": _by_role(
        "Human: TRIMMED<|separator|>\n\n",
        "Assistant: TEXT<|separator|>\n\n",
        "System: TRIMMED<|separator|>\n\n",
        "Assistant:",
        start="",
    ),
    "hunyuan-dense": _by_role(
        "<｜hy_User｜>TEXT",
        "<｜hy_Assistant｜>TEXT<｜hy_place▁holder▁no▁2｜>",
        "TEXT<｜hy_place▁holder▁no▁3｜>",
        "<｜hy_Assistant｜>",
    ),
    "hunyuan-moe": _by_role(
        "<|startoftext|>TEXT<|extra_0|>",
        "TEXT<|eos|>",
        "<|startoftext|>TEXT<|extra_4|>",
        "",
        start="",
    ),
    "kimi-k2": _by_role(
        _kimi_k2("user"),
        _kimi_k2("assistant"),
        _kimi_k2("system", "{{ m.role }}"),
        "<|im_assistant|>assistant<|im_middle|>",
        start="",
    ),
    "llama2": _llama2("TEXT\n"),
    "llama2-sys": _llama2(_LLAMA2_SYSTEM),
    "llama2-sys-bos": _llama2(_LLAMA2_SYSTEM, begin=_BOS_LATER),
    "llama2-sys-strip": _llama2(_LLAMA2_SYSTEM, "TRIMMED"),
    "llama3": _turns(
        "<|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama4": _turns(
        "<|header_start|>ROLE<|header_end|>\n\nTRIMMED<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n",
    ),
    "megrez": _turns(
        "<|role_start|>ROLE<|role_end|>TEXT<|turn_end|>", "<|role_start|>assistant<|role_end|>", ""
    ),
    "minicpm": _by_role("<用户>TRIMMED<AI>", "TRIMMED", "TRIMMED", ""),
    "mistral-v1": _by_role("TEXT [/INST]", f" TEXT{EOS}", "TEXT\n\n", "", " [INST] "),
    "mistral-v3": _by_role("TEXT[/INST]", f" TRIMMED{EOS}", "TEXT\n\n", "", "[INST] "),
    "mistral-v3-tekken": _by_role("TEXT[/INST]", f"TEXT{EOS}", "TEXT\n\n", "", "[INST]"),
    "mistral-v7": _by_role(
        "[INST] TEXT[/INST]", f" TEXT{EOS}", "[SYSTEM_PROMPT] TEXT[/SYSTEM_PROMPT]", ""
    ),
    "mistral-v7-tekken": _by_role(
        "[INST]TEXT[/INST]", f"TEXT{EOS}", "[SYSTEM_PROMPT]TEXT[/SYSTEM_PROMPT]", ""
    ),
    "monarch": _turns(f"{BOS}ROLE\nTEXT{EOS}\n", f"{BOS}assistant\n", ""),
    "openchat": _by_role(
        "GPT4 Correct User: TEXT<|end_of_turn|>",
        "GPT4 Correct Assistant: TEXT<|end_of_turn|>",
        "TEXT<|end_of_turn|>",
        "GPT4 Correct Assistant:",
    ),
    "orion": _by_role(
        f"TEXT\n\nAssistant: {EOS}", f"TEXT{EOS}", "TEXT\n\n", "", exchange="Human: "
    ),
    "phi3": _turns("<|ROLE|>\nTEXT<|end|>\n", "<|assistant|>\n"),
    "phi4": _turns(
        "<|im_start|>ROLE<|im_sep|>TEXT<|im_end|>", "<|im_start|>assistant<|im_sep|>", ""
    ),
    "rwkv-world": _by_role(
        "User: TRIMMED\n\n", "Assistant: TRIMMED\n\n", "System: TRIMMED\n\n", "Assistant:", start=""
    ),
    "seed_oss": _turns("<seed:bos>ROLE\nTEXT<seed:eos>", "<seed:bos>assistant\n", ""),
    "smolvlm": _by_role(
        "User: TEXT<end_of_utterance>\n",
        "Assistant: TEXT<end_of_utterance>\n",
        "TEXT\n\n",
        "Assistant:",
        start="<|im_start|>",
    ),
    "vicuna": _by_role(*_VICUNA, "TEXT\n\n", "ASSISTANT:"),
    "vicuna-orca": _by_role(*_VICUNA, "SYSTEM: TEXT\n", "ASSISTANT:"),
    "yandex": _by_role(
        " Пользователь: TEXT\n\n", " Ассистент: TEXT\n\n", "TEXT\n\n", " Ассистент:[SEP]"
    ),
    "zephyr": _turns(f"<|ROLE|>\nTEXT{EOS}\n", "<|assistant|>\n"),
}
