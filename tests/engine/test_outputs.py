"""The parameters of a request, through `LLM` with a tiny model."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import BOS, EOS, EOS_ID, TURN_END_ID, tiny_folder, tiny_llm
from twostroke import LLM, SamplingParams
from twostroke.engine import output_processor
from twostroke.engine.output_processor import StopStrings
from twostroke.errors import RequestError
from twostroke.outputs import CompletionOutput

PROMPT = "the quick brown fox"
# Letters only, so that what is written is one readable text.
LETTERS = [*range(68, 94)]  # a to z


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    return tiny_llm(folder)


@pytest.fixture
def llm(shared: LLM) -> Any:
    """An engine for all tests; every test must leave it as it was."""
    yield shared
    shared.engine.core.scheduler.audit()
    assert not shared.engine.core.has_work
    outputs = shared.engine.output_processor
    assert not outputs._states
    assert not outputs._running


def write(llm: LLM, prompt: Any = PROMPT, **params: Any) -> CompletionOutput:
    params = {"temperature": 0, "max_tokens": 16} | params
    (output,) = llm.generate(prompt, SamplingParams(**params))
    assert output.finished
    return output.outputs[0]


def spell(llm: LLM, **params: Any) -> CompletionOutput:
    """A text of letters, one a token."""
    return write(llm, **({"allowed_token_ids": LETTERS, "ignore_eos": True} | params))


# Stop strings


def test_the_tokens_of_these_tests_are_letters(llm: LLM) -> None:
    text = spell(llm).text
    assert len(text) == 16
    assert text.isalpha()
    assert text.islower()


def test_a_stop_string_across_tokens_ends_the_text_before_it(llm: LLM) -> None:
    whole = spell(llm)
    stop = whole.text[5:8]
    at = whole.text.index(stop)
    stopped = spell(llm, stop=stop)
    assert stopped.text == whole.text[:at]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == stop
    assert stopped.token_ids == whole.token_ids[: at + 3]


def test_a_stop_string_inside_the_text_of_one_token_is_found(llm: LLM) -> None:
    tokenizer = llm.engine.input_processor.tokenizer
    (long,) = (n for n in range(300) if tokenizer.token_text(n) == "the")
    stopped = write(llm, allowed_token_ids=[long], stop="h", max_tokens=5)
    assert (stopped.text, stopped.stop_reason, stopped.token_ids) == ("t", "h", [long])
    stopped = write(llm, allowed_token_ids=[long], stop="et", max_tokens=5)
    assert (stopped.text, stopped.token_ids) == ("th", [long, long])


def test_the_stop_string_is_shown_if_asked_for_and_nothing_after_it(llm: LLM) -> None:
    tokenizer = llm.engine.input_processor.tokenizer
    (long,) = (n for n in range(300) if tokenizer.token_text(n) == "the")
    params = {"allowed_token_ids": [long], "stop": "th", "include_stop_str_in_output": True}
    assert write(llm, **params).text == "th"


def test_of_several_stop_strings_the_one_complete_first_wins(llm: LLM) -> None:
    text = spell(llm).text
    early, late = text[2:5], text[8:11]
    assert text.index(early) < text.index(late)
    for stops in ([early, late], [late, early]):
        assert spell(llm, stop=stops).stop_reason == early


def test_a_held_start_of_a_stop_string_is_released_at_the_end(llm: LLM) -> None:
    text = spell(llm).text
    never = text[-3:] + "#"
    written = spell(llm, stop=never)
    assert written.text == text
    assert written.finish_reason == "length"
    assert written.stop_reason is None


def test_stop_strings_count_only_after_min_tokens(llm: LLM) -> None:
    text = spell(llm).text
    stop = text[1]
    assert spell(llm, stop=stop).text == text[:1]
    late = spell(llm, stop=stop, min_tokens=16)
    assert late.text == (text if text[15] != stop else text[:15])
    assert len(late.token_ids) == 16


def cut(text: str, pieces: random.Random) -> list[str]:
    parts, start = [], 0
    while start < len(text):
        end = start + pieces.randint(1, 4)
        parts.append(text[start:end])
        start = end
    return parts


def run_stops(stops: list[str], include: bool, parts: list[str]) -> tuple[str, str | None]:
    machine, text = StopStrings(stops, include), ""
    for part in parts:
        text += machine.push(part)
        if machine.found is not None:
            return text, machine.found
    return text + machine.flush(), None


def first_complete(stops: list[str], include: bool, text: str) -> tuple[str, str | None]:
    """The definition: read letter by letter until one of the stop strings is at the end."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            hit = max(hits, key=len)
            return text[: end if include else end - len(hit)], hit
    return text, None


