"""`bench.gpu` without a GPU: how results are kept, told and drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import gpu
from bench.gpu_parts import busy_and_span
from bench.gpu_picture import draw
from bench.gpu_report import BEGIN, END, PICTURE, floors_of, group_of, put_into, read, tables

LARGE = "llama-3.1-8b"
CURVE = [
    {
        "budget": budget,
        "prompt": 32000,
        "steady_ms": 6.0,
        "worst_ms": 6.0 * times,
        "worst_over_steady": times,
        "long_ttft_s": ttft,
    }
    for budget, times, ttft in ((8192, 38.0, 1.6), (512, 3.5, 2.9), (2048, 9.25, 1.9))
]
DECODE = [{"batch": 1, "tpot_ms": 4.5}]
NANO = [
    {"budget": b, "tok_s": t, "steps": 10, "decode_step_ms": 5.0, "idle_share": 0.01}
    for b, t in ((512, 9000.0), (8192, 10490.0))
]


def make_run(file: Path, deadline_s: float | None = None) -> gpu.Run:
    return gpu.Run(False, 300.0, deadline_s, str(file), "", {})


def test_time_in_which_kernels_overlap_counts_once() -> None:
    events = [("a", 0.0, 2.0), ("b", 1.0, 3.0), ("c", 1.5, 1.75), ("d", 4.0, 5.0)]
    assert busy_and_span(events) == (4.0, 5.0)
    assert busy_and_span([]) == (0.0, 0.0)


def test_the_final_run_keeps_every_part_as_soon_as_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "result.json", []
    commands: list[list[str]] = []

    def start(self: gpu.Run, command: list[str], env: Any = None, show: bool = True) -> Iterator:
        commands.append(command[2:4])
        for part in command[3].split(","):
            result: Any = DECODE if part == "decode" else {}
            if part == "start":
                result = {"imported_at": 2e9, "first_token_at": 2e9 + 5, "ready_s": 4.0}
            yield "RESULT " + json.dumps({"part": part, "result": result})
            seen.append(part in json.loads(file.read_text())[command[2]])

    monkeypatch.setattr(gpu.Run, "_start", start)
    run = make_run(file)
    run.final()
    assert all(seen)
    assert commands[0] == [LARGE, "start,prefill,decode,nano,profile"]
    assert commands[-1] == [LARGE, "start"]
    kept = json.loads(file.read_text())
    assert kept[LARGE]["decode"] == DECODE
    assert {"cold_s", "warm_s", "cold_imports_s", "warm_ready_s"} <= set(kept[LARGE]["start"])


def test_a_process_is_not_started_when_no_time_is_left(tmp_path: Path) -> None:
    assert list(make_run(tmp_path / "r", deadline_s=1.0)._start(["-c", "print(1)"])) == []
    assert list(make_run(tmp_path / "r")._start(["-c", "print(1)"])) == ["1"]


def test_a_part_that_failed_does_not_hide_an_earlier_result(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.write_text(json.dumps({LARGE: {"decode": DECODE, "nano": [{}]}}))
    second.write_text(json.dumps({LARGE: {"decode": {"error": "gone"}, "nano": NANO}}))
    assert read([str(first), str(second)])[LARGE] == {"decode": DECODE, "nano": NANO}


def test_tables_set_each_figure_beside_its_floor_and_its_peer(tmp_path: Path) -> None:
    peer = {"decode": [{"batch": 1, "tpot_ms": 4.98}], "nano": [{"tok_s": 9536}]}
    vllm = tmp_path / "vllm.json"
    vllm.write_text(json.dumps({LARGE: peer | {"start": {"ready_s": 61}}}))
    profile = {
        "decode 1": {"nvjet_x": 3.0, "cublasLt::splitKreduce_kernel<x>": 0.5, "_decode": 1.0}
    }
    shown = tables(
        {
            LARGE: {
                "decode": DECODE,
                "nano": NANO,
                "interference": CURVE,
                "profile": profile,
                "start": {"cold_s": 30.5},
            }
        },
        str(vllm),
    )
    assert (
        "| llama-3.1-8b, decode, 1 at a time | 3.80 ms | **4.50 ms** | 84% | 4.98 ms | 1.11× |"
        in shown
    )
    assert "**10,490 tok/s** | | 9,536 tok/s | 1.10× |" in shown
    assert "first token, cold | | 30.5 s | | 61 s (imports apart) | 2.0× |" in shown
    assert "| llama-3.1-8b, decode 1 | 3.50 | 1.00 | 0.00 |" in shown
    assert "budget 2,048 | 6.0 ms | 55.5 ms | 9.2× | 1.90 s |" in shown
    assert group_of("void at::native::_scatter_gather_elementwise_kernel") == "row state, copies"


def test_the_ledger_has_the_tables_of_the_results() -> None:
    shown = tables(read(["bench/results/gpu_h200.json"]))
    page = Path("docs/PERFORMANCE.md").read_text()
    assert page.split(BEGIN)[1].split(END)[0].strip() == shown.strip()
    assert f"]({PICTURE})" not in page or Path("docs", PICTURE).exists()


def test_floors_of_a_format_a_phase_are_those_of_each() -> None:
    both = {"prefill_quantization": "fp8", "decode_quantization": "int4", "max_num_seqs": 8}
    fp8, int4 = (floors_of(LARGE, {"quantization": one}) for one in ("fp8", "int4"))
    for work, floor in floors_of(LARGE, both).items():
        assert floor == (fp8 if work.startswith("prefill") else int4)[work]
    assert fp8["decode 1"] > int4["decode 1"]


def test_tables_take_the_place_of_older_ones(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put_into(page, "| new |")
    assert page.read_text() == f"before\n{BEGIN}\n| new |\n{END}\nafter\n"


def test_the_picture_is_an_image_that_says_the_numbers() -> None:
    root = ElementTree.fromstring(draw(CURVE))
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert "32 streams decoding at 6.0 ms, a prompt of 32,000 tokens arrives" in texts
    assert [text for text in texts if "× (" in text] == [
        "3.5× (21 ms)",
        "9.2× (56 ms)",
        "38.0× (228 ms)",
    ]
    heights = [float(e.get("height", "")) for e in root.iter() if e.get("class") == "bar"]
    assert heights == sorted(heights)
    assert heights[0] / heights[2] == pytest.approx(3.5 / 38, abs=0.01)
