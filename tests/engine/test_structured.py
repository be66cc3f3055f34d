"""Structured outputs. The tiny model's weights are random: only the grammar makes valid text."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import default_model_path
from tests.tiny import EOS_ID, tiny_folder, tiny_llm
from twostroke import LLM, SamplingParams
from twostroke import structured as structured_module
from twostroke.engine import grammar_check
from twostroke.errors import EngineError, RequestError
from twostroke.exec import grammar
from twostroke.outputs import CompletionOutput
from twostroke.request import EngineRequest, FinishReason, StructuredOutputs

PROMPT = "the quick brown fox"
WORD = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "name": WORD,
            "at": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "at"],
        "additionalProperties": False,
    },
    "array": {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": 99},
        "minItems": 2,
        "maxItems": 4,
    },
    "enum": {"enum": ['with "quotes"', "ä", 3, None, True]},
    "number": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"anyOf": [{"type": "null"}, WORD]}},
        "required": ["b"],
        "additionalProperties": False,
    },
}


def holds(value: Any, schema: dict[str, Any]) -> bool:
    """Check a value against the subset of JSON schema that these tests use."""
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    if "anyOf" in schema:
        return any(holds(value, one) for one in schema["anyOf"])
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": int | float,
        "boolean": bool,
        "null": type(None),
    }
    if not isinstance(value, kinds[schema["type"]]):
        return False
    if isinstance(value, dict):
        known = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(known) and all(
            holds(entry, known[name]) for name, entry in value.items()
        )
    if isinstance(value, list):
        count = schema["minItems"] <= len(value) <= schema["maxItems"]
        return count and all(holds(entry, schema["items"]) for entry in value)
    if isinstance(value, str):
        return len(value) <= schema["maxLength"]
    if value is None:
        return True
    return schema.get("minimum", value) <= value <= schema.get("maximum", value)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    """An engine whose grammar checks may wait minutes for an idle core. The limit on their CPU time
    stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_check, "LIMITS", replace(grammar_check.LIMITS, wall_s=300.0))
        yield tiny_llm(folder)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    core = shared.engine.core
    core.scheduler.audit()
    assert not core.has_work
    assert core._grammars is not None
    assert not core._grammars.active


def structured(params: dict[str, Any] | None = None, **asked: Any) -> SamplingParams:
    given = {"temperature": 0, "max_tokens": 200} | (params or {})
    return SamplingParams(structured_outputs=StructuredOutputs(**asked), **given)


def write(llm: LLM, params: dict[str, Any] | None = None, **asked: Any) -> CompletionOutput:
    (output,) = llm.generate(PROMPT, structured(params, **asked), use_tqdm=False)
    return output.outputs[0]


# What is asked for is what is written


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_json_follows_its_schema(llm: LLM, name: str, temperature: float) -> None:
    for seed in range(3):
        output = write(llm, {"temperature": temperature, "seed": seed}, json=SCHEMAS[name])
        assert output.finish_reason == "stop"
        assert holds(json.loads(output.text), SCHEMAS[name]), output.text


def test_a_schema_may_be_a_text(llm: LLM) -> None:
    text = json.dumps(SCHEMAS["array"])
    assert write(llm, json=text).text == write(llm, json=SCHEMAS["array"]).text


@pytest.mark.parametrize("pattern", [r"[a-c]{3}-\d{2}", r"(ab|cd){2,5}", r"[äöü]{4}", r"a+b?"])
def test_the_whole_text_matches_the_regex(llm: LLM, pattern: str) -> None:
    for seed in range(3):
        output = write(llm, {"temperature": 1, "seed": seed}, regex=pattern)
        assert output.finish_reason == "stop"
        assert re.fullmatch(pattern, output.text), output.text


