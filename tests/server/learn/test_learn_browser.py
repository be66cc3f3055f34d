"""/learn in a real browser: lessons walked to their answers, and pictures compared with the records
they came from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.server.browser import CONTROL, KEY_EVENT, SHIFT, Browser, Page
from tests.server.learn.learn_page import IDLE, READY, LearnPage, learn_page
from tests.server.legible import each_look, spilt_text
from tests.server.running import Running, running
from tests.tiny import tiny_folder, tiny_llm
from twostroke.config import EngineConfig
from twostroke.kernels import cpu
from twostroke.kv.cache import KVCache, KVSequence
from twostroke.measure.roofline.hardware import Hardware
from twostroke.measure.roofline.roofline import Roofline, RooflineSettings
from twostroke.observe.ceilings import Ceilings
from twostroke.observe.record import ENGINE_STEPS, RequestRecord, StepRecord
from twostroke.serve.monitor.ceilings_probe import CeilingsProbe

GEMMA2: dict[str, Any] = {"head_dim": 24, "sliding_window": 40, "query_pre_attn_scalar": 20}
SPILT = "h2,h3,p,dt,dd,th,td,label,output,summary,button,.button,.legend li"


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder), engine=EngineConfig(model=str(folder))) as server:
        yield server


class Recorded:
    """The engine's own records of the newest run of an experiment."""

    def __init__(self, learn: LearnPage, server: Running, experiment: str) -> None:
        (arm,) = learn.last(experiment)["arms"]
        known = {one.request_id: one for one in server.client.records.requests}
        self.requests: list[RequestRecord] = [known[one["request_id"]] for one in arm["requests"]]
        self.steps = {one.step: one for one in server.client.records.steps}

    def steps_of(self, request: RequestRecord) -> list[StepRecord]:
        """The chunks and decode steps of a request, in order."""
        numbers = [step for _, step, _, _ in request.chunks]
        numbers += [step for step in request.token_step if step not in numbers]
        return [self.steps[number] for number in numbers]


def numbers(shown: Sequence[dict[str, str]], name: str) -> list[float]:
    return [float(one[name]) for one in shown]


def exactly(values: Sequence[float]) -> Any:
    return pytest.approx(list(values), rel=1e-6)


def starts(learn: LearnPage, selector: str) -> list[float]:
    return [x for x, *_ in learn.positions(selector)]


def axis(
    ticks: Sequence[tuple[float, float]], scale: Callable[[float], float] = float
) -> Callable[[float], float]:
    """The position of a value, by the first and the last tick of an axis."""
    (low, start), (high, end) = ticks[0], ticks[-1]
    unit = (end - start) / (scale(high) - scale(low))
    return lambda value: start + unit * (scale(value) - scale(low))


def test_a_lesson_is_walked_to_its_answer_and_the_prompt_is_the_recorded_one(
    chrome: Browser, server: Running
) -> None:
    with learn_page(chrome, f"{server.url}/learn") as learn:
        learn.go("lesson/2/1")
        assert learn.answered(0) == "wrong"
        assert learn.right_option() == 1
        assert "engine" in learn.text()
        assert learn.answered(1) == "right"
        learn.page.value("document.querySelector('[data-next]').click()")
        learn.page.wait_for(f"{READY} === 'lesson/2/2'")
        learn.run("run")
        records = Recorded(learn, server, "text")
        steps = records.steps_of(records.requests[0])
        boxes = learn.shown("rect[data-step]")
        assert numbers(boxes, "step") == [one.step for one in steps]
        assert numbers(boxes, "seconds") == exactly([one.device_s for one in steps])
        assert numbers(boxes, "tokens") == [one.prefill.tokens or 1 for one in steps]
        learn.go("lesson/2/3")
        assert len(learn.shown("[data-option]")) == 3
        assert learn.answered(1) in ("right", "wrong")
        assert learn.page.errors == []


@pytest.mark.full
@pytest.mark.parametrize("number", range(1, 7))
def test_each_lesson_is_walked_to_its_answers(
    chrome: Browser, server: Running, number: int
) -> None:
    with learn_page(chrome, f"{server.url}/learn", f"lesson/{number}/1") as learn:
        questions = 0
        for place in range(1, learn.screens() + 1):
            learn.go(f"lesson/{number}/{place}")
            if learn.is_question():
                questions += 1
                learn.answered(0)
                assert learn.answered(learn.right_option()) == "right"
                said = learn.page.value("document.querySelector('[data-agrees]').textContent")
                assert any(one.isdigit() for one in said), "the engine answers with numbers"
        assert questions == 2
        assert learn.page.errors == []


