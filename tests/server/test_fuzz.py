"""Bodies that nobody would send, by the hundred: none of them may break or hang the server."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.running import Running, running
from tests.tiny import tiny_llm

CALLS = 400
NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 5, 10**9, 2**31, 2**63, 2**64, 10**40, -(10**40), 0.0, -0.5,
    0.5, 1e-300, 1e308, "", "a", "\x00", "🙂" * 50, "x" * 5000, "{% if 1 %}x{% endif %}",
    "{{", "auto", "none", "required", "text", "json_object", [], [[]], [None], [0], [1, 2], [-1],
    [10**20], ["a"], ["", "b"], [["a"]], [[1], [2]], [{}], {}, {"a": 1}, {"type": "text"},
    {"type": "json_object"}, {"type": "json_schema"}, {"5": 1.5}, {"5": "x"}, {"-1": 0}, {"": {}},
    {"role": "user", "content": "hi"}, [{"role": "user", "content": "hi"}], [{"role": 3}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "x", "content": None}],
    [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "function": {}}],
    {"include_usage": True}, {"json": {"type": "nothing"}}, {"regex": "(a|b)*"}, {"choice": ["a"]},
]  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [4, 5]},
}


@pytest.mark.parametrize("seed", [0])
def test_no_body_breaks_the_server(tmp_path: Path, seed: int) -> None:
    with running(tiny_llm(tmp_path / "tiny"), trust_request_chat_template=True) as server:
        statuses = fuzz(server, seed, CALLS)
        assert statuses[200] > CALLS / 10
        assert statuses[400] > CALLS / 20
        assert server.ask("GET", "/health")[0] == 200


def fuzz(server: Running, seed: int, calls: int) -> dict[int, int]:
    """Most values are of a type that their field takes, so that they get further than the door."""
    random.seed(seed)
    bodies = {route.path: route.body for route in server.app.routes if route.body is not None}
    fitting = {
        (path, name): [one for one in NASTY if fits(kind, GOOD[path] | {name: one})] or NASTY
        for path, kind in bodies.items()
        for name in kind.__struct_fields__
    }
    statuses: dict[int, int] = {}
    for _ in range(calls):
        path = random.choice(list(bodies))
        names = [*bodies[path].__struct_fields__, "nonsense"]
        changed = random.sample(names, random.choice([1, 1, 2, 3]))
        body = dict(GOOD[path])
        for name in changed:
            good = fitting.get((path, name), NASTY) if random.random() < 0.95 else NASTY
            body[name] = random.choice(good)
        status, _, answer = server.ask("POST", path, body)
        assert status in (200, 400, 404), (path, json.dumps(body)[:500], answer[:500])
        statuses[status] = statuses.get(status, 0) + 1
    return statuses


def fits(kind: type[msgspec.Struct], body: dict[str, Any]) -> bool:
    try:
        msgspec.json.decode(json.dumps(body), type=kind)
    except msgspec.DecodeError:
        return False
    return True
