"""Harmony, the format of gpt-oss: messages on channels.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>

A message on the channel `analysis` is reasoning, a message to a tool is a call, other messages are
content.
"""

from __future__ import annotations

import re

from twostroke.serve.parsers.calls import CallParser
from twostroke.serve.parsers.scanner import Steps

MAX_HEADER = 256  # characters
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")


class Harmony(CallParser):
    special_tokens = True
    forced = ("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "<|call|>")

    def read(self) -> Steps[None]:
        self.hold()
        # The prompt may end within the header of the first message, before "to=".
        tag = yield from self.accept("to=", after=" ")
        if not tag:
            tag = yield from self.text_until("<|start|>", "<|channel|>")
        while tag:
            rest, found = yield from self.until("<|message|>", max_chars=MAX_HEADER)
            if found:
                yield from self._message(tag + rest)
            else:
                self.give_up()
            tag = yield from self.text_until("<|start|>", "<|channel|>")

    def _message(self, header: str) -> Steps[None]:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self.tools:
            self.begin_call(recipient[1])
            _, end = yield from self.until(*_ENDS, sink=self.emit_arguments)
            self._flush_runs()
            if end and not self.calls[-1].arguments.strip():
                self.emit_arguments("{}")
        elif channel is not None and channel[1] == "analysis":
            self.drop()
            self.thinking = True
            yield from self.until(*_ENDS, sink=self.emit_reasoning)
            self.thinking = False
        else:
            if recipient is not None or channel is None:
                self.give_up()  # a call of an unknown tool is content
            self.drop()
            yield from self.until(*_ENDS, sink=self.emit_text)
