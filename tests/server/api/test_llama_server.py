"""llama-server's own routes on a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.server.running import Running, running
from tests.tiny import VOCAB_SIZE, tiny_folder, tiny_llm

PROMPT = "the quick fox"
GREEDY: Any = {"prompt": PROMPT, "n_predict": 8, "temperature": 0}
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
# The keys of the real server's answer, of build b1-0c1e570.
KEYS = {
    "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted",
    "tokens_evaluated", "generation_settings", "prompt", "has_new_line", "truncated", "stop_type",
    "stopping_word", "tokens_cached", "timings",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny", vocab_size=VOCAB_SIZE + 4)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(FIM))
    tokenizer.save(str(folder / "tokenizer.json"))
    with running(tiny_llm(folder)) as server:
        yield server


def stream(server: Running, path: str, body: Any) -> list[Any]:
    status, headers, content = server.ask("POST", path, {**body, "stream": True})
    assert status == 200, content
    assert headers["content-type"].startswith("text/event-stream")
    parts = content.decode().split("\n\n")[:-1]
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_a_completion_has_llama_servers_keys(server: Running) -> None:
    answer = server.post("/completion", GREEDY)
    assert set(answer) == KEYS
    same = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    assert answer["content"] == server.post("/v1/completions", same)["choices"][0]["text"]
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert (answer["tokens_predicted"], answer["truncated"]) == (8, False)
    assert answer["tokens_cached"] == answer["tokens_evaluated"] + 7
    assert (answer["prompt"], answer["tokens"]) == (PROMPT, [])
    settings = answer["generation_settings"]
    assert (settings["temperature"], settings["n_predict"], settings["mirostat"]) == (0, 8, 0)
    assert answer["timings"]["predicted_n"] == 8
    assert server.post("/completions", GREEDY)["content"] == answer["content"]


def test_a_stream_ends_with_the_whole_but_its_text(server: Running) -> None:
    whole = server.post("/completion", {**GREEDY, "return_tokens": True})
    *parts, last = stream(server, "/completion", GREEDY)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert not any(part["stop"] for part in parts)
    assert set(last) == KEYS
    assert (last["content"], last["stop"], last["tokens_predicted"]) == ("", True, 8)
    assert last["generation_settings"] == {**whole["generation_settings"], "stream": True}


def test_several_prompts_are_answered_by_a_list(server: Running) -> None:
    answers: Any = server.post("/completion", {**GREEDY, "prompt": [PROMPT, [4, 5, 6]]})
    assert [answer["index"] for answer in answers] == [0, 1]
    assert [answer["tokens_evaluated"] for answer in answers][1] == 3
    assert answers[0]["content"] == server.post("/completion", GREEDY)["content"]
    several: Any = server.post("/completion", {**GREEDY, "n_cmpl": 2, "temperature": 1, "seed": 3})
    assert [answer["index"] for answer in several] == [0, 1]
    assert several[0]["content"] != several[1]["content"]


def test_a_prompt_of_token_ids_and_texts_in_a_row(server: Running) -> None:
    def ids(text: str, special: bool) -> list[int]:
        return server.post("/tokenize", {"prompt": text, "add_special_tokens": special})["tokens"]

    mixed = server.post("/completion", {**GREEDY, "prompt": ["the quick", 7, " fox"]})
    prompt = [*ids("the quick", True), 7, *ids(" fox", False)]
    plain = server.post("/completion", {**GREEDY, "prompt": prompt})
    assert (mixed["content"], mixed["prompt"]) == (plain["content"], plain["prompt"])
    assert mixed["prompt"].startswith("<s>the quick")
    assert mixed["tokens_evaluated"] == len(prompt)


def test_a_stop_word_is_named(server: Running) -> None:
    whole = server.post("/completion", GREEDY)["content"]
    stop = next(whole[n : n + 2] for n in range(2, 8) if whole[n : n + 2].isascii())
    answer = server.post("/completion", {**GREEDY, "stop": [stop]})
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", stop)
    assert answer["content"] == whole[: whole.index(stop)]


def test_the_probabilities_of_tokens(server: Running) -> None:
    answer = server.post("/completion", {**GREEDY, "n_probs": 3})
    entries = answer["completion_probabilities"]
    assert len(entries) == 8
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["id"] == entry["top_logprobs"][0]["id"]  # greedy
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0
        assert bytes(entry["bytes"])
    parts = stream(server, "/completion", {**GREEDY, "n_probs": 3})
    assert [one for part in parts for one in part.get("completion_probabilities", ())] == entries


def test_grammars_and_schemas(server: Running) -> None:
    more = {**GREEDY, "n_predict": 60}
    grammar = 'root ::= "yes" | "no"'
    assert server.post("/completion", {**more, "grammar": grammar})["content"] in ("yes", "no")
    schema = {"enum": ["Rome", "Oslo"]}
    answer = server.post("/completion", {**more, "json_schema": schema})
    assert json.loads(answer["content"]) in ("Rome", "Oslo")
    assert answer["stop_type"] == "eos"


def test_logit_bias_in_both_forms(server: Running) -> None:
    first = server.post("/completion", {**GREEDY, "return_tokens": True})["tokens"][0]
    for bias in ([[first, False]], {str(first): -100}, [[first, -100.0]]):
        answer = server.post("/completion", {**GREEDY, "return_tokens": True, "logit_bias": bias})
        assert answer["tokens"][0] != first


def test_samplers_that_are_not_named_are_off(server: Running) -> None:
    more = {"temperature": 0, "top_k": 5, "min_p": 0.5, "repeat_penalty": 1.5}
    answer = server.post("/completion", {**GREEDY, **more, "samplers": ["top_k", "infill"]})
    settings = answer["generation_settings"]
    assert (settings["temperature"], settings["top_k"], settings["min_p"]) == (1, 5, 0)
    assert settings["repeat_penalty"] == 1


def test_only_the_prompt_and_only_some_fields(server: Running) -> None:
    answer = server.post("/completion", {**GREEDY, "n_predict": 0})
    assert (answer["content"], answer["tokens_predicted"]) == ("", 0)
    assert answer["stop_type"] == "limit"
    fields = ["content", "generation_settings/n_predict", "nothing"]
    answer = server.post("/completion", {**GREEDY, "response_fields": fields})
    assert set(answer) == {"content", "generation_settings/n_predict"}


def test_a_prompt_is_cached_unless_it_must_not_be(server: Running) -> None:
    ask = {**GREEDY, "prompt": list(range(4, 104))}
    server.post("/completion", ask)
    assert server.post("/completion", ask)["timings"]["cache_n"] > 0
    assert server.post("/completion", {**ask, "cache_prompt": False})["timings"]["cache_n"] == 0


def test_the_middle_is_filled_in_after_the_models_own_tokens(server: Running) -> None:
    tokens = {text: VOCAB_SIZE + n for n, text in enumerate(FIM)}

    def ids(text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return server.post("/tokenize", body)["tokens"]

    prompt = [
        *server.post("/tokenize", {"prompt": ""})["tokens"],
        tokens["<|file_sep|>"], *ids("a.py\nthe lazy dog\n"),
        tokens["<|fim_prefix|>"], *ids("the quick"),
        tokens["<|fim_suffix|>"], *ids("the dog"),
        tokens["<|fim_middle|>"], *ids("fox"),
    ]  # fmt: skip
    sampling = {"n_predict": 8, "temperature": 0}
    answer = server.post(
        "/infill",
        {
            **sampling,
            "input_prefix": "the quick",
            "input_suffix": "the dog",
            "input_extra": [{"filename": "a.py", "text": "the lazy dog"}],
            "prompt": "fox",
        },
    )
    assert answer["tokens_evaluated"] == len(prompt)
    same = server.post("/completion", {**sampling, "prompt": prompt})
    assert answer["content"] == same["content"]
    body = {"prompt": "the quick", "suffix": "the dog", "stream": False}
    assert server.post("/api/generate", {**body, "options": {"num_predict": 4}})["eval_count"] == 4
    assert "insert" in server.post("/api/show", {})["capabilities"]


def test_a_model_without_such_tokens_says_so(tmp_path: Path) -> None:
    with running(tiny_llm(tmp_path / "tiny")) as server:
        body = {"input_prefix": "a", "input_suffix": "b"}
        status, _, content = server.ask("POST", "/infill", body)
    assert status == 400
    assert json.loads(content)["error"]["code"] == "no_infill"


def test_a_template_is_applied(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "größer 東京"}], "temperature": 0.5}
    assert server.post("/apply-template", body) == {
        "prompt": "<|im_start|>user\ngrößer 東京<|im_end|>\n<|im_start|>assistant\n"
    }


def test_props_and_slots(server: Running) -> None:
    status, _, content = server.ask("GET", "/props")
    props = json.loads(content)
    assert status == 200
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert "im_start" in props["chat_template"]
    assert props["bos_token"] == "<s>"
    slots = json.loads(server.ask("GET", "/slots")[2])
    assert len(slots) == props["total_slots"]
    assert set(slots[0]) == {"id", "n_ctx", "speculative", "is_processing"}
    assert not any(slot["is_processing"] for slot in slots)
    assert server.ask("GET", "/models")[2] == server.ask("GET", "/v1/models")[2]
    assert server.ask("GET", "/v1/health")[0] == 200


@pytest.mark.parametrize(
    ("field", "value", "off"),
    [
        ("mirostat", 2, 0),
        ("typical_p", 0.9, 1.0),
        ("dry_multiplier", 0.8, 0.0),
        ("xtc_probability", 0.5, 0.0),
        ("dynatemp_range", 0.5, 0.0),
        ("top_n_sigma", 1.0, -1.0),
        ("post_sampling_probs", True, False),
        ("lora", [{"id": 0, "scale": 1}], []),
    ],
)
def test_samplers_that_are_not_there_are_refused_unless_they_are_off(
    server: Running, field: str, value: Any, off: Any
) -> None:
    status, _, content = server.ask("POST", "/completion", {**GREEDY, field: value})
    assert status == 400
    assert json.loads(content)["error"]["param"] == field
    assert server.post("/completion", {**GREEDY, "n_predict": 1, field: off})["stop"] is True


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"n_predict": 1}, "prompt"),
        ({**GREEDY, "logit_bias": [["Hello", 1.0]]}, "logit_bias"),
        ({**GREEDY, "repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({**GREEDY, "grammar": 'root ::= "a"', "json_schema": {}}, "exactly one"),
        ({**GREEDY, "prompt": [4, "a"] * 50_000}, "tokens are read"),
    ],
)
def test_what_cannot_be_done_is_refused(server: Running, body: Any, words: str) -> None:
    status, _, content = server.ask("POST", "/completion", body)
    assert status == 400
    assert words in json.loads(content)["error"]["message"]
