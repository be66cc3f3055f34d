"""Slow or endless work for one request does not delay other requests."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Running, running
from tests.tiny import tiny_folder, tiny_llm
from twostroke.engine.grammar_check import GrammarCheck
from twostroke.errors import RequestError
from twostroke.request import StructuredOutputs
from twostroke.sandbox import LimitExceeded

pytestmark = pytest.mark.core  # bounds of security

PATIENCE_S = 240
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FOREVER = "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
MEMORY = "{{ range(99999)|map('string')|join('x'*99999)|length }}"
# The model's own: endless for one message, good for all others.
TEMPLATE = (
    "{% if messages[0].content == 'for ever' %}" + FOREVER + "{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
Answer = tuple[int, dict[str, str], bytes]


def chat(content: str = "the fox", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}


def costly(n: int) -> dict[str, Any]:
    """A grammar that takes a checker the maximal time."""
    patterns = [{"type": "string", "pattern": f"^.*x{k}_{n}.*$"} for k in range(300)]
    return chat(structured_outputs={"json": {"allOf": patterns}})


def message(answer: Answer) -> str:
    return str(json.loads(answer[2])["error"]["message"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder), trust_request_chat_template=True) as one:
        yield one


def test_costly_grammars_keep_nothing_else_waiting_and_too_many_are_refused(
    server: Running,
) -> None:
    known = chat(structured_outputs={"choice": ["yes", "no"]})
    assert server.ask("POST", CHAT, known)[0] == 200
    with ThreadPoolExecutor(40) as pool:
        asked: list[Future[Answer]] = [
            pool.submit(server.ask, "POST", CHAT, costly(n)) for n in range(40)
        ]
        while sum(one.done() for one in asked) < 20:  # those that find the queue full
            time.sleep(0.005)
        for method, path, body in (
            ("GET", "/metrics", None),
            ("GET", "/health", None),
            ("POST", COMPLETIONS, {"prompt": "the", "max_tokens": 1}),
            ("POST", CHAT, chat()),
            ("POST", CHAT, known),
        ):
            assert server.ask(method, path, body)[0] == 200
        assert not all(one.done() for one in asked)  # and yet the others have been answered
        answers = [one.result(PATIENCE_S) for one in asked]
    assert {status for status, _, _ in answers} == {400, 429}
    for answer in answers:
        if answer[0] == 429:
            assert answer[1]["retry-after"] == "1"
            assert "new grammars are waiting" in message(answer)
        else:  # the second text: on a busy machine the limit of the waiting time comes first
            refused = r"the grammar (is too complex|could not be checked) \(it takes "
            assert re.search(refused, message(answer))
    assert sum(status == 400 for status, _, _ in answers) >= 18  # two at work, sixteen waiting


def test_a_grammar_found_bad_is_not_compiled_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = chat(structured_outputs={"regex": "a(b"})
    first = server.ask("POST", CHAT, bad)
    grammars = server.client.input_processor.grammars
    monkeypatch.setattr(grammars._pool, "ask", lambda request: pytest.fail("asked again"))
    second = server.ask("POST", CHAT, bad)
    assert first[0] == second[0] == 400
    assert first[2] == second[2]


@pytest.mark.parametrize("transient", [False, True])
def test_a_limit_is_remembered_unless_it_was_the_machines(
    transient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may not run a check for seconds: that says nothing about the grammar."""
    check, asked = GrammarCheck("{}", []), []

    def ask(request: bytes) -> bytes:
        asked.append(request)
        raise LimitExceeded("it takes long", transient)

    monkeypatch.setattr(check._pool, "ask", ask)
    reason = "could not be checked .*try again" if transient else "the grammar is too complex"
    for _ in range(2):
        with pytest.raises(RequestError, match=reason):
            check.check(StructuredOutputs(regex="a+"))
    assert len(asked) == (2 if transient else 1)
    check.close()


def test_an_endless_template_of_the_model_costs_its_own_request_only(server: Running) -> None:
    assert server.ask("POST", CHAT, chat())[0] == 200
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.ask, "POST", CHAT, chat("for ever")) for _ in range(4)]
        assert server.ask("GET", "/health")[0] == 200
        assert server.ask("GET", "/metrics")[0] == 200
        assert not any(one.done() for one in asked)
        for one in asked:
            answer = one.result(PATIENCE_S)
            assert answer[0] == 400
            assert message(answer).startswith("the model's chat template cannot be rendered")
            assert "" in message(answer)
    assert server.ask("POST", CHAT, chat())[0] == 200


