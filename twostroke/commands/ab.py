"""`twostroke ab`: compares two servers or settings by pairs of runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.commands.bench import NOT_CERTIFIED, api_key
from twostroke.commands.parser import Parser
from twostroke.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from twostroke.measure.compare.ab import Pilot, RunFigures, Trial
    from twostroke.measure.compare.prediction import PredictionOutcome
    from twostroke.measure.doctor.verdict import ProposedExperiment

DESCRIPTION = (
    "Compare B with A under the same requests, in interleaved pairs of runs (A B, B A, …). The "
    "result is the ratio of each metric with its interval, corrected for several metrics, and WIN, "
    "LOSS, TIE or INCONCLUSIVE. An arm is a URL, the options of a `twostroke serve` to start, or a "
    "command with {port} that starts a server. "
    "Exit status: 0 B wins or ties, 3 requests failed, 4 B loses, 5 not enough runs to tell. "
    "Example: twostroke ab --a '' --b '--max-num-batched-tokens 512' --pairs 8"
)
OPERANDS = ""
LOST, INCONCLUSIVE = 4, 5
EXAMPLE_EFFECT = 0.05
# Lengths vary by default. With equal lengths the users of a closed loop would synchronise,
# differently for each server, but in the same way in all runs of a server.
LOAD: dict[str, Any] = {
    "num_prompts": 40,
    "random_input_len": 256,
    "random_output_len": 32,
    "random_prefix_len": 0,
    "random_range_ratio": 0.5,
    "max_concurrency": 4,
}


def add_arguments(parser: Parser) -> None:
    parser.command_line_options = ("--a", "--b")
    add = parser.add_argument
    add("--a", default="", metavar="ARM", help="URL, options of serve, or a command with {port}")
    add("--b", metavar="ARM", help="the same for B")
    add("--playbook", metavar="NAME", help="a change that often helps, on top of --a; or `list`")
    add("--from-doctor", metavar="FILE", help="the experiment of `doctor --json`, on top of --a")
    add("--aa", action="store_true", help="compare A with itself: any difference is an error")
    add("--pairs", type=int, default=8, metavar="N", help="runs of each arm; default 8")
    add(
        "--pilot",
        type=int,
        default=3,
        metavar="N",
        help="runs of each arm that estimate what the pairs can detect; default 3, 0: none",
    )

    def load(flag: str, *flags: str, text: str) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        default = LOAD[name]
        add(flag, *flags, type=type(default), metavar="N", help=f"{text}; default {default}")

    load("--num-prompts", text="requests of each run")
    load("--random-input-len", "--input-len", text="tokens of a prompt")
    load("--random-output-len", "--output-len", text="tokens of an answer")
    load("--random-prefix-len", text="more tokens that all prompts of a run share")
    load("--random-range-ratio", text="lengths vary by ± this share")
    load("--max-concurrency", text="requests at the same time")
    add("--trace", metavar="FILE", help="replay a trace (Azure, Mooncake) with its arrival times")
    add("--request-rate", type=float, default=float("inf"), metavar="R", help="default: inf")
    add("--model", help="default: the first model of the servers")
    add("--api-key", metavar="KEY", help="default: OPENAI_API_KEY, if set")
    add("--seed", type=int, default=0)
    add("--markdown", metavar="FILE", help="write a table for a pull request to this file")
    add("--json", action="store_true", help="print the result as JSON")


def execute(args: argparse.Namespace) -> int:
    from rich.console import Console

    from twostroke.measure.compare.ab import TrialCallbacks, run_ab
    from twostroke.measure.compare.ab_report import markdown, trial_json
    from twostroke.measure.compare.playbook import PLAYBOOK
    from twostroke.measure.compare.prediction import outcome_of
    from twostroke.measure.load.bench import ServeOptions

    if args.playbook == "list":
        for name, (a, b, _) in PLAYBOOK.items():
            print(f"{name:18} {a or 'defaults'}  →  {b}")
        return 0
    arms, load, experiment = _chosen(args)
    chosen = {name: value for name in LOAD if (value := getattr(args, name)) is not None}
    if args.trace is not None:
        # Requests are sent at the times of the trace, without a limit of concurrency by default.
        load = {"dataset_name": "trace", "dataset_path": args.trace, "max_concurrency": None}
    options = ServeOptions(
        url="",
        api_key=api_key(args),
        model=args.model,
        request_rate=args.request_rate,
        seed=args.seed,
        **(LOAD | load | chosen),
    )
    console = Console(stderr=args.json)
    callbacks = TrialCallbacks(
        lambda pilot: show_pilot(console, pilot, args.pairs),
        lambda pair, arm, figures: _show_run(console, pair, arm, figures),
    )
    trial = run_ab(arms, options, args.pairs, args.pilot, callbacks)
    prediction = None if experiment is None else outcome_of(experiment, trial.a, trial.b)
    if args.json:
        print(json.dumps(trial_json(trial, arms, options, prediction)))
    else:
        show(console, trial, arms, prediction)
    if args.markdown:
        text = markdown(trial, arms, options, prediction)
        Path(args.markdown).write_text(text, encoding="utf-8")
    return status(trial.verdict, args.aa, prediction)


def status(verdict: str, aa: bool = False, prediction: PredictionOutcome | None = None) -> int:
    """Return the exit status. `aa`: A was compared with itself, and any difference is an error."""
    if verdict == "INVALID":
        return NOT_CERTIFIED
    if prediction is not None:
        verdict = {"CONFIRMED": "WIN", "REFUTED": "LOSS"}.get(prediction.verdict, "INCONCLUSIVE")
    if aa:
        return LOST if verdict in ("WIN", "LOSS", "MIXED") else 0
    return {"WIN": 0, "TIE": 0, "INCONCLUSIVE": INCONCLUSIVE}.get(verdict, LOST)


def _chosen(
    args: argparse.Namespace,
) -> tuple[tuple[str, str], dict[str, Any], ProposedExperiment | None]:
    """Return the two arms, the load of the playbook, and the experiment of the doctor."""
    from twostroke.measure.compare.arms import is_url
    from twostroke.measure.compare.playbook import play
    from twostroke.measure.compare.prediction import arms_of, read_experiment

    sources = {
        "--b": args.b is not None,
        "--playbook": args.playbook is not None,
        "--from-doctor": args.from_doctor is not None,
        "--aa": args.aa,
    }
    chosen = [flag for flag, is_given in sources.items() if is_given]
    if not chosen:
        raise ConfigError("give the change as --b, such as --b '--max-num-batched-tokens 512'")
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} each define B; give one of them")
    if args.from_doctor is not None:
        experiment = read_experiment(args.from_doctor)
        return arms_of(experiment, args.a), {}, experiment
    if args.playbook is not None:
        found = play(args.playbook)
        if is_url(args.a):
            raise ConfigError("--playbook starts both servers; give their common options as --a")
        a, b = (f"{args.a} {change}".strip() for change in (found.a, found.b))
        return (a, b), dict(found.load), None
    return (args.a, args.a if args.aa else args.b), {}, None


def show_pilot(console: Console, pilot: Pilot, pairs: int) -> None:
    """Print the smallest changes that the trial can detect, before it begins."""
    from rich.text import Text

    from twostroke.measure.compare.ab_report import METRIC_TITLES

    finds, needed = pilot.detectable(pairs), pilot.pairs_for(EXAMPLE_EFFECT)
    parts = ", ".join(
        f"{METRIC_TITLES[name]} {_percent(finds[name])} "
        f"({needed[name]} pairs for {EXAMPLE_EFFECT:.0%})"
        for name in finds
    )
    console.print(
        Text(
            f"according to {pilot.runs} pilot runs of each arm, {pairs} pairs detect in nine of "
            f"ten cases a change of: {parts}"
        )
    )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share < 1 else "over 100%"


def _show_run(console: Console, pair: int, arm: str, figures: RunFigures) -> None:
    if sys.stderr.isatty():
        late = "  (not certified)" if figures.problems else ""
        console.print(
            f"{pair + 1:3} {arm}: TTFT {figures.ttft:,.0f} ms, TPOT {figures.tpot:.2f} ms, "
            f"{figures.throughput:,.1f} tokens/s{late}",
            highlight=False,
        )


def show(
    console: Console,
    trial: Trial,
    arms: tuple[str, str],
    prediction: PredictionOutcome | None = None,
) -> None:
    from rich.table import Table
    from rich.text import Text

    from twostroke.measure.compare.ab_report import METRIC_TITLES, arm_title, problems

    console.print(Text(f"{trial.verdict}: B ({arm_title(arms[1])})", style="bold"))
    console.print(Text(f"against A ({arm_title(arms[0])}), {len(trial.a)} pairs of runs"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("B / A", "99% interval", "finds", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in trial.comparisons:
        interval = f"{result.low:.3f}–{result.high:.3f}"
        cells = (f"{result.ratio:.3f}", interval, _percent(result.detectable), result.verdict)
        table.add_row(METRIC_TITLES[result.metric], *cells)
    console.print(table)
    console.print(
        Text("finds: the change that this many pairs detect in nine of ten cases", style="dim")
    )
    if prediction is not None:
        console.print(Text(prediction.sentence, style="bold"))
    for problem in problems(trial):
        console.print(Text(problem, style="red"))
