"""The library as programs written for vLLM use it, with a tiny model: imports, calls and fields.

`tests/clients/vllm_examples.py` runs programs of vLLM itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import CHAT_TEMPLATE, EOS_ID, MAX_LEN
from twostroke import (
    LLM,
    AsyncEngine,
    AsyncEngineArgs,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    SamplingParams,
)
from twostroke.distributed import cleanup_dist_env_and_memory
from twostroke.errors import ConfigError, RequestError
from twostroke.inputs import TextPrompt, TokensPrompt
from twostroke.outputs import RequestOutput
from twostroke.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    StructuredOutputsParams,
)
from twostroke.utils import FlexibleArgumentParser
from twostroke.v1.engine.async_llm import AsyncLLM
from twostroke.v1.metrics.reader import Counter, Gauge, Histogram

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CHAT = [{"role": "user", "content": "the quick brown fox"}]
SMALL = {"device": "cpu", "kv_cache_memory_bytes": 1 << 20}


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), **SMALL)


# Settings


def test_vllm_settings_without_effect_are_accepted_with_a_notice(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(
        model=str(folder),
        dtype="float",
        trust_remote_code=True,
        swap_space=4,
        tokenizer_mode="mistral",
        config_format="mistral",
        load_format="mistral",
        disable_log_stats=False,
        enforce_eager=True,
        runner="generate",
        pipeline_parallel_size=1,
        **SMALL,
    )
    assert llm.engine.config.dtype == "float32"
    assert llm.engine.config.load_format == "auto"
    notices = [record for record in caplog.records if record.name == "twostroke.vllm_settings"]
    told = [record.getMessage() for record in notices]
    assert [line.partition(" has no effect: ")[0] for line in told] == [
        "load_format='mistral' is read as 'auto': Hugging Face's files are read",
        "trust_remote_code=True",
        "tokenizer_mode='mistral'",
        "config_format='mistral'",
        "swap_space=4",
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"runner": "pooling"}, "runner is 'pooling', but the engine only generates text"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, but layers are not spread"),
        ({"enable_lora": True}, "enable_lora is True, but LoRA adapters are not supported yet"),
        ({"trust_remotecode": True}, "no setting 'trust_remotecode'; did you mean 'trust_remote_"),
    ],
)
def test_vllm_settings_that_would_have_an_effect_are_refused(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM("nowhere", **settings)


def test_a_command_line_of_engine_args_gives_what_was_given(folder: Path) -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=str(folder))
    parser.add_argument_group("own").add_argument("--top-k", type=int)
    words = ["--max_model_len", "64", "--trust-remote-code", "--dtype=half", "--device", "cpu"]
    args = parser.parse_args(words)
    given = vars(args)
    assert given.pop("top_k") is None
    assert given == {
        "model": str(folder),
        "max_model_len": 64,
        "trust_remote_code": True,
        "dtype": "half",
        "device": "cpu",
    }
    engine_args = EngineArgs.from_cli_args(args)
    assert dataclasses.asdict(engine_args)["dtype"] == "float16"
    engine_args.max_model_len = 32
    assert LLM.from_engine_args(engine_args).engine.memory.max_model_len == 32
    engine_args.max_model_len, engine_args.enable_lora = None, True
    with pytest.raises(ConfigError, match="LoRA adapters are not supported yet"):
        engine_args.engine_config()
    engine_args.max_model_len = -1
    with pytest.raises(ConfigError, match="max_model_len must be"):
        engine_args.engine_config()


# Parameters and prompts


def test_sampling_params_may_be_changed_and_are_checked_when_they_are_used(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens, params.ignore_eos = 0.0, 3, True
    assert llm.get_default_sampling_params().max_tokens == 16
    kept = params.clone()
    params.max_tokens, params.stop = 5, "nowhere"
    (short,), (long,) = (llm.generate("the", one, use_tqdm=False) for one in (kept, params))
    assert len(short.outputs[0].token_ids) == 3
    assert len(long.outputs[0].token_ids) == 5
    params.temperature = -1
    with pytest.raises(RequestError, match="temperature must be a number from 0"):
        llm.generate("the", params, use_tqdm=False)


def test_changes_after_a_request_was_added_do_not_reach_it(folder: Path) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(folder), **SMALL))
    params = GREEDY.clone()
    engine.add_request("a", "the", params)
    params.max_tokens, params.temperature = 1, math.nan
    assert len(finished(engine)["a"].outputs[0].token_ids) == 6


def test_structured_outputs_are_taken_as_params_or_as_a_dict(llm: LLM) -> None:
    for given in (StructuredOutputsParams(choice=["fox", "dog"]), {"choice": ["fox", "dog"]}):
        params = SamplingParams(structured_outputs=given)  # type: ignore[arg-type]
        (output,) = llm.generate("the", sampling_params=params, use_tqdm=False)
        assert output.outputs[0].text in ("fox", "dog")
    with pytest.raises(RequestError, match="no setting 'choices'; did you mean 'choice'"):
        SamplingParams(structured_outputs={"choices": ["a"]})  # type: ignore[arg-type]


def test_prompts_may_be_dicts_with_text_and_ids(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode("the quick")
    prompts = [
        TextPrompt(prompt="the quick"),
        TokensPrompt(prompt_token_ids=ids),
        TokensPrompt(prompt_token_ids=ids, prompt="the quick"),
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=None)
    assert [output.prompt for output in outputs] == ["the quick", None, "the quick"]
    assert [output.prompt_token_ids for output in outputs] == [ids] * 3
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    with pytest.raises(RequestError, match="LoRA adapters are not supported yet"):
        llm.generate("the", lora_request="adapter")  # type: ignore[arg-type]


# Chats and the tokenizer


def test_a_chat_says_its_prompt_and_takes_other_templates(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    (output,) = llm.chat(CHAT, GREEDY, False)
    assert output.prompt == tokenizer.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    assert output.prompt_token_ids == tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True
    )
    other = "{% for m in messages %}{{ m.content }}{% if tools %} ({{ tools|length }}){% endif %}"
    other += "{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    (output,) = llm.chat(CHAT, GREEDY, False, chat_template=other, tools=tools)
    assert output.prompt == "the quick brown fox (1)!"
    (output,) = llm.chat(CHAT, GREEDY, False, chat_template=other, add_generation_prompt=False)
    assert output.prompt == "the quick brown fox"
    parts: dict[str, Any] = {"chat_template": "{{ messages[0].content[0].text }}"}
    (output,) = llm.chat(CHAT, GREEDY, False, **parts, chat_template_content_format="openai")
    assert output.prompt == "the quick brown fox"
    open_ended = [*CHAT, {"role": "assistant", "content": "the lazy"}]
    how = {"add_generation_prompt": False, "continue_final_message": True}
    outputs = llm.chat([open_ended, open_ended], GREEDY, use_tqdm=False, **how)
    assert [one.prompt and one.prompt[-20:] for one in outputs] == ["|>assistant\nthe lazy"] * 2
    assert tokenizer.apply_chat_template([open_ended], tokenize=False, **how) == [outputs[0].prompt]
    with pytest.raises(RequestError, match="set add_generation_prompt=False"):
        llm.chat(open_ended, GREEDY, continue_final_message=True)


def test_the_tokenizer_has_the_names_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    assert (tokenizer.eos_token_id, tokenizer.eos_token) == (EOS_ID, "</s>")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert len(tokenizer) == tokenizer.vocab_size == 300
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer("the fox", add_special_tokens=False).input_ids == ids
    both = tokenizer(["the fox", "the"], add_special_tokens=False)
    assert both["input_ids"] == [ids, tokenizer.encode("the", add_special_tokens=False)]
    assert [len(row) for row in both.attention_mask] == [len(row) for row in both.input_ids]
    assert tokenizer.decode([*ids, EOS_ID]) == "the fox</s>"
    assert tokenizer.batch_decode([[*ids, EOS_ID]], skip_special_tokens=True) == ["the fox"]
    assert tokenizer.decode(EOS_ID) == "</s>"


# Metrics and the cache


def test_the_metrics_of_an_output_are_one_object(llm: LLM) -> None:
    (output,) = llm.generate("the", SamplingParams(n=3, max_tokens=4, ignore_eos=True))
    metrics = output.metrics
    assert metrics is not None
    assert metrics.num_generation_tokens == 12
    times = (
        metrics.received_ts,
        metrics.queued_ts,
        metrics.scheduled_ts,
        metrics.first_token_ts,
        metrics.last_token_ts,
    )
    assert list(times) == sorted(times)
    assert metrics.first_token_latency == metrics.ttft_s == times[3] - times[0]
    assert metrics.tpot_s == pytest.approx(sum(one.tpot_s for one in output.records) / 3)


def test_metrics_are_read_as_counters_gauges_and_histograms(folder: Path) -> None:
    llm = LLM(str(folder), **SMALL)
    llm.generate(["the quick", "the lazy"], GREEDY, use_tqdm=False)
    metrics = llm.get_metrics()
    named = {metric.name: metric for metric in metrics}
    written, running = named["vllm:generation_tokens"], named["vllm:num_requests_running"]
    assert isinstance(written, Counter)
    assert written.value == 12
    assert isinstance(running, Gauge)
    assert running.value == 0
    ttft = named["vllm:time_to_first_token_seconds"]
    assert isinstance(ttft, Histogram)
    assert (ttft.count, ttft.buckets["+Inf"]) == (2, 2)
    assert list(ttft.buckets.values()) == sorted(ttft.buckets.values())
    assert 0 < ttft.sum < 3600
    ended = [one for one in metrics if one.name == "vllm:request_success"]
    assert {one.labels["finished_reason"]: one.value for one in ended if one.value} == {  # type: ignore[attr-defined]
        "length": 2
    }


def test_a_reset_cache_finds_nothing_and_the_tokens_stay_the_same(folder: Path) -> None:
    llm = LLM(str(folder), enable_prefix_caching=True, **SMALL)
    prompt = list(range(5, 105))
    first, again = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 96)
    assert llm.reset_prefix_cache()
    (anew,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert anew.num_cached_tokens == 0
    assert anew.outputs[0].token_ids == first.outputs[0].token_ids
    assert llm.kv_usage().used == 0
    del llm
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize(
    ("name", "why"),
    [("collective_rpc", "no workers"), ("sleep", "weights stay"), ("embed", "only generates text")],
)
def test_missing_methods_are_refused_by_name(name: str, why: str, llm: LLM) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"LLM has no '{name}': .*{why}"):
        getattr(llm, name)
    with pytest.raises(AttributeError, match=r"LLM has no 'genrate'$"):
        llm.genrate  # noqa: B018


# Engines whose loop the caller runs


def finished(engine: LLMEngine) -> dict[str, RequestOutput]:
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output
    return found


def test_an_engine_takes_requests_between_its_steps(folder: Path, llm: LLM) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(folder), **SMALL))
    logged = dataclasses.replace(GREEDY, logprobs=1, prompt_logprobs=1)
    engine.add_request("0", "the quick brown", logged)
    assert engine.get_num_unfinished_requests() == 1
    (first,) = engine.step()
    assert (first.request_id, len(first.outputs[0].token_ids)) == ("0", 1)
    engine.add_request("1", "a small model", dataclasses.replace(GREEDY, n=2, output_kind="delta"))
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert len(first.outputs[0].token_ids) == 1, "an output that was given no longer grows"
    engine.add_request("2", "the", GREEDY)
    engine.abort_request(["2"])
    outputs = finished(engine)
    assert set(outputs) == {"0", "1"}
    (alone,) = llm.generate("the quick brown", logged, use_tqdm=False)
    assert outputs["0"].outputs[0].token_ids == alone.outputs[0].token_ids
    assert outputs["0"].prompt_logprobs == alone.prompt_logprobs
    assert sum(len(one.token_ids) for one in outputs["1"].outputs) <= 2, "a delta is what is new"
    assert engine.step() == []


def test_an_async_engine_streams_deltas(folder: Path, llm: LLM) -> None:
    assert AsyncLLMEngine is AsyncLLM is AsyncEngine

    async def run() -> str:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **SMALL))
        params = dataclasses.replace(GREEDY, output_kind=RequestOutputKind.DELTA)
        text = ""
        try:
            async for output in engine.generate(
                request_id="a", prompt="the quick", sampling_params=params
            ):
                text += "".join(one.text for one in output.outputs)
        finally:
            engine.shutdown()
        return text

    (whole,) = llm.generate("the quick", GREEDY, use_tqdm=False)
    assert asyncio.run(run()) == whole.outputs[0].text


# Beam search


def plain_beam_search(
    model: Any, prompt: list[int], params: BeamSearchParams, end_ids: set[int]
) -> list[tuple[float, list[int]]]:
    """Every candidate's whole text through the model, no cache: (log-probability, tokens)."""

    def score(beam: tuple[float, list[int]]) -> float:
        total, tokens = beam
        return total / (len(tokens) - (tokens[-1] in end_ids)) ** params.length_penalty

    live, ended = [(0.0, prompt)], []
    for _ in range(params.max_tokens):
        longer = []
        for total, tokens in live:
            with torch.no_grad():
                logprobs = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
            best = logprobs.topk(2 * params.beam_width)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                into = ended if token in end_ids else longer
                into.append((total + value, [*tokens, token]))
        live = sorted(longer, key=score, reverse=True)[: params.beam_width]
    return sorted(ended + live, key=score, reverse=True)[: params.beam_width]


