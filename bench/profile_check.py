"""Do a profile's stages add up to the steps, and do the phases lie under the machine's roofs?

    python -m bench.profile_check [MODEL] [--seconds 10] [--hardware here] [--json FILE]
    python -m bench.profile_check MODEL --hardware h200              on a GPU

Starts `twostroke serve`, loads it with `twostroke bench serve` so that steps of all kinds occur and
takes a `twostroke profile` meanwhile. The profile's rows are held against the step records, whose
times come from other readings of the clock: plan to commit, and the executor's own time. Then one
user alone, and `twostroke roofline MODEL --hardware here --server URL`: no phase, and no single
step, may be faster than the rates measured here allow. On a GPU the kernels' times, by stage, are
held against the step by CUDA's events, and the profile must have the ranges that NVIDIA's tools
show. Ends with one JSON line; exit status 1 if the sums differ by more than 5%, a range is missing
or something lies above a roof.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from bench.measure_check import model_file
from bench.witness import Json, Witness
from twostroke.measure.compare.arms import serving
from twostroke.measure.load.result import environment

SUM_SHARE = 0.05
ROOFS = 5  # measured so often
PHASES = ("prefill", "decode")
RANGES = ("attention", "mlp", "head", "sampling", "decode step", "mixed step")  # on a GPU
HOST = ("plan", "sampling", "commit", "unaccounted")  # not part of the executor's forward call


def twostroke(*words: str) -> list[str]:
    return [sys.executable, "-m", "twostroke", *words]


def load(url: str, users: int, count: int, prompt: int, output: int) -> subprocess.Popen[bytes]:
    words = ["bench", "serve", "--base-url", url, "--max-concurrency", str(users)]
    words += ["--num-prompts", str(count), "--random-input-len", str(prompt)]
    words += ["--random-output-len", str(output)]
    return subprocess.Popen(twostroke(*words), stdout=subprocess.DEVNULL)


def printed(*words: str) -> Json:
    done = subprocess.run(twostroke(*words, "--json"), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"twostroke {' '.join(words)}: {done.stderr}")
    return dict(json.loads(done.stdout))


def highest(roofline: Json) -> float:
    return float(roofline["hardware"]["flops_per_s"] * roofline["hardware"]["bytes_per_s"])


def stage_sums(profile: Json, steps: list[Json]) -> list[Json]:
    """By phase: the rows' sum beside what the step records say of the same steps."""
    known = {step["step"]: step for step in steps}
    names = profile["stage_names"]
    found = []
    for phase in profile["phases"]:
        rows = [
            (known[number], dict(zip(names, seconds, strict=True)))
            for number, name, _, *seconds in profile["steps"]
            if name == phase and number in known
        ]
        if not rows:
            continue
        # The record ends when the tokens are known; what comes after is in the rows only.
        planned = sum(step["committed_s"] - step["planned_s"] for step, _ in rows)
        device = sum(step["device_s"] for step, _ in rows)
        every = sum(sum(row.values()) - row["unaccounted"] - row["commit"] for _, row in rows)
        forward = sum(sum(s for n, s in row.items() if n not in HOST) for _, row in rows)
        sampled = sum(row["sampling"] for _, row in rows)
        found.append(
            {
                "phase": phase,
                "steps": len(rows),
                "step_ms": 1e3 * planned / len(rows),
                "rows_over_step": every / planned,
                "forward_and_sampling_over_device": (forward + sampled) / device,
                "unaccounted_share": sum(r["unaccounted"] for _, r in rows)
                / sum(sum(r.values()) for _, r in rows),
            }
        )
    return found


def kernel_sums(profile: Json) -> list[Json]:
    """By phase: the kernels' sum beside the step by the device's events."""
    found = []
    for phase, told in profile["phases"].items():
        unaccounted = told["stages"]["unaccounted"]["seconds"] / told["step_s"]
        found.append(
            {
                "phase": phase,
                "steps": told["steps"],
                "step_ms": 1e3 * told["step_s"] / told["steps"],
                "rows_over_step": 1 - unaccounted,
                "unaccounted_share": unaccounted,
            }
        )
    return found


def missing_ranges(profile: Json) -> list[str]:
    names = {event["name"] for event in profile["events"]}
    return [one for one in RANGES if not any(name.startswith(one) for name in names)]


def under_roofs(steps: list[Json], rate: float, bandwidth: float) -> list[Json]:
    """By phase: the least time that the work needs over what it took; at most 1 under a roof."""
    found = []
    for phase, other in (PHASES, PHASES[::-1]):
        pure = [s for s in steps if s[phase]["tokens"] and not s[other]["tokens"]]
        pure = [step for step in pure if step["device_s"] > 0]
        if not pure:
            continue
        floors = [max(s[phase]["flops"] / rate, s[phase]["num_bytes"] / bandwidth) for s in pure]
        shares = [floor / s["device_s"] for floor, s in zip(floors, pure, strict=True)]
        seconds = sum(step["device_s"] for step in pure)
        found.append(
            {
                "phase": phase,
                "steps": len(pure),
                "flops_per_s": sum(step[phase]["flops"] for step in pure) / seconds,
                "bytes_per_s": sum(step[phase]["num_bytes"] for step in pure) / seconds,
                "of_roof": sum(floors) / seconds,
                "of_roof_median_step": statistics.median(shares),
                "of_roof_best_step": max(shares),
                "steps_above": sum(share > 1 for share in shares),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the profile")
    parser.add_argument("--hardware", default="here", help="whose roofs, as `roofline` knows it")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    with serving([args.model]) as (url,):
        with Witness(url, 2.0) as mixed:
            users = load(url, 4, 400, 128, 64)
            try:
                profile = printed("profile", url, "--seconds", f"{args.seconds:g}")
            finally:
                users.terminate()
                users.wait()
        with Witness(url, 2.0) as alone:
            load(url, 1, 12, 256, 128).wait()
        of_model = "roofline", model_file(args.model or None), "--server", url
        # The machine's best: whoever else uses it while a roof is measured makes it lower.
        times = range(ROOFS if args.hardware == "here" else 1)
        found = [printed(*of_model, "--hardware", args.hardware) for _ in times]
        roofline = max(found, key=highest)
    of_kernels = profile["kind"] == "kernels"
    sums = kernel_sums(profile) if of_kernels else stage_sums(profile, mixed.steps)
    missing = missing_ranges(profile) if of_kernels else []
    hardware = roofline["hardware"]
    rates = hardware["flops_per_s"], hardware["bytes_per_s"]
    roofs = {"alone": under_roofs(alone.steps, *rates), "loaded": under_roofs(mixed.steps, *rates)}
    out = [one["phase"] for one in sums if abs(one["rows_over_step"] - 1) > SUM_SHARE]
    above = [f"{one['phase']}, {k}" for k, v in roofs.items() for one in v if one["of_roof"] > 1]
    result = {
        "bench": "profile_check",
        "environment": environment(),
        "sums": sums,
        "sums_out_of_bounds": out,
        "missing_ranges": missing,
        "flops_per_s": rates[0],
        "bytes_per_s": rates[1],
        "roofs": roofs,
        "above_roof": above,
        "roofline_says": roofline["measured"],
    }
    line = json.dumps(result)
    print(json.dumps(result, indent=1))
    print(line)
    if args.json:
        Path(args.json).write_text(line + "\n")
    if out or above or missing:
        raise SystemExit(f"sums out of bounds: {out}; above a roof: {above}; no range: {missing}")


if __name__ == "__main__":
    main()
