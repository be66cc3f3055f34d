"""Reports of `bench latency` and `bench throughput`, as tables and HTML pages."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from twostroke.measure.report.charts import Axis, Series, chart, cumulative
from twostroke.measure.report.html import footer, page, plots, section, table, tiles
from twostroke.measure.report.tables import NAMES, milliseconds, show_rows

Json = dict[str, Any]
COLUMNS = ("mean", "median", "p90", "p99")


def latency_lines(result: Json) -> list[str]:
    return [
        f"a batch of {result['batch_size']} took {milliseconds(1e3 * result['avg_latency'])} on "
        f"average of {len(result['latencies'])}: {result['input_len']:,} tokens in, "
        f"{result['output_len']:,} out each"
    ]


def throughput_lines(result: Json) -> list[str]:
    return [
        f"{result['num_requests']:,} requests in {result['elapsed_time']:,.1f} s: "
        f"{result['requests_per_second']:,.2f} requests a second",
        f"{result['tokens_per_second']:,.1f} tokens a second, "
        f"{result['output_tokens_per_second']:,.1f} of them output tokens",
    ]


def phase_rows(result: Json) -> list[list[str]]:
    rows = [
        [NAMES[name], *(milliseconds(result[f"{column}_{name}_ms"]) for column in COLUMNS)]
        for name in ("ttft", "tpot", "itl")
    ]
    if "latencies" in result:
        p = result["percentiles"]
        values = (result["avg_latency"], p["50"], p["90"], p["99"])
        rows.append(["the whole batch", *(milliseconds(1e3 * value) for value in values)])
    return rows


def show_offline(console: Console, result: Json) -> None:
    console.print(Text(_subject(result), style="bold"))
    for line in latency_lines(result) if "latencies" in result else throughput_lines(result):
        console.print(Text(line))
    show_rows(console, ("", *COLUMNS), phase_rows(result))


def latency_page(result: Json) -> str:
    taken = [(float(n), 1e3 * seconds) for n, seconds in enumerate(result["latencies"], 1)]
    figures = [
        chart(
            "Batch by batch",
            [Series("", taken, "queue", "dots")],
            Axis("number of the batch"),
            Axis("time to the last token of the batch", "ms"),
        ),
        *_distributions(result),
    ]
    shown = [
        ("the batch, mean", milliseconds(1e3 * result["avg_latency"]), "queue"),
        ("TTFT, mean", milliseconds(result["mean_ttft_ms"]), "prefill"),
        ("TPOT, mean", milliseconds(result["mean_tpot_ms"]), "decode"),
    ]
    return _page("bench latency", result, latency_lines(result), shown, figures)


def throughput_page(result: Json) -> str:
    over = result["over_time"]
    size = over["bin_s"]

    def rates(phase: str) -> list[tuple[float, float]]:
        return [((n + 0.5) * size, tokens / size) for n, tokens in enumerate(over[phase])]

    figures = [
        chart(
            "Tokens a second over the run",
            [
                Series("prefill", rates("prefill"), "prefill", "area"),
                Series("decode", rates("decode"), "decode", "area"),
            ],
            Axis("seconds after the start"),
            Axis("tokens a second"),
            wide=True,
        ),
        *_distributions(result),
    ]
    shown = [
        ("requests a second", f"{result['requests_per_second']:,.2f}", "queue"),
        ("tokens a second, prefill and decode", f"{result['tokens_per_second']:,.1f}", "prefill"),
        ("output tokens a second", f"{result['output_tokens_per_second']:,.1f}", "decode"),
        ("TTFT, p99", milliseconds(result["p99_ttft_ms"]), "prefill"),
    ]
    return _page("bench throughput", result, throughput_lines(result), shown, figures)


def _distributions(result: Json) -> list[str]:
    return [
        chart(
            NAMES[name],
            [Series("", cumulative(result[f"{name}s_ms"]), color, "area")],
            Axis("at most this long", "ms", log=None),
            Axis("share of requests", "%"),
            marks=[
                (result[f"{key}_{name}_ms"], f"{key} {milliseconds(result[f'{key}_{name}_ms'])}")
                for key in ("median", "p99")
            ],
            marks_below=True,
        )
        for name, color in (("ttft", "prefill"), ("tpot", "decode"))
        if result[f"{name}s_ms"]
    ]


def _subject(result: Json) -> str:
    server = result["server"]
    return f"{server['model']} on {server['device']}"


def _page(
    command: str,
    result: Json,
    lines: list[str],
    shown: list[tuple[str, str, str]],
    figures: list[str],
) -> str:
    rows = table(["", *COLUMNS], phase_rows(result))
    body = [tiles(shown), section("By phase", rows), plots(figures), footer(result)]
    return page(command, _subject(result), "; ".join(lines), body, result)
