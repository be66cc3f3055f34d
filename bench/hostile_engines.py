"""Attacks of `hostile.py` on models and engines: grammars, templates, tokenizers, processes, and
the network between engines. Each attack once hurt the stream of another client, or an engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from bench.hostile import Attack, AttackTarget, Fire
from bench.hostile_http import (
    CHAT,
    COMPLETIONS,
    ask,
    at_once,
    chat,
    long_prompt,
    post,
    schema,
    told,
)
from bench.hostile_watch import ATTACK_S, children, engine_pid

# ── grammars ──────────────────────────────────────────────────────────────────────────────────────


# Each mask takes longer than the one before, 3 to 14 ms, and all of them 0.1 s of CPU time.
AMBIGUOUS = """root ::= e
e ::= e e | w
w ::= [a-z] | [a-z] [a-z] | [a-z] [a-z] [a-z] | " "
"""
SIXTEEN = {"prompt": "Once", "n": 16, "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}


def slow_masks(grammar: str | None) -> Callable[[AttackTarget], Fire]:
    """Return an attack with four requests of 16 texts, whose masks are made in the same steps."""
    asked = SIXTEEN if grammar is None else SIXTEEN | {"structured_outputs": {"grammar": grammar}}
    body = json.dumps(asked).encode()
    return lambda target: lambda: told(at_once(target.port, COMPLETIONS, [body] * 4))


def many_bans(target: AttackTarget) -> Fire:
    """Send the plain texts of `slow_masks` with as many bans as a request may have."""
    words = [f"{word}{n}" for n in range(256) for word in ("a", "be", "can", "does")]
    bans = {
        "allowed_token_ids": list(range(2, 49_000)),
        "logit_bias": {str(n): 1.0 for n in range(100, 1_124)},
        "bad_words": words,
    }
    body = json.dumps(SIXTEEN | bans).encode()
    return lambda: told(at_once(target.port, COMPLETIONS, [body] * 4))


def choices_of_a_long_prompt(target: AttackTarget) -> Fire:
    """Ask for 16 choices, which begin and end in the same steps, of a prompt of 7,800 tokens."""
    asked = SIXTEEN | {"prompt": long_prompt(7_800), "max_tokens": 40}
    return lambda: told(at_once(target.port, COMPLETIONS, [json.dumps(asked).encode()]))


def plain_chats(target: AttackTarget) -> Fire:
    return many_chats(target, [chat(seed=n) for n in range(48)])


def many_schemas(target: AttackTarget) -> Fire:
    forms = ({"name": "x", "schema": schema(n)} for n in range(48))
    asked = [chat(response_format={"type": "json_schema", "json_schema": form}) for form in forms]
    return many_chats(target, asked)


def many_chats(target: AttackTarget, asked: list[dict[str, Any]]) -> Fire:
    """Send all bodies at once, while other clients read /metrics and send plain requests."""
    bodies = [json.dumps(one).encode() for one in asked]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

    def fire() -> str:
        slowest: dict[str, float] = {}
        with ThreadPoolExecutor(64) as pool:
            jobs = [pool.submit(ask, target.port, "POST", CHAT, body) for body in bodies]
            while not all(job.done() for job in jobs):
                for name, call in (
                    ("/metrics", partial(ask, target.port, "GET", "/metrics")),
                    ("/health", partial(ask, target.port, "GET", "/health")),
                    ("a tool", partial(post, target.port, CHAT, chat(tools=[tool]))),
                    ("20 KB", partial(post, target.port, CHAT,
                     chat(messages=[{"role": "user", "content": "understanding " * 1_400}]))),
                ):  # fmt: skip
                    start = perf_counter()
                    status, _ = call()
                    took = perf_counter() - start
                    slowest[name] = max(took, slowest.get(name, 0.0))
                    if name.startswith("/") and status != 200:
                        return f"FAILED {name} answered {status}"
            answers = [job.result() for job in jobs]
        times = ", ".join(f"{name} {took:.2f} s" for name, took in slowest.items())
        slow = max(slowest.get("/metrics", 0), slowest.get("/health", 0)) > 1.0
        return f"{'FAILED ' if slow else ''}slowest {times}; {told(answers)}"

    return fire


# ── templates ─────────────────────────────────────────────────────────────────────────────────────

BOMBS = (
    "{{ range(99999)|map('string')|join('x'*99999)|length }}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ ('\\t'*99999).expandtabs(99999)|length }}",
    "{{ ('x'*99999)|replace('x', 'y'*99999)|length }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
)


def foreign_templates(target: AttackTarget) -> Fire:
    bodies = [json.dumps(chat(chat_template=bomb)).encode() for bomb in BOMBS]

    def fire() -> str:
        answers = at_once(target.port, CHAT, bodies)
        usual, _ = post(target.port, CHAT, chat())
        good = all(status == 400 for status, _ in answers) and usual == 200
        return f"{'' if good else 'FAILED '}{told(answers)}; afterwards {usual}"

    return fire


def own_template(folder: Path) -> list[str]:
    (folder / "bomb.jinja").write_text(BOMBS[1])
    return ["--chat-template", str(folder / "bomb.jinja")]


def hung_template(target: AttackTarget) -> Fire:
    def fire() -> str:
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(post, target.port, CHAT, chat()) for _ in range(4)]
            sleep(0.5)
            health, _ = ask(target.port, "GET", "/health")
            answers = [job.result() for job in jobs]
        good = health == 200 and all(400 <= status < 500 for status, _ in answers)
        return f"{'' if good else 'FAILED '}/health {health}, {told(answers)}"

    return fire


# ── tokenizers ────────────────────────────────────────────────────────────────────────────────────

# Patterns that split a text into words, with texts that they take endless time for.
SPLITS = (
    ("(a+)+$", "a" * 60 + "b"),
    ("(?=(a|aa)+$)x", "a" * 60 + "b"),
    ("a+a+b", "a" * 3_000 + "cb"),
    ("a*b", "a" * 60_000 + "cb"),
)


def endless_tokenizer(folder: Path) -> list[str]:
    """Write a tokenizer with the default model's tokens, and with all patterns."""
    from twostroke.config import EngineConfig
    from twostroke.model.find.hub import find_model
    from twostroke.model.find.packaged import DEFAULT_MODEL
    from twostroke.model.text.model_text import open_tokenizer

    config = EngineConfig(model=DEFAULT_MODEL.name)
    tokenizer = open_tokenizer(config, find_model(config))
    assert tokenizer is not None
    content = json.loads(tokenizer.to_json())
    splits = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
        for one, _ in SPLITS
    ]
    steps = [*splits, content["pre_tokenizer"]]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    grown = {"type": "Replace", "pattern": {"Regex": "[q-q]"}, "content": "r" * 60}
    content["normalizer"] = grown
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "config.json").write_text("{}")  # makes it a folder that --tokenizer takes
    return ["--tokenizer", str(folder)]


