"""The store of `/v1/responses`: limits on number, bytes and age, for each API key."""

from __future__ import annotations

import http.client
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import JSON, PATIENCE_S, Running, running
from tests.tiny import tiny_llm
from twostroke.serve.api.responses.response_store import (
    OVERHEAD_BYTES,
    ResponseStore,
    StoredResponse,
)
from twostroke.serve.api.responses.responses_routes import ResponsesRoutes

KIB = 1024


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def new_store(max_responses: int = 8, max_bytes: int = 64 * KIB) -> tuple[ResponseStore, Clock]:
    clock = Clock()
    return ResponseStore(max_responses, max_bytes, 60.0, clock), clock


def add(
    store: ResponseStore,
    name: str,
    owner: int | None = None,
    num_bytes: int = KIB,
    previous: StoredResponse | None = None,
) -> StoredResponse | None:
    """A request from beginning to end, with the server's calls of the store."""
    one = StoredResponse(owner, name, previous, b"[]", keep=True)
    if not store.reserve(one, 2):
        return None
    if store.write(one, "completed", b"x" * (num_bytes - OVERHEAD_BYTES - 2)):
        store.put(one)
    store.release(one)
    return one


def names(store: ResponseStore, owner: int | None = None) -> list[str]:
    return list(store._usage_of(owner).by_id)


def test_the_oldest_goes_when_there_are_too_many() -> None:
    store, _ = new_store(max_responses=3)
    for n in range(5):
        add(store, f"r{n}", num_bytes=2 * KIB)
    assert names(store) == ["r2", "r3", "r4"]
    assert (store.num_kept, store.num_bytes) == (3, 6 * KIB)
    add(store, "r3", num_bytes=3 * KIB)  # an id that is used again
    assert names(store) == ["r4", "r3"]  # while it ran, it counted beside the other
    assert store.num_bytes == 5 * KIB


def test_the_oldest_go_when_they_are_too_large_and_one_alone_is_not_kept() -> None:
    store, _ = new_store()
    for n in range(3):
        add(store, f"r{n}", num_bytes=20 * KIB)
    add(store, "large", num_bytes=40 * KIB)
    assert names(store) == ["r2", "large"]
    add(store, "larger", num_bytes=65 * KIB)
    assert names(store) == ["r2", "large"]
    assert store.num_bytes == 60 * KIB


def test_they_are_forgotten_with_age() -> None:
    store, clock = new_store()
    add(store, "old")
    clock.now_s += 30
    add(store, "new")
    clock.now_s += 30
    assert store.get(None, "old") is None
    assert store.get(None, "new") is not None
    clock.now_s += 30
    assert store.get(None, "new") is None
    assert (store.num_kept, store.num_bytes) == (0, 0)


def test_a_conversation_holds_its_beginning_and_is_counted_once() -> None:
    store, clock = new_store(max_responses=4)
    first = add(store, "r0", num_bytes=4 * KIB)
    clock.now_s += 50
    second = add(store, "r1", num_bytes=4 * KIB, previous=first)
    clock.now_s += 20
    assert store.get(None, "r0") is None  # too old, but the second goes on from it
    assert (store.num_kept, store.num_bytes) == (2, 8 * KIB)
    assert second is not None
    assert [one.id for one in second.chain()] == ["r1", "r0"]
    third = add(store, "r2", num_bytes=4 * KIB, previous=second)
    store.remove(second)
    assert (store.num_kept, store.num_bytes) == (3, 12 * KIB)
    assert third is not None
    store.remove(third)
    assert (store.num_kept, store.num_bytes) == (0, 0)
    # A request that began before its past was dropped brings it back, and it is counted again.
    fourth = add(store, "r3", num_bytes=4 * KIB, previous=third)
    assert (store.num_kept, store.num_bytes) == (4, 16 * KIB)
    assert fourth is not None
    store.remove(fourth)
    assert (store.num_kept, store.num_bytes) == (0, 0)


def test_whoever_keeps_most_makes_room() -> None:
    store, _ = new_store(max_responses=100)
    add(store, "a", owner=0, num_bytes=8 * KIB)
    for n in range(20):
        add(store, f"b{n}", owner=1, num_bytes=8 * KIB)
    assert names(store, 0) == ["a"]
    assert len(names(store, 1)) == 7
    add(store, "a2", owner=0, num_bytes=8 * KIB)
    assert names(store, 0) == ["a", "a2"]
    assert len(names(store, 1)) == 6


def test_what_runs_is_counted_and_never_dropped_for_others() -> None:
    store, _ = new_store()
    running_ones = [StoredResponse(None, f"r{n}", None, b"[]", keep=True) for n in range(8)]
    assert all(store.reserve(one, 7 * KIB) for one in running_ones)
    assert store.num_bytes == 64 * KIB
    assert add(store, "more") is None
    extra = StoredResponse(None, "x", None, b"", keep=False)
    assert not store.reserve(extra, 0)
    store.release(running_ones.pop())
    assert store.reserve(extra, 0)  # it is not kept, so it counts only in bytes
    events = running_ones[0]
    events.events, events.status, events.background = [], "in_progress", True
    store.put(events)
    count = 0
    while store.add_event(events, b"e" * 100):
        count += 1
    assert count == (7 * KIB) // (100 + 64)
    assert store.num_bytes <= 64 * KIB


