"""`twostroke ab`: does a change help? Two servers or settings, compared by pairs of runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.commands.bench import api_key
from twostroke.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from twostroke.measure.ab import Figures, Trial

DESCRIPTION = (
    "Compare B with A under the exact same requests, in interleaved pairs of runs (A B, B A, …): "
    "the ratio of each metric with its interval, corrected for several metrics, and WIN, LOSS, TIE "
    "or INCONCLUSIVE. An arm is a URL, or options of `twostroke serve`, which is then started. "
    "Exit status: 0 B wins or ties, 4 it loses, 5 not enough runs to tell. Example: "
    "twostroke ab --a '' --b '--max-num-batched-tokens 512' --pairs 8"
)
OPERANDS = ""
LOST, INCONCLUSIVE = 4, 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--a", default="", metavar="ARM", help="URL or options of serve; default: the defaults")
    add("--b", metavar="ARM", help="URL or options of serve")
    add("--playbook", metavar="NAME", help="a comparison that is often worth it; `list` shows them")
    add("--aa", action="store_true", help="compare A with itself: nothing may be found")
    add("--pairs", type=int, default=8, metavar="N", help="runs of each arm; default 8")
    add("--num-prompts", type=int, default=40, metavar="N", help="of each run; default 40")
    add("--random-input-len", "--input-len", type=int, default=256, metavar="N")
    add("--random-output-len", "--output-len", type=int, default=32, metavar="N")
    add("--request-rate", type=float, default=float("inf"), metavar="R")
    add("--max-concurrency", type=int, default=4, metavar="N")
    add("--model", help="default: the first that the servers have")
    add("--api-key", metavar="KEY", help="default: OPENAI_API_KEY, if set")
    add("--seed", type=int, default=0)
    add("--markdown", metavar="FILE", help="a table for a pull request")
    add("--json", action="store_true")


def execute(args: argparse.Namespace) -> int:
    from rich.console import Console

    from twostroke.measure.ab import PLAYBOOK, markdown, run_ab, trial_json
    from twostroke.measure.bench import ServeOptions

    if args.playbook == "list":
        for name, (a, b) in PLAYBOOK.items():
            print(f"{name:18} {a or 'defaults'}  →  {b}")
        return 0
    arms = _arms(args, PLAYBOOK)
    options = ServeOptions(
        url="",
        api_key=api_key(args),
        model=args.model,
        num_prompts=args.num_prompts,
        random_input_len=args.random_input_len,
        random_output_len=args.random_output_len,
        request_rate=args.request_rate,
        max_concurrency=args.max_concurrency,
        seed=args.seed,
    )
    console = Console(stderr=args.json)

    def tell(pair: int, arm: str, figures: Figures) -> None:
        if sys.stderr.isatty():
            late = "" if figures.certified else "  (not certified)"
            console.print(
                f"pair {pair + 1} of {args.pairs}, {arm}: TTFT {figures.ttft:,.0f} ms, TPOT "
                f"{figures.tpot:.2f} ms, {figures.throughput:,.1f} tokens/s{late}",
                highlight=False,
            )

    trial = run_ab(arms, options, args.pairs, tell)
    if args.json:
        print(json.dumps(trial_json(trial, arms)))
    else:
        show(console, trial, arms)
    if args.markdown:
        Path(args.markdown).write_text(markdown(trial, arms), encoding="utf-8")
    if trial.verdict in ("LOSS", "MIXED") or (args.aa and trial.verdict == "WIN"):
        return LOST
    return INCONCLUSIVE if trial.verdict == "INCONCLUSIVE" and not args.aa else 0


def _arms(args: argparse.Namespace, playbook: dict[str, tuple[str, str]]) -> tuple[str, str]:
    if args.playbook is not None:
        if args.playbook not in playbook:
            raise ConfigError(
                f"--playbook {args.playbook!r} is not known{nearest(args.playbook, playbook)}; "
                "`--playbook list` shows them"
            )
        return playbook[args.playbook]
    if args.aa:
        return args.a, args.a
    if args.b is None:
        raise ConfigError("give the change as --b, such as --b '--max-num-batched-tokens 512'")
    return args.a, args.b


def show(console: Console, trial: Trial, arms: tuple[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"{trial.verdict}: B ({arms[1] or 'defaults'})", style="bold"))
    console.print(Text(f"against A ({arms[0] or 'defaults'}), {len(trial.a)} pairs of runs"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("B / A", "95% interval", "finds", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in trial.comparisons:
        interval = f"{one.low:.3f}–{one.high:.3f}"
        cells = (f"{one.ratio:.3f}", interval, f"{one.detectable:.0%}", one.verdict)
        table.add_row(one.metric, *cells)
    console.print(table)
    console.print(
        Text("finds: the change that so many pairs find in nine of ten cases", style="dim")
    )
    bad = sum(not one.certified for one in (*trial.a, *trial.b))
    if bad:
        reason = next(one.problems[0] for one in (*trial.a, *trial.b) if one.problems)
        console.print(Text(f"{bad} runs were not certified: {reason}", style="red"))