def endless_texts(target: AttackTarget) -> Fire:
    """Send texts that the tokenizer of the model takes endless time or memory for."""
    texts = [text for _, text in SPLITS] + ["q" * 60_000]
    bodies = [json.dumps({"prompt": text, "max_tokens": 1}).encode() for text in texts]

    def fire() -> str:
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(at_once, target.port, COMPLETIONS, bodies)
            slowest, until = 0.0, perf_counter() + ATTACK_S
            while not job.done() and perf_counter() < until:
                start = perf_counter()
                ask(target.port, "GET", "/health")
                slowest = max(slowest, perf_counter() - start)
                sleep(0.05)
            answers = job.result()
        usual, _ = post(target.port, COMPLETIONS, {"prompt": "hi", "max_tokens": 1})
        good = all(status in (200, 400) for status, _ in answers) and usual == 200 and slowest < 1
        health = f"/health within {slowest:.2f} s"
        return f"{'' if good else 'FAILED '}{told(answers)}; {health}; afterwards {usual}"

    return fire


# ── the network between engines ───────────────────────────────────────────────────────────────────

SECRET = "the secret of the engines that are attacked"
MESSAGE_BYTES = 1024**3


def listening_ports(pids: list[int]) -> list[int]:
    """Return the TCP ports at which processes listen."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(file))
    ports = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # LISTEN
            ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


def two_engines(_: Path) -> list[str]:
    return ["--prefill-engines", "1", "--decode-engines", "1", "--kv-transport", "sockets"]


def long_messages(target: AttackTarget) -> Fire:
    """Send a message of many parts to each socket of the engines, with their secret."""
    import zmq

    from twostroke.network_auth import protect_connector

    def send(port: int) -> bool:
        """Return whether the connection was closed."""
        context: zmq.Context[Any] = zmq.Context()
        peer = context.socket(zmq.DEALER)
        protect_connector(peer, SECRET)
        monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        peer.connect(f"tcp://127.0.0.1:{port}")
        closed = False
        if monitor.poll(10_000):
            monitor.recv_multipart()
            part = bytes(60_000)
            peer.send_multipart([part] * (MESSAGE_BYTES // len(part)), copy=False)
            closed = bool(monitor.poll(30_000))
        context.destroy(linger=0)
        return closed

    def fire() -> str:
        ports = listening_ports(children(target.pid))
        closed = sum(send(port) for port in ports)
        usual, counted = counted_drops(target, "endless")
        good = ports and closed == len(ports) and usual == 200 and counted > 0
        outcome = f"{closed} of {len(ports)} connections closed, counted {counted:g}"
        return f"{'' if good else 'FAILED '}{outcome}; afterwards {usual}"

    return fire


def counted_drops(target: AttackTarget, reason: str) -> tuple[int, float]:
    """Return the status of a request, and the dropped messages that engines then report."""
    usual, _ = post(target.port, CHAT, chat())
    _, metrics = ask(target.port, "GET", "/metrics")
    name = rf'twostroke:dropped_messages_total\{{[^}}]*reason="{reason}"\}} (\S+)'
    return usual, max(map(float, re.findall(name, metrics.decode())), default=0.0)


MALFORMED = (
    [b""],
    [b"\xc1"],
    [b"\x91" * 50_000],  # deeper than a decoder goes
    [b"\xdd\xff\xff\xff\xff"],  # a list of four billion values
    [b"\xc6\xff\xff\xff\xff"],  # four billion bytes
    [b"", b"a"] * 500,
    [b"\x93\x01\x02\x03"],
)
NUM_MALFORMED, NUM_STRANGERS = 20_000, 100


def malformed_messages(target: AttackTarget) -> Fire:
    """Send messages that are not ours to each socket of the engines: many with the secret, and some
    without the secret."""
    import zmq

    from twostroke.network_auth import protect_connector

    def send(port: int, number: int, secret: str | None) -> None:
        context: zmq.Context[Any] = zmq.Context()
        peer = context.socket(zmq.DEALER)
        peer.sndtimeo = 5_000
        protect_connector(peer, secret)
        peer.connect(f"tcp://127.0.0.1:{port}")
        with contextlib.suppress(zmq.Again):
            for n in range(number):
                peer.send_multipart(MALFORMED[n % len(MALFORMED)])
        context.destroy(linger=1_000 if secret else 0)

    def fire() -> str:
        ports = listening_ports(children(target.pid))
        for port in ports:
            for _ in range(NUM_STRANGERS):
                send(port, len(MALFORMED), None)
            send(port, NUM_MALFORMED, SECRET)
        usual, counted = counted_drops(target, "unreadable")
        outcome = f"{len(ports)} sockets, counted {counted:g} unreadable messages"
        return f"{'' if ports and usual == 200 and counted else 'FAILED '}{outcome}; then {usual}"

    return fire


# ── the engine ────────────────────────────────────────────────────────────────────────────────────


def deaths(target: AttackTarget) -> Fire:
    """Kill processes again and again. They are restarted, or the server ends with a reason."""

    def fire() -> str:
        killed = 0
        until = perf_counter() + 150.0
        while perf_counter() < until and killed < 10:
            if not Path(f"/proc/{target.pid}/fd/0").exists():
                break  # the server has ended
            if pid := engine_pid(target.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
            sleep(0.7)
        until = perf_counter() + 60.0
        while perf_counter() < until:
            try:
                status, _ = post(target.port, CHAT, chat())
                if status == 200:
                    return f"{killed} deaths, then it answers again"
            except OSError:
                lines = target.log.read_text(errors="replace").strip().splitlines()
                return f"{killed} deaths, then it ended: {lines[-1][-200:] if lines else ''}"
            sleep(0.5)
        return f"FAILED {killed} deaths, then it neither answers nor ends"

    return fire


def hang(target: AttackTarget) -> Fire:
    def fire() -> str:
        pid = engine_pid(target.pid)
        os.kill(pid, signal.SIGSTOP)
        start = perf_counter()
        noticed = 0.0
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(post, target.port, CHAT, chat())
            while perf_counter() - start < 150.0:
                if not noticed and ask(target.port, "GET", "/health")[0] != 200:
                    noticed = perf_counter() - start
                if engine_pid(target.pid) != pid and ask(target.port, "GET", "/health")[0] == 200:
                    job.result()
                    again = perf_counter() - start
                    good = "" if noticed else "FAILED /health stayed at 200; "
                    return f"{good}noticed after {noticed:.0f} s, another engine after {again:.0f}"
                sleep(0.2)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return "FAILED an engine that stood still for 150 s was not replaced"

    return fire


HANG_TIMEOUT_S = 3


def hang_at_start(target: AttackTarget) -> Fire:
    """Kill the engine, and stop each new engine as soon as it starts, three times."""

    def fire() -> str:
        known: set[int] = set()
        start, until = perf_counter(), perf_counter() + 150.0
        while perf_counter() < until and len(known) < 4:
            pid = engine_process(target.pid)
            if pid and pid not in known:
                os.kill(pid, signal.SIGSTOP if known else signal.SIGKILL)
                known.add(pid)
            sleep(0.05)
        while perf_counter() < until:
            if ask(target.port, "GET", "/health")[0] == 200:
                return f"3 engines stopped at their start, up after {perf_counter() - start:.0f} s"
            sleep(0.2)
        return f"FAILED of 3 engines {len(known) - 1} were stopped, and none is up after 150 s"

    return fire


def engine_process(http_pid: int) -> int:
    for pid in children(http_pid):
        with contextlib.suppress(OSError):
            if b"twostroke.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


ENGINE_ATTACKS = [
    Attack("48 plain chats", plain_chats, max_gap_ms=1e9),  # effect of many users
    Attack("48 schemas", many_schemas, control="48 plain chats"),
    Attack("16 choices of a long prompt", choices_of_a_long_prompt, max_gap_ms=1e9),
    Attack("16 choices of a long prompt, with drafts", choices_of_a_long_prompt,
           control="16 choices of a long prompt",
           flags=lambda _: ["--speculative-config", '{"method": "suffix,ngram"}']),
    Attack("64 plain texts", slow_masks(None), max_gap_ms=1e9),  # effect of many texts
    Attack("64 texts with bans", many_bans, control="64 plain texts"),
    Attack("64 texts with slow masks", slow_masks(AMBIGUOUS), control="64 plain texts"),
    Attack("template of a request", foreign_templates,
           flags=lambda _: ["--trust-request-chat-template"]),
    Attack("template of a model", hung_template, flags=own_template),
    Attack("texts without an end for a tokenizer", endless_texts, flags=endless_tokenizer),
    Attack("messages of 1 GiB to engines", long_messages, victim=False,
           environment={"TWOSTROKE_ENGINE_SECRET": SECRET}, flags=two_engines),
    Attack("malformed messages to engines", malformed_messages,
           environment={"TWOSTROKE_ENGINE_SECRET": SECRET}, flags=two_engines),
    Attack("an engine that dies", deaths, victim=False, max_growth_mib=512),
    Attack("an engine that hangs", hang, victim=False, max_growth_mib=512),
    Attack("an engine that hangs at its start", hang_at_start, victim=False, max_growth_mib=512,
           flags=lambda _: ["--engine-hang-timeout-s", str(HANG_TIMEOUT_S)]),
]  # fmt: skip
