"""Readers of request traces. A file may be compressed (.gz).

Azure's CSV          times and lengths
Mooncake's JSONL     times, lengths, and the blocks that prompts share
/records             requests in the records of a twostroke server
bench results        `bench serve --save-detailed` of twostroke and vLLM, with start_times
guidellm's export    the first benchmark of the file
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError, shown

MOONCAKE_BLOCK = 512  # prompt tokens of one hash id
SPREAD = 0.8  # standard deviation of the logarithms of synthetic lengths
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """The arrival and the lengths of one request. Blocks with equal ids have equal tokens."""

    at_s: float  # seconds after the first request of the trace
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # ids of blocks of `MOONCAKE_BLOCK` tokens


def read_trace(path: str, start_s: float = 0.0, seconds: float | None = None) -> list[TraceRequest]:
    """Return the requests that arrive in `seconds` after `start_s`, with times from `start_s`."""
    if not (math.isfinite(start_s) and start_s >= 0):
        raise ConfigError(f"--trace-start must be 0 or more seconds, not {start_s:g}")
    found = []
    for request in _read(Path(path)):
        if seconds is not None and request.at_s >= start_s + seconds:
            break
        if request.at_s >= start_s:
            at_s = request.at_s - start_s
            found.append(replace(request, at_s=at_s))
    if not found:
        part = "" if seconds is None else f" and before {start_s + seconds:g} s"
        raise ConfigError(f"{path} has no requests after {start_s:g} s{part}")
    return found


def scaled(
    requests: list[TraceRequest], speed: float = 1.0, shrink: float = 1.0, keep: int = 1
) -> list[TraceRequest]:
    """Return the trace scaled to a smaller machine. `speed` divides times, `shrink` divides lengths
    and block sizes, and one of each `keep` requests is kept."""
    return [
        TraceRequest(
            one.at_s / speed,
            max(1, round(one.prompt_tokens / shrink)),
            max(1, round(one.output_tokens / shrink)),
            one.blocks,
        )
        for one in requests[::keep]
    ]


def at_rate(requests: list[TraceRequest], rate: float) -> list[TraceRequest]:
    """Return the trace with times scaled to a mean rate in requests a second."""
    if len(requests) < 2 or requests[-1].at_s <= 0:
        raise ConfigError(
            "--rate scales the times of a trace, but all requests of this trace have the same time"
        )
    return scaled(requests, speed=rate * requests[-1].at_s / (len(requests) - 1))


def synthetic(
    rate: float, seconds: float, mean_prompt: int, mean_output: int, seed: int = 0
) -> list[TraceRequest]:
    """Return a synthetic trace with Poisson arrivals and log-normal lengths of these means. The
    prompts share no prefix."""
    rng = random.Random(f"synthetic {seed}")
    found, at_s = [], 0.0
    while at_s < seconds:
        prompt, output = (
            max(1, round(mean * rng.lognormvariate(-SPREAD * SPREAD / 2, SPREAD)))
            for mean in (mean_prompt, mean_output)
        )
        found.append(TraceRequest(at_s, prompt, output))
        at_s += rng.expovariate(rate)
    return found


def block_tokens(shrink: float) -> int:
    return max(1, round(MOONCAKE_BLOCK / shrink))


def _read(path: Path) -> Iterator[TraceRequest]:
    if not path.is_file():
        raise ConfigError(f"there is no trace file {shown(str(path))}")
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", errors="replace") as file:
            first = next(file, "")
            if first.lstrip().startswith("{"):
                content = _document(first, file)
                if content is not None:
                    yield from _exported(path, content)
                    return
                file.seek(0)
                yield from _mooncake(path, next(file), file)
            elif first.strip().split(",")[:3] == list(AZURE_COLUMNS):
                yield from _azure(path, file)
            elif missing := _missing_columns(first):
                raise ConfigError(
                    f"{path}, line 1: this looks like Azure's trace, but lacks the columns "
                    f"{', '.join(missing)}; they come first, as {','.join(AZURE_COLUMNS)}"
                )
            else:
                raise _unknown(path, "line 1")
    except (OSError, EOFError) as error:  # a damaged .gz, too
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _missing_columns(header: str) -> list[str]:
    """Return the columns of Azure's trace that a header with some of them lacks."""
    found = [name.strip() for name in header.strip().split(",")]
    missing = [name for name in AZURE_COLUMNS if name not in found]
    return missing if len(missing) < len(AZURE_COLUMNS) else []


