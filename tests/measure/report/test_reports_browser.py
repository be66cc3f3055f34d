"""Every report in a real browser: nothing is loaded, and the report is readable on a phone."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.server.browser import Browser
from tests.server.legible import background, each_look, poor_contrast, spilt_text
from tests.server.test_load import served
from tests.tiny import tiny_folder
from twostroke.cli import main
from twostroke.engine.spawn import DEFAULT_BUILDER
from twostroke.measure.load.bench import ServeOptions, run_serve
from twostroke.measure.load.definitions import Goals
from twostroke.measure.load.serve_report import serve_page

PLOTS = {
    "serve": 7,
    "latency": 3,
    "throughput": 3,
    "phases": 2,
    "roofline": 3,
    "profile": 0,
    "why": 0,
}
# Text in a picture that is cut: outside of it, or over another of its words.
CUT = """(() => {
  const cut = [];
  for (const svg of document.querySelectorAll('figure svg')) {
    const box = svg.getBoundingClientRect();
    if (!box.width) continue;
    const texts = [...svg.querySelectorAll('text')].map(one => [one, one.getBoundingClientRect()]);
    for (const [one, at] of texts)
      if (at.left < box.left - 1 || at.right > box.right + 1 || at.bottom > box.bottom + 1)
        cut.push('outside: ' + one.textContent);
    for (const kind of ['mid', 'end', 'mark-text']) {
      const alike = texts.filter(([one]) => one.classList.contains(kind) &&
                                            (kind === 'mark-text' ||
                                             !one.classList.contains('mark-text')));
      alike.forEach(([a, p], n) => alike.slice(n + 1).forEach(([b, q]) => {
        if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 &&
            q.top < p.bottom - 3) cut.push(a.textContent + ' over ' + b.textContent);
      }));
    }
  }
  return cut;
})()"""
SPILT = "h1,h2,p,dt,dd,li,.tile,.tile b,.key,.ledger span,b"
TEXT, DRAWN = "h1,h2,h2 span,p,dt,dd,li,td,th,b,em,text,.key", "polyline,circle,path.dots"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The real commands on a tiny model behind a real server."""
    folder = tmp_path_factory.mktemp("reports")
    model = tiny_folder(folder / "tiny")
    made = {name: folder / f"{name}.html" for name in PLOTS}

    def run(name: str, words: list[str]) -> None:
        # 3: not certified, which a busy machine is
        assert main([*words, "--html", str(made[name])]) in (0, 3), name

    with (
        pytest.MonkeyPatch.context() as patch,
        served(model, DEFAULT_BUILDER, device="cpu", num_gpu_blocks_override=256) as server,
    ):
        patch.setattr("twostroke.measure.load.workload.FIRST_ID", 10)
        patch.setattr("twostroke.measure.load.workload.LAST_ID", 299)
        url = f"http://127.0.0.1:{server.port}"
        made["serve"].write_text(serve_page(outcome(url)), encoding="utf-8")
        run("why", ["why", url, "--slowest", "3"])
        run("phases", ["phases", url, "--prompt-tokens", "40", "--output-tokens", "20"])
        run("roofline", ["roofline", "qwen3-0.6b", "--hardware", "H100", "--server", url])
        load = Thread(target=outcome, args=(url,))
        load.start()
        run("profile", ["profile", url, "--seconds", "1"])
        load.join()
        sizes = ["--model", str(model), "--device", "cpu", "--num-gpu-blocks-override", "64"]
        sizes += ["--input-len", "16", "--output-len", "8"]
        run("latency", ["bench", "latency", *sizes, "--num-iters", "3", "--batch-size", "2"])
        run("throughput", ["bench", "throughput", *sizes, "--num-prompts", "12"])
    return made


def outcome(url: str) -> Any:
    options = ServeOptions(
        url=url,
        num_prompts=36,
        random_input_len=60,
        random_range_ratio=0.8,
        random_output_len=20,
        request_rate=1000.0,  # so that prompts share steps with the first streams
        metric_percentiles=(90.0, 99.0),
        goals=Goals(ttft_s=0.2, tpot_s=0.05),
    )
    found, _ = run_serve(options, lambda sample: None, None, lambda row: None)
    rates = ((8.0, 7.9), (16.0, 15.2), (32.0, 11.0), (22.6, 21.0), (26.9, 17.0))
    found.result["search"] = [
        {
            "request_rate": rate,
            "share": goodput / rate,
            "goodput": goodput,
            "median_ttft_ms": 10 * rate,
            "median_tpot_ms": rate,
            "met": goodput > 0.9 * rate,
        }
        for rate, goodput in rates
    ]
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", PLOTS)
def test_a_report_reads_anywhere(chrome: Browser, reports: dict[str, Path], name: str) -> None:
    address = reports[name].as_uri()
    with chrome.page(address) as page:
        assert [url for url in page.asked if not url.startswith("data:")] == [address]
        assert page.errors == []
        assert page.value("document.querySelectorAll('figure').length") == PLOTS[name]
        said = json.loads(page.value("document.getElementById('result').textContent"))
        assert said["schema_version"] == 1
        assert {"twostroke", "python", "cores"} <= set(said["environment"])
        assert said["definitions"]
        colours = set()
        for width, scheme in each_look(page, (320, 390, 800, 1280)):
            assert page.value(CUT) == [], (width, scheme)
            assert spilt_text(page, SPILT) == [], (width, scheme)
            assert poor_contrast(page, TEXT, DRAWN) == [], (width, scheme)
            colours.add(background(page))
        assert len(colours) == 2


def test_gaps_have_their_causes(reports: dict[str, Path]) -> None:
    """By the step records: most is decode here, and prompts shared some steps."""
    text = reports["serve"].read_text()
    found = json.loads(text.rpartition('id="result">')[2].partition("</script>")[0])
    assert found["gap_causes"]["known_share"] == 1.0
    assert found["gap_causes"]["seconds"]["decode"] > 0
    assert found["gap_causes"]["seconds"]["prefill"] > 0
    assert 'class="dots c-decode"' in text
    assert "coloured by the largest cause" in text
