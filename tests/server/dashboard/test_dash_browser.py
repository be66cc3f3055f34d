"""The dashboard in a real browser, under a real load: it shows what `/metrics` says."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_serve import started
from tests.server.browser import Browser, Page
from tests.server.dashboard.dash_page import LIVE, dash_page
from tests.server.legible import background, each_look, poor_contrast, spilt_text
from tests.server.monitor.test_metrics import scrape, value
from tests.server.running import Running, running
from tests.server.test_process import process
from tests.tiny import tiny_llm
from twostroke.kernels import cpu

NOTICE = "document.getElementById('notice').textContent"
SPILT = "h1,h2,dt,dd,th,td:not(.id),button,label,#step span,#step b"  # ids are cut on purpose
TEXT, DRAWN = "dt,dd,h2,#about,footer", ".legend i"


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder)) as server:
        yield server


def ask_many(server: Running, count: int) -> None:
    def ask(n: int) -> None:
        prompt = "the quick brown fox jumps over the lazy dog " * (1 + n % 3) + str(n % 5)
        body = {"prompt": prompt, "max_tokens": 10 + 5 * (n % 4), "ignore_eos": True}
        server.events("/v1/completions", {**body, "stream": True})

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def figure(page: Page, name: str) -> float:
    return float(page.value(f"document.getElementById('{name}').dataset.value"))


def settled(page: Page, server: Running) -> None:
    """Wait until the load has ended and the page shows it."""
    server.assert_idle()
    ended = value(scrape(server), "vllm:request_success_total", finished_reason="length")
    page.value("document.querySelector('[data-window=all]').click()")
    page.wait_for(
        f"state.feed && state.feed.window.seconds === state.feed.server.up_s && "
        f"state.feed.load.running === 0 && state.feed.totals.requests.length === {ended}"
    )


def test_its_figures_are_those_of_metrics(chrome: Browser, server: Running) -> None:
    with dash_page(chrome, server.url) as page:
        assert page.value("document.getElementById('step').textContent") == "No step yet."
        assert "No request" in page.value("document.getElementById('slow-empty').textContent")
        assert figure(page, "running") == figure(page, "total-generated") == 0
        load = threading.Thread(target=ask_many, args=(server, 24))
        load.start()
        page.wait_for("state.steps.length > 20")
        load.join()
        settled(page, server)
        said = scrape(server)
        for name, series, labels in (
            ("waiting", "vllm:num_requests_waiting", {}),
            ("running", "vllm:num_requests_running", {}),
            ("total-prompt", "vllm:prompt_tokens_total", {}),
            ("total-generated", "vllm:generation_tokens_total", {}),
            ("decode-rate", "vllm:generation_tokens_total", {}),
            ("prefill-rate", "twostroke:phase_tokens_total", {"phase": "prefill"}),
            ("cached-share", "vllm:prefix_cache_hits_total", {}),
            ("preemptions", "vllm:num_preemptions_total", {}),
            ("gaps-all-share", "vllm:inter_token_latency_seconds_count", {}),
            ("gap-count", "vllm:inter_token_latency_seconds_count", {}),
            ("first-count", "vllm:time_to_first_token_seconds_count", {}),
            ("ended-length", "vllm:request_success_total", {"finished_reason": "length"}),
            ("ended-abort", "vllm:request_success_total", {"finished_reason": "abort"}),
            ("ended-error", "vllm:request_success_total", {"finished_reason": "error"}),
            ("gaps-all", "vllm:inter_token_latency_seconds_sum", {}),
            ("gaps-decode", "twostroke:gap_seconds_total", {"cause": "decode"}),
            ("gaps-prefill", "twostroke:gap_seconds_total", {"cause": "prefill"}),
            ("gaps-preemption", "twostroke:gap_seconds_total", {"cause": "preemption"}),
            ("gaps-host", "twostroke:gap_seconds_total", {"cause": "host"}),
            ("roof-prefill-flops", "twostroke:phase_flops_total", {"phase": "prefill"}),
            ("roof-decode-bytes", "twostroke:phase_bytes_total", {"phase": "decode"}),
            ("kv-used", "twostroke:kv_cache_tokens", {"state": "used"}),
            ("kv-fragmented", "twostroke:kv_cache_tokens", {"state": "fragmented"}),
            ("kv-cached", "twostroke:kv_cache_tokens", {"state": "cached"}),
            ("kv-free", "twostroke:kv_cache_tokens", {"state": "free"}),
            ("kv-reserved", "twostroke:kv_cache_reserved_tokens", {}),
        ):
            assert figure(page, name) == pytest.approx(value(said, series, **labels)), name
        assert figure(page, "total-requests") == 24
        shown = page.value("document.getElementById('total-generated').textContent")
        assert shown == f"{int(value(said, 'vllm:generation_tokens_total')):,}"
        first = 1e-3 * figure(page, "first-p99")
        below = value(said, "vllm:time_to_first_token_seconds_bucket", le=_above(first))
        assert below >= 0.99 * 24
        assert page.value("document.getElementById('slow').tBodies[0].rows.length") == 8
        said_of_charts = page.value(
            "[...document.querySelectorAll('figure canvas')].map(one => one.ariaLabel)"
        )
        figures = ("time to first token", "prompts read", "gap between tokens", "written")
        over_time = ("running", "waiting", "KV cache", "ended")
        *said_of_charts, errors = said_of_charts
        assert re.fullmatch(r"errors.*: nothing", errors, re.DOTALL)
        for label, name in zip(said_of_charts, (*figures, *over_time), strict=True):
            if name == "waiting" and label.endswith("nothing"):
                continue
            assert re.fullmatch(f"{name}.*, the last 1 min: up to [0-9].*", label, re.DOTALL), label
        assert "weights" in page.value("document.getElementById('about').textContent")
        assert re.fullmatch(
            r"[\d.]+ (K|M|G)iB",
            page.value("document.getElementById('kv-reserved-share').textContent"),
        )
        assert page.errors == []
        assert {url.split("?")[0] for url in page.asked if not url.startswith("data:")} == {
            f"{server.url}/dash",
            f"{server.url}/dash/feed",
        }


def _above(seconds: float) -> str:
    from twostroke.observe.totals import FIRST_BUCKETS

    return str(float(min(one for one in FIRST_BUCKETS if one >= seconds)))


def test_it_fits_any_width_in_light_and_dark(chrome: Browser, server: Running) -> None:
    ask_many(server, 6)
    with dash_page(chrome, server.url) as page:
        colours = set()
        for width, scheme in each_look(page, (320, 390, 768, 900, 1280, 1920)):
            assert spilt_text(page, SPILT) == [], (width, scheme)
            assert poor_contrast(page, TEXT, DRAWN) == [], scheme
            colours.add(background(page))
        assert len(colours) == 2
        columns = "getComputedStyle(document.querySelector('main')).display"
        page.look(390, 844, "dark")
        assert page.value(columns) == "flex"
        page.value("document.getElementById('theme').click()")
        assert page.value("document.documentElement.dataset.theme") == "light"
        assert background(page) in colours


@pytest.mark.skipif(
    not cpu.available() or not hasattr(os, "memfd_create"), reason="native kernels on Linux only"
)
def test_pools_and_what_goes_between_them_are_shown(chrome: Browser, folder: Path) -> None:
    pools = ["--prefill-engines", "1", "--decode-engines", "2", "--num-gpu-blocks-override", "64"]
    cells = "[...document.querySelectorAll('#engines tbody tr')].map(row => row.dataset.name)"
    way = "[...document.querySelectorAll('#transfers tbody td')].map(one => one.textContent)"
    with started("twostroke", "serve", str(folder), *pools) as server:
        body = {"prompt": [5, 6, 7] * 20, "max_tokens": 8, "ignore_eos": True}
        assert server.ask("/v1/completions", body)[0] == 200
        with dash_page(chrome, f"http://127.0.0.1:{server.port}") as page:
            assert page.value(cells) == ["prefill-0", "decode-0", "decode-1"]
            page.wait_for("!document.getElementById('transfers-box').hidden")
            sender, requests, failed, *_ = page.value(way)
            assert (sender, requests, failed) == ("prefill-0 → decode-0", "1", "0")
            assert "decode-0" in page.value("document.getElementById('step').textContent")
            for width, scheme in each_look(page, (320, 768, 1280)):
                assert spilt_text(page, SPILT) == [], (width, scheme)
            assert page.errors == []
        assert server.terminate()[0] == 0


def test_the_keyboard_reaches_everything_and_walks_the_steps(
    chrome: Browser, server: Running
) -> None:
    ask_many(server, 4)
    server.assert_idle()
    with chrome.page(f"{server.url}/dash") as page:
        page.wait_for(f"{LIVE} && state.steps.length > 5")
        reached: list[Any] = []
        for _ in range(12):
            page.press("Tab")
            reached.append(
                page.value("document.activeElement.id || document.activeElement.tagName")
            )
            outline = page.value("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid", reached
            if reached[-1] == "steps":
                break
        assert {"pause", "theme", "steps"} <= set(reached)
        newest = int(page.value("document.getElementById('steps').ariaValueNow"))
        assert newest == page.value("state.since")
        now = "Number(document.getElementById('steps').ariaValueNow)"
        for key, at in (("ArrowLeft", 1), ("ArrowLeft", 2), ("PageDown", 12), ("End", 0)):
            page.press(key)
            assert page.value(now) == newest - at
        page.press("Home")
        assert page.value(now) == page.value("shownSteps[0].number")
        said = page.value("document.getElementById('steps').ariaValueText")
        assert said.startswith("step ")
        assert " ms" in said
        shown = page.value("document.getElementById('step').textContent")
        assert shown.startswith("step ")
        page.press("Escape")
        assert page.value("document.getElementById('step').textContent").startswith("newest")
        page.value("document.getElementById('pause').focus()")
        page.press("Enter")
        page.wait_for("document.getElementById('state').textContent === 'paused'")
        before = len(page.asked)
        time.sleep(1.2)
        assert len(page.asked) - before <= 1, "a page that is paused asks nothing"


def test_a_lost_server_is_told_and_found_again(chrome: Browser, folder: Path) -> None:
    with running(tiny_llm(folder)) as server:
        port = server.port
        ask_many(server, 3)
        with chrome.page(f"{server.url}/dash") as page:
            page.wait_for(f"{LIVE} && state.steps.length > 5")
            server.server.stop()
            page.wait_for(f"{NOTICE}.includes('No answer from the server')")
            server.thread.join()
            assert page.value("document.body.classList.contains('stale')")
            with running(tiny_llm(folder), port=port):
                page.wait_for(LIVE)
                assert page.value("state.steps.length") == 0, "its steps are another server's"
                assert page.value(NOTICE) == ""
                assert not page.value("document.body.classList.contains('stale')")


def test_with_a_key_the_page_asks_for_it_and_keeps_it(chrome: Browser, folder: Path) -> None:
    form = "document.getElementById('key').hidden"
    with (
        running(tiny_llm(folder), api_keys=("sesame",)) as server,
        chrome.page(f"{server.url}/dash") as page,
    ):
        page.wait_for(f"!{form}")
        assert page.value("document.activeElement.id") == "key-text"
        page.write("wrong")
        page.press("Enter")
        page.wait_for(f"{NOTICE}.includes('does not know this key')")
        page.write("sesame")
        page.press("Enter")
        page.wait_for(f"{LIVE} && {form}")
        page.call("Page.reload")
        page.wait_for(f"document.readyState === 'complete' && {LIVE}")
        assert not any("sesame" in url for url in page.asked)


def test_an_engine_that_dies_is_told_and_the_page_goes_on(chrome: Browser, folder: Path) -> None:
    with (
        process(folder, drain_s=5) as (child, port),
        dash_page(chrome, f"http://127.0.0.1:{port}") as page,
    ):
        tasks = Path(f"/proc/{child.pid}/task").iterdir()
        children = " ".join((task / "children").read_text() for task in tasks)
        for pid in children.split():
            if "engine.process" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(int(pid), signal.SIGKILL)
        # It may be back before the page has asked: what it says meanwhile is asked of it alone.
        page.wait_for("document.getElementById('up').textContent.includes('restarted 1×')")
        page.wait_for(f"{LIVE} && {NOTICE} === ''")
        down = "showState({server: {...state.feed.server, up: false}})"
        assert "engine has stopped" in page.value(f"({down}, {NOTICE})")
        assert page.errors == []
