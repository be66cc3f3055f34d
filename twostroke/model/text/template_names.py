"""Chat templates that `--chat-template` knows by name, as llama-server does."""

from __future__ import annotations

from typing import Final


def _turns(before: str, after: str, open_turn: str, roles: str = "m.role") -> str:
    """A template whose turns all look the same. `before` and `after` stand around a content."""
    turn = before.replace("ROLE", "{{ " + roles + " }}")
    return (
        "{{ bos_token }}{% for m in messages %}"
        f"{turn}{{{{ m.content }}}}{after}"
        "{% endfor %}{% if add_generation_prompt %}" + open_turn + "{% endif %}"
    )


_GEMMA_ROLES = "'model' if m.role == 'assistant' else 'user'"
_VICUNA_TURN = (
    "{% if m.role == 'user' %}USER: {{ m.content }}\n"
    "{% elif m.role == 'assistant' %}ASSISTANT: {{ m.content }}{{ eos_token }}\n"
    "{% else %}{{ m.content }}\n\n{% endif %}"
)
NAMED_TEMPLATES: Final[dict[str, str]] = {
    "chatml": _turns("<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_start|>assistant\n").removeprefix(
        "{{ bos_token }}"
    ),
    "llama3": _turns(
        "<|start_header_id|>ROLE<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": _turns(
        "<start_of_turn>ROLE\n", "<end_of_turn>\n", "<start_of_turn>model\n", _GEMMA_ROLES
    ),
    "phi3": _turns("<|ROLE|>\n", "<|end|>\n", "<|assistant|>\n"),
    "zephyr": _turns("<|ROLE|>\n", "{{ eos_token }}\n", "<|assistant|>\n"),
    "vicuna": "{{ bos_token }}{% for m in messages %}"
    + _VICUNA_TURN
    + "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
}