def test_one_of_the_choices_is_written(llm: LLM) -> None:
    choices = ["yes", "ye", 'say "no"', "line\nbreak", "back\\slash", "東京", "a|b", "😀", "[x]"]
    written = {
        write(llm, {"temperature": 5, "seed": seed}, choice=choices).text for seed in range(40)
    }
    assert written <= set(choices)
    assert len(written) > 3
    assert {write(llm, choice=[one]).text for one in choices} == set(choices)


def test_a_gbnf_and_a_lark_grammar_are_followed(llm: LLM) -> None:
    gbnf = 'root ::= pair ("," pair){1,3}\npair ::= [a-z] "=" [0-9]'
    lark = 'start: pair ("," pair){1,3}\npair: /[a-z]/ "=" /[0-9]/'
    for one in (gbnf, lark):
        text = write(llm, {"temperature": 1, "seed": 1}, grammar=one).text
        assert re.fullmatch(r"[a-z]=\d(,[a-z]=\d){1,3}", text), text


def test_a_json_object_begins_as_one_and_never_loops_on_white_space(llm: LLM) -> None:
    space = [n for n in range(300) if llm.engine.input_processor.tokenizer.token_bytes(n).isspace()]
    favoured = {"logit_bias": dict.fromkeys(space, 100.0)}
    text = write(llm, favoured, json_object=True).text
    assert text.startswith("{")
    assert not re.search(r"\s{14}", text.split('"')[0])
    ended = {"logit_bias": {llm.get_tokenizer().encode("}", add_special_tokens=False)[0]: 100.0}}
    assert json.loads(write(llm, ended, json_object=True).text) == {}


# Beside others, preempted, many


