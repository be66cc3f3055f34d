"""A comparison of twostroke with its peers on this CPU: floors, then both phases, in rounds.

    python -m bench.cpu --peer-model FOLDER [--llama BIN_FOLDER] [--openvino PYTHON]
        [--vllm PYTHON] [--transformers PYTHON] [--twostroke key=value ...] [--before FOLDER]
        [--only NAME ...] [--phases TEXT ...] [--output N] [--repeat N]
        [--interference [--budget N]]
        [--json FILE]

A peer is given by the folder of its binaries or by its Python, as an option or in the environment
(LLAMA_CPP_BIN, OPENVINO_PYTHON, VLLM_PYTHON, TRANSFORMERS_PYTHON). A missing peer is skipped with a
message. PEER_MODEL or --peer-model is the model as a folder, for peers that do not read GGUF:
`python -m bench.cpu_dequantise FOLDER`. --before: another checkout of twostroke, with its native
module beside its sources.

Each engine keeps its model loaded in its own process, which is stopped (SIGSTOP) during the turns
of other engines. A measurement that other processes disturb is repeated. Sampling is greedy without
end of text, on the same token ids; llama.cpp is measured by its llama-batched-bench. Prefill: the
prompt's tokens / time to the first token. Decode: tokens of all streams a second while all streams
decode. Figures are medians. --interference starts servers instead: four streams decode while a
prompt of 4,000 tokens arrives. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cpu_floors import CpuCeilings, ModelWork, describe, floor_tokens_per_s, measure_ceilings
from bench.cpu_process import Worker
from bench.cpu_workers import as_options, tokens
from bench.output import write_result

PROMPT = 128  # tokens before a decode
DISTURBED = 0.05  # CPU share of other processes above which a measurement is repeated
TRIES = 3
VLLM_OPTIONS = ["dtype=float32", "max_model_len=8192", "gpu_memory_utilization=0.4"]
WORKERS = Path(__file__).with_name("cpu_workers.py")


@dataclass(frozen=True)
class PhaseWorkload:
    name: str
    streams: int
    prompt: int
    output: int

    def rate(self, answer: dict[str, float]) -> float:
        if self.output == 1:
            return self.streams * self.prompt / answer["first_s"]
        return answer["decode_tokens"] / answer["decode_s"]


def phases_of(args: argparse.Namespace) -> list[PhaseWorkload]:
    all_of_them = [PhaseWorkload(f"prefill {length}", 1, length, 1) for length in (512, 2048)]
    for streams in (1, 8, 32):  # the first token of an output is the prefill's
        output = args.output if streams == 1 else args.output // 2  # slow engines take minutes
        all_of_them.append(PhaseWorkload(f"decode, batch {streams}", streams, PROMPT, output + 1))
    return [p for p in all_of_them if not args.phases or any(t in p.name for t in args.phases)]


@dataclass(frozen=True)
class Competitor:
    name: str
    command: list[str]
    environment: dict[str, str]


def worker(name: str, python: str, kind: str, model: str, *options: str, **env: str) -> Competitor:
    return Competitor(name, [python, str(WORKERS), kind, model, *options], env)


def competitors(args: argparse.Namespace, gguf: str) -> list[Competitor]:
    """Return the installed engines, and print the names of missing engines."""
    found = [worker("twostroke", sys.executable, "twostroke", gguf, *args.twostroke)]
    if args.before:
        worker_of_then = str(Path(args.before) / "bench" / WORKERS.name)
        command = [sys.executable, worker_of_then, "twostroke", gguf, *args.twostroke]
        found.append(Competitor("before", command, {"PYTHONPATH": args.before}))
    folder = args.peer_model
    if args.llama:
        place = f"{args.llama}:{gguf}"
        for flash in ("off", "on"):
            name = f"llama.cpp, fa {flash}"
            found.append(worker(name, sys.executable, "llama", place, f"fa={flash}"))
    if args.openvino:
        found.append(worker("openvino", args.openvino, "openvino", gguf, *args.openvino_options))
    if args.vllm and folder:
        cores = f"0-{(os.cpu_count() or 1) - 1}"  # the default leaves one core free
        found.append(
            worker(
                "vllm",
                args.vllm,
                "vllm",
                folder,
                *args.vllm_options,
                VLLM_CPU_OMP_THREADS_BIND=cores,
                VLLM_LOGGING_LEVEL="WARNING",
            )
        )
    if args.transformers and folder:
        found.append(worker("transformers", args.transformers, "transformers", folder))
    for name in ("llama", "openvino", "vllm", "transformers"):
        if not getattr(args, name):
            print(f"{name} is not named (--{name}): skipped")
        elif name in ("vllm", "transformers") and not folder:
            print(f"{name} needs --peer-model: skipped")
    return [one for one in found if not args.only or one.name in args.only]


def undisturbed(
    engine: Worker, phase: PhaseWorkload, prompts: list[list[int]]
) -> tuple[float, float]:
    """Return the rate and the CPU share of other processes, of the quietest of a few tries."""
    tries = []
    for _ in range(TRIES):
        answer = engine.ask(prompts, phase.output)
        tries.append((answer["others"], phase.rate(answer)))
        if answer["others"] <= DISTURBED:
            break
    others, rate = min(tries)
    return rate, others


def alternate(
    running: dict[str, Worker],
    phases: list[PhaseWorkload],
    repeat: int,
    tell: Callable[[str], None],
) -> dict[str, dict[str, list[float]]]:
    """Return tokens a second: phase → engine → one figure for each round."""
    rates: dict[str, dict[str, list[float]]] = {p.name: {n: [] for n in running} for p in phases}
    names = list(running)
    for turn in range(repeat):
        for phase in phases:
            order = names[turn % len(names) :] + names[: turn % len(names)]
            prompts = [tokens(phase.prompt, 100 * turn + n) for n in range(phase.streams)]
            for name in order:
                if running[name].dead:
                    continue
                try:
                    rate, others = undisturbed(running[name], phase, prompts)
                except RuntimeError as error:
                    tell(f"{name} died in {phase.name}: {error}")
                    continue
                rates[phase.name][name].append(rate)
                line = f"round {turn + 1}, {phase.name}: {name} {rate:,.1f} tok/s"
                if others > DISTURBED:
                    line += f" (others took {others:.0%} of the processor)"
                tell(line)
    return rates


def summarise(
    rates: dict[str, dict[str, list[float]]],
    phases: list[PhaseWorkload],
    work: ModelWork,
    ceilings: CpuCeilings,
) -> dict[str, dict[str, Any]]:
    """Return for each phase the floor, medians, ranges, the best peer and our ratio to it."""
    rows: dict[str, dict[str, Any]] = {}
    for phase in phases:
        floor = floor_tokens_per_s(work, ceilings, phase.streams, phase.prompt, phase.output)
        medians = {n: statistics.median(each) for n, each in rates[phase.name].items() if each}
        peers = {name: rate for name, rate in medians.items() if name != "twostroke"}
        best = max(peers, key=lambda name: peers[name]) if peers else None
        row: dict[str, Any] = {"floor": floor, "tok_s": medians, "best_peer": best}
        row["rounds"] = rates[phase.name]
        if "twostroke" in medians:
            row["share_of_floor"] = medians["twostroke"] / floor
            row["to_best_peer"] = medians["twostroke"] / peers[best] if best else None
        rows[phase.name] = row
    return rows


def print_table(names: list[str], rows: dict[str, dict[str, Any]]) -> None:
    widths = [max(9, len(name)) for name in names]
    head = "  ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    print(f"\n{'tok/s':18}  {'floor':>8}  {head}  {'to best':>7}  {'of floor':>8}")
    for phase, row in rows.items():
        cells = []
        for name, width in zip(names, widths, strict=True):
            rate = row["tok_s"].get(name)
            cells.append(f"{'-' if rate is None else f'{rate:,.1f}':>{width}}")
        ratio, share = row.get("to_best_peer"), row.get("share_of_floor")
        ends = f"{'-' if ratio is None else f'{ratio:.2f}':>7}  "
        ends += f"{'-' if share is None else f'{share:.0%}':>8}"
        print(f"{phase:18}  {row['floor']:8,.0f}  {'  '.join(cells)}  {ends}")


def run_phases(
    args: argparse.Namespace, found: list[Competitor], work: ModelWork
) -> dict[str, Any]:
    phases = phases_of(args)
    ceilings = measure_ceilings(work.weight_bytes)
    print(describe(ceilings))
    for phase in phases:
        floor = floor_tokens_per_s(work, ceilings, phase.streams, phase.prompt, phase.output)
        print(f"floor of {phase.name}: {floor:,.0f} tok/s", flush=True)
    starts: dict[str, list[float]] = {}
    running: dict[str, Worker] = {}
    try:
        for one in found:
            for attempt in range(args.starts):  # the last stays
                try:
                    started = Worker(one.command, one.environment)
                except RuntimeError as error:
                    print(f"{one.name} does not run here: {error}", flush=True)
                    break
                starts.setdefault(one.name, []).append(started.start_s)
                if attempt < args.starts - 1:
                    started.close()
                else:
                    running[one.name] = started
        rates = alternate(running, phases, args.repeat or 3, lambda line: print(line, flush=True))
        # A neighbour may have been busy at the start; a ceiling is the best that was seen.
        ceilings = ceilings.best_of(measure_ceilings(work.weight_bytes))
        peaks = {name: each.peak_bytes() for name, each in running.items()}
    finally:
        for each in running.values():
            each.close()
    rows = summarise(rates, phases, work, ceilings)
    print_table(list(running), rows)
    first = {name: statistics.median(times) for name, times in starts.items()}
    for name in running:
        print(f"{name}: first token {first[name]:.2f} s after its start, ", end="")
        print(f"peak memory {peaks[name] / 1e9:.2f} GB")
    return {
        "ceilings": vars(ceilings),
        "phases": rows,
        "start_to_first_token_s": first,
        "peak_bytes": peaks,
    }


def arguments() -> argparse.Namespace:
    assert __doc__ is not None
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    given = os.environ.get
    parser.add_argument("--model", help="a GGUF file instead of the default model")
    parser.add_argument("--peer-model", default=given("PEER_MODEL"))
    parser.add_argument("--llama", default=given("LLAMA_CPP_BIN"))
    parser.add_argument("--openvino", default=given("OPENVINO_PYTHON"))
    parser.add_argument("--vllm", default=given("VLLM_PYTHON"))
    parser.add_argument("--transformers", default=given("TRANSFORMERS_PYTHON"))
    pairs: dict[str, Any] = {"nargs": "*", "metavar": "key=value"}
    parser.add_argument("--twostroke", default=[], help="settings of LLM", **pairs)
    parser.add_argument("--openvino-options", default=["INFERENCE_PRECISION_HINT=f32"], **pairs)
    parser.add_argument("--vllm-options", default=VLLM_OPTIONS, **pairs)
    parser.add_argument("--before", help="a checkout to compare with")
    parser.add_argument("--only", nargs="*", help="engines by the name in the table")
    parser.add_argument("--phases", nargs="*", help="parts of phases' names")
    parser.add_argument("--repeat", type=int, help="rounds (3; of --interference 5)")
    parser.add_argument("--output", type=int, default=128, help="tokens that each stream decodes")
    parser.add_argument("--starts", type=int, default=1, help="how often each engine is started")
    parser.add_argument("--interference", action="store_true")
    parser.add_argument("--budget", type=int, help="of --interference: also with equal budgets")
    parser.add_argument("--json", help="also write the result here")
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave no engine behind
    args = arguments()
    as_options(args.twostroke)  # refuse a bad pair before anything runs
    work = ModelWork.of(args.model)
    if args.interference:
        from bench.cpu_interference import run_interference

        result = run_interference(args, work.path)
    else:
        result = run_phases(args, competitors(args, work.path), work)
    out = {"bench": "cpu", "machine": platform.machine(), "cores": os.cpu_count(), **result}
    write_result({**out, "twostroke": args.twostroke}, args.json)


if __name__ == "__main__":
    main()
