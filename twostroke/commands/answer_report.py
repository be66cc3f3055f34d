"""The report of an answer's times and tokens by phase: a table, a line, or JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from twostroke.commands.answer import Answer
from twostroke.commands.terminal import columns, unbreakable, wrapped

if TYPE_CHECKING:
    from twostroke.engine.build import Engine

MIB = 1024**2
Row = Sequence[str]


def report_stream() -> TextIO:
    """Return stdout if it is a terminal. Otherwise return stderr, so that stdout has only the
    answer."""
    return sys.stdout if sys.stdout.isatty() else sys.stderr


def print_report(engine: Engine, answer: Answer, max_tokens: int | None) -> None:
    if hint := length_hint(engine, answer, max_tokens):
        print_dim(hint)
    per_token = bytes_per_token(engine)
    phases = [
        ("", "tokens", "cached", "time", "", "tok/s"),
        (
            "prefill",
            f"{answer.prompt_tokens:,}",
            f"{answer.cached_tokens:,}",
            "TTFT, caller's side",
            duration(answer.ttft_s),
            rate(answer.prefill_tokens_per_s),
        ),
        (
            "decode",
            f"{len(answer.token_ids):,}",
            "",
            "TPOT",
            duration(answer.tpot_s),
            rate(answer.decode_tokens_per_s),
        ),
    ]
    cache = [
        ("KV cache", *answer.kv._fields),
        ("tokens", *(f"{tokens:,}" for tokens in answer.kv)),
        ("MiB", *(f"{tokens * per_token / MIB:,.1f}" for tokens in answer.kv)),
    ]
    for rows in (phases, cache):
        print(file=report_stream())
        print_table(rows)


def turn_line(answer: Answer) -> str:
    prefill = (
        f"prefill {answer.prefilled_tokens:,} tok ({answer.cached_tokens:,} of "
        f"{answer.prompt_tokens:,} cached)",
        unbreakable(f"TTFT {duration(answer.ttft_s)}"),
        unbreakable(f"{rate(answer.prefill_tokens_per_s)} tok/s"),
    )
    decode = (
        unbreakable(f"decode {len(answer.token_ids):,} tok"),
        unbreakable(f"TPOT {duration(answer.tpot_s)}"),
        unbreakable(f"{rate(answer.decode_tokens_per_s)} tok/s"),
    )
    kv = (f"KV {answer.kv.used:,} of {answer.kv.reserved:,} tokens used",)
    return " │ ".join(" · ".join(part) for part in (prefill, decode, kv))


def answer_json(engine: Engine, answer: Answer, load_s: float) -> dict[str, Any]:
    return {
        "model": engine.model_name,
        "prompt_token_ids": answer.prompt_token_ids,
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "timings": {
            "queue_s": answer.queue_s,
            "prefill_s": answer.prefill_s,
            "decode_s": answer.decode_s,
            "ttft_s": answer.ttft_s,
            "ttft_side": "caller",
            "tpot_s": answer.tpot_s,
            "prefill_tokens_per_s": answer.prefill_tokens_per_s,
            "decode_tokens_per_s": answer.decode_tokens_per_s,
            "load_s": load_s,
        },
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "completion_tokens": len(answer.token_ids),
        },
        "kv": {**answer.kv._asdict(), "bytes_per_token": bytes_per_token(engine)},
    }


def length_hint(engine: Engine, answer: Answer, max_tokens: int | None) -> str:
    """Return a message about the limit that ended the answer; "" if the model ended it."""
    if answer.finish_reason != "length":
        return ""
    if len(answer.token_ids) == max_tokens:
        return f"the answer was cut off at {max_tokens} tokens; --max-tokens allows more"
    return f"the answer was cut off at max_model_len, {engine.memory.max_model_len:,} tokens"


def bytes_per_token(engine: Engine) -> int:
    """Return the bytes of a token in the KV cache, the mean over the KV groups."""
    memory = engine.memory
    blocks = zip(memory.group_blocks, memory.sizing.block_bytes, strict=True)
    num_bytes = sum(count * size for count, size in blocks)
    return num_bytes // (sum(memory.group_blocks) * engine.config.block_size)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"


def rate(per_s: float | None) -> str:
    if per_s is None:
        return "–"
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}"


def print_dim(text: str) -> None:
    """Print a dim text, wrapped at the width of the terminal."""
    stream = report_stream()
    text = wrapped(text, columns(stream), "  ")
    if not stream.isatty():
        print(text, file=stream)
        return
    from rich.console import Console

    Console(file=stream).print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def print_table(rows: Sequence[Row]) -> None:
    """Print a table. The first row is the heading. Columns are right-aligned, except the first. A
    table that is too wide for the terminal is transposed."""
    stream = report_stream()
    width = columns(stream)
    lines = aligned(rows)
    if width is not None and max(map(len, lines)) > width:
        lines = aligned(list(zip(*rows, strict=True)))
    print_dim(lines[0])
    for line in lines[1:]:
        print(line, file=stream)


def aligned(rows: Sequence[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *cells)).rstrip())
    return lines