@pytest.mark.parametrize("max_tried", [output_processor.MAX_HELD_TRIED, 0])
def test_stop_strings_do_not_depend_on_the_pieces_of_the_text(
    max_tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_processor, "MAX_HELD_TRIED", max_tried)
    choose = random.Random(3)
    found = 0
    for _ in range(2000):
        stops = ["".join(choose.choices("ab", k=choose.randint(1, 5))) for _ in range(3)]
        text = "".join(choose.choices("abc", weights=[4, 4, 1], k=20))
        include = choose.random() < 0.5
        expected = first_complete(stops, include, text)
        found += expected[1] is not None
        assert run_stops(stops, include, cut(text, choose)) == expected
        assert run_stops(stops, include, [text]) == expected
    assert 500 < found < 2000


def test_a_piece_of_text_is_compared_with_few_beginnings_of_long_stop_strings() -> None:
    """A text that was nearly a stop string may end one letter before its end, in many rows at once,
    and all streams wait for the comparisons."""
    compared = []

    class Counted(str):
        def startswith(self, *given: Any) -> bool:
            compared.append(1)
            return super().startswith(*given)

    nearly = "ab" * 2000
    machine, text = StopStrings([Counted(f"{nearly}{n}") for n in range(64)], False), ""
    for start in range(0, len(nearly), 16):
        text += machine.push(nearly[start : start + 16])
    compared.clear()
    while not text:
        text += machine.push("b")
        assert len(compared) <= 64 * (output_processor.MAX_HELD_TRIED + 1)
        compared.clear()
    for _ in range(len(nearly)):
        text += machine.push("c")
    assert text.startswith(nearly + "b")
    assert len(text) > 2 * len(nearly) - 10


def test_overlapping_starts_are_held_and_released() -> None:
    machine = StopStrings(["aab"], include=False)
    assert [machine.push(c) for c in "aaaa"] == ["", "", "a", "a"]
    assert machine.push("c") == "aac"
    assert machine.found is None
    assert machine.push("aab") == ""
    assert machine.found == "aab"


def test_a_stop_string_that_hits_leaves_metrics_and_cached_tokens(folder: Path) -> None:
    llm = tiny_llm(folder)
    prompt = [7] * 40
    llm.generate([prompt], SamplingParams(max_tokens=1))
    (plain,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
    text = plain.outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=8, stop=text[0])
    (stopped,) = llm.generate([prompt], params)
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.num_cached_tokens == plain.num_cached_tokens == 32
    assert [record.finish_reason for record in stopped.records] == ["stop"]
    assert llm.engine.core.records.requests[-1].finish_reason == "stop"


# Stop tokens


def test_a_stop_token_ends_the_text_and_is_named(llm: LLM) -> None:
    whole = spell(llm)
    stop = whole.token_ids[4]
    at = whole.token_ids.index(stop)
    stopped = spell(llm, stop_token_ids=[stop, 299])
    assert stopped.token_ids == whole.token_ids[: at + 1]
    assert stopped.text == whole.text[:at]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    shown = spell(llm, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert shown.text == whole.text[: at + 1]


@pytest.mark.parametrize("end", [EOS_ID, TURN_END_ID])
def test_the_end_of_a_text_is_among_the_ids_but_not_in_the_text(llm: LLM, end: int) -> None:
    ended = write(llm, logit_bias={end: 100})
    assert ended.token_ids == [end]
    assert ended.text == ""
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)


def test_ignore_eos_writes_on(llm: LLM) -> None:
    written = write(llm, allowed_token_ids=[EOS_ID], ignore_eos=True, max_tokens=3)
    assert written.token_ids == [EOS_ID] * 3
    assert written.text == ""
    assert written.finish_reason == "length"


def test_special_tokens_are_shown_if_asked_for(llm: LLM) -> None:
    params = {"allowed_token_ids": [EOS_ID], "ignore_eos": True, "max_tokens": 2}
    assert write(llm, skip_special_tokens=False, **params).text == EOS * 2
    ended = write(llm, logit_bias={EOS_ID: 100}, skip_special_tokens=False)
    assert ended.text == ""


