"""`hf_overrides`: the model's settings replaced, for config.json and for a GGUF file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.cli.reading import read
from tests.support import default_model_path
from tests.tiny import tiny_folder
from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.model.describe.overrides import override_config, override_metadata
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.find.hub import find_model
from twostroke.model.load import open_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def spec_of(model: Path, overrides: dict[str, Any] | None) -> ModelSpec:
    config = EngineConfig(model=str(model), hf_overrides=overrides, load_format="dummy")
    return open_model(config, find_model(config), "cpu").spec


def test_a_folder_is_read_with_the_overrides(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    own = spec_of(folder, None)
    changed = spec_of(folder, {"rope_scaling": YARN, "rope_theta": 123456.0})
    (rope,) = changed.ropes()
    assert (rope.kind, rope.factor, rope.original_context) == ("yarn", 4.0, 2048)
    assert rope.theta == 123456.0
    assert changed.max_context == max(own.max_context, 8192)


def test_a_gguf_file_takes_the_same_names_and_those_of_its_metadata() -> None:
    own = spec_of(default_model_path(), None)
    (rope,) = spec_of(default_model_path(), {"rope_scaling": YARN}).ropes()
    assert (rope.kind, rope.factor, rope.original_context) == ("yarn", 4.0, 2048)
    longer = {"llama.context_length": own.max_context // 2}
    assert spec_of(default_model_path(), longer).max_context == own.max_context // 2


@pytest.mark.parametrize("name", ["hidden_size", "tokenizer.ggml.add_bos_token"])
def test_a_gguf_file_refuses_what_its_metadata_does_not_have(name: str) -> None:
    with pytest.raises(ConfigError, match=r"hf_overrides: .* has no counterpart in the"):
        override_metadata({"general.architecture": "llama"}, {name: 1}, "m.gguf")


def test_overrides_without_effect_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        spec_of(tiny_folder(tmp_path), {"no_such_setting": 1})
    assert "hf_overrides change nothing of" in caplog.text


def test_settings_of_the_rope_go_where_the_config_keeps_them() -> None:
    both = override_config({"rope_parameters": {"rope_theta": 1e4}}, {"rope_scaling": YARN})
    assert both == {"rope_parameters": {"rope_theta": 1e4, **YARN}}
    by_kind = {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}
    both = override_config({"rope_parameters": by_kind}, {"rope_scaling": YARN})
    assert both["rope_parameters"]["full_attention"] == YARN
    sliding = {"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}}
    both = override_config({"rope_parameters": by_kind}, {"rope_theta": 9.0, **sliding})
    assert both["rope_parameters"]["full_attention"]["rope_theta"] == 9.0
    assert both["rope_parameters"]["sliding_attention"]["rope_theta"] == 5.0
    older = override_config({"rope_scaling": {"type": "linear"}}, {"rope_scaling": YARN})
    assert older == {"rope_scaling": YARN}
    alone = override_config({}, {"rope_scaling": {"factor": 2.0}})
    assert alone["rope_scaling"]["rope_type"] == "linear"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 2048",
            {"rope_scaling": YARN},
        ),
        ("--rope-freq-scale 0.25", {"rope_scaling": {"factor": 4.0}}),
        ("--rope-freq-base 1000000", {"rope_scaling": {"rope_theta": 1e6}}),
        ("--rope-freq-base 0 --yarn-beta-fast -1", None),
        ("--rope-scaling none", {"rope_scaling": {"rope_type": "default"}}),
        ('--rope-scaling {"rope_type":"yarn"}', {"rope_scaling": {"rope_type": "yarn"}}),
        ("--rope-theta 50000", {"rope_theta": 50000.0}),
        ("--hf-overrides.rope_scaling.factor 2.0", {"rope_scaling": {"factor": 2.0}}),
        ('--hf-overrides {"a":1} --hf-overrides {"b":2}', {"a": 1, "b": 2}),
        ("--override-kv a.b=int:3,a.c=bool:true", {"a.b": 3, "a.c": True}),
    ],
)
def test_flags_of_both_servers_set_them(line: str, expected: dict[str, Any] | None) -> None:
    taken = read(*line.split())
    assert taken.problems == []
    assert taken.config is not None
    assert taken.config.hf_overrides == expected


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--rope-scaling cubic", "--rope-scaling cubic: expected none, linear, yarn or a JSON"),
        ("--rope-scale x", "--rope-scale x: expected a number"),
        ("--yarn-ext-factor 0", "--yarn-ext-factor 0: yarn always extrapolates fully"),
        ("--override-kv a=1", "--override-kv a=1: expected KEY=TYPE:VALUE"),
        (
            "--override-kv tokenizer.x=int:1",
            "--override-kv tokenizer.x=int:1: settings of the tokenizer",
        ),
        ("--hf-overrides [1]", "--hf-overrides [1]: expected a JSON object"),
    ],
)
def test_wrong_values_are_refused(line: str, says: str) -> None:
    (problem,) = read(*line.split()).problems
    assert problem.startswith(says)


def test_threads_of_minus_one_are_the_default() -> None:
    taken = read("--threads", "-1", "--threads-batch", "0", "-t", "-1")
    assert taken.config == EngineConfig()
    assert read("--threads", "-2").problems