@pytest.mark.parametrize("number", [2, 4])
def test_a_whole_lesson_by_keyboard_alone(chrome: Browser, server: Running, number: int) -> None:
    with learn_page(chrome, f"{server.url}/learn") as learn:
        page = learn.page
        page.tab_to({2: "Prefill", 4: "The KV cache"}[number])
        page.press("Enter")
        page.wait_for(f"{READY} === 'lesson/{number}/1'")
        for place in range(1, learn.screens() + 1):
            page.wait_for(f"{READY} === 'lesson/{number}/{place}'")
            if learn.is_question():
                page.tab_to(page.value("document.querySelector('[data-option] label').textContent"))
                page.press(" ")
                page.press("ArrowDown")
                page.tab_to("Check with the engine")
                page.press("Enter")
                page.wait_for(f"{IDLE} && document.querySelector('.verdict') !== null")
                assert page.value("document.activeElement.dataset.run"), "the focus stays"
            elif number == 2:
                _step_through_a_prompt_by_keys(page)
            else:
                page.tab_to("Run it on the engine")
                page.press("Enter")
                page.wait_for(f"{IDLE} && document.querySelector('.sentence') !== null")
                assert page.value("document.activeElement.dataset.run"), "the focus stays"
            last = place == learn.screens()
            page.tab_to(
                {2: "Lesson 3: Decode", 4: "Lesson 5: Batching"}[number] if last else "Next"
            )
            page.press("Enter")
        page.wait_for(f"{READY} === 'lesson/{number + 1}/1'")
        assert page.inputs == {KEY_EVENT}
        assert page.errors == []


def _step_through_a_prompt_by_keys(page: Page) -> None:
    """Write a prompt, run it, go through its steps, and open its panels."""
    now = "document.querySelector('.now').textContent"
    page.tab_to(page.value("document.querySelector('#view textarea').labels[0].textContent"))
    page.press("a", CONTROL)
    page.type("the fox")
    page.tab_to("Run it on the engine")
    page.press("Enter")
    page.wait_for(f"{IDLE} && document.querySelector('.now') !== null")
    assert page.value("document.querySelector('.tokens').textContent").startswith("<s>the␣fox")
    page.tab_to("Step")
    page.press("Home")
    assert "wait" in page.value(now)
    page.press("ArrowRight")
    assert "prefill" in page.value(now)
    page.tab_to("One step forward", SHIFT)
    page.press(" ")
    assert "decode" in page.value(now)
    page.tab_to("Candidates for the newest token")
    page.press("Enter")
    page.tab_to("Temperature")
    page.press("Home")
    shares = "[...document.querySelectorAll('[data-token]')].map(one => Number(one.dataset.share))"
    assert page.value(shares)[:2] == [1, 0], "at temperature 0 one candidate is left"
    page.tab_to("What each token looks at: attention")
    page.press("Enter")
    page.tab_to("Show the attention")
    page.press("Enter")
    page.wait_for(f"{IDLE} && document.querySelector('rect[data-query]') !== null")


# ── pictures ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def learn(chrome: Browser, server: Running) -> Iterator[LearnPage]:
    with learn_page(chrome, f"{server.url}/learn", "company") as learn:
        yield learn
        assert learn.page.errors == []


def test_the_picture_of_the_stall_is_the_recorded_one(learn: LearnPage, server: Running) -> None:
    learn.run("stall")
    records = Recorded(learn, server, "stall")
    you, visitor = records.requests
    gaps = [after - before for before, after in itertools.pairwise(you.token_s)]
    shown = learn.shown("rect[data-who=you]")
    assert numbers(shown, "step") == list(you.token_step)[1:]
    assert numbers(shown, "seconds") == exactly(gaps)
    chunks = [records.steps[step] for _, step, _, _ in visitor.chunks]
    shown = learn.shown("rect[data-who=visitor]")
    assert numbers(shown, "step") == [one.step for one in chunks]
    assert numbers(shown, "seconds") == exactly([one.device_s for one in chunks])
    at = axis(learn.ticks("[data-result=stall] svg.picture", "x"))
    began = you.received_s
    for who, times in (
        ("you", you.token_s[:-1]),
        ("visitor", [one.committed_s - one.device_s for one in chunks]),
    ):
        drawn = starts(learn, f"[data-result=stall] rect[data-who={who}]")
        assert drawn == pytest.approx([at(time - began) for time in times], abs=0.05)
    (row,) = learn.shown("[data-result=stall] tr[data-arm]")
    assert float(row["gap"]) == pytest.approx(max(gaps))
    assert float(row["ttft"]) == pytest.approx(visitor.first_token_s - visitor.received_s)