def test_min_tokens_holds_back_the_end(llm: LLM) -> None:
    ended = write(llm, logit_bias={EOS_ID: 100}, min_tokens=5)
    assert len(ended.token_ids) == 6
    assert ended.token_ids.index(EOS_ID) == 5
    assert ended.finish_reason == "stop"


# Several continuations


def test_continuations_are_numbered_and_differ(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(n=4, max_tokens=12, ignore_eos=True))
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    assert len(output.records) == 4


def test_a_seed_fixes_every_continuation(llm: LLM) -> None:
    def ids(seed: int, n: int = 3) -> list[list[int]]:
        params = SamplingParams(n=n, seed=seed, max_tokens=12)
        return [c.token_ids for c in llm.generate(PROMPT, params)[0].outputs]

    first = ids(7)
    assert ids(7) == first
    assert len({tuple(tokens) for tokens in first}) == 3
    assert ids(7, n=1) == first[:1]
    assert ids(70) != first


def test_without_a_seed_two_requests_differ_and_two_engines_agree(folder: Path) -> None:
    params = SamplingParams(max_tokens=12)
    runs = []
    for _ in range(2):
        outputs = tiny_llm(folder).generate([PROMPT, PROMPT], params)
        runs.append([output.outputs[0].token_ids for output in outputs])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


# Log-probabilities


def test_logprobs_contain_the_best_and_the_sampled_token_with_their_ranks(llm: LLM) -> None:
    params = SamplingParams(logprobs=3, max_tokens=20, seed=5, ignore_eos=True, temperature=2.0)
    completion = llm.generate(PROMPT, params)[0].outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 20
    sizes = set()
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        sizes.add(len(entry))
        assert token in entry
        ranks = [logprob.rank for logprob in entry.values()]
        assert ranks[:3] == [1, 2, 3]
        values = [logprob.logprob for logprob in entry.values()]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert entry[token].decoded_token == llm.engine.input_processor.tokenizer.token_text(token)
    assert sizes == {3, 4}  # the chosen one among the best, and further down
    chosen = [
        entry[token].logprob
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))


def test_logprobs_zero_gives_the_sampled_token_alone(llm: LLM) -> None:
    completion = write(llm, logprobs=0, max_tokens=3)
    assert completion.logprobs is not None
    assert [list(entry) for entry in completion.logprobs] == [[n] for n in completion.token_ids]
    assert [e[t].rank for e, t in zip(completion.logprobs, completion.token_ids, strict=True)] == [
        1,
        1,
        1,
    ]


def test_without_logprobs_there_are_none(llm: LLM) -> None:
    completion = write(llm)
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None


def test_a_prompt_has_its_logprobs_cached_or_not(folder: Path) -> None:
    prompt = list(range(60, 110))
    params = SamplingParams(prompt_logprobs=2, max_tokens=1, temperature=0)
    (expected,) = tiny_llm(folder, enable_prefix_caching=False).generate([prompt], params)
    llm = tiny_llm(folder)
    llm.generate([prompt], SamplingParams(max_tokens=1))
    (hit,) = llm.generate([prompt], SamplingParams(max_tokens=1))
    assert hit.num_cached_tokens == 48
    (output,) = llm.generate([prompt], params)
    assert output.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    pairs = zip(prompt[1:], output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True)
    for token, entry, other in pairs:
        assert entry is not None
        assert other is not None
        assert token in entry
        assert list(entry) == list(other)
        assert entry[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)
        assert [e.rank for e in entry.values()] == [e.rank for e in other.values()]
    assert hit.prompt_logprobs is None


def test_prompt_logprobs_are_whole_when_the_prompt_runs_in_chunks(folder: Path) -> None:
    prompt = list(range(60, 110))
    params = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0)
    (whole,) = tiny_llm(folder).generate([prompt], params)
    (parts,) = tiny_llm(folder, max_num_batched_tokens=7, max_num_seqs=4).generate([prompt], params)
    assert whole.prompt_logprobs is not None
    assert parts.prompt_logprobs is not None
    for token, one, other in zip(
        prompt[1:], whole.prompt_logprobs[1:], parts.prompt_logprobs[1:], strict=True
    ):
        assert one is not None
        assert other is not None
        assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


# What may be written