@pytest.mark.parametrize("length_penalty", [1.0, 0.0])
def test_beam_search_finds_what_a_plain_search_finds(length_penalty: float, folder: Path) -> None:
    llm = LLM(str(folder), kernels="reference", **SMALL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = llm.engine.tokenizer()
    assert tokenizer is not None
    prompts = ["the quick brown", "a small model writes"]
    params = BeamSearchParams(
        beam_width=3,
        max_tokens=6,
        length_penalty=length_penalty,
        ignore_eos=True,
        include_stop_str_in_output=True,
    )

    def check() -> list[str | None]:
        reasons = []
        ends = set() if params.ignore_eos else set(tokenizer.stop_ids)
        outputs = llm.beam_search([{"prompt": text} for text in prompts], params)
        for text, output in zip(prompts, outputs, strict=True):
            expected = plain_beam_search(model, tokenizer.encode(text), params, ends)
            assert [one.tokens for one in output.sequences] == [tokens for _, tokens in expected]
            found = [one.cum_logprob for one in output.sequences]
            assert found == pytest.approx([total for total, _ in expected], abs=1e-3)
            assert output.sequences[0].text == tokenizer.decode(output.sequences[0].tokens)
            reasons += [one.finish_reason for one in output.sequences]
        return reasons

    assert check() == ["length"] * 6
    # A model of random weights seldom ends a text: what it likes to write is made an end.
    (best, *_) = llm.beam_search(prompts[:1], params)[0].sequences
    tokenizer.stop_ids, params.ignore_eos = frozenset({best.tokens[-3], best.tokens[-1]}), False
    assert set(check()) == {"length", "stop"}
    params.include_stop_str_in_output = False
    (output,) = llm.beam_search(prompts[:1], params)
    ended = [one for one in output.sequences if one.finish_reason == "stop"]
    assert ended
    assert all(one.stop_reason in tokenizer.stop_ids for one in ended)
    assert all(one.tokens[-1] not in tokenizer.stop_ids for one in ended)


def test_beams_end_where_the_model_does_and_too_many_are_refused(llm: LLM) -> None:
    prompt = list(range(5, 5 + MAX_LEN - 3))
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=50))
    assert {len(one.tokens) for one in output.sequences} <= {MAX_LEN - 2, MAX_LEN - 1, MAX_LEN}
    assert any(one.finish_reason == "length" for one in output.sequences)
    with pytest.raises(RequestError, match="lower beam_width, or raise max_logprobs"):
        llm.beam_search(["the"], BeamSearchParams(beam_width=11, max_tokens=1))