@pytest.mark.full
@pytest.mark.skipif(not cpu.available(), reason="needs the native kernels")
def test_the_stall_is_shown_for_every_engine_of_its_own(chrome: Browser, folder: Path) -> None:
    config = EngineConfig(model=str(folder))
    with (
        running(tiny_llm(folder), engine=config, learn_engines=True) as server,
        learn_page(chrome, f"{server.url}/learn", "company") as learn,
    ):
        learn.run("stall")
        arms = learn.last("stall")["arms"]
        rows = learn.shown("[data-result=stall] tr[data-arm]")
        names = ["one piece", "chunks of 128", "a goal of 50 ms", "two pools"]
        assert [one["arm"] for one in rows] == [one["name"] for one in arms] == names
        for row, arm in zip(rows, arms, strict=True):
            times = arm["requests"][0]["token_s"]
            gaps = [after - before for before, after in itertools.pairwise(times)]
            assert float(row["gap"]) == pytest.approx(max(gaps))
        you, visitor = arms[-1]["requests"]
        reading = {step // ENGINE_STEPS for _, step, _, _ in visitor["chunks"]}
        writing = {step // ENGINE_STEPS for step in you["token_step"][1:]}
        assert reading.isdisjoint(writing), "an engine for each phase"
        assert "With two pools" in learn.text()
        assert learn.page.errors == []


def test_the_bars_of_the_batch_and_of_the_context_are_medians_of_recorded_steps(
    learn: LearnPage, server: Running
) -> None:
    learn.run("batch")
    records = Recorded(learn, server, "batch")
    numbers_of = [one.step for request in records.requests for one in records.steps_of(request)]
    ran = [records.steps[one] for one in range(min(numbers_of), max(numbers_of) + 1)]
    decodes = [one for one in ran if one.decode.tokens and not one.prefill.tokens]
    rows = learn.shown("tr[data-streams]")
    assert numbers(rows, "streams") == [1, 2, 4, 8, 16]
    assert numbers(rows, "seconds") == exactly(
        [
            median(one.device_s for one in decodes if one.decode.rows == streams)
            for streams in (1, 2, 4, 8, 16)
        ]
    )
    learn.run("context")
    records = Recorded(learn, server, "context")
    rows = learn.shown("tr[data-context]")
    assert numbers(rows, "context") == [one.num_prompt for one in records.requests]
    assert numbers(rows, "seconds") == exactly(
        [
            median(one.device_s for one in records.steps_of(request) if not one.prefill.tokens)
            for request in records.requests
        ]
    )


def test_the_prefix_hit_is_the_recorded_one(learn: LearnPage, server: Running) -> None:
    learn.run("prefix")
    first, second = Recorded(learn, server, "prefix").requests
    rows = learn.shown("[data-result=prefix] tr[data-cached]")
    assert numbers(rows, "cached") == [first.num_cached, second.num_cached]
    assert numbers(rows, "ttft") == exactly(
        [one.first_token_s - one.received_s for one in (first, second)]
    )


def test_the_picture_of_a_full_cache_has_every_step_and_every_preemption(
    chrome: Browser, folder: Path
) -> None:
    with (
        running(tiny_llm(folder, num_gpu_blocks_override=44)) as server,
        learn_page(chrome, f"{server.url}/learn", "company") as learn,
    ):
        learn.run("full_cache")
        records = Recorded(learn, server, "full_cache")
        drawn = [step for request in records.requests for step in _steps_with_chunks_first(request)]
        assert numbers(learn.shown("[data-result=full_cache] rect[data-step]"), "step") == drawn
        waits = [when for request in records.requests for when, _ in request.preempted]
        assert waits, "44 blocks are too few for four streams"
        at = axis(learn.ticks("[data-result=full_cache] svg.picture", "x"))
        began = min(one.received_s for one in records.requests)
        steps = [records.steps[number] for number in drawn]
        times = [one.committed_s - one.device_s - began for one in steps]
        picture = "[data-result=full_cache] rect"
        assert starts(learn, f"{picture}[data-step]") == pytest.approx(
            [at(time) for time in times], abs=0.05
        )
        assert starts(learn, f"{picture}[data-preempted]") == pytest.approx(
            [at(when - began) for when in waits], abs=0.05
        )
        assert numbers(learn.shown("rect[data-preempted]"), "preempted") == exactly(waits)
        again = sum(tokens for one in records.requests for _, tokens in one.preempted)
        assert f"compute {again} tokens again" in learn.text()
        assert learn.page.errors == []


def _steps_with_chunks_first(request: RequestRecord) -> list[int]:
    return list(dict.fromkeys([*(step for _, step, _, _ in request.chunks), *request.token_step]))


def test_the_dots_of_the_roofline_are_the_recorded_steps(
    chrome: Browser, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CeilingsProbe, "ceilings", Ceilings(2e10, 4e11))
    with learn_page(chrome, f"{server.url}/learn", "roofline") as learn:
        assert learn.shown("circle[data-step]") == []
        learn.run("run")
        records = Recorded(learn, server, "batch")
        dots = learn.shown("circle[data-step]")
        steps = [records.steps[int(one["step"])] for one in dots]
        phases = [one.prefill if one.prefill.tokens else one.decode for one in steps]
        assert numbers(dots, "intensity") == exactly([one.flops / one.num_bytes for one in phases])
        assert numbers(dots, "rate") == exactly(
            [one.flops / step.device_s for one, step in zip(phases, steps, strict=True)]
        )
        alone = {
            step.step
            for request in records.requests
            for step in records.steps_of(request)
            if not (step.prefill.tokens and step.decode.tokens)
        }
        assert {one.step for one in steps} == alone
        assert "ridge 20" in learn.page.value("document.querySelector('svg.picture').textContent")
        picture, dot = "svg.picture", 2 * 3.2
        right = axis(learn.ticks(picture, "x"), math.log)
        up = axis(learn.ticks(picture, "y"), math.log)
        assert learn.positions("circle[data-step]") == [
            pytest.approx([right(intensity) - dot / 2, up(rate) - dot / 2, dot, dot], abs=0.05)
            for intensity, rate in zip(
                numbers(dots, "intensity"), numbers(dots, "rate"), strict=True
            )
        ]
        floors = Roofline(
            None,
            Hardware("this machine", {"fp16": 4e11}, 2e10, 1e9),
            RooflineSettings(prompt=512, context=512),
        )
        floors.cost = server.client.engine.core.cost
        for name, floor in {"prefill": floors.prefill(), "decode": floors.decode()}.items():
            ((x, y, width, height),) = learn.positions(f"circle.ring.{name}")
            assert x + width / 2 == pytest.approx(right(floor.intensity), abs=0.05)
            assert y + height / 2 == pytest.approx(up(floor.flops / floor.floor_s), abs=0.05)
        assert learn.page.errors == []


def test_the_second_run_of_a_prompt_is_drawn_with_its_blocks_and_candidates(
    chrome: Browser, server: Running
) -> None:
    with learn_page(chrome, f"{server.url}/learn", "prompt") as learn:
        for _ in range(2):
            learn.run("run")
        (request,) = Recorded(learn, server, "text").requests
        (told,) = learn.last("text")["arms"][0]["requests"]
        assert request.num_cached > 0
        chips = learn.page.value(
            "[...document.querySelectorAll('.chip')].map(one => one.className)"
        )
        read, written = request.num_prompt - request.num_cached, len(request.token_s)
        kinds = ["cached"] * request.num_cached + ["prefill"] * read + ["decode"] * written
        assert chips == [f"chip {kind}" for kind in kinds]
        size = server.client.info.block_size
        filled = request.num_prompt + written - 1  # the last token's keys are not computed
        blocks = learn.shown(".block")
        assert numbers(blocks, "used") == [
            max(0, min(size, filled - first))
            for first in range(0, request.num_prompt + written, size)
        ]
        cached = learn.page.value("document.querySelectorAll('.block.cached').length")
        assert cached == request.num_cached // size
        newest = told["candidates"][-1]
        shown = learn.shown("[data-panel=candidates] [data-token]")
        assert numbers(shown, "token") == newest["ids"][: len(shown)]
        chances = [math.exp(one) for one in newest["logprobs"]]
        assert numbers(shown, "share") == exactly(
            [one / sum(chances) for one in chances[: len(shown)]]
        )
        learn.page.value("document.querySelector('[data-panel=attention]').open = true")
        learn.run("attention")
        ids = [one["id"] for one in learn.last("text")["tokens"]][:64]
        head = {"tokens": ids, "layer": 1, "head": 0}  # what the sliders show at first
        rows = server.post("/learn/attention", head)["rows"]
        shares = [share for row in rows for share in row]
        assert numbers(learn.shown("rect[data-query]"), "share") == exactly(shares)
        assert learn.page.errors == []


def test_a_prompt_is_made_longer_until_it_is_too_long(learn: LearnPage, server: Running) -> None:
    learn.go("prompt")
    text = "document.querySelector('#view textarea').value"
    learn.page.value(f"{text} = 'a small model'")
    for times in (2, 4):
        learn.page.value("document.querySelector('[data-part=lengthen]').click()")
        assert learn.page.value(text) == " ".join(["a small model"] * times)
    learn.run("run")
    (request,) = Recorded(learn, server, "text").requests
    assert sum(size for *_, size in request.chunks) == request.num_prompt
    for _ in range(7):
        learn.page.value("document.querySelector('[data-part=lengthen]').click()")
    with pytest.raises(AssertionError, match=r"(at most|1 to) \d+ tokens"):
        learn.run("run")
    learn.page.errors.clear()  # the browser notes the answer 400


def test_blocks_that_have_left_a_window_are_drawn_so(
    chrome: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[tuple[int, int]] = []
    drop = KVCache.drop_outside_windows

    def noted(cache: KVCache, sequence: KVSequence) -> list[tuple[int, int]]:
        found = drop(cache, sequence)
        dropped.extend(found)
        return found

    monkeypatch.setattr(KVCache, "drop_outside_windows", noted)
    folder = tiny_folder(tmp_path / "gemma", model_type="gemma2", **GEMMA2)
    left = '[...document.querySelectorAll(`[data-window="{}"] .block`)].map(one => one.className)'
    with (
        running(tiny_llm(folder)) as server,
        learn_page(chrome, f"{server.url}/learn", "prompt") as learn,
    ):
        learn.run("run")
        (request,) = Recorded(learn, server, "text").requests
        windows = [group.window for group in server.client.info.kv_groups]
        assert sorted(windows, key=str) == [GEMMA2["sliding_window"], None]
        group = windows.index(GEMMA2["sliding_window"])
        count = max(first for which, first in dropped if which == group)
        total = -(-(request.num_prompt + len(request.token_s)) // server.client.info.block_size)
        assert 0 < count < total
        shown = learn.page.value(left.format(GEMMA2["sliding_window"]))
        assert shown[:count] == ["block left"] * count
        assert "block left" not in shown[count:]
        assert "block left" not in learn.page.value(left.format("all"))
        learn.page.value("document.querySelector('input[aria-label=Step]').focus()")
        learn.page.press("Home")
        assert "block left" not in learn.page.value(left.format(GEMMA2["sliding_window"]))
        assert learn.page.errors == []


def test_a_prediction_is_shown_beside_what_the_records_say(
    chrome: Browser, server: Running
) -> None:
    with learn_page(chrome, f"{server.url}/learn", "predict?prompt=64&answer=16") as learn:
        learn.run("calibration")
        learn.run("predict")
        requests = Recorded(learn, server, "predict").requests
        assert [(one.num_prompt, one.max_tokens) for one in requests] == [(64, 16)] * 3
        ttft, tpot, _ = learn.shown("tr[data-row]")
        assert float(ttft["measured"]) == pytest.approx(
            median(one.first_token_s - one.received_s for one in requests)
        )
        assert float(tpot["measured"]) == pytest.approx(
            median((one.token_s[-1] - one.token_s[0]) / 15 for one in requests)
        )
        assert learn.page.errors == []


@pytest.mark.full
def test_every_view_fits_every_width_in_light_and_dark(chrome: Browser, server: Running) -> None:
    views = ("sliders", "prompt", "roofline", "predict", "company", "quiz", "myths", "lesson/1/1")
    with learn_page(chrome, f"{server.url}/learn") as learn:
        for view in views:
            learn.go(view)
            for width, scheme in each_look(learn.page, (320, 768, 1280)):
                assert spilt_text(learn.page, SPILT) == [], (view, width, scheme)
        assert learn.page.errors == []
