"""The formats in which models write their reasoning, and the parser of reasoning.

    deepseek_r1, deepseek_v3, qwen3,
    glm45, glm47, kimi_k2,
    olmo3                       <think>…</think>
    seed_oss                    <seed:think>…</seed:think>
    mistral                     [THINK]…[/THINK]
    granite                     Here is my thought process:…Here is my response:
    openai_gptoss               Harmony's channel `analysis` (`harmony.py`)

The prompt decides whether the model reasons:

    the prompt ends with the opening tag    from the first token
    ends with opening and closing tag       no; templates write this for `enable_thinking: false`
    otherwise                               if the model writes the opening tag first. With
                                            deepseek_r1, kimi_k2, olmo3 and seed_oss (as in vLLM)
                                            always, even without the tag

With kimi_k2, reasoning also ends where tool calls begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from twostroke.request import Thinking
from twostroke.serve.parsers.harmony import Harmony
from twostroke.serve.parsers.json_formats import KimiK2
from twostroke.serve.parsers.scanner import SPACE, Scanner, Steps

if TYPE_CHECKING:  # the settings import this module, and --help must not import tokenizers
    from twostroke.model.text.tokenizer import Tokenizer

PROMPT_END: Final = 24  # tokens at the end of a prompt that are searched for tags
CONTINUED_END: Final = 4096  # the same, for a prompt that ends within a message


@dataclass(frozen=True)
class ReasoningFormat:
    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    ends_before: tuple[str, ...] = ()  # texts that end the reasoning and belong to the answer
    begins_open: bool = False  # the opening tag is not needed
    forced_end: str = ""  # inserted when the token budget is used up; "": the first of `ends`

    def opened(self, prompt_end: str, continued: bool) -> bool | None:
        """Return True if reasoning is open at the end of a prompt, False if it has been closed, and
        None if there are no tags. `continued`: the prompt ends within a message, which may have the
        tags anywhere."""
        if continued:
            start = max(prompt_end.rfind(text) for text in self.starts)
            end = max(prompt_end.rfind(text) for text in self.ends)
            return None if start == end else start > end
        prompt_end = prompt_end.rstrip(SPACE)
        if prompt_end.endswith(self.starts):
            return True
        return False if prompt_end.endswith(self.ends) else None

    def has_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Return whether the text loses the closing tag when special tokens are skipped."""
        (tag, *_) = self.ends
        return tokenizer.decode(tokenizer.encode(tag, add_special_tokens=False)) != tag


THINK: Final = ReasoningFormat()
SEED: Final = ReasoningFormat(("<seed:think>",), ("</seed:think>",), begins_open=True)
HARMONY: Final = ReasoningFormat(
    ("<|channel|>analysis<|message|>",),
    ("<|channel|>final<|message|>",),
    begins_open=True,
    forced_end="<|end|><|start|>assistant<|channel|>final<|message|>",
)
MISTRAL: Final = ReasoningFormat(("[THINK]",), ("[/THINK]",))
FORMATS: Final = {
    "deepseek_r1": replace(THINK, begins_open=True),
    "deepseek_v3": THINK,
    "glm45": THINK,
    "glm47": THINK,
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "kimi_k2": replace(THINK, ends_before=(KimiK2.all_begin,), begins_open=True),
    "mistral": MISTRAL,
    "olmo3": replace(THINK, begins_open=True),
    "openai_gptoss": HARMONY,
    "qwen3": THINK,
    "seed_oss": SEED,
}


def choose_format(chat_template: str | None) -> ReasoningFormat | None:
    """Return the format of the reasoning that a chat template shows."""
    template = chat_template or ""
    if is_harmony(template):
        return HARMONY
    if "[THINK]" in template:
        return MISTRAL
    if "seed:think" in template:
        return SEED
    if "thought process:" in template and "<think>" not in template:
        return FORMATS["granite"]
    return THINK if "</think>" in template else None


def is_harmony(chat_template: str | None) -> bool:
    return "<|channel|>" in (chat_template or "") and "<|message|>" in (chat_template or "")


