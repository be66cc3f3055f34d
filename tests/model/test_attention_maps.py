"""The attention that a page shows is the model's: equal to transformers' own, layer by layer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from tests.equivalence.rows import random_model, random_prompts
from tests.specs import make_spec
from twostroke.config import EngineConfig
from twostroke.errors import RequestError
from twostroke.model.attention_maps import COMPUTED, MAX_TOKENS, attention_maps, check
from twostroke.model.find.hub import find_model
from twostroke.model.load import open_model

TOLERANCE = 5e-5  # of a probability; the largest difference found is 1.3e-6
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
WINDOW = 9
GEMMA2 = {"head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 20}
GEMMA2 |= {"attn_logit_softcapping": 4.0}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        Qwen3Config(**SIZES | {"head_dim": 24}),
        Gemma2Config(**SIZES | GEMMA2),
        GPT2Config(**SIZES | {"num_key_value_heads": 4}),
        GPTNeoXConfig(**SIZES | {"num_key_value_heads": 4}),
        FalconConfig(**SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ],
    ids=lambda config: config.model_type,
)
def test_every_layer_and_head_attends_as_in_transformers(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    model = random_model(config)
    model.save_pretrained(tmp_path)
    (prompt,) = random_prompts([23], 300)
    with torch.no_grad():
        theirs = model(torch.tensor([prompt]), output_attentions=True).attentions
    ours = attention_maps(*_opened(tmp_path), prompt)
    assert len(ours) == len(theirs) == 3
    for layer, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(layer, expected[0].numpy(), atol=TOLERANCE)
        assert np.all(layer[:, 0, 1:] == 0), "the first token sees itself alone"
    assert np.abs(ours[0] - ours[1]).max() > 0.05, "layers differ, so a wrong one would be seen"


def test_the_process_answers_with_all_maps_or_with_the_reason(tmp_path: Path) -> None:
    random_model(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    tokens = [5, 7, 11]
    head, rest = _asked({"config": {"model": str(tmp_path)}, "tokens": tokens})
    assert head == {"error": "", "heads": [4, 4, 4]}
    maps = np.frombuffer(rest, np.float32).reshape(3, 4, 3, 3)
    np.testing.assert_allclose(maps.sum(-1), 1.0, atol=1e-5)
    head, rest = _asked({"config": {"model": str(tmp_path)}, "tokens": tokens * MAX_TOKENS})
    assert f"1 to {MAX_TOKENS} tokens" in head["error"]
    assert rest == b""


def test_a_model_with_experts_is_refused(tmp_path: Path) -> None:
    from transformers import MixtralConfig

    random_model(MixtralConfig(**SIZES, num_local_experts=3)).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="dense MLPs; this model has experts"):
        attention_maps(*_opened(tmp_path), [1, 2, 3])


def test_a_field_that_is_not_computed_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new field of `AttentionSpec` is not in `COMPUTED`."""
    capped = make_spec(softcap=30.0)
    check(capped, 3)
    monkeypatch.setattr("twostroke.model.attention_maps.COMPUTED", COMPUTED - {"softcap"})
    check(make_spec(), 3)
    with pytest.raises(RequestError, match="models with softcap"):
        check(capped, 3)


def _opened(folder: Path) -> Any:
    config = EngineConfig(model=str(folder), skip_tokenizer_init=True)
    opened = open_model(config, find_model(config), "cpu")
    return opened.spec, opened.weights


def _asked(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    words = [sys.executable, "-m", "twostroke.model.attention_maps"]
    done = subprocess.run(
        words, input=json.dumps(request).encode(), stdout=subprocess.PIPE, check=True
    )
    head, _, rest = done.stdout.partition(b"\n")
    return json.loads(head), rest
