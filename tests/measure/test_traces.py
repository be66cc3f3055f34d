"""Trace files: read as they are, scaled as asked, refused by line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from twostroke.errors import ConfigError
from twostroke.measure.traces import MOONCAKE_BLOCK, read_trace, scaled
from twostroke.measure.workload import Prompts, replayed

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,879,55
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 50, "hash_ids": [1, 2, 3]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 60, "hash_ids": [1, 2, 4]},
    {"timestamp": 6000, "input_length": 700, "output_length": 10, "hash_ids": [1, 5]},
]


@pytest.fixture
def azure(tmp_path: Path) -> str:
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    return str(path)


@pytest.fixture
def mooncake(tmp_path: Path) -> str:
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)) + "\n")
    return str(path)


def test_azures_trace_has_times_and_lengths(azure: str) -> None:
    found = read_trace(azure)
    assert [(one.prompt_tokens, one.output_tokens) for one in found] == [
        (374, 44),
        (396, 109),
        (879, 55),
    ]
    assert [one.at_s for one in found] == pytest.approx([0.0, 4.314579, 60.0])


def test_a_part_of_a_trace_starts_at_its_own_time(azure: str) -> None:
    assert len(read_trace(azure, 0.0, 30.0)) == 2
    (last,) = read_trace(azure, 30.0, 60.0)
    assert last.at_s == pytest.approx(30.0)
    with pytest.raises(ConfigError, match="no request arrives"):
        read_trace(azure, 100.0, 1.0)


def test_a_scaled_trace_keeps_its_shape(azure: str) -> None:
    found = scaled(read_trace(azure), speed=2.0, shrink=4.0)
    assert [one.at_s for one in found] == pytest.approx([0.0, 2.1572895, 30.0])
    assert [(one.prompt_tokens, one.output_tokens) for one in found] == [
        (94, 11),
        (99, 27),
        (220, 14),
    ]
    assert len(scaled(read_trace(azure), keep=2)) == 2


@pytest.mark.parametrize("shrink", [1.0, 8.0])
def test_mooncakes_prompts_share_what_their_hash_ids_share(mooncake: str, shrink: float) -> None:
    requests = scaled(read_trace(mooncake), shrink=shrink)
    planned = replayed(requests, Prompts(0, "x", as_text=False), shrink)
    prompts = [list(one.prompt) for one in planned]
    assert [len(prompt) for prompt in prompts] == [
        round(e["input_length"] / shrink) for e in MOONCAKE
    ]
    block = round(MOONCAKE_BLOCK / shrink)
    assert prompts[0][: 2 * block] == prompts[1][: 2 * block]
    assert prompts[0][2 * block :] != prompts[1][2 * block :]
    assert prompts[2][:block] == prompts[0][:block]
    assert prompts[2][block:] != prompts[0][block : len(prompts[2])]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello\n", "line 1: this is neither Azure's trace"),
        (AZURE + "2023-11-16 18:17:00,many,3\n", "line 5: .*many.* is not a time and two numbers"),
        (AZURE + "2023-11-16 18:00:00.0,3,3\n", "line 5: .* times that do not go back"),
        (json.dumps(MOONCAKE[0]) + "\n{\n", "line 2: .* is not a JSON object with timestamp"),
        (json.dumps({"timestamp": 1}) + "\n", "line 1: .* is not a JSON object with timestamp"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_trace(str(path))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no trace file"):
        read_trace("/nowhere/trace.csv")