@pytest.mark.parametrize("seed", range(8))
def test_random_lives_stay_within_the_limits_and_leave_nothing(seed: int) -> None:
    luck = random.Random(seed)
    store, clock = new_store(max_responses=6, max_bytes=20 * KIB)
    seen: list[StoredResponse] = []
    open_ones: list[StoredResponse] = []
    for _ in range(400):
        clock.now_s += luck.choice((0, 1, 20))
        owner = luck.choice((None, 0, 1))
        do = luck.random()
        if do < 0.5:
            past = luck.choice([None, *[one for one in seen[-9:] if one.owner == owner]])
            one = StoredResponse(owner, f"r{luck.randrange(30)}", past, b"[]", keep=True)
            if store.reserve(one, luck.randrange(2 * KIB)):
                open_ones.append(one)
        elif do < 0.9 and open_ones:
            one = open_ones.pop(luck.randrange(len(open_ones)))
            content = b"x" * luck.randrange(8 * KIB)
            if do < 0.8 and store.write(one, "completed", content):
                store.put(one)
                seen.append(one)
            store.release(one)
        elif seen:
            store.remove(luck.choice(seen))
        assert 0 <= store.num_kept <= 6
        assert 0 <= store.num_bytes <= 20 * KIB
        held = {one for o in open_ones for one in o.chain()}
        held |= {o for s in store._usages.values() for one in s.by_id.values() for o in one.chain()}
        assert store.num_kept == len(held)
        assert store.num_bytes == sum(one.num_bytes for one in held)
    for one in open_ones:
        store.release(one)
    clock.now_s += 100
    store.get(None, "")
    assert (store.num_kept, store.num_bytes) == (0, 0)


# ── through the server ──────────────────────────────────────────────────────────────────────


def store_of(server: Running) -> ResponseStore:
    (route,) = (r for r in server.app.routes if (r.method, r.path) == ("POST", "/v1/responses"))
    assert isinstance(route.handler, ResponsesRoutes)
    return route.handler.store


def test_a_server_keeps_no_more_than_it_is_told(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_stored_responses": 2, "max_stored_response_bytes": 2**20}
    ask = {"input": "hi", "max_output_tokens": 4}
    with running(tiny_llm(tmp_path / "tiny"), **settings) as server:
        kept = [server.post("/v1/responses", ask)["id"] for _ in range(3)]
        statuses = [server.ask("GET", f"/v1/responses/{name}")[0] for name in kept]
        assert statuses == [404, 200, 200]
        store = store_of(server)
        assert store.num_kept == 2
        spoken = [{"role": "user", "content": "hi", "other": "x" * 2**19}]
        assert server.post("/v1/responses", {**ask, "input": spoken})["store"] is True
        assert store.num_bytes < 32 * KIB  # what nobody looks at is not kept
        # The tiny model's template does not show tools, and the response repeats them.
        tools = [{"type": "function", "name": "f", "description": "x" * 2**19}]
        many = {**ask, "tools": tools, "tool_choice": "none"}
        assert server.post("/v1/responses", many)["store"] is True
        assert 2**19 < store.num_bytes <= 2**20
        clock = Clock()
        clock.now_s = time.monotonic()
        store._clock = clock
        name = server.post("/v1/responses", ask)["id"]
        clock.now_s += 24 * 3600 - 1
        assert server.ask("GET", f"/v1/responses/{name}")[0] == 200
        clock.now_s += 2
        assert server.ask("GET", f"/v1/responses/{name}")[0] == 404


def test_a_background_stream_that_cannot_be_stored_fails_and_says_so(tmp_path: Path) -> None:
    with running(tiny_llm(tmp_path / "tiny")) as server:
        store = store_of(server)
        store.max_bytes = 16 * KIB
        ask = {"input": "hi", "max_output_tokens": 200, "ignore_eos": True}
        both = {**ask, "background": True, "stream": True}
        status, _, content = server.ask("POST", "/v1/responses", both)
        assert status == 200
        events = [json.loads(line[6:]) for line in content.splitlines() if line[:6] == b"data: "]
        numbers = [event["sequence_number"] for event in events]
        assert numbers == sorted(set(numbers))
        assert events[-1]["type"] == "response.failed"
        failed = events[-1]["response"]
        assert "--max-stored-response-bytes" in failed["error"]["message"]
        path = f"/v1/responses/{failed['id']}"
        assert json.loads(server.ask("GET", path)[2])["status"] == "failed"
        assert server.ask("GET", f"{path}?stream=true")[0] == 400  # its events made room
        assert store.num_bytes <= 16 * KIB
        # Without a client's wish to see it again there is no such limit on a stream.
        status, _, content = server.ask("POST", "/v1/responses", {**ask, "stream": True})
        assert b"response.incomplete" in content
        assert server.ask("DELETE", path)[0] == 200
        server.ask("POST", "/v1/responses", {**ask, "max_output_tokens": 1, "store": False})
        # A client that leaves a stream takes along what was kept for it.
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        body = json.dumps({**ask, "stream": True, "instructions": "the quick fox"})
        connection.request("POST", "/v1/responses", body, JSON)
        answer = connection.getresponse()
        assert answer.status == 200
        answer.readline()
        connection.close()
        server.assert_idle()
        until = time.monotonic() + PATIENCE_S
        while store.num_bytes != sum(
            one.num_bytes for usage in store._usages.values() for one in [*usage.by_id.values()]
        ):
            assert time.monotonic() < until, "something is counted that is not stored"
            time.sleep(0.005)


def test_a_server_that_stores_nothing_says_so(tmp_path: Path) -> None:
    with running(tiny_llm(tmp_path / "tiny"), max_stored_responses=0) as server:
        ask = {"input": "hi", "max_output_tokens": 4}
        answer = server.post("/v1/responses", ask)
        assert answer["store"] is False
        assert server.ask("GET", f"/v1/responses/{answer['id']}")[0] == 404
        status, _, content = server.ask("POST", "/v1/responses", {**ask, "background": True})
        assert status == 400
        assert "--max-stored-responses" in json.loads(content)["error"]["message"]
        assert store_of(server).num_bytes == 0
