"""Log-probabilities over the whole vocabulary, ours and transformers', for the same tokens.

    tokens   p0 p1 … pn │ o0 o1 … om        prompt, then what our engine wrote
    rows     r0 r1 … rn   r(n+1) … r(n+m)   row i: what is expected after token i

Ours come through the public API: the prompt's rows from the prefill, the first output's from its
last chunk, the others from decode steps. Theirs are one forward over all the tokens, no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from twostroke import LLM, SamplingParams
from twostroke.outputs import Logprob

# On log-probabilities, in float32: the largest difference found over all the tiny models is 2.0e-5
# where it comes from sums taken in another order alone, and 8.0e-5 on machines where numpy and
# torch round the powers that rope's angles are made of differently.
TOLERANCE = 1.6e-4

SPREAD = 1.6  # standard deviation of every product of a normed vector: logits that differ
NUM_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Written:
    prompt: list[int]
    tokens: list[int]  # the prompt and what was written
    rows: torch.Tensor  # [len(tokens) - 1, vocab]


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    random = torch.Generator().manual_seed(len(lengths) + 1000 * seed)
    draws = [torch.randint(vocab_size, (n,), generator=random) for n in lengths]
    return [draw.tolist() for draw in draws]


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    draw_weights(model, seed)
    return model.eval()


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int = 0) -> None:
    """Biases and norms are random too: at the zeros and ones of a fresh model they are not seen."""
    random = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() >= 2:  # 3: of all experts
            weight.normal_(0.0, SPREAD / weight.shape[-1] ** 0.5, generator=random)
        else:
            weight.normal_(weight[0].item(), 0.3, generator=random)
    for name, values in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # of a router
            values.normal_(0.0, 0.3, generator=random)


def same_weights_under(config: PreTrainedConfig, model: PreTrainedModel) -> PreTrainedModel:
    """The model's weights run by another description of it; biases it does not know are left."""
    other = random_model(config)
    other.load_state_dict(model.state_dict(), strict=False)
    return other


def write_with_ours(
    model: Path, prompts: list[list[int]], max_tokens: int, vocab_size: int, **settings: Any
) -> list[Written]:
    llm = open_ours(model, vocab_size, **settings)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=vocab_size,
        prompt_logprobs=vocab_size,
    )
    written = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        completion = output.outputs[0]
        assert output.prompt_logprobs is not None
        assert completion.logprobs is not None
        entries = [*output.prompt_logprobs[1:], *completion.logprobs]
        prompt = output.prompt_token_ids
        rows = torch.stack([row_of(entry, vocab_size) for entry in entries])
        written.append(Written(prompt, prompt + completion.token_ids, rows))
    return written


def open_ours(model: Path, vocab_size: int, **settings: Any) -> LLM:
    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        num_gpu_blocks_override=NUM_BLOCKS,
        max_logprobs=vocab_size,
        **{"device": "cpu", "kernels": "reference"} | settings,
    )


def row_of(entry: dict[int, Logprob] | None, vocab_size: int) -> torch.Tensor:
    assert entry is not None
    assert len(entry) == vocab_size
    return torch.tensor([entry[token].logprob for token in range(vocab_size)])


@torch.no_grad()
def rows_of_theirs(
    model: PreTrainedModel, tokens: list[int], positions: list[int] | None = None
) -> torch.Tensor:
    """All rows but the last token's, after which our engine has stopped."""
    ids = torch.tensor([tokens])
    at = None if positions is None else torch.tensor([positions])
    logits = model(input_ids=ids, position_ids=at, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def largest_difference(written: Sequence[Written], theirs: PreTrainedModel) -> float:
    return max(
        (one.rows - rows_of_theirs(theirs, one.tokens)).abs().max().item() for one in written
    )