def test_bad_words_of_one_and_of_several_tokens_never_appear(llm: LLM) -> None:
    params = {"allowed_token_ids": LETTERS[:3], "ignore_eos": True, "max_tokens": 100}
    params |= {"temperature": 1.0, "seed": 11, "n": 1}
    free = write(llm, **params).text
    assert "a" in free
    assert "bc" in free
    text = write(llm, bad_words=["a"], **params).text
    assert set(text) == {"b", "c"}
    text = write(llm, bad_words=["bc", "cba"], **params).text
    assert "bc" not in text
    assert "cba" not in text
    assert set(text) == {"a", "b", "c"}


def test_a_bad_word_may_end_in_what_the_prompt_began(llm: LLM) -> None:
    """Only written tokens count: the first letter here belongs to the prompt."""
    params = {"allowed_token_ids": [LETTERS[2]], "bad_words": ["bc"], "max_tokens": 1}
    assert write(llm, [LETTERS[1]], **params).text == "c"


def test_a_bias_of_100_forces_and_of_minus_100_forbids(llm: LLM) -> None:
    assert write(llm, logit_bias={77: 100}, max_tokens=4).token_ids == [77] * 4
    favourite = write(llm, max_tokens=1).token_ids[0]
    assert write(llm, logit_bias={favourite: -100}, max_tokens=1).token_ids != [favourite]
    banned = dict.fromkeys(set(range(300)) - {50, 51}, -100.0)
    drawn = write(llm, logit_bias=banned, temperature=1.0, seed=1, max_tokens=30)
    assert set(drawn.token_ids) == {50, 51}


def test_only_allowed_tokens_are_written(llm: LLM) -> None:
    drawn = write(llm, allowed_token_ids=[20, 30, 40], temperature=5.0, seed=2, max_tokens=40)
    assert set(drawn.token_ids) == {20, 30, 40}


# Text and ids


def test_without_detokenize_there_are_ids_only(llm: LLM) -> None:
    expected = write(llm)
    bare = write(llm, detokenize=False)
    assert bare.token_ids == expected.token_ids
    assert bare.text == ""


def test_an_engine_without_a_tokenizer_takes_and_gives_ids(folder: Path, llm: LLM) -> None:
    bare = tiny_llm(folder, skip_tokenizer_init=True)
    assert bare.get_tokenizer() is None
    expected = write(llm, [5, 6, 7], ignore_eos=True, logprobs=1)
    found = write(bare, [5, 6, 7], logprobs=1)
    assert found.token_ids == expected.token_ids
    assert found.text == ""
    assert found.logprobs is not None
    assert all(entry.decoded_token is None for entry in found.logprobs[0].values())


def test_a_prompt_is_a_text_or_ids_or_a_dict_of_either(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPT)
    expected = write(llm, PROMPT).token_ids
    forms: list[Any] = [[PROMPT], ids, [ids], tuple(ids), {"prompt": PROMPT}]
    forms += [{"prompt_token_ids": ids}, [{"prompt": PROMPT, "cache_salt": "x"}]]
    for form in forms:
        assert write(llm, form).token_ids == expected
    (output,) = llm.generate({"prompt": PROMPT}, SamplingParams(max_tokens=1))
    assert (output.prompt, output.prompt_token_ids) == (PROMPT, ids)
    (output,) = llm.generate(ids, SamplingParams(max_tokens=1))
    assert output.prompt is None


def test_outputs_come_in_the_order_of_their_prompts(llm: LLM) -> None:
    prompts = [[50 + n] * (40 - n) for n in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (5 * n) % 7) for n in range(12)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [
        1 + (5 * n) % 7 for n in range(12)
    ]


def test_only_the_same_salt_shares_a_prefix(folder: Path) -> None:
    llm = tiny_llm(folder)
    ids = list(range(100, 150))

    def cached(salt: str | None) -> int:
        prompt = {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})
        return llm.generate(prompt, SamplingParams(max_tokens=1))[0].num_cached_tokens

    assert [cached(None), cached(None)] == [0, 48]
    assert [cached("a"), cached("a")] == [0, 48]
    assert [cached("b"), cached("a"), cached(None)] == [0, 48, 48]
    off = tiny_llm(folder, enable_prefix_caching=False)
    prompts = [{"prompt_token_ids": ids}] * 2
    outputs = [off.generate(p, SamplingParams(max_tokens=1))[0] for p in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]


