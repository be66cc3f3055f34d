"""What tensor parallelism costs: on a CPU measured, on GPUs computed.

    python -m bench.ranks [--ranks 1,2,4] [--steps 200] [--json FILE]

Measured: an engine of the reference backend on random weights of a small shape, in one process and
in as many as there are ranks. A step's time, of it what rank 0 spent in collectives (gloo), what
the host did between two steps, and what a plan takes: to encode, and to send to the other ranks.
Ranks share the machine's cores: with more ranks than cores their times say what they cost, not what
they gain.

Computed (`--computed` prints that alone): bytes that a step's collectives send, from the shape, and
the time for them at the links' published rates, beside the least time for the rest of the step.
Nothing in that table was measured, and the time it takes to begin a collective is not in it.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from twostroke import LLM
from twostroke.exec.ranks import encode_plan
from twostroke.measure.roofline.hardware import HARDWARE
from twostroke.measure.roofline.roofline import Roofline, Settings
from twostroke.model.describe.cost import ring_bytes
from twostroke.model.describe.hf_config import load_hf_config
from twostroke.plan import StepPlan
from twostroke.request import EngineRequest, SamplingParams

SHAPES = Path(__file__).parent / "shapes"
SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
STREAMS, PROMPT = 8, 64
WARM_STEPS = 10


# ── measured ────────────────────────────────────────────────────────────────────────────────


class Plans:
    """Followers whose messages are timed, and the plans in them."""

    def __init__(self, followers: Any) -> None:
        self._followers, self.failure = followers, followers.failure
        self.send_s: list[float] = []
        self.sizes: list[int] = []

    def send(self, data: bytes) -> None:
        began = perf_counter()
        self._followers.send(data)
        self.send_s.append(perf_counter() - began)
        self.sizes.append(len(data))


def measure(ranks: int, steps: int, folder: Path) -> dict[str, float]:
    """Of steps that decode `STREAMS` rows."""
    (folder / "config.json").write_text(json.dumps(SMALL))
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        kernels="reference",
        tensor_parallel_size=ranks,
        num_gpu_blocks_override=1024,
    )
    core: Any = llm.engine.core
    executor = core._executor
    plans: list[StepPlan] = []
    forward, sent = executor.forward, None
    if ranks > 1:
        sent = executor._followers = Plans(executor._followers)

    def noted(plan: StepPlan) -> Any:
        plans.append(plan)
        return forward(plan)

    executor.forward = noted
    params = SamplingParams(max_tokens=WARM_STEPS + steps + 1, ignore_eos=True, temperature=0.0)
    for n in range(STREAMS):
        prompt = tuple((31 * n + 7 * at) % 4000 for at in range(PROMPT))
        core.add(EngineRequest(f"r{n}", prompt, params, seed=0))
    walls, last = [], perf_counter()
    while core.has_work:
        core.step()
        now = perf_counter()
        walls.append(now - last)
        last = now
    records = list(core.records.steps)
    kept = slice(-steps - 1, -1)  # decode alone, warm
    encoding = []
    for plan in plans[kept]:
        began = perf_counter()
        encode_plan(plan)
        encoding.append(perf_counter() - began)
    host = [wall - one.device_s for wall, one in zip(walls[kept], records[kept], strict=True)]
    step_s = median(one.device_s for one in records[kept])
    comm_s = median(one.comm_s for one in records[kept])
    found = {
        "ranks": ranks,
        "step_ms": 1e3 * step_s,
        "collectives_ms": 1e3 * comm_s,
        "collectives_share": comm_s / step_s,
        "sent_bytes": median(one.comm_bytes for one in records[kept]),
        "host_us": 1e6 * median(host),
        "encode_us": 1e6 * median(encoding),
        "plan_bytes": median(sent.sizes[kept]) if sent else 0,
        "send_us": 1e6 * median(sent.send_s[kept]) if sent else 0.0,
    }
    del llm, core, executor
    return found


COLUMNS = {
    "ranks": "ranks",
    "step_ms": "step, ms",
    "collectives_ms": "collectives, ms",
    "collectives_share": "share",
    "sent_bytes": "bytes sent by a rank",
    "host_us": "host between steps, µs",
    "encode_us": "plan: encode, µs",
    "plan_bytes": "bytes",
    "send_us": "send, µs",
}


def measured_table(rows: list[dict[str, float]]) -> Iterator[str]:
    yield "| " + " | ".join(COLUMNS.values()) + " |"
    yield "|" + "---|" * len(COLUMNS)
    for row in rows:
        cells = []
        for name in COLUMNS:
            value = row[name]
            if name == "collectives_share":
                cells.append(f"{value:.0%}")
            else:
                cells.append(
                    f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
                )
        yield "| " + " | ".join(cells) + " |"


# ── computed ────────────────────────────────────────────────────────────────────────────────

MODELS = ("llama-3.1-8b", "llama-3.1-70b")
WORK = {
    "decode, 1 stream": (1, False),
    "decode, 64 streams": (64, False),
    "prefill 8,192": (8192, True),
}
CONTEXT = 1024


def computed() -> Iterator[dict[str, Any]]:
    """The least times on H100s: 450 GB/s each way over NVLink, 64 over PCIe 5.0 ×16."""
    links = {"NVLink 4": HARDWARE["H100"].link, "PCIe 5.0": 64e9}
    for name in MODELS:
        spec, _ = load_hf_config(SHAPES / f"{name}.json")
        for work, (tokens, prefill) in WORK.items():
            for ranks in (1, 2, 4, 8):
                settings = Settings(context=CONTEXT, tensor_parallel=ranks)
                roofline = Roofline(spec, HARDWARE["H100"], settings)
                floor = roofline.prefill(tokens) if prefill else roofline.decode(tokens)
                own_s = max(floor.compute_s, floor.memory_s)
                samples = 1 if prefill else tokens
                sent = ring_bytes(spec, ranks, 2, tokens, samples) * (ranks - 1) / ranks
                yield {
                    "model": name,
                    "work": work,
                    "ranks": ranks,
                    "fits": roofline.weight_bytes < 0.9 * ranks * HARDWARE["H100"].memory,
                    "own_ms": 1e3 * own_s,
                    "sent_mb": sent / 1e6,
                    "collectives": 2 * spec.num_layers + 3 if ranks > 1 else 0,
                    **{link: 1e3 * sent / rate for link, rate in links.items()},
                }


def computed_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "Computed from published figures (H100 SXM), not measured:"
    head = ["model", "work", "ranks", "the rest, ms", "sent by a rank, MB"]
    head += ["over NVLink 4, ms", "over PCIe 5.0, ms", "collectives"]
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * 8
    for row in rows:
        own = f"{row['own_ms']:.2f}" + ("" if row["fits"] else " (does not fit)")
        cells = [row["model"], row["work"], row["ranks"], own, f"{row['sent_mb']:,.2f}"]
        cells += [f"{row['NVLink 4']:.3f}", f"{row['PCIe 5.0']:.3f}", row["collectives"]]
        yield "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--computed", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for ranks in [] if args.computed else map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(ranks, args.steps, Path(folder)))
    floors = list(computed())
    for line in [*(measured_table(rows) if rows else ()), "", *computed_table(floors)]:
        print(line)
    result = {"machine": platform.machine(), "shape": SMALL, "streams": STREAMS}
    result |= {"measured": rows, "computed": floors}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"measured": rows}))


if __name__ == "__main__":
    main()
