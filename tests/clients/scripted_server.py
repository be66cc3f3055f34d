"""A real server with a scripted model, for agents whose loops need certain answers.

    python -m tests.clients.scripted_server [PORT]

The answer depends on the number of tool results in the prompt: first a call that writes one.txt,
then a call that copies one.txt to two.txt, then a text. The calls use the shell tool of the agent.
An agent without tools (aider) gets the content of a file, which is a word of its message.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Final

from tests.server.running import running
from tests.server.scripted import Row, Scripted
from tests.tiny import EOS, tiny_folder, tiny_llm, write_json
from twostroke.plan import StepPlan

CONTEXT: Final = 1 << 18  # tokens: an agent's first prompt has tens of thousands of bytes
BLOCK: Final = 16
RESULT: Final = "[[tool result]]"
TEMPLATE: Final = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}" + RESULT + "{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
COMMANDS: Final = ("echo one > one.txt", "cat one.txt > two.txt")
LAST_TEXT: Final = "Both files are written."
# The arguments of the agents' shell tools: Claude Code's, opencode's, Codex's.
SHELLS: Final = {
    "Bash": lambda command: {"command": command, "description": "Write a file"},
    "bash": lambda command: {"command": command, "description": "Write a file"},
    "exec_command": lambda command: {"cmd": command},
    "shell_command": lambda command: {"command": command},
    "shell": lambda command: {"command": ["bash", "-lc", command]},
}


def answer(prompt: str) -> str:
    """Return the answer of the script to a prompt."""
    offered = [name for name in SHELLS if f'"name": "{name}"' in prompt]
    if offered:
        turn = prompt.count(RESULT)
        if turn >= len(COMMANDS):
            return LAST_TEXT
        call = {"name": offered[0], "arguments": SHELLS[offered[0]](COMMANDS[turn])}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
    if asked := re.findall(r"write (\w+) into (\w+\.txt)", prompt):
        word, file = asked[-1]
        return f"{file}\n```\n{word}\n```\n"
    return LAST_TEXT


class Agents(Scripted):
    """An executor that generates `answer` for each prompt."""

    def forward(self, plan: StepPlan) -> StepPlan:
        plan = super().forward(plan)
        for new in plan.new:
            prompt = self._tokenizer.decode(list(new.tokens), skip_special_tokens=False)
            self._rows[new.row] = Row(new, self.encode(answer(prompt) + EOS))
        return plan


def main(port: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = tiny_folder(Path(name), max_position_embeddings=CONTEXT)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        write_json(folder / "tokenizer_config.json", settings | {"chat_template": TEMPLATE})
        llm = tiny_llm(
            folder, num_gpu_blocks_override=CONTEXT // BLOCK * 2, max_num_batched_tokens=1 << 15
        )
        llm.engine.core._executor = Agents(llm)
        with running(llm, port=port, served_model_names=("scripted",)) as server:
            print(server.url, flush=True)
            threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