@pytest.mark.parametrize(("template", "why"), [(FOREVER, "it takes "), (MEMORY, "memory")])
def test_a_requests_template_costs_its_own_request_only(
    server: Running, template: str, why: str
) -> None:
    good = chat(chat_template="{{ messages[0].content }}")
    answer = server.ask("POST", CHAT, chat(chat_template=template))
    assert answer[0] == 400
    assert message(answer).startswith("the request's chat template cannot be rendered")
    assert why in message(answer)
    assert json.loads(answer[2])["error"]["param"] == "chat_template"
    assert server.ask("POST", CHAT, good)[0] == 200


def test_templates_of_requests_that_hang_do_not_delay_the_models_own(server: Running) -> None:
    with ThreadPoolExecutor(14) as pool:
        body = chat(chat_template=FOREVER)
        asked = [pool.submit(server.ask, "POST", CHAT, body) for _ in range(14)]
        assert server.ask("POST", CHAT, chat())[0] == 200
        assert sum(one.done() for one in asked) < len(asked)
        statuses = [one.result(PATIENCE_S)[0] for one in asked]
    assert set(statuses) == {400, 429}


def test_scrapes_at_the_same_time_share_one(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = server.app.service.metrics
    go, calls, text = threading.Event(), [], metrics.text

    def slow() -> bytes:
        calls.append(1)
        go.wait(PATIENCE_S)
        return text()

    monkeypatch.setattr(metrics, "text", slow)
    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(server.ask, "GET", "/metrics") for _ in range(10)]
        assert server.ask("POST", CHAT, chat())[0] == 200
        assert server.ask("GET", "/health")[0] == 200
        go.set()
        assert [one.result(PATIENCE_S)[0] for one in asked] == [200] * 10
    assert len(calls) < 10


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (COMPLETIONS, {"prompt": "7" * 70_000}, "70000 characters, and at most 255 tokens"),
        (COMPLETIONS, {"prompt": "7" * 60_000}, "at least 8192 tokens, and at most 255"),
        (CHAT, chat("7" * 70_000), "70000 characters, and at most 255"),
        (
            COMPLETIONS,
            {"prompt": "a", "bad_words": [f"{n}" + "7" * 250 for n in range(1024)]},
            "bad_words have more than 16384 tokens together",
        ),
        (CHAT, {"messages": chat()["messages"] * 300}, "300 messages, and at most 255"),
        (CHAT, chat(tools=[], chat_template_kwargs={"x": "y" * 2**21}), "bytes with its messages"),
        ("/tokenize", {"prompt": "7" * 70_000}, "70000 characters"),
        ("/detokenize", {"tokens": [5] * 257}, "257 ids, and at most 256"),
    ],
)
def test_what_is_too_long_is_refused_before_it_takes_memory(
    server: Running, path: str, body: dict[str, Any], says: str
) -> None:
    answer = server.ask("POST", path, body)
    assert answer[0] == 400
    assert says in message(answer)


def test_a_thread_that_hangs_does_not_keep_the_process_from_ending() -> None:
    script = (
        "import asyncio, threading\n"
        "from twostroke.serve.generation.prompts import ThreadPool\n"
        "async def main():\n"
        "    pool = ThreadPool('jobs', 1, 1)\n"
        "    jobs = [asyncio.create_task(pool.run(threading.Event().wait)) for _ in range(3)]\n"
        "    await asyncio.wait(jobs, timeout=0.2)\n"
        "    print(jobs[2].exception().status)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (0, "429\n")


def test_sigterm_ends_a_server_whose_template_hangs(folder: Path) -> None:
    from tests.server.test_process import process

    with process(folder, drain_s=1) as (child, port), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(_post_chat, port, chat("for ever"))
        time.sleep(0.5)
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_S) == 0
        asked.result(PATIENCE_S)


def _post_chat(port: int, body: Any) -> int:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", CHAT, json.dumps(body), headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
