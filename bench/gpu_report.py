"""Tables of the measurements of `gpu.py`, beside the floors and vLLM's figures.

    python -m bench.gpu --table FILE [FILE …] [--into PAGE]     later files go over earlier ones

Floors are what a step's FLOPs or bytes need at the card's measured ceilings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twostroke.config import KV_8_BIT, EngineConfig
from twostroke.model.describe.cost import CostModel, cost_model
from twostroke.model.describe.hf_config import load_hf_config
from twostroke.model.formats.phase_formats import phase_formats
from twostroke.model.formats.w8a8_weights import W8Format
from twostroke.model.formats.weight_formats import weight_bytes
from twostroke.model.weights.dummy import DummyWeights
from twostroke.plan import PhaseWork

# The card's ceilings, measured. In fp8 or int8 all operations are counted at
# fp8's rate, attention's too.
READ_BYTES_S, FLOPS_S, FP8_FLOPS_S = 3.99e12, 783e12, 1429e12
SHAPES = SMALL, LARGE, EXPERTS = ("qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b")
VLLM = "bench/results/vllm_h200.json"  # as `peers/vllm_gpu.py` wrote it, on a card of the same kind
PICTURE = "interference_h200.svg"  # beside the page; `bench.gpu --picture`
BEGIN, END = "<!-- tables of bench.gpu -->", "<!-- end of the tables -->"
# Kernels by what they do: the first group with a part of the kernel's name. cuBLAS is the rest.
# A decode step's attention does rope and KV store too.
GROUPS = {
    "attention": ("_decode", "_prefill", "_merge", "flash", "fmha"),
    "norms": ("_rms_norm",),
    "rope, KV store": ("_rope_store",),
    "silu": ("_silu_and_mul", "_act_and_mul"),
    "sampling": ("_survey", "_settle", "_scan_tiles", "_choose", "_sample", "_adjust", "_advance"),
    "row state, copies": ("scatter", "index", "gather", "Mem", "copy", "elementwise"),
}


# ── floors ──────────────────────────────────────────────────────────────────────────────────


def floors_of(shape: str, settings: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Milliseconds below which no step can be, from the spec and the card's ceilings. `settings`:
    of the engine, of which the formats count."""
    spec, _ = load_hf_config(Path(f"bench/shapes/{shape}.json"))
    asked = {name: value for name, value in (settings or {}).items() if "quantization" in name}
    formats = phase_formats(spec, DummyWeights(spec), EngineConfig(**asked))
    kv_size = 1 if (settings or {}).get("kv_cache_dtype") in ("fp8", *KV_8_BIT) else 2
    prefill, decode = (cost_model(spec, weight_bytes(spec, 2, one), kv_size) for one in formats)
    rates = [
        FP8_FLOPS_S if any(isinstance(one, W8Format) for one in kept.values()) else FLOPS_S
        for kept in formats
    ]
    found, cost, flops_s = {}, prefill, rates[0]
    for size in (1024, 4096):
        work = PhaseWork(1, size, size * (size + 1) // 2, size)
        found[f"prefill {size}"] = _floor_ms(cost, work, 1, cost.prefill_flops(work, 1) / flops_s)
    cost, flops_s = decode, rates[1]
    for batch in (1, 8, 32, 128):
        context = batch * (1024 + 64)
        work = PhaseWork(batch, batch, context, context)
        found[f"decode {batch}"] = _floor_ms(cost, work, batch, cost.decode_flops(work) / flops_s)
    return found


def _floor_ms(cost: CostModel, work: PhaseWork, samples: int, computing_s: float) -> float:
    moved = cost.weight_bytes(samples, work.tokens) + cost.kv_bytes(work)
    return 1e3 * max(moved / READ_BYTES_S, computing_s)


# ── pages ───────────────────────────────────────────────────────────────────────────────────


def put_into(page: Path, shown: str) -> None:
    """Between the two marks of the page, instead of what is there."""
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{shown}\n{END}{after}")


# ── tables ──────────────────────────────────────────────────────────────────────────────────


def read(files: Sequence[str]) -> dict[str, Any]:
    """Results of several runs as one; a part that failed does not go over one that did not."""
    results: dict[str, Any] = {}
    for file in files:
        given = json.loads(Path(file).read_text())
        for shape in SHAPES:
            into = results.setdefault(shape, {})
            for part, result in given.get(shape, {}).items():
                if part not in into or not (isinstance(result, dict) and "error" in result):
                    into[part] = result
    return results


def tables(results: dict[str, Any], vllm: str = VLLM) -> str:
    """Markdown: the figures, the mixed-step budgets, what the time goes into, the rest."""
    return "\n".join(
        [
            *_figures(results, vllm_figures(vllm)),
            *_budgets(results),
            *_profiles(results),
            *_interference(results),
            *_others(results),
        ]
    )


def _rows(results: dict[str, Any], part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for shape in SHAPES:
        found = results.get(shape, {}).get(part)
        for row in found if isinstance(found, list) else ():
            yield shape, row


def vllm_figures(file: str) -> dict[str, dict[str, float]]:
    """Return vLLM's time for each piece of work, under the names of the floors."""
    if not Path(file).exists():
        return {shape: {} for shape in SHAPES}
    given = read([file])
    return {
        shape: {f"prefill {row['tokens']}": row["ms"] for row in parts.get("prefill", ())}
        | {f"decode {row['batch']}": row["tpot_ms"] for row in parts.get("decode", ())}
        | ({"nano": parts["nano"][0]["tok_s"]} if "nano" in parts else {})
        | ({"start": parts["start"]["ready_s"]} if "start" in parts else {})
        for shape, parts in given.items()
    }


def _figures(results: dict[str, Any], vllm: dict[str, dict[str, float]]) -> Iterator[str]:
    yield "| work | floor | measured | of the floor | vLLM | to vLLM |"
    yield "|---|---|---|---|---|---|"
    for part, size, value, unit in (
        ("prefill", "tokens", "ms", "tokens"),
        ("decode", "batch", "tpot_ms", "at a time"),
    ):
        for shape, row in _rows(results, part):
            name, taken = f"{part} {row[size]}", row[value]
            floors = results.get("floors", {}).get(shape) or floors_of(shape)
            floor, peer = floors[name], vllm[shape].get(name)
            beside = f"{peer:.2f} ms | {peer / taken:.2f}×" if peer else " | "
            yield (
                f"| {shape}, {part}, {row[size]:,} {unit} | {floor:.2f} ms | **{taken:.2f} ms** | "
                f"{floor / taken:.0%} | {beside} |"
            )
    best = {s: max(r["tok_s"] for t, r in _rows(results, "nano") if t == s) for s in _nano(results)}
    for shape, rate in best.items():
        peer = vllm[shape].get("nano")
        beside = f"{peer:,.0f} tok/s | {rate / peer:.2f}×" if peer else " | "
        yield f"| {shape}, nano-vLLM's workload | | **{rate:,.0f} tok/s** | | {beside} |"
    for shape, name, seconds in _starts(results):
        peer = vllm[shape].get("start") if name == "cold" else None
        against = f"{peer:.0f} s (imports apart)" if peer else ""
        ratio = f"{peer / seconds:.1f}×" if peer else ""
        work = f"{shape}, start to first token, {name}"
        yield f"| {work} | | {seconds:.1f} s | | {against} | {ratio} |"


def _nano(results: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(shape for shape, _ in _rows(results, "nano")))


def _starts(results: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    for shape in SHAPES:
        found = results.get(shape, {}).get("start", {})
        for name in ("cold", "warm"):
            if f"{name}_s" in found:
                yield shape, name, found[f"{name}_s"]


def _budgets(results: dict[str, Any]) -> Iterator[str]:
    if not _nano(results):
        return
    yield "\n| nano-vLLM's workload, tokens in a step | tok/s | steps | decode step | device idle |"
    yield "|---|---|---|---|---|"
    for shape, row in _rows(results, "nano"):
        yield (
            f"| {shape}, {row['budget']:,} | {row['tok_s']:,.0f} | {row['steps']:,} | "
            f"{row['decode_step_ms']:.2f} ms | {row['idle_share']:.1%} |"
        )


def group_of(kernel: str) -> str:
    for group, parts in GROUPS.items():
        if any(part in kernel for part in parts):
            return group
    return "products"


def _profiles(results: dict[str, Any]) -> Iterator[str]:
    columns = ["products", *GROUPS]
    rows = []
    for shape in SHAPES:
        found = results.get(shape, {}).get("profile", {})
        for step, kernels in found.items() if "error" not in found else ():
            totals = dict.fromkeys(columns, 0.0)
            for name, taken in kernels.items():
                if name not in ("busy", "span"):
                    totals[group_of(name)] += taken
            cells = " | ".join(f"{totals[column]:.2f}" for column in columns)
            idle = f"{kernels['span'] - kernels['busy']:.2f}" if "span" in kernels else ""
            rows.append(f"| {shape}, {step} | {cells} | {idle} |")
    if rows:
        yield f"\n| ms a step, by the profiler | {' | '.join(columns)} | nothing runs |"
        yield "|---" * (len(columns) + 2) + "|"
        yield from rows


def _interference(results: dict[str, Any]) -> Iterator[str]:
    rows = list(_rows(results, "interference"))
    if rows:
        yield "\n| 32 streams, a long prompt arrives | steady gap | worst gap | | its TTFT |"
        yield "|---|---|---|---|---|"
    for shape, row in rows:
        yield (
            f"| {shape}, {row['prompt']:,} tokens, {bound_of(row)} | "
            f"{row['steady_ms']:.1f} ms | {row['worst_ms']:.1f} ms | "
            f"{row['worst_over_steady']:.1f}× | {row['long_ttft_s']:.2f} s |"
        )
    if rows:
        yield f"\n![The worst gap and the time to first token, by budget]({PICTURE})"


def bound_of(row: dict[str, Any]) -> str:
    """Return the bound on the steps of an interference run: the default one, or a token budget."""
    return "default" if row.get("stall") else f"budget {row['budget']:,}"


def _others(results: dict[str, Any]) -> Iterator[str]:
    for shape in SHAPES:
        mixed = results.get(shape, {}).get("mixed", {})
        if mixed.get("idle_share") is not None and "span_ms" in mixed:
            yield (
                f"\nMixed steps ({shape}, 64 streams and chunks of 512): {mixed['step_ms']:.2f} ms "
                f"a step; the device idles {mixed['between_steps']:.1%} of the time between steps, "
                f"{mixed['idle_share']:.1%} in all under the profiler."
            )
