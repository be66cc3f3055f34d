"""The default model writes what transformers would write with the weights of the same file.

Our engine writes greedily, all prompts in one batch, chunked. transformers then reads prompt and
continuation in one forward, so that at every step it chooses after the same tokens as we did. Steps
at which its two best logits are closer than rounding are not compared: either choice is right.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from tests.equivalence.gguf_reading import as_the_package_reads
from tests.support import default_model_path
from twostroke import LLM, SamplingParams

pytestmark = pytest.mark.full  # the matrix has the default model in core

# On log-probabilities, in float32: the largest difference found is 2.1e-5.
TOLERANCE = 5e-5
# Between transformers' two best logits: each may be off by the tolerance, in opposite directions.
# No step was found that is closer, so that all of them are compared.
GAP = 2 * TOLERANCE
LEAST_COMPARED = 0.9  # of all steps
NUM_TOKENS = 40
NUM_SHORT = 5  # prompts of a few tokens, enough for the negative controls

CANAL = """The canal was dug in the years when grain was dear and labour was cheap. Four hundred men
came down from the hills with their own spades, and for two summers they slept in barns and under
carts along the line that the surveyor had marked with white stones. He was a careful man, and he
trusted water more than he trusted maps: wherever a stream crossed the line he waited a whole
season to see how high it rose before he would say where the bank should be. The owners wrote him
angry letters. He answered each of them politely and changed nothing."""

LOCKS = """There are eleven locks between the river and the basin in the town. The lowest three are
close together, and a loaded barge needs most of an hour to climb them. Each lock is a chamber of
stone with a pair of gates at either end. When the lower gates are shut and the sluices above are
opened, the chamber fills, and the barge rises with it until it stands level with the reach ahead.
No engine is needed, only patience, a windlass, and water, of which every passage costs about a
hundred thousand litres. In a dry summer the keepers count them, and make the boats wait for one
another so that a chamber is never emptied for nothing."""

TRADE = """What the barges carried changed with the town. At first it was grain and slate, then coal
for the new furnaces, and for thirty years cotton in bales so tightly pressed that a man could not
push a knife into them. A horse could draw fifty tons along the towpath at a walking pace, which
was more than any wagon could move on the roads of that county at any speed. The boatmen were paid
by the ton and the mile, so they lived aboard with their families, and their children learned to
steer before they learned to read. When the railway came it took the coal first, because coal was
heavy and regular, and the railway liked what was so. The cotton followed within ten years. The
slate stayed on the water longest, since it broke when it was shaken."""

DECLINE = """By the end of the century only the keepers and a few old boats were left. Reeds grew in
the upper basin. One winter a bank gave way near the third lock, and the reach above it ran dry in a
night: people walked out in the morning among stranded fish and found cart wheels, two anvils, a
church bell that nobody had reported missing, and the white stones of the surveyor, still in their
line along the bottom. The company had no money to mend the bank. A society was formed to do it, by
a schoolteacher, a brewer and the widow of a lock keeper, and they dug with spades, as it had been
dug the first time, on Saturdays, for nine years."""

PRICES = "\n".join(
    f"{year}: {tons} tons of {what} carried, {tons * 3 // 7} pounds taken in tolls"
    for year, tons, what in [
        (1801, 1120, "grain"),
        (1802, 1385, "grain"),
        (1803, 2210, "slate"),
        (1804, 2475, "slate"),
        (1805, 4030, "coal"),
        (1806, 4410, "coal"),
        (1807, 5125, "coal"),
    ]
)

PROMPTS = [
    "Once upon a",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at one hundred degrees. Why does it boil sooner on a mountain?\n",
    "<|im_start|>user\nWrite two sentences about the sea.<|im_end|>\n<|im_start|>assistant\n",
    PRICES + "\n1808:",
    CANAL,
    f"{LOCKS}\n\n{TRADE}\n\nIn short,",
    f"{CANAL}\n\n{LOCKS}\n\n{TRADE}\n\n{DECLINE}\n\n{PRICES}\n\nSummary:",
]


@dataclass(frozen=True, slots=True)
class Continuation:
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]  # of the tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    steps: int
    compared: int
    differing: int  # of those compared, where transformers would have gone on otherwise
    logprob_difference: float  # the largest, over all the steps


@pytest.fixture(scope="module")
def written() -> list[Continuation]:
    llm = LLM(
        kernels="reference",
        model=str(default_model_path()),
        device="cpu",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=len(PROMPTS),
        max_num_batched_tokens=256,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    found = []
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        tokens = completion.token_ids
        own = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
        found.append(Continuation(output.prompt_token_ids, tokens, own))
    return found


@pytest.fixture(scope="module")
def theirs() -> PreTrainedModel:
    file = gguf.GGUFReader(default_model_path())

    def setting(key: str) -> float:
        return file.fields[f"llama.{key}"].contents()

    config = LlamaConfig(
        vocab_size=setting("vocab_size"),
        hidden_size=setting("embedding_length"),
        intermediate_size=setting("feed_forward_length"),
        num_hidden_layers=setting("block_count"),
        num_attention_heads=setting("attention.head_count"),
        num_key_value_heads=setting("attention.head_count_kv"),
        max_position_embeddings=setting("context_length"),
        rms_norm_eps=setting("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": setting("rope.freq_base")},
        tie_word_embeddings=True,
    )
    return as_the_package_reads(file, config)


def compare(
    written: list[Continuation], theirs: PreTrainedModel, skip_position: bool = False
) -> Comparison:
    steps = compared = differing = 0
    largest = 0.0
    for one in written:
        logits = logits_of_theirs(theirs, one, skip_position)
        ours = torch.tensor(one.tokens)
        best = logits.topk(2, dim=-1)
        clear = best.values[:, 0] - best.values[:, 1] >= GAP
        steps += len(ours)
        compared += int(clear.sum())
        differing += int((clear & (best.indices[:, 0] != ours)).sum())
        own = torch.log_softmax(logits, dim=-1).gather(1, ours.unsqueeze(1)).squeeze(1)
        largest = max(largest, (own - torch.tensor(one.logprobs)).abs().max().item())
    return Comparison(steps, compared, differing, largest)


@torch.no_grad()
def logits_of_theirs(
    theirs: PreTrainedModel, one: Continuation, skip_position: bool
) -> torch.Tensor:
    """At each step, what transformers makes of everything before it: [steps, vocab]."""
    tokens = one.prompt + one.tokens[:-1]
    positions = torch.arange(len(tokens))
    if skip_position:  # a shift of all of them would change nothing: rope sees distances only
        positions[len(one.prompt) - 1 :] += 1
    out = theirs(
        input_ids=torch.tensor([tokens]),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=len(one.tokens),
    )
    return out.logits[0]


def test_the_prompts_are_of_many_lengths(written: list[Continuation]) -> None:
    lengths = sorted(len(one.prompt) for one in written)
    assert lengths[0] <= 4
    assert 600 <= lengths[-1] <= 800
    assert len(lengths) >= 8
    assert lengths[NUM_SHORT - 1] < 32
    assert len(set(lengths)) >= 8
    assert {len(one.tokens) for one in written} == {NUM_TOKENS}


def test_every_token_is_the_one_that_transformers_would_have_written(
    written: list[Continuation], theirs: PreTrainedModel
) -> None:
    found = compare(written, theirs)
    assert found.differing == 0
    assert found.logprob_difference <= TOLERANCE
    assert found.steps == len(PROMPTS) * NUM_TOKENS
    assert found.compared >= LEAST_COMPARED * found.steps


def test_a_skipped_position_is_told_apart(
    written: list[Continuation], theirs: PreTrainedModel
) -> None:
    found = compare(written[:NUM_SHORT], theirs, skip_position=True)
    assert found.differing > 0
    assert found.logprob_difference > 0.1


def test_two_matrices_exchanged_in_one_of_the_layers_are_told_apart(
    written: list[Continuation], theirs: PreTrainedModel
) -> None:
    mlp = theirs.model.layers[15].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
    try:
        found = compare(written[:NUM_SHORT], theirs)
    finally:
        mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
    assert found.differing > 0
    assert found.logprob_difference > 0.1