def test_a_chat_is_its_rendered_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    messages = [{"role": "user", "content": "the dog"}]
    text = "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    (chat,) = llm.chat(messages, params)
    (plain,) = llm.generate(ids, params)
    assert chat.prompt_token_ids == ids
    assert chat.outputs[0].token_ids == plain.outputs[0].token_ids
    both = llm.chat([messages, messages], params)
    assert [output.outputs[0].text for output in both] == [plain.outputs[0].text] * 2
    assert BOS not in text


# Streams


@pytest.mark.parametrize("n", [1, 3])
def test_the_pieces_of_a_stream_are_the_whole_text(llm: LLM, n: int) -> None:
    text = spell(llm).text
    params = SamplingParams(
        n=n, seed=3, max_tokens=16, allowed_token_ids=LETTERS, stop=[text[-2:] + "#"], logprobs=1
    )
    (whole,) = llm.generate(PROMPT, params)
    texts, ids, logprobs = [""] * n, [[] for _ in range(n)], [0] * n  # type: ignore[var-annotated]
    ends: list[tuple[int, str | None]] = []
    for output in llm.stream(PROMPT, params):
        for piece in output.outputs:
            texts[piece.index] += piece.text
            ids[piece.index] += piece.token_ids
            logprobs[piece.index] += len(piece.logprobs or ())
            if piece.finished:
                ends.append((piece.index, piece.finish_reason))
    assert texts == [completion.text for completion in whole.outputs]
    assert ids == [completion.token_ids for completion in whole.outputs]
    assert logprobs == [16] * n
    assert sorted(ends) == [(index, "length") for index in range(n)]


def test_leaving_a_stream_early_frees_everything(llm: LLM) -> None:
    before = llm.kv_usage()
    stream = llm.stream([9] * 50, SamplingParams(n=2, max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.kv_usage().used > before.used
    stream.close()  # type: ignore[attr-defined]
    usage = llm.kv_usage()
    assert usage.used == usage.fragmented == 0
    assert usage.cached + usage.free == usage.reserved
    assert len(write(llm).token_ids) == 16


def test_a_name_that_belongs_to_a_continuation_is_taken(llm: LLM) -> None:
    """Ids of continuations are derived from the id of their request, and are taken, too."""
    outputs, process = llm.engine.output_processor, llm.engine.input_processor.process
    state, _ = outputs.add(process([5], SamplingParams(n=2)), "a")
    with pytest.raises(RequestError, match=r"a request with the id 'a/1' is already running"):
        outputs.add(process([5], SamplingParams()), "a/1")
    assert outputs.close(state) == ["a/0", "a/1"]


def test_generated_ids_avoid_ids_in_use(llm: LLM) -> None:
    outputs = llm.engine.output_processor
    taken = f"req-{outputs._count + 1}"
    request = llm.engine.input_processor.process([5], SamplingParams())
    first, _ = outputs.add(request, taken)
    second, _ = outputs.add(request)
    assert first.request_id == taken
    assert second.request_id != taken
    for state in (first, second):
        outputs.close(state)


def test_streams_and_batches_may_interleave_on_one_engine(llm: LLM) -> None:
    """Each user's wait runs the loop for all users; no user gets the tokens of another."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in llm.generate([[5, 6], [7, 8], [9, 10]], params)]
    first, second = llm.stream([5, 6], params), llm.stream([7, 8], params)
    got: list[list[int]] = [[], [], []]
    for _ in range(3):
        got[0] += next(first).outputs[0].token_ids
        got[1] += next(second).outputs[0].token_ids
    got[2] += llm.generate([9, 10], params)[0].outputs[0].token_ids
    for stream, tokens in ((second, got[1]), (first, got[0])):
        for output in stream:
            tokens += output.outputs[0].token_ids
    assert got == expected
    llm.engine.core.scheduler.audit()


def test_the_makers_recommendation_is_used_where_no_parameters_are_given(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"do_sample": True, "temperature": 0.9, "top_k": 1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    llm = tiny_llm(folder)
    recommended = llm.get_default_sampling_params()
    assert (recommended.temperature, recommended.top_k, recommended.top_p) == (0.9, 1, 1.0)
    likeliest = llm.generate([5, 6, 7], SamplingParams(temperature=0))[0]
    default = llm.generate([5, 6, 7])[0]
    assert default.outputs[0].token_ids == likeliest.outputs[0].token_ids
    override = {"temperature": 0.3, "presence_penalty": 1.0}
    over = tiny_llm(folder, override_generation_config=override).get_default_sampling_params()
    assert over == replace(recommended, **override)
