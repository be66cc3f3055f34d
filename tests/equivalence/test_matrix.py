"""However a request is scheduled, it writes the same tokens: the real default model, greedy."""

from __future__ import annotations

import math

import pytest
import torch

from tests.equivalence.harness import (
    MOVES,
    Written,
    assert_same,
    default_decoder,
    default_tokenizer,
    make_core,
    run,
)
from twostroke.exec.program import DeviceStep, StepProgram
from twostroke.model.torch.step_inputs import StepInputs
from twostroke.request import EngineRequest, SamplingParams

STORY = (
    "The lighthouse keeper had not spoken to anyone for eleven days when the boat came. It was a "
    "small boat, painted green, and the woman who rowed it did not look up until she was close "
    "enough to throw a rope. He caught it. Neither of them said a word about the storm, which had "
    "taken the roof off the boathouse and most of the hens. She had brought flour, lamp oil, a "
    "letter from the harbour office, and a box of seed potatoes. He carried the box up the steps "
    "while she tied the boat, and when he came back she was standing in the lamp room with her hat "
    "in her hands, looking at the glass as if it had asked her a question. "
)
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "Q: What is 17 + 25?\nA:",
    STORY,
    STORY + "He read the letter twice, then he folded it and said: ",
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = default_tokenizer()
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> list[Written]:
    """The definition: each prompt by itself, prefilled in one piece, nothing shared."""
    core = make_core(default_decoder())
    written = [run(core, [prompt])[0] for prompt in prompts]
    assert all(one.num_chunks == 1 for one in written)
    return written


@pytest.mark.full
@pytest.mark.parametrize("size", [5, 16, 64])
def test_chunked_prefill_gives_the_same_tokens_as_one_shot(
    size: int, prompts: list[list[int]], alone: list[Written]
) -> None:
    core = make_core(default_decoder(), max_num_batched_tokens=size, max_num_seqs=1)
    got = [run(core, [prompt])[0] for prompt in prompts]
    assert max(one.num_chunks for one in got) == math.ceil(max(map(len, prompts)) / size)
    assert_same(alone, got)


def test_mixed_with_other_requests_gives_the_same_tokens(
    prompts: list[list[int]], alone: list[Written]
) -> None:
    core = make_core(default_decoder(), max_num_batched_tokens=24, max_num_seqs=8)
    got = run(core, prompts)
    steps = core.records.steps
    mixed = [step for step in steps if step.prefill.tokens and step.decode.tokens]
    assert len(mixed) > 5
    assert_same(alone, got)


def test_a_prefix_hit_gives_the_same_tokens(prompts: list[list[int]], alone: list[Written]) -> None:
    core = make_core(default_decoder(), prefix_caching=True)
    run(core, prompts)
    got = run(core, prompts)
    for prompt, one in zip(prompts, got, strict=True):
        assert one.num_cached == (len(prompt) - 1) // 16 * 16
    assert max(one.num_cached for one in got) > 100
    assert_same(alone, got)


@pytest.mark.full
def test_a_prefix_computed_in_the_same_step_gives_the_same_tokens(
    prompts: list[list[int]], alone: list[Written]
) -> None:
    """STORY begins two of the prompts: the second shares blocks that are being computed."""
    core = make_core(default_decoder(), prefix_caching=True)
    got = run(core, prompts)
    assert core.records.steps[0].prefill.rows == len(prompts)
    assert got[-1].num_cached > 90
    assert_same(alone, got)


@pytest.mark.parametrize("prefix_caching", [False, pytest.param(True, marks=pytest.mark.core)])
def test_preempted_and_resumed_gives_the_same_tokens(
    prefix_caching: bool, prompts: list[list[int]], alone: list[Written]
) -> None:
    """Room for about a third of what the requests need, admitted without looking ahead."""
    core = make_core(
        default_decoder(),
        num_blocks=18,
        max_num_batched_tokens=64,
        lookahead=0,
        prefix_caching=prefix_caching,
    )
    got = run(core, prompts)
    assert sum(one.num_preempted for one in got) > 0
    assert_same(alone, got)


@pytest.mark.full
def test_batched_with_31_others_gives_the_same_tokens(
    prompts: list[list[int]], alone: list[Written]
) -> None:
    others = [[n + 5, 300 + n, 17 * n + 40] * (1 + n % 5) for n in range(32 - len(prompts))]
    core = make_core(default_decoder(), max_num_seqs=32)
    got = run(core, [*prompts, *others])
    assert max(step.decode.rows for step in core.records.steps) == 32
    assert_same(alone, got[: len(prompts)])


@pytest.mark.full
def test_planning_one_step_ahead_gives_the_same_tokens(
    prompts: list[list[int]], alone: list[Written]
) -> None:
    """Step n + 1 is planned and run before the host has seen the tokens of step n."""
    core = make_core(default_decoder(), in_flight=2, max_num_batched_tokens=48, num_blocks=24)
    assert_same(alone, run(core, prompts))


@pytest.mark.full
@pytest.mark.parametrize("in_flight", [1, 2])
def test_goals_for_latency_give_the_same_tokens(
    in_flight: int, prompts: list[list[int]], alone: list[Written]
) -> None:
    """Goals that nothing can meet: chunks of a few tokens, and order by what is left of a goal."""
    goals = {"ttft_slo_s": 1e-3, "itl_slo_s": 1e-3}
    core = make_core(default_decoder(), in_flight, max_num_batched_tokens=64, **goals)
    got = run(core, prompts)
    assert max(one.num_chunks for one in got) > 2
    assert_same(alone, got)


@pytest.mark.full
def test_other_block_sizes_give_the_same_tokens(
    prompts: list[list[int]], alone: list[Written]
) -> None:
    core = make_core(default_decoder(), block_size=5, num_blocks=800, max_num_batched_tokens=100)
    assert_same(alone, run(core, prompts))


@pytest.mark.full
def test_logprobs_at_decode_equal_those_of_the_same_text_at_prefill(
    prompts: list[list[int]], alone: list[Written]
) -> None:
    core = make_core(default_decoder())
    for prompt, one in zip(prompts, alone, strict=True):
        params = SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=1)
        text = [*prompt, *one.tokens]
        core.add(EngineRequest("r", text, params, seed=0))
        entries = None
        while core.has_work:
            for update in core.step():
                entries = update.prompt_logprobs
        assert entries is not None
        assert len(entries) == len(text) - 1
        at_prefill = torch.tensor([e.logprobs[0] for e in entries[len(prompt) - 1 :]])
        at_decode = torch.tensor([e.logprobs[0] for e in one.logprobs])
        torch.testing.assert_close(at_prefill, at_decode, atol=MOVES, rtol=0)


def test_a_wrong_position_makes_the_comparison_fail(
    prompts: list[list[int]], alone: list[Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: decode believes to be one position further. The short prompts show it."""

    made = StepProgram.inputs

    def shifted(program: StepProgram, step: DeviceStep) -> StepInputs:
        inputs = made(program, step)
        inputs.positions[: inputs.num_decode_tokens] += 1
        return inputs

    monkeypatch.setattr(StepProgram, "inputs", shifted)
    core = make_core(default_decoder())
    short = [number for number, prompt in enumerate(prompts) if len(prompt) < 16]
    got = [run(core, [prompts[number]])[0] for number in short]
    with pytest.raises(AssertionError, match=r"differs at step|moved by"):
        assert_same([alone[number] for number in short], got)
