"""Attacks of `hostile.py` through HTTP: bodies, connections, keys and routes. Each attack once hurt
the stream of another client. Also the functions with which all attacks send requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from bench.hostile import Attack, AttackTarget, Fire
from bench.hostile_watch import ATTACK_S

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
MODEL = "SmolLM2-135M-Instruct"  # the default model; some APIs require its name
JSON = {"Content-Type": "application/json"}
RAW_HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\n"
KEYS = ("first-key", "second-key")

# ── asking ────────────────────────────────────────────────────────────────────────────────────────


def ask(
    port: int, method: str, path: str, body: bytes | None = None, key: str | None = None
) -> tuple[int, bytes]:
    """Return status and answer. A server may close the connection before the end of the body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ATTACK_S)
    headers = dict(JSON) if body is not None else {}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.putrequest(method, path)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def post(port: int, path: str, body: Any, key: str | None = None) -> tuple[int, bytes]:
    return ask(port, "POST", path, json.dumps(body).encode(), key)


def warm_up(target: AttackTarget) -> None:
    """Send one request of each kind, to start everything that starts with a first request."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        for key in (None, KEYS[0]):
            schema = {"type": "json_object"}
            post(target.port, CHAT, {"messages": HELLO, "max_tokens": 2}, key)
            post(target.port, CHAT, {"messages": HELLO, "max_tokens": 4,
                 "response_format": schema}, key)  # fmt: skip
        ask(target.port, "GET", "/metrics")


def told(answers: Iterable[tuple[int, bytes]]) -> str:
    """Return the number of answers by status, and the message of the first refusal."""
    answers = list(answers)
    counts = Counter(status for status, _ in answers)
    text = ", ".join(f"{count}× {status}" for status, count in sorted(counts.items()))
    for status, answer in answers:
        if status >= 400:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text += f": {json.loads(answer)['error']['message'][:160]}"
            break
    longest = max(len(answer) for status, answer in answers if status >= 400 or status == 200)
    failed = any(status >= 500 and status not in (501, 503) for status in counts)
    return f"{'FAILED ' if failed else ''}{text} ({longest:,} bytes at most)"


def at_once(port: int, path: str, bodies: list[bytes]) -> list[tuple[int, bytes]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: ask(port, "POST", path, body), bodies))


def sending(path: str, body: Callable[[], Any], times: int = 1) -> Callable[[AttackTarget], Fire]:
    """Return an attack with one body, sent once or several times at once."""

    def prepare(target: AttackTarget) -> Fire:
        made = body()
        data = made if isinstance(made, bytes) else json.dumps(made).encode()
        return lambda: told(at_once(target.port, path, [data] * times))

    return prepare


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 4, **fields}


# ── bodies ────────────────────────────────────────────────────────────────────────────────────────


def nested_metadata() -> bytes:
    inner = b",".join([b"[[[]]]"] * 1_800_000)
    return b'{"messages":[{"role":"user","content":"hi"}],"metadata":{"a":[%b]}}' % inner


def long_name() -> bytes:
    return b'{"messages":[{"role":"user","content":"hi"}],"%b":1}' % (b"temperatur" * 1_400_000)


def many_parts() -> Any:
    return chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 200_000}])


def many_messages() -> Any:
    pair = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    return chat(messages=pair * 10_000)


def many_words() -> Any:
    return chat(bad_words=[f"word{n}" for n in range(1_200_000)])


def long_prompt(tokens: int) -> list[int]:
    return [(n * 31) % 40_000 + 100 for n in range(tokens)]


def schema(seed: int, patterns: int = 400) -> dict[str, Any]:
    """Return a JSON schema of some 60 KB, different for each seed, that takes long to compile."""
    properties = {}
    for n in range(patterns):
        words = "|".join(f"[a-z]{{{k},{k + n % 17 + 3}}}{seed}" for k in range(1, 6))
        properties[f"field_{seed}_{n}"] = {"type": "string", "pattern": f"^({words})$"}
    return {"type": "object", "properties": properties, "required": list(properties)}


# ── keys, logs, values ────────────────────────────────────────────────────────────────────────────


def keys(_: Path) -> list[str]:
    return ["--api-key", *KEYS]


def shared_prefix(target: AttackTarget) -> Fire:
    asked = {"prompt": long_prompt(200), "max_tokens": 1}

    def fire() -> str:
        cached = []
        for key in (KEYS[0], KEYS[0], KEYS[1]):
            _, answer = post(target.port, COMPLETIONS, asked, key)
            details = json.loads(answer)["usage"].get("prompt_tokens_details") or {}
            cached.append(details.get("cached_tokens", 0))
        failed = "FAILED " if cached[2] or not cached[1] else ""
        return f"{failed}cached for the first key {cached[1]}, for the second {cached[2]}"

    return fire


def logged_key(target: AttackTarget) -> Fire:
    def fire() -> str:
        ask(target.port, "GET", "/health?api_key=sk-secret-value&x=1")
        text, until = "", perf_counter() + 10.0
        while "/health" not in text and perf_counter() < until:
            sleep(0.1)
            text = target.log.read_text(errors="replace")
        failed = "FAILED " if "sk-secret-value" in text or "/health" not in text else ""
        return f"{failed}the log says {re.findall(r'.*/health.*', text)[-1:]}"

    return fire


FOREIGN_PAGES = (
    {"Host": "rebound.example"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
)
ACTS = (
    "/start_profile",
    "/stop_profile",
    "/pools",
    "/learn/run",
    "/learn/attention",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
)


def foreign_pages(target: AttackTarget) -> Fire:
    """Send requests like a browser on pages of other sites, to a server without an API key."""

    def fire() -> str:
        answers = []
        for headers in FOREIGN_PAGES:
            for path in ACTS:
                connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=ATTACK_S)
                connection.request("POST", path, b"", headers)
                answer = connection.getresponse()
                answers.append((answer.status, answer.read()))
                connection.close()
        failed = "FAILED " if any(status != 403 for status, _ in answers) else ""
        return f"{failed}{told(answers)}"

    return fire


def odd_values(target: AttackTarget) -> Fire:
    bodies = [chat(top_k=0.5), chat(top_k=1e-9), chat(temperature=1e-300), chat(top_p=5e-324)]

    def fire() -> str:
        answers = [post(target.port, CHAT, body) for body in bodies]
        usual, _ = post(target.port, CHAT, chat())
        return f"{'' if usual == 200 else 'FAILED '}{told(answers)}; afterwards {usual}"

    return fire


# ── other APIs ────────────────────────────────────────────────────────────────────────────────────


def many_items() -> Any:
    item = {"type": "function_call_output", "call_id": "c", "output": "x"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    return {"input": [call, item] * 30_000, "max_output_tokens": 4}


def many_blocks() -> Any:
    said = [{"type": "text", "text": "a"}] * 200_000
    return {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": said}]}


def many_tools() -> Any:
    tools = [{"name": f"t{n}", "input_schema": {"type": "object"}} for n in range(100_000)]
    return {"model": MODEL, "max_tokens": 4, "messages": HELLO, "tools": tools}


def ollama_messages() -> Any:
    return {"model": MODEL, "messages": many_messages()["messages"]}


def stored_responses(target: AttackTarget) -> Fire:
    """Store many more answers than the server keeps. Their long inputs share a prefix, so that
    prefill is fast."""
    text = "word " * 4000
    bodies = [
        json.dumps({"input": [{"role": "user", "content": f"{text} {n}"}], "max_output_tokens": 1})
        for n in range(600)
    ]
    data = [body.encode() for body in bodies]

    def fire() -> str:
        with ThreadPoolExecutor(4) as pool:
            asked = pool.map(lambda body: ask(target.port, "POST", "/v1/responses", body), data)
            return told(list(asked))

    return fire


def background_responses(target: AttackTarget) -> Fire:
    """Start many more background answers than may run."""
    body = json.dumps({"input": "hi", "background": True, "max_output_tokens": 64}).encode()
    return lambda: told(at_once(target.port, "/v1/responses", [body] * 200))


def many_records(target: AttackTarget) -> Fire:
    def fire() -> str:
        with ThreadPoolExecutor(16) as pool:
            path = "/records?seconds=600"
            return told(list(pool.map(lambda _: ask(target.port, "GET", path), range(200))))

    return fire


HTTP_ATTACKS = [
    Attack("nested metadata", sending(CHAT, nested_metadata)),
    Attack("nested metadata × 14", sending(CHAT, nested_metadata, 14)),
    Attack("unknown name of 14 MB", sending(CHAT, long_name)),
    Attack("3 M ids detokenized", sending("/detokenize", lambda: {"tokens": [7] * 3_000_000})),
    Attack("200,000 content parts", sending(CHAT, many_parts)),
    Attack("20,000 messages", sending(CHAT, many_messages)),
    Attack(
        "13 MB of allowed ids",
        sending(CHAT, lambda: chat(allowed_token_ids=list(range(100, 40_000)) * 45)),
    ),
    Attack("14 MB of bad words", sending(CHAT, many_words)),
    Attack(
        "1,000 prompts",
        sending(COMPLETIONS, lambda: {"prompt": [f"Text {n}" for n in range(1000)],
                                      "max_tokens": 4}),
    ),
    Attack(
        "n=256 with log-probabilities",
        sending(COMPLETIONS, lambda: {"prompt": "Once", "n": 256, "logprobs": 20,
                                      "max_tokens": 24, "ignore_eos": True, "temperature": 1.0}),
    ),
    Attack(
        "prompt log-probabilities",
        sending(COMPLETIONS, lambda: {"prompt": long_prompt(4000), "prompt_logprobs": 20,
                                      "max_tokens": 1}),
    ),
    Attack(
        "prompt log-probabilities of all tokens",
        sending(COMPLETIONS, lambda: {"prompt": long_prompt(4000), "prompt_logprobs": -1,
                                      "max_tokens": 1}),
    ),
    Attack("60,000 items of /v1/responses", sending("/v1/responses", many_items)),
    Attack("stored responses", stored_responses, max_gap_ms=1e9,  # 600 prompts to compute
           flags=lambda _: ["--max-stored-response-bytes", str(8 << 20)]),
    Attack("200 background responses", background_responses, max_gap_ms=1e9),  # and this 200
    Attack("200,000 blocks of /v1/messages", sending("/v1/messages", many_blocks)),
    Attack("100,000 tools of /v1/messages", sending("/v1/messages", many_tools)),
    Attack("20,000 messages to Ollama", sending("/api/chat", ollama_messages)),
    Attack(
        "a long text to /infill",
        sending("/infill", lambda: {"input_prefix": "a " * 3_000_000, "input_suffix": "b"}),
    ),
    Attack(
        "a long text to /completion",
        sending("/completion", lambda: {"prompt": "word " * 2_500_000, "n_predict": 4}),
    ),
    Attack("/records 200 times", many_records),
    Attack("prefix of another key", shared_prefix, flags=keys, victim=False),
    Attack("key in the log", logged_key, victim=False,
           flags=lambda _: ["--uvicorn-log-level", "info", "--enable-log-requests"]),
    Attack("pages of other sites", foreign_pages, victim=False,
           environment={"TWOSTROKE_SERVER_DEV_MODE": "1"}),
    Attack("odd values", odd_values),
]  # fmt: skip
