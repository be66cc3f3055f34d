"""Trace files: reading, scaling, and errors that name the line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from twostroke.errors import ConfigError
from twostroke.measure.load.traces import MOONCAKE_BLOCK, at_rate, read_trace, scaled, synthetic
from twostroke.measure.load.workload import PromptGenerator, replayed

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
    with pytest.raises(ConfigError, match=r"has no requests after 100 s and before 101 s"):
        read_trace(azure, 100.0, 1.0)
    with pytest.raises(ConfigError, match="--trace-start must be 0 or more seconds, not -5"):
        read_trace(azure, -5.0)


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
    planned = replayed(requests, PromptGenerator(0, "x", as_text=False), shrink)
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
        ("hello\n", "line 1: unknown format"),
        (AZURE + "2023-11-16 18:17:00,many,3\n", "line 5: .*many.* is not a time and two numbers"),
        (AZURE + "2023-11-16 18:00:00.0,3,3\n", "line 5: .* with an ascending time"),
        (json.dumps(MOONCAKE[0]) + "\n{\n", "line 2: .* is not a JSON object with timestamp"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "line 1: .* lacks the columns GeneratedTokens"),
        (json.dumps(MOONCAKE[0] | {"timestamp": -1}) + "\n", "line 1: .* with an ascending time"),
        (
            json.dumps(MOONCAKE[0] | {"timestamp": float("nan")}) + "\n",
            "line 1: .* with an ascending time",
        ),
        (
            AZURE + "2023-11-16 18:17:30+00:00,3,3\n",
            "line 5: .* is not a time like that of the first request",
        ),
        (
            json.dumps(MOONCAKE[0] | {"input_length": float("inf")}) + "\n",
            "line 1: .* is not a JSON object with timestamp",
        ),
        (AZURE.splitlines()[0] + "\n", "has no requests after 0 s"),
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


BENCH = {"start_times": [2.0, 0.5], "input_lens": [30, 10], "output_lens": [3, 1]}
EXPORTS = {
    "bench": {"mean_ttft_ms": 1.0, **BENCH},
    "guidellm": {
        "benchmarks": [
            {
                "requests": {
                    "successful": [
                        {"request_start_time": 100.5, "prompt_tokens": 10, "output_tokens": 1},
                        {"start_time": 102.0, "prompt_tokens": 30, "output_tokens": 3},
                    ]
                }
            }
        ]
    },
    "records": {
        "steps": [],
        "requests": [
            {"received_s": 9.5, "num_prompt": 30, "token_s": [1.0, 2.0, 3.0]},
            {"received_s": 8.0, "num_prompt": 10, "token_s": [1.0]},
            {"received_s": 8.5, "num_prompt": 10, "token_s": []},
        ],
    },
}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", EXPORTS)
def test_exports_are_traces_in_the_order_of_their_times(
    name: str, indent: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "export.json"
    path.write_text(json.dumps(EXPORTS[name], indent=indent))
    found = [(one.at_s, one.prompt_tokens, one.output_tokens) for one in read_trace(str(path))]
    assert found == [(0.0, 10, 1), (1.5, 30, 3)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            {"mean_ttft_ms": 1.0},
            "result of bench serve, but is malformed: .*start_times .*save-detailed",
        ),
        ({"benchmarks": []}, "guidellm's export, but is malformed"),
        ({"requests": [{}]}, "/records, but is malformed: 'received_s'"),
        (BENCH | {"start_times": [1.0, -2.0]}, "request 1 .* time -2, .* negative"),
        (BENCH | {"input_lens": [30]}, "but is malformed"),
    ],
)
def test_an_export_without_what_a_trace_needs_says_what(
    content: dict[str, object], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "export.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=says):
        read_trace(str(path))


def test_a_damaged_gz_is_named(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode() * 99)[:60])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(str(path))


def test_a_trace_at_a_rate_has_its_shape(azure: str) -> None:
    found = at_rate(read_trace(azure), 4.0)
    assert [one.at_s for one in found] == pytest.approx([0.0, 0.5 * 4.314579 / 60, 0.5])


def test_a_synthetic_trace_has_the_means_that_were_asked_for() -> None:
    found = synthetic(20.0, 500.0, 300, 40)
    assert found == synthetic(20.0, 500.0, 300, 40)
    assert len(found) == pytest.approx(10_000, rel=0.05)
    assert sum(one.prompt_tokens for one in found) / len(found) == pytest.approx(300, rel=0.05)
    assert sum(one.output_tokens for one in found) / len(found) == pytest.approx(40, rel=0.05)
