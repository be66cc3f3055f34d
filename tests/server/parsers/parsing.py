"""What a client makes of a message that comes in pieces, cut everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from twostroke.serve.generation.conversation import AssistantMessage
from twostroke.serve.parsers.deltas import ContentDelta, ReasoningDelta


class Said(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str]]  # name, arguments


def read(message: AssistantMessage, pieces: Sequence[str]) -> Said:
    """Joined from the deltas, as a client does; the message itself must say the same."""
    deltas = [delta for piece in pieces for delta in message.push(piece)] + message.flush()
    reasoning, content, calls = "", "", list[list[str]]()
    for delta in deltas:
        if isinstance(delta, ContentDelta | ReasoningDelta):
            assert delta.text
            if isinstance(delta, ContentDelta):
                content += delta.text
            else:
                reasoning += delta.text
        elif delta.id is not None:
            assert delta.name is not None
            assert delta.index == len(calls)
            calls.append([delta.name, delta.arguments])
        else:
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.arguments
    assert (message.reasoning or "", message.content or "") == (reasoning, content)
    assert [[call.name, call.arguments] for call in message.calls] == calls
    return Said(reasoning, content, [(name, arguments) for name, arguments in calls])


def read_however_cut(new_message: Callable[[], AssistantMessage], text: str) -> Said:
    """What is read in one piece; the same must be read in two, in many, and by the character."""
    whole = read(new_message(), [text])
    for cut in range(1, len(text)):
        assert read(new_message(), [text[:cut], text[cut:]]) == whole, text[:cut]
    assert read(new_message(), list(text)) == whole
    numbers = random.Random(len(text))
    for _ in range(20):
        cuts = sorted(numbers.randrange(len(text) + 1) for _ in range(4))
        ends = [*cuts, len(text)]
        pieces = [text[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
        assert read(new_message(), pieces) == whole, pieces
    return whole