def test_other_requests_in_the_batch_are_not_affected(llm: LLM) -> None:
    free = SamplingParams(temperature=1, seed=7, max_tokens=20)
    (alone,) = llm.generate("a small model", free, use_tqdm=False)
    asked = structured({"seed": 3, "temperature": 1}, json=SCHEMAS["nested"])
    prompts = ["a small model", PROMPT, "a small model", PROMPT]
    outputs = llm.generate(prompts, [free, asked, free, asked], use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert outputs[2].outputs[0].token_ids == alone.outputs[0].token_ids
    for output in (outputs[1], outputs[3]):
        assert holds(json.loads(output.outputs[0].text), SCHEMAS["nested"])


class MaskClock:
    """A CPU clock that advances with each mask only."""

    def __init__(self, mask_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.num_masks = 0.0, 0
        plain = grammar.mask_from_bytes

        def mask(bits: bytes, vocab_size: int) -> Any:
            self.now_s += mask_s
            self.num_masks += 1
            return plain(bits, vocab_size)

        monkeypatch.setattr(grammar, "thread_time", lambda: self.now_s)
        monkeypatch.setattr(grammar, "mask_from_bytes", mask)


def test_masks_of_a_step_stay_within_a_budget_and_other_rows_do_not_wait(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of 4 ms each: two fit into the 10 ms of a step, once the first has been timed."""
    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    asked = structured({"temperature": 1, "seed": 5, "n": 8}, regex="[a-z]{12}")
    expected = llm.generate(PROMPT, asked, use_tqdm=False)[0]
    MaskClock(0.004, monkeypatch)
    steps = llm.engine.core.records.steps
    before = steps[-1].step
    texts, alone = llm.generate([PROMPT, "a small model"], [asked, free], use_tqdm=False)
    for one, same in zip(texts.outputs, expected.outputs, strict=True):
        assert one.token_ids == same.token_ids
    slots = [len(step.slots) for step in steps if step.step > before]
    first = slots.index(9)  # the masks of the first run took next to no time
    assert slots[first + 1] == 3
    assert max(slots[first + 1 :]) == 3
    # The other request has a token in every step from its first one on.
    assert len(alone.outputs[0].token_ids) == 40
    record = alone.records[0]
    written_in = list(record.token_step)
    assert written_in == list(range(written_in[0], written_in[0] + 40))


def test_masks_of_a_grammar_without_a_timed_mask_share_the_budget_too(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second tokens of all rows are due in one step. Four of them have their masks there, and
    from then on the time of a mask is known."""
    write(llm, {"max_tokens": 1}, regex="[b-y]{12}")  # compiles it; a first mask is not timed
    MaskClock(0.004, monkeypatch)
    steps = llm.engine.core.records.steps
    before = steps[-1].step
    new = structured({"temperature": 1, "seed": 5, "n": 8}, regex="[b-y]{12}")
    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm.generate([PROMPT, "a small model"], [new, free], use_tqdm=False)
    assert max(len(step.slots) for step in steps if step.step > before) == 5


def test_a_request_whose_masks_always_take_more_than_the_budget_is_ended(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MaskClock(0.02, monkeypatch)
    client = llm._client
    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    bad = client.add(PROMPT, structured(regex="[a-z]{100}"))
    good = client.add("a small model", free)
    ends = {}
    for changed in client.run([bad, good]):
        ends.update({output.request_id: output for output in changed if output.finished})
    assert "takes 20 ms of CPU time a token, and at most 10 ms a step" in ends[bad].error
    assert len(ends[bad].outputs[0].token_ids) == grammar.AVERAGED_TOKENS + 1
    assert clock.num_masks == grammar.AVERAGED_TOKENS + 1
    assert len(ends[good].outputs[0].token_ids) == 40


def test_a_preempted_request_continues_its_grammar(folder: Path, llm: LLM) -> None:
    pattern = {"regex": "([a-z]{2}-[0-9]{2};){30}"}
    params = [structured({"temperature": 1, "seed": n}, **pattern) for n in range(4)]
    calm = llm.generate([PROMPT] * 4, params, use_tqdm=False)
    crowded = tiny_llm(folder, num_gpu_blocks_override=18)
    outputs = crowded.generate([PROMPT] * 4, params, use_tqdm=False)
    assert any(record.preempted for output in outputs for record in output.records)
    for output, expected in zip(outputs, calm, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert re.fullmatch(pattern["regex"], output.outputs[0].text)


def test_each_of_n_follows_the_grammar_by_itself(llm: LLM) -> None:
    asked = structured({"n": 6, "temperature": 2, "seed": 1}, regex="[a-z]{2,9}!")
    (output,) = llm.generate(PROMPT, asked, use_tqdm=False)
    texts = [one.text for one in output.outputs]
    assert all(re.fullmatch("[a-z]{2,9}!", text) for text in texts)
    assert len(set(texts)) > 1


def test_an_aborted_request_leaves_nothing_and_its_name_can_be_used_again(llm: LLM) -> None:
    for output in llm.stream(PROMPT, structured(regex="[a-z]{100}")):
        assert output is not None
        break
    assert llm.engine.core._grammars is not None
    assert not llm.engine.core._grammars.active


# Ends


def test_max_tokens_cuts_a_text_that_is_valid_so_far(llm: LLM) -> None:
    output = write(llm, {"max_tokens": 5}, regex="[a-z]{50}")
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 5
    assert re.fullmatch("[a-z]{5,50}", output.text)


def test_a_text_that_may_end_ends_where_the_model_ends_it(llm: LLM) -> None:
    output = write(llm, {"logit_bias": {EOS_ID: 100.0}}, regex="[a-z]{3,90}")
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] == EOS_ID
    assert re.fullmatch("[a-z]{3,}", output.text)
    assert len(output.text) < 90


def test_ignore_eos_writes_on_while_the_grammar_lets_it(llm: LLM) -> None:
    params = {"logit_bias": {EOS_ID: 100.0}, "ignore_eos": True}
    output = write(llm, params, regex="[a-z]{3,40}")
    assert output.finish_reason == "stop"
    assert len(output.text) == 40


def test_a_finished_grammar_ends_the_text_before_min_tokens(llm: LLM) -> None:
    output = write(llm, {"min_tokens": 50}, regex="[a-z]{4}")
    assert (output.finish_reason, len(output.text)) == ("stop", 4)
    longer = write(llm, {"min_tokens": 12, "logit_bias": {EOS_ID: 100.0}}, regex="[a-z]*")
    assert longer.finish_reason == "stop"
    assert len(longer.token_ids) == 13


def test_a_grammar_of_the_empty_text_ends_at_once(llm: LLM) -> None:
    for ignore in (False, True):
        output = write(llm, {"ignore_eos": ignore}, regex="")
        assert (output.text, output.finish_reason) == ("", "stop")


def test_a_grammar_that_leaves_no_allowed_token_ends_that_request_only(llm: LLM) -> None:
    asked = structured({"allowed_token_ids": [EOS_ID]}, regex="[a-z]{4}")
    with pytest.raises(EngineError, match="no token that the grammar allows"):
        llm.generate(PROMPT, asked, use_tqdm=False)
    assert write(llm, regex="[a-z]{4}").finish_reason == "stop"


# Refusals


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "exactly one of json, regex"),
        ({"json": "{}", "regex": "a"}, "json and regex was given"),
        ({"choice": []}, "non-empty strings"),
        ({"choice": "yes"}, "non-empty strings"),
        ({"choice": ["a", ""]}, "non-empty strings"),
        ({"regex": 3}, "regex must be a string"),
        ({"jsn": "{}"}, "did you mean 'json'"),
        ({"regex": "(a"}, "unclosed group"),
        ({"json": "{"}, "not JSON"),
        ({"json": {"type": "text"}}, "Invalid type: text"),
        ({"json": {"$ref": "http://127.0.0.1/schema"}}, "does not fetch"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "cannot be used"),
        ({"grammar": 'start: "a" b'}, "unknown name"),
        ({"grammar": "root :: oops"}, "Expected ::="),
        ({"regex": "a\ud800"}, "surrogate"),
    ],
)
def test_unsupported_grammars_are_refused(llm: LLM, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        write(llm, **asked)


def chain(count: int) -> str:
    rules = "\n".join(f"r{n}: r{n + 1}" for n in range(count))
    return f'start: r0\n{rules}\nr{count}: "a"'


def references(count: int) -> dict[str, Any]:
    defs: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(count)}
    return {"$defs": defs | {f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


HOSTILE: dict[str, dict[str, Any]] = {
    "a megabyte": {"json": json.dumps({"enum": ["x" * 100] * 10_000})},
    "a stack of rules": {"grammar": chain(5000)},
    "a stack of references": {"json": references(3000)},
    "patterns that all must hold": {
        "json": {"allOf": [{"type": "string", "pattern": f"^.*x{n}.*$"} for n in range(300)]}
    },
    "patterns for names": {
        "json": {
            "type": "object",
            "patternProperties": {f"^a{n}_[a-z]*$": {"type": "string"} for n in range(300)},
        }
    },
    "a large divisor": {"json": {"type": "integer", "multipleOf": 999_983}},
    "doubling terminals": {
        "grammar": "start: A0\n"
        + "\n".join(f"A{n}: A{n + 1} A{n + 1}" for n in range(30))
        + '\nA30: "a"'
    },
    "deep nesting": {"json": '{"items":' * 5000 + "true" + "}" * 5000},
    "nested parentheses": {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "nested groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_bounded_time(llm: LLM, name: str) -> None:
    with pytest.raises(RequestError, match=r"(?s)^structured_outputs: .{10,600}$"):
        write(llm, **HOSTILE[name])
    assert write(llm, choice=["still here"]).text == "still here"


def test_a_grammar_that_explodes_while_it_is_followed_ends_its_request_only(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=30)
    (alone,) = llm.generate("a small model", free, use_tqdm=False)
    client = llm._client
    bad = client.add(PROMPT, structured(regex="a{1000000}"))
    good = client.add("a small model", free)
    ends = {}
    for changed in client.run([bad, good]):
        ends.update({output.request_id: output for output in changed if output.finished})
    assert "too complex" in ends[bad].error
    assert ends[bad].outputs[0].finish_reason == "error"
    assert ends[good].outputs[0].token_ids == alone.outputs[0].token_ids


def test_without_a_tokenizer_grammars_are_refused(folder: Path) -> None:
    llm = tiny_llm(folder, skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="structured_outputs needs a tokenizer"):
        llm.generate([[5, 6]], structured(regex="a"), use_tqdm=False)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_compiling_at_idle_priority_does_not_hold_the_interpreter_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = {}

    def watched(name: str) -> None:
        work = getattr(structured_module, name)

        def note(*given: Any) -> Any:
            policies[name] = os.sched_getscheduler(threading.get_native_id())
            return work(*given)

        monkeypatch.setattr(structured_module, name, note)

    llm = tiny_llm(folder)
    watched("to_grammar")  # Python: the engine's loop would wait for the interpreter
    watched("make_matcher")  # not Python, and what takes long
    assert write(llm, regex="[a-z]{7}").text
    own = os.sched_getscheduler(0)
    assert policies == {"to_grammar": own, "make_matcher": os.SCHED_IDLE}


def test_other_requests_write_while_a_grammar_is_compiled(folder: Path) -> None:
    core = tiny_llm(folder).engine.core
    grammars = core._grammars
    assert grammars is not None
    compiled, compile_grammar = threading.Event(), grammars._compile

    def slow(asked: StructuredOutputs) -> Any:
        assert compiled.wait(60)
        if asked.regex == "bad":
            raise RequestError("no such luck")
        return compile_grammar(asked)

    grammars._compile = slow  # type: ignore[method-assign]
    asked, bad = structured({"max_tokens": 9}, regex="[a-z]{9}"), structured(regex="bad")
    for name, params in (("one", asked), ("gone", asked), ("two", asked), ("bad", bad)):
        core.add(EngineRequest(name, (5, 6, 7), params, 1))
    with pytest.raises(RequestError, match="already running"):
        core.add(EngineRequest("one", (5, 6, 7), asked, 1))
    core.add(EngineRequest("free", (5, 6, 8), SamplingParams(max_tokens=20), 1))
    assert core.num_waiting == 5
    ends = [update for _ in range(40) for update in core.step() if update.finish_reason]
    assert [end.request_id for end in ends] == ["free"]
    gone = core.abort("gone")
    assert gone is not None
    assert (gone.finish_reason, core.num_waiting) == (FinishReason.ABORT, 3)
    compiled.set()
    while core.has_work:
        ends += [update for update in core.step() if update.finish_reason]
    assert {end.request_id: end.finish_reason for end in ends[1:]} == {
        "one": FinishReason.STOP,
        "two": FinishReason.STOP,
        "bad": FinishReason.ERROR,
    }
    (failed,) = [end for end in ends if end.request_id == "bad"]
    assert (failed.error, failed.impossible) == ("no such luck", True)
    assert not grammars.active
    core.scheduler.audit()


def test_a_vocabulary_smaller_or_larger_than_the_models(tmp_path: Path) -> None:
    for size in (320, 299):
        llm = tiny_llm(tiny_folder(tmp_path / str(size), vocab_size=size))
        output = write(llm, {"temperature": 3, "seed": 1}, json=SCHEMAS["nested"])
        assert holds(json.loads(output.text), SCHEMAS["nested"])


def test_the_default_model_fills_a_schema() -> None:
    llm = LLM(str(default_model_path()), max_model_len=512)
    schema = SCHEMAS["nested"]
    messages = [{"role": "user", "content": "Name a town and a position from -9 to 9."}]
    (output,) = llm.chat(messages, structured(json=schema), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert holds(json.loads(output.outputs[0].text), schema)
