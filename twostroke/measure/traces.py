"""Request traces: Azure's CSV (times and lengths) and Mooncake's JSONL (and which blocks of the
prompt are shared). Compressed files (.gz) are read as they are."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError, shown

MOONCAKE_BLOCK = 512  # tokens of the prompt that one of its hash ids stands for
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    at_s: float  # after the trace's first
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # of `MOONCAKE_BLOCK` tokens: equal ids, equal tokens


def read_trace(path: str, start_s: float = 0.0, seconds: float | None = None) -> list[TraceRequest]:
    """The requests that arrive in `seconds` from `start_s`, with times from there."""
    found = []
    for request in _read(Path(path)):
        if seconds is not None and request.at_s >= start_s + seconds:
            break
        if request.at_s >= start_s:
            at_s = request.at_s - start_s
            shifted = (at_s, request.prompt_tokens, request.output_tokens, request.blocks)
            found.append(TraceRequest(*shifted))
    if not found:
        raise ConfigError(
            f"{path}: no request arrives in the {seconds or 0:g} s from {start_s:g} s"
        )
    return found


def scaled(
    requests: list[TraceRequest], speed: float = 1.0, shrink: float = 1.0, keep: int = 1
) -> list[TraceRequest]:
    """The trace for a smaller machine: `speed` divides times, `shrink` divides lengths (blocks of
    the prompt with them), and of `keep` requests one is kept."""
    return [
        TraceRequest(
            one.at_s / speed,
            max(1, round(one.prompt_tokens / shrink)),
            max(1, round(one.output_tokens / shrink)),
            one.blocks,
        )
        for one in requests[::keep]
    ]


def block_tokens(shrink: float) -> int:
    return max(1, round(MOONCAKE_BLOCK / shrink))


def _read(path: Path) -> Iterator[TraceRequest]:
    if not path.is_file():
        raise ConfigError(f"there is no trace file {shown(str(path))}")
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", errors="replace") as file:
        first = next(file, "")
        if first.lstrip().startswith("{"):
            yield from _mooncake(path, first, file)
        elif first.strip().split(",")[:3] == list(AZURE_COLUMNS):
            yield from _azure(path, file)
        else:
            raise ConfigError(
                f"{path}, line 1: this is neither Azure's trace (a header "
                f"{','.join(AZURE_COLUMNS)}) nor Mooncake's (one JSON object a line with "
                "timestamp, input_length, output_length, hash_ids)"
            )


def _azure(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    begun: datetime | None = None
    last = 0.0
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        words = line.strip().split(",")
        try:
            at = datetime.fromisoformat(words[0][:26])  # seven digits of a second are one too many
            prompt, output = int(words[1]), int(words[2])
        except (ValueError, IndexError):
            raise _malformed(path, number, line, "a time and two numbers of tokens") from None
        begun = begun or at
        at_s = (at - begun).total_seconds()
        if at_s < last or prompt < 0 or output < 0:
            raise _malformed(path, number, line, "times that do not go back and lengths from 0")
        last = at_s
        yield TraceRequest(at_s, max(1, prompt), max(1, output))


def _mooncake(path: Path, first: str, lines: Iterator[str]) -> Iterator[TraceRequest]:
    number, line, begun, last = 1, first, None, 0.0
    while line:
        if line.strip():
            try:
                entry = json.loads(line)
                at = float(entry["timestamp"]) / 1e3
                prompt, output = int(entry["input_length"]), int(entry["output_length"])
                blocks = tuple(map(int, entry.get("hash_ids", ())))
            except (ValueError, KeyError, TypeError, AttributeError):
                expected = "a JSON object with timestamp, input_length, output_length, hash_ids"
                raise _malformed(path, number, line, expected) from None
            begun = at if begun is None else begun
            if at - begun < last or prompt < 0 or output < 0:
                raise _malformed(path, number, line, "times that do not go back, lengths from 0")
            last = at - begun
            yield TraceRequest(last, max(1, prompt), max(1, output), blocks)
        line, number = next(lines, ""), number + 1


def _malformed(path: Path, number: int, line: str, expected: str) -> ConfigError:
    return ConfigError(f"{path}, line {number}: {shown(line.strip())} is not {expected}")
