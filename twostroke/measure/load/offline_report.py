"""What `bench latency` and `bench throughput` found, as tables and pages."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from twostroke.measure.report.charts import Series, chart, cumulative
from twostroke.measure.report.html import footing, page, plots, section, table, tiles
from twostroke.measure.report.tables import NAMES, milliseconds, show_rows

Json = dict[str, Any]
COLUMNS = ("mean", "median", "p90", "p99")


def latency_lines(found: Json) -> list[str]:
    return [
        f"a batch of {found['batch_size']} took {milliseconds(1e3 * found['avg_latency'])} on "
        f"average of {len(found['latencies'])}: {found['input_len']:,} tokens in, "
        f"{found['output_len']:,} out each"
    ]


def throughput_lines(found: Json) -> list[str]:
    return [
        f"{found['num_requests']:,} requests in {found['elapsed_time']:,.1f} s: "
        f"{found['requests_per_second']:,.2f} requests a second",
        f"{found['tokens_per_second']:,.1f} tokens a second, "
        f"{found['output_tokens_per_second']:,.1f} of them written",
    ]


def phase_rows(found: Json) -> list[list[str]]:
    rows = [
        [NAMES[name], *(milliseconds(found[f"{column}_{name}_ms"]) for column in COLUMNS)]
        for name in ("ttft", "tpot", "itl")
    ]
    if "latencies" in found:
        p = found["percentiles"]
        values = (found["avg_latency"], p["50"], p["90"], p["99"])
        rows.append(["the whole batch", *(milliseconds(1e3 * value) for value in values)])
    return rows


def show_offline(console: Console, found: Json) -> None:
    console.print(Text(_subject(found), style="bold"))
    for line in latency_lines(found) if "latencies" in found else throughput_lines(found):
        console.print(Text(line))
    show_rows(console, ("", *COLUMNS), phase_rows(found))


def latency_page(found: Json) -> str:
    taken = [(float(n), 1e3 * seconds) for n, seconds in enumerate(found["latencies"], 1)]
    figures = [
        chart(
            "Batch by batch",
            [Series("", taken, "queue", "dots")],
            "number of the batch",
            "time to the last token of all",
            y_unit="ms",
        ),
        *_distributions(found),
    ]
    shown = [
        ("the batch, mean", milliseconds(1e3 * found["avg_latency"]), "queue"),
        ("TTFT, mean", milliseconds(found["mean_ttft_ms"]), "prefill"),
        ("TPOT, mean", milliseconds(found["mean_tpot_ms"]), "decode"),
    ]
    return _page("bench latency", found, latency_lines(found), shown, figures)


def throughput_page(found: Json) -> str:
    over = found["over_time"]
    size = over["bin_s"]

    def rates(phase: str) -> list[tuple[float, float]]:
        return [((n + 0.5) * size, tokens / size) for n, tokens in enumerate(over[phase])]

    figures = [
        chart(
            "Tokens a second over the run",
            [
                Series("read by prefill", rates("prefill"), "prefill", "area"),
                Series("written by decode", rates("decode"), "decode", "area"),
            ],
            "seconds after the start",
            "tokens a second",
            wide=True,
        ),
        *_distributions(found),
    ]
    shown = [
        ("requests a second", f"{found['requests_per_second']:,.2f}", "queue"),
        ("tokens a second, read and written", f"{found['tokens_per_second']:,.1f}", "prefill"),
        ("tokens written a second", f"{found['output_tokens_per_second']:,.1f}", "decode"),
        ("TTFT, p99", milliseconds(found["p99_ttft_ms"]), "prefill"),
    ]
    return _page("bench throughput", found, throughput_lines(found), shown, figures)


def _distributions(found: Json) -> list[str]:
    return [
        chart(
            NAMES[name],
            [Series("", cumulative(found[f"{name}s_ms"]), color, "area")],
            "so long or shorter",
            "share of requests",
            x_unit="ms",
            y_unit="%",
            x_log=None,
            marks=[
                (found[f"{key}_{name}_ms"], f"{key} {milliseconds(found[f'{key}_{name}_ms'])}")
                for key in ("median", "p99")
            ],
            marks_below=True,
        )
        for name, color in (("ttft", "prefill"), ("tpot", "decode"))
        if found[f"{name}s_ms"]
    ]


def _subject(found: Json) -> str:
    server = found["server"]
    return f"{server['model']} on {server['device']}"


def _page(
    command: str,
    found: Json,
    lines: list[str],
    shown: list[tuple[str, str, str]],
    figures: list[str],
) -> str:
    rows = table(["", *COLUMNS], phase_rows(found))
    body = [tiles(shown), section("By phase", rows), plots(figures), footing(found)]
    return page(command, _subject(found), "; ".join(lines), body, found)
