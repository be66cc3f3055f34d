"""The engine's side of reasoning: a budget, and a grammar after it, on real executors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_grammar_ahead import Noted
from tests.tiny import tiny_llm
from twostroke.engine.wire import decode_to_engine, encode, pack_add
from twostroke.errors import RequestError
from twostroke.exec.grammar import TOKENS_AHEAD
from twostroke.exec.thinking import ThinkingState
from twostroke.request import EngineRequest, SamplingParams, StructuredOutputs, Thinking

END = (40, 41, 42)  # what ends it: three tokens of the tiny vocabulary
NEVER = (b"\xff\xfe",)  # bytes that no text has


def thinking(budget: int | None, **more: Any) -> Thinking:
    return Thinking(NEVER, NEVER, forced_ids=END, is_open=True, budget=budget, **more)


def params(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.8, max_tokens=80, ignore_eos=True, **more)


def write(folder: Path, depth: int, requests: list[EngineRequest], **settings: Any) -> Any:
    """Return the tokens of each request and the executor, which takes `depth` steps ahead."""
    core = tiny_llm(folder, **settings).engine.core
    # The first one waits for the tokenizer, which a thread reads; without it, all begin together.
    core.add(EngineRequest("first", (5,), params(), seed=1, thinking=thinking(0)))
    while core.has_work:
        core.step()
    core.scheduler._step = 0
    noted = core._executor = Noted(core._executor, depth)
    written: dict[str, list[int]] = {given.request_id: [] for given in requests}
    for given in requests:
        core.add(given)
    while core.has_work:
        for update in core.step():
            assert not update.error, update.error
            written[update.request_id] += update.tokens
        core.scheduler.audit()
    assert not core._grammars.active
    return written, noted


@pytest.mark.parametrize(
    ("settings", "depth"), [({}, 1), ({}, 2), ({"kernels": "reference", "device": "cpu"}, 2)]
)
def test_the_end_is_forced_on_every_backend(
    folder: Path, settings: dict[str, Any], depth: int
) -> None:
    budgets = {"a": 0, "b": 7, "c": 60}
    requests = [
        EngineRequest(name, (5, 6, 7), params(), seed=n, thinking=thinking(budget))
        for n, (name, budget) in enumerate(budgets.items())
    ]
    requests.append(EngineRequest("free", (5, 6, 7), params(), seed=9))
    written, noted = write(folder, depth, requests, **settings)
    free = [EngineRequest(one.request_id, (5, 6, 7), params(), seed=one.seed) for one in requests]
    unbounded, _ = write(folder, 1, free, **settings)
    for name, budget in budgets.items():
        assert tuple(written[name][budget : budget + 3]) == END
        assert written[name][:budget] == unbounded[name][:budget]
        assert len(written[name]) == 80
    assert written["free"] == unbounded["free"]
    if depth == 2:  # what is far from its end makes no step wait for the one before
        at = {call: n for n, call in enumerate(noted.calls)}
        ahead = [at["sample", n] < at["wait", n - 1] for n in range(12, 60 - TOKENS_AHEAD)]
        assert all(ahead)
        assert ahead


def test_a_grammar_begins_where_the_reasoning_ends(folder: Path) -> None:
    bound = params(structured_outputs=StructuredOutputs(regex="[0-9]{5}"))
    given = EngineRequest("a", (5, 6, 7), bound, seed=1, thinking=thinking(9))
    written, _ = write(folder, 2, [given])
    llm = tiny_llm(folder)
    assert tuple(written["a"][9:12]) == END
    text = llm.engine.input_processor.tokenizer.decode(written["a"][12:])
    assert text.isdigit()
    assert len(text) == 5


def test_tags_without_tokens_are_refused(folder: Path) -> None:
    core = tiny_llm(folder).engine.core
    impossible = Thinking(NEVER, NEVER, forced_ids=(5, 300), is_open=True, budget=1)
    with pytest.raises(RequestError, match="cannot write the tags"):
        core.add(EngineRequest("a", (5,), params(), seed=1, thinking=impossible))
    assert not core.has_work


def test_thinking_settings_are_sent_over_the_wire() -> None:
    asked = thinking(3, start_ids=(4,))
    given = EngineRequest("a", (5,), params(), seed=1, thinking=asked)
    sent = decode_to_engine(encode(pack_add(1, [given])))
    assert sent.request.thinking == asked


# The state alone. Tokens are letters here.


def state(before_grammar: bool = False, **more: Any) -> ThinkingState:
    settings: dict[str, Any] = {"starts": (b"<t>",), "ends": (b"</t>", b"DONE"), **more}
    return ThinkingState(Thinking(**settings), lambda token: bytes([token]), before_grammar)


def test_tags_of_several_tokens_are_found() -> None:
    one = state()
    assert one.advance(b" <t") == ()
    assert not one.inside
    assert one.advance(b">ab</") == ()
    assert one.inside
    assert bytes(one.advance(b"t>cd")) == b"cd"
    assert one.over


def test_text_before_the_opening_tag_is_no_reasoning() -> None:
    one = state()
    assert bytes(one.advance(b"x<t>")) == b"x<t>"
    assert one.over
    one = state()
    assert one.advance(b"<") == ()
    assert bytes(one.advance(b"u")) == b"u"
    assert one.over


def test_before_a_grammar_only_a_token_opens_it() -> None:
    assert state(before_grammar=True).over  # the tag is no token: the grammar applies at once
    one = state(before_grammar=True, start_ids=(7,))
    assert bytes(one.advance(b"<")) == b"<"
    one = state(before_grammar=True, start_ids=(7,))
    assert one.advance([7]) == ()
    assert one.inside


def test_the_forced_end_is_counted_down_to() -> None:
    one = state(is_open=True, budget=2, forced_ids=tuple(b"</t>"))
    assert (one.left, one.forced) == (2, None)
    one.advance(b"ab")
    assert (one.left, one.forced) == (0, ord("<"))
    one.advance(b"</t")
    assert one.forced == ord(">")
    one.advance(b">")
    assert (one.over, one.refused) == (True, False)
    other = state(is_open=True, budget=0, forced_ids=(9,))
    other.advance([8])
    assert other.refused
    early = state(is_open=True, budget=9, forced_ids=(9,))
    assert bytes(early.advance(b"aDONEb")) == b"b"
