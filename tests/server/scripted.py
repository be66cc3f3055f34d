"""A fake model that writes a script, over a real scheduler and core."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from tests.tiny import EOS, tiny_folder, tiny_llm, write_json
from twostroke import LLM
from twostroke.exec.token_mask import unpack_mask
from twostroke.plan import NewRow, StepPlan, StepResult

VOCAB_SIZE = 320


@dataclass
class Row:
    new: NewRow
    script: list[int] = field(default_factory=list)  # what is left of it


@dataclass
class Done:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class Scripted:
    """Writes the script. If the next token is not allowed, it writes the first allowed token and
    continues after that token in the script, if the script has it."""

    max_in_flight = 1

    def __init__(self, llm: LLM) -> None:
        tokenizer = llm.engine.input_processor.tokenizer
        assert tokenizer is not None
        self._tokenizer = tokenizer
        self._rows: dict[int, Row] = {}
        self.script: list[int] = []
        self.num_masked = 0

    def write(self, text: str) -> None:
        """Set the script of the next requests."""
        self.script = self.encode(text + EOS)
        self.num_masked = 0

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def forward(self, plan: StepPlan) -> StepPlan:
        for row in plan.retired:
            self._rows.pop(row, None)
        for new in plan.new:
            self._rows[new.row] = Row(new, list(self.script))
        return plan

    def sample(self, plan: StepPlan, masks: Any = None) -> Done:
        rows = [self._rows[slot.row] for slot in plan.decode]
        rows += [self._rows[chunk.row] for chunk in plan.prefill if chunk.last]
        masks = masks or {}
        self.num_masked += len(masks)
        tokens = [self._next(row, masks.get(index)) for index, row in enumerate(rows)]
        return Done(StepResult(tokens, {}, {}, 0.0))

    def _next(self, row: Row, mask: Any) -> int:
        token = row.script[0] if row.script else 0
        allowed = row.new.params.allowed_token_ids
        if allowed is not None:
            token = allowed[0]
        elif mask is not None and not (may := unpack_mask(mask, VOCAB_SIZE))[token]:
            token = int(may.argmax())
        if token in row.script:
            del row.script[: row.script.index(token) + 1]
        return token

    def reset(self) -> None:
        self._rows.clear()


def scripted_llm(
    path: Path, chat_template: str, tags: list[str], special: bool = False
) -> tuple[LLM, Scripted]:
    """`tags`: special tokens that are added to the vocabulary."""
    tiny_folder(path, vocab_size=VOCAB_SIZE)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    added = [tokenizers.AddedToken(tag, normalized=False, special=special) for tag in tags]
    tokenizer.add_tokens(added)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    write_json(path / "tokenizer_config.json", settings | {"chat_template": chat_template})
    llm = tiny_llm(path)
    executor = Scripted(llm)
    llm.engine.core._executor = executor
    return llm, executor
