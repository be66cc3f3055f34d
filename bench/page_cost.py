"""The cost of an open page: streams beside the chat, `/learn` and `/dash`, and beside no page.

    python -m bench.page_cost server [--cycles 7] [--window 10] [--json FILE]
    python -m bench.page_cost browser [--cycles 7] [--window 10] [--json FILE]
    python -m bench.page_cost weight [--json FILE]

The load and the order of the windows are those of `bench.observer_cost`.

server: a light client sends the requests of the page at the same rate: the cost of a browser on
another machine. In the chat a user types all the time, `/learn` runs on an uncalibrated machine,
and the last arm computes attention in each window. Before that, without load: the server's share of
the processors for each page, which is more exact than tokens a second on a shared machine.
browser: Chromium shows the page on the same cores as the engine. The page is loaded before the
window.
weight: requests, bytes and the time to interactive of each page, in Chromium without a cache.
Ends with one JSON line. Exit status 1 if the server or the browser takes 2% of the processors or
more for a page.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from bench.observer_cost import (
    MAX_COST,
    USERS,
    ObserverArm,
    cpu_s,
    judged,
    measure,
    nothing,
    save,
    tree_cpu_s,
)
from bench.witness import Json
from tests.server.browser import Browser, Page, browser
from twostroke.measure.compare.arms import serving
from twostroke.measure.load.http_client import Connections, Endpoint

# A page's path, and a script that is true when the page is interactive.
PAGES = {
    "chat": ("/", "document.documentElement?.dataset.ready === 'true'"),
    "learn": ("/learn", "document.getElementById('view')?.dataset.ready === 'start'"),
    "dash": ("/dash", "document.getElementById('state')?.dataset.state === 'live'"),
}
TYPED = {"messages": [{"role": "user", "content": "a draft of about this many words " * 4}]}
TYPED_S, FACTS_S, FEED_S = 0.4, 2.5, 1.0  # how often the chat, /learn and /dash ask
ATTENDED = list(range(100, 164))
DRAWN_S = 1.0  # from a page that is ready to one that is drawn
START_S, IDLE_WINDOW_S = 8.0, 20.0
LOADS = 5


# ── page requests ─────────────────────────────────────────────────────────────────────────────────

Ask = Callable[[Connections], Coroutine[Any, Any, Any]]


async def repeat(url: str, window_s: float, every_s: float, ask: Ask) -> None:
    until = perf_counter() + window_s
    connections = Connections(Endpoint(url))
    try:
        while (left_s := until - perf_counter()) > 0:
            await ask(connections)
            await asyncio.sleep(min(every_s, max(0.0, left_s)))
    finally:
        connections.close()


async def chat(url: str, window_s: float) -> None:
    await repeat(url, window_s, TYPED_S, lambda one: one.fetch("/tokenize", TYPED))


async def learn(url: str, window_s: float) -> None:
    await repeat(url, window_s, FACTS_S, lambda one: one.fetch("/learn/facts"))


async def dash(url: str, window_s: float) -> None:
    since = 0

    async def ask(connections: Connections) -> None:
        nonlocal since
        told = await connections.fetch_json(f"/dash/feed?since={since}&window=60&slow=total")
        since = told["num_steps"]

    await repeat(url, window_s, FEED_S, ask)


async def attention(url: str, window_s: float) -> None:
    connections = Connections(Endpoint(url))
    try:
        tokens = [int(perf_counter() * 1000) % 1000 + 100, *ATTENDED[1:]]  # no prompt of before
        await connections.fetch("/learn/attention", {"tokens": tokens, "layer": 0, "head": 0})
    finally:
        connections.close()


SERVER_ARMS = {"chat": chat, "learn": learn, "dash": dash, "attention asked once": attention}


async def idle_shares(url: str, window_s: float) -> dict[str, float]:
    """Return the server's share of this machine's processor time for each page, without load."""
    await asyncio.sleep(START_S)
    shares = {}
    for name, look in {"no page": nothing, **SERVER_ARMS}.items():
        if look is attention:
            continue
        begin, spent_s = perf_counter(), cpu_s()
        await look(url, window_s)
        await asyncio.sleep(max(0.0, window_s - (perf_counter() - begin)))
        elapsed_s = perf_counter() - begin
        shares[name] = round((cpu_s() - spent_s) / elapsed_s / (os.cpu_count() or 1), 4)
    return shares


# ── browser ───────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def shown(page: Page, url: str, ready: str) -> AsyncIterator[None]:
    """Load a page before the window, and leave it afterwards."""
    await asyncio.to_thread(page.call, "Page.navigate", url=url)
    await asyncio.to_thread(page.wait_for, ready)
    await asyncio.sleep(DRAWN_S)
    try:
        yield
    finally:
        await asyncio.to_thread(page.call, "Page.navigate", url="about:blank")


class BrowserArms:
    """The arms of one browser, which shows each page in turn. `shares`: for each window, the
    browser's share of this machine's processor time."""

    def __init__(self, chrome: Browser, page: Page, url: str) -> None:
        self._pid, self.shares = chrome.pid, dict[str, list[float]]()
        self.arms = [ObserverArm("no page", url, self._look("no page"))]
        for name, (path, ready) in PAGES.items():
            beside = partial(shown, page, url + path, ready)
            self.arms.append(ObserverArm(name, url, self._look(name), beside))

    def _look(self, name: str) -> Callable[[str, float], Coroutine[Any, Any, None]]:
        shares = self.shares[name] = []

        async def look(url: str, window_s: float) -> None:
            begin, spent_s = perf_counter(), tree_cpu_s(self._pid)
            await asyncio.sleep(window_s - 0.1)
            elapsed_s = perf_counter() - begin
            shares.append((tree_cpu_s(self._pid) - spent_s) / elapsed_s / (os.cpu_count() or 1))

        return look

    def median_shares(self) -> dict[str, float]:
        """Return the medians without the first window of each arm, which warms up."""
        return {name: round(median(shares[1:]), 4) for name, shares in self.shares.items()}


# ── weight ────────────────────────────────────────────────────────────────────────────────────────

WATCH = (
    "(() => {{ const look = () => {{ if ({ready}) window.readyAt = performance.now(); "
    "else setTimeout(look, 2); }}; setTimeout(look, 0); }})()"
)
ENTRIES = (
    "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
    ".map(one => [one.name, one.transferSize])"
)


def weight(chrome: Browser, url: str, path: str, ready: str) -> Json:
    """Return the medians of page loads with an empty cache."""
    times = []
    for _ in range(LOADS):
        with chrome.page("about:blank") as page:
            page.call("Network.setCacheDisabled", cacheDisabled=True)
            page.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH.format(ready=ready))
            page.call("Page.navigate", url=url + path)
            page.wait_for("window.readyAt !== undefined")
            times.append(float(page.value("window.readyAt")))
            entries = page.value(ENTRIES)
    return {
        "requests": len(entries),
        "bytes": sum(size for _, size in entries),
        "interactive_ms": round(median(times), 1),
        "interactive_ms_of_each": [round(one, 1) for one in times],
    }


def weights(url: str) -> Json:
    with browser() as chrome:
        return {name: weight(chrome, url, *page) for name, page in PAGES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("server", "browser", "weight"))
    parser.add_argument("--cycles", type=int, default=7)
    parser.add_argument("--window", type=float, default=10.0, metavar="S")
    parser.add_argument("--limit", type=float, default=450.0, metavar="S", help="for all cycles")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    result: Json = {"bench": "page_cost", "what": args.what}
    with ExitStack() as stack:
        (url,) = stack.enter_context(serving([""]))
        if args.what == "weight":
            save(result | {"pages": weights(url)}, args.json)
            return
        if args.what == "server":
            shares = asyncio.run(idle_shares(url, IDLE_WINDOW_S))
            arms = [ObserverArm("no page", url, nothing)]
            arms += [ObserverArm(name, url, look) for name, look in SERVER_ARMS.items()]
        else:
            chrome = stack.enter_context(browser())
            shows = BrowserArms(chrome, stack.enter_context(chrome.page("about:blank")), url)
            arms = shows.arms
        rows = asyncio.run(measure(arms, args.cycles, args.window, args.limit))
    found = judged(rows, [arm.name for arm in arms])
    for one in found:
        print(
            f"{one['arm']}, {one['metric']}: {one['change']:+.2%} "
            f"({one['low']:+.2%} to {one['high']:+.2%}), {one['cycles']} cycles"
        )
    gaps = {arm.name: 1e3 * USERS / median(row[arm.name][0] for row in rows) for arm in arms}
    result |= {"window_s": args.window, "mean_gap_ms": gaps, "changes": found}
    if args.what == "browser":
        shares = shows.median_shares()
    save(result | {f"{args.what}_share_of_processors": shares}, args.json)
    if any(shares[name] - shares["no page"] >= MAX_COST for name in PAGES):
        raise SystemExit(f"the {args.what} takes 2% of the processors or more for a page")


if __name__ == "__main__":
    main()