class ReasoningParser(Scanner):
    """Parses reasoning, stripped of white space, and then content."""

    def __init__(self, form: ReasoningFormat, is_open: bool) -> None:
        super().__init__()
        self._form = form
        self.thinking = is_open
        self.ended = False  # True if only content follows

    def read(self) -> Steps[None]:
        started = yield from self.accept(*self._form.starts, after=SPACE)
        if started or self.thinking:
            self.thinking = True
            self._sink = self.emit_reasoning
            yield from self.space()
            found = yield from self.text_until(*self._form.ends, *self._form.ends_before)
            self.drop()
            self.thinking = False
            self._sink = self.emit_text
            if found in self._form.ends_before:
                self._at -= len(found)
            yield from self.space()
        self.ended = True


@dataclass(frozen=True)
class Reasoning:
    """The format of a request's reasoning, and the state of reasoning at the end of the prompt."""

    form: ReasoningFormat
    is_open: bool  # the model reasons from the first token
    is_closed: bool  # the prompt has the closing tag, so the model does not reason

    def parser(self) -> Scanner:
        return Harmony({}) if self.form is HARMONY else ReasoningParser(self.form, self.is_open)

    def for_engine(
        self, tokenizer: Tokenizer, budget: int | None, forces_call: bool
    ) -> Thinking | None:
        """Return the settings for the engine. `forces_call`: a grammar forces a tool call."""
        if self.is_closed:
            return None
        form = self.form
        starts: tuple[int, ...] = ()
        if not self.is_open:
            # If a grammar restricts the answer, the model may write the opening tag only if the tag
            # is one token: the first of several tokens could also begin a text of the grammar.
            starts = tuple(
                ids[0]
                for text in form.starts
                if len(ids := tokenizer.encode(text, add_special_tokens=False)) == 1
            )
        ends, forced_end = (*form.ends, *form.ends_before), form.forced_end or form.ends[0]
        if form is HARMONY and forces_call:
            ends, forced_end = ("<|start|>assistant",), "<|end|><|start|>assistant"
        forced = tokenizer.encode(forced_end, add_special_tokens=False)
        return Thinking(
            starts=tuple(text.encode() for text in form.starts),
            ends=tuple(text.encode() for text in ends),
            start_ids=starts,
            forced_ids=tuple(forced),
            is_open=self.is_open,
            budget=budget,
        )


def requested_reasoning(
    parser: str | None,
    chat_template: str | None,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    continued: bool = False,
) -> Reasoning | None:
    """Return the reasoning to parse in the answer to a prompt, or None.

    `parser`: the name of a format; "auto": the format of the chat template; "none": no parsing;
    None: as "auto", but only if reasoning is open at the end of the prompt, or with Harmony.
    `continued`: the prompt ends within the message that the model continues.
    """
    if parser == "none":
        return None
    form = choose_format(chat_template) if parser in (None, "auto") else FORMATS[parser]
    if form is None:
        return None
    end = prompt[-(CONTINUED_END if continued else PROMPT_END) :]
    opened = form.opened(tokenizer.decode(end, skip_special_tokens=False), continued)
    if parser is None and form is not HARMONY and not opened:
        return None
    return Reasoning(form, form.begins_open if opened is None else opened, opened is False)


class ReasoningCounter:
    """Counts the output tokens that are reasoning, without the tags."""

    def __init__(self, reasoning: Reasoning, tokenizer: Tokenizer) -> None:
        self._parser = reasoning.parser()
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        self._count = 0
        self._maybe_tag = 0  # tokens that are either reasoning or part of a tag

    @property
    def count(self) -> int:
        return self._count + self._maybe_tag

    def push(self, token_ids: Sequence[int]) -> None:
        parser = self._parser
        for token in token_ids:
            if isinstance(parser, ReasoningParser) and parser.ended:
                return
            before = parser.thinking
            parser.push(self._detokenizer.push([token]))
            if not parser.thinking:
                self._maybe_tag = 0
            elif parser.looks_ahead:
                self._maybe_tag += 1
            elif before:
                self._count += self._maybe_tag + 1
                self._maybe_tag = 0