def _unknown(path: Path, where: str) -> ConfigError:
    return ConfigError(
        f"{path}, {where}: unknown format. Known are Azure's trace (a header "
        f"{','.join(AZURE_COLUMNS)}), Mooncake's trace (one JSON object a line with timestamp, "
        "input_length, output_length, hash_ids), a twostroke server's /records, a result of bench "
        "serve --save-detailed with start_times, and guidellm's export"
    )


# ── files that are one JSON object ──────────────────────────────────────────────────────────────


def _document(first: str, lines: Iterator[str]) -> dict[str, Any] | None:
    """Return the file as one JSON object, or None if each line is an object."""
    try:
        content = json.loads(first)
    except ValueError:
        if first.strip() != "{" and not first.rstrip().endswith((",", "{", "[")):
            return None
        try:
            content = json.loads(first + "".join(lines))
        except ValueError:
            return None
    lines_of_objects = not isinstance(content, dict) or "timestamp" in content
    return None if lines_of_objects or not _EXPORTS.keys() & content.keys() else content


def _exported(path: Path, content: dict[str, Any]) -> Iterator[TraceRequest]:
    key = next(key for key in _EXPORTS if key in content)
    format_name, rows_of = _EXPORTS[key]
    try:
        rows = sorted(
            (float(at_s), int(prompt), int(output), number)
            for number, (at_s, prompt, output) in enumerate(rows_of(content))
        )
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise ConfigError(
            f"{path}: this looks like {format_name}, but is malformed: {error}"
        ) from None
    for at_s, prompt, output, number in rows:
        if not (0 <= at_s < math.inf) or prompt < 0 or output < 0:
            raise ConfigError(
                f"{path}: request {number} of {format_name} has the time {at_s:g}, {prompt} prompt "
                f"tokens and {output} output tokens; none of them may be negative"
            )
        if output:  # a request without output failed
            yield TraceRequest(at_s - rows[0][0], max(1, prompt), output)


def _rows_of_records(content: dict[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    for one in content["requests"]:
        yield one["received_s"], one["num_prompt"], len(one["token_s"])


def _rows_of_bench(content: dict[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    for name in ("start_times", "input_lens", "output_lens"):
        if name not in content:
            raise KeyError(f"{name} (run the benchmark with --save-detailed)")
    columns = (content["start_times"], content["input_lens"], content["output_lens"])
    yield from zip(*columns, strict=True)


def _rows_of_guidellm(content: dict[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    for one in content["benchmarks"][0]["requests"]["successful"]:
        at_s = one["request_start_time"] if "request_start_time" in one else one["start_time"]
        yield at_s, one["prompt_tokens"], one["output_tokens"]


Rows = Callable[[dict[str, Any]], Iterator[tuple[Any, Any, Any]]]
# A key of the file → the name of its format, and a function that yields time, prompt tokens and
# output tokens of each request.
_EXPORTS: dict[str, tuple[str, Rows]] = {
    "benchmarks": ("guidellm's export", _rows_of_guidellm),
    "input_lens": ("a result of bench serve", _rows_of_bench),
    "mean_ttft_ms": ("a result of bench serve", _rows_of_bench),
    "requests": ("a twostroke server's /records", _rows_of_records),
}


# ── files of lines ──────────────────────────────────────────────────────────────────────────────


def _azure(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    begun: datetime | None = None
    last = 0.0
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        words = line.strip().split(",")
        try:
            # Azure writes seven decimal digits of a second; Python reads six.
            at = datetime.fromisoformat(words[0][:26])
            prompt, output = int(words[1]), int(words[2])
            begun = begun or at
            at_s = (at - begun).total_seconds()
        except (ValueError, IndexError):
            raise _malformed(path, number, line, "a time and two numbers of tokens") from None
        except TypeError:  # one time has a time zone, and the other has none
            raise _malformed(path, number, line, "a time like that of the first request") from None
        if at_s < last or prompt < 0 or output < 0:
            raise _malformed(
                path, number, line, "a request with an ascending time and lengths from 0"
            )
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
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                expected = "a JSON object with timestamp, input_length, output_length, hash_ids"
                raise _malformed(path, number, line, expected) from None
            begun = at if begun is None else begun
            if not 0 <= at < math.inf or at - begun < last or prompt < 0 or output < 0:
                raise _malformed(
                    path, number, line, "a request with an ascending time and lengths from 0"
                )
            last = at - begun
            yield TraceRequest(last, max(1, prompt), max(1, output), blocks)
        line, number = next(lines, ""), number + 1


def _malformed(path: Path, number: int, line: str, expected: str) -> ConfigError:
    return ConfigError(f"{path}, line {number}: {shown(line.strip())} is not {expected}")
