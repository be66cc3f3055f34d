"""The cases of the doctor's exam: injected faults and healthy controls."""

from __future__ import annotations

import os
from typing import NamedTuple

SCHED_IDLE = getattr(os, "SCHED_IDLE", None)


class UserLoad(NamedTuple):
    """A closed-loop load: each user sends the next request after the last answer."""

    users: int
    prompt: int  # tokens
    output: int  # tokens
    pause_s: float = 0.0
    chat: bool = False
    prefix: int = 0  # tokens at the start of each prompt that all users share
    prefixes: int = 1  # number of different shared prefixes, taken in turn
    stagger_s: float = 0.2  # between the starts of two users


class Case(NamedTuple):
    """One server with its flags, its load, and a fault that the doctor should find."""

    name: str
    expected: str  # the cause; "" for a healthy control
    description: str
    serve: tuple[str, ...] = ()  # flags of `twostroke serve`
    loads: tuple[UserLoad, ...] = ()
    faults: tuple[str, ...] = ()  # arguments of `faulty_server.py`
    template: str = ""  # a chat template
    link: tuple[str, float] | None = None  # mode and seconds of `slow_link.py`
    cold: bool = False  # the doctor starts together with the server
    kills_engine: bool = False
    neighbours: int = 0  # processes that compute on the same processors
    neighbour_policy: int | None = None  # scheduling policy of these processes; None: the usual one
    warm_s: float = 1.5  # seconds of load before the doctor starts
    watch_s: float = 8.0  # seconds that the doctor watches


# Renders ChatML after a loop of some millions of iterations.
SLOW_TEMPLATE = (
    "{%- for m in range(COUNT) -%}{%- for n in range(99999) -%}{%- endfor -%}{%- endfor -%}"
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{%- endfor -%}<|im_start|>assistant\n"
)
CHATS = UserLoad(2, 40, 24, chat=True, pause_s=0.1)
LIGHT = UserLoad(1, 40, 16, pause_s=0.4, chat=True)
THROUGHPUT = ("--performance-mode", "throughput")

_FAULTS = (
    Case(
        "queue-long-prompts",
        "queueing_behind_prefills",
        "short requests beside one user who keeps sending prompts of 1,500 tokens",
        (),
        (UserLoad(1, 1500, 2), UserLoad(3, 32, 4, pause_s=0.05)),
    ),
    Case(
        "queue-prompt-bursts",
        "queueing_behind_prefills",
        "short requests beside bursts of three prompts of 800 tokens",
        (),
        (UserLoad(3, 800, 2, pause_s=0.2, stagger_s=0.0), UserLoad(3, 32, 4, pause_s=0.05)),
    ),
    Case(
        "starved-by-budget",
        "prefill_starves_decode",
        "streams beside prompts of 1,500 tokens, without a bound on the step time",
        ("--max-decode-stall", "0", "--max-num-batched-tokens", "4096"),
        (UserLoad(3, 32, 200), UserLoad(1, 1500, 2, pause_s=0.5)),
    ),
    Case(
        "starved-unchunked",
        "prefill_starves_decode",
        "streams beside prompts of 1,200 tokens that are computed in one piece",
        (*THROUGHPUT, "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"),
        (UserLoad(2, 32, 200), UserLoad(1, 1200, 2, pause_s=0.4)),
    ),
    Case(
        "one-seat",
        "batch_too_small",
        "six users and --max-num-seqs 1",
        ("--max-num-seqs", "1"),
        (UserLoad(6, 32, 48),),
    ),
    Case(
        "two-seats",
        "batch_too_small",
        "eight users and --max-num-seqs 2",
        ("--max-num-seqs", "2"),
        (UserLoad(8, 24, 64),),
    ),
    Case(
        "small-cache-queue",
        "kv_pressure",
        "six users, and a KV cache that holds two of them",
        ("--num-gpu-blocks-override", "24", "--max-model-len", "380"),
        (UserLoad(6, 60, 100),),
    ),
    Case(
        "small-cache-preemption",
        "kv_pressure",
        "six users whose answers grow beyond what the KV cache holds",
        ("--num-gpu-blocks-override", "80", "--max-model-len", "1024"),
        (UserLoad(6, 24, 400, stagger_s=0.0),),
    ),
    Case(
        "no-prefix-caching",
        "no_prefix_reuse",
        "two users with the same system prompt of 1,024 tokens, and no prefix caching",
        ("--no-enable-prefix-caching",),
        (UserLoad(2, 1060, 8, prefix=1024),),
    ),
    Case(
        "prefixes-evicted",
        "no_prefix_reuse",
        "two system prompts in turn, and a KV cache that holds one of them",
        ("--num-gpu-blocks-override", "90", "--max-model-len", "1400"),
        (UserLoad(1, 1060, 8, prefix=1024, prefixes=2),),
        watch_s=14.0,
    ),
    Case(
        "slow-template",
        "tokenizer_or_template",
        "a chat template that takes half a second",
        loads=(CHATS,),
        template=SLOW_TEMPLATE.replace("COUNT", "90"),
    ),
    Case(
        "slow-tokenizer",
        "tokenizer_or_template",
        "a tokenizer that takes 0.3 s a text",
        loads=(CHATS,),
        faults=("tokenizer_s=0.3",),
    ),
    Case(
        "far-away",
        "client_or_network",
        "0.2 s of network in each direction",
        loads=(LIGHT,),
        link=("far", 0.2),
    ),
    Case(
        "buffering-proxy",
        "client_or_network",
        "a proxy that buffers an answer before it passes the answer on",
        loads=(LIGHT,),
        link=("buffering", 0.5),
    ),
    Case(
        "starting",
        "cold_start",
        "the doctor and two users connect while the server starts",
        loads=(CHATS,),
        cold=True,
    ),
    Case(
        "engine-killed",
        "cold_start",
        "the engine's process dies under load and is started again",
        loads=(CHATS,),
        kills_engine=True,
    ),
    Case(
        "slow-host",
        "host_bound_decode",
        "the host takes 25 ms before each step",
        loads=(UserLoad(2, 32, 64),),
        faults=("plan_s=0.025",),
    ),
    Case(
        "stuttering-host",
        "host_bound_decode",
        "the host pauses for 150 ms before every fifth step",
        loads=(UserLoad(2, 32, 64),),
        faults=("plan_s=0.15", "plan_every=5"),
    ),
)

_MACHINE_FAULTS = (
    Case(
        "eight-neighbours",
        "cpu_taken",
        "eight busy processes on the server's processors, and one user who chats",
        loads=(LIGHT,),
        neighbours=8,
    ),
    Case(
        "four-neighbours",
        "cpu_taken",
        "four busy processes on the server's processors, and two users",
        loads=(UserLoad(2, 200, 32),),
        neighbours=4,
    ),
    Case(
        "portable-kernels",
        "slow_kernels",
        "kernels without the vector instructions that the CPU has",
        loads=(LIGHT,),
        faults=("isa=portable",),
    ),
    Case(
        "portable-kernels-busy",
        "slow_kernels",
        "the same, and two users with prompts of 200 tokens",
        loads=(UserLoad(2, 200, 32),),
        faults=("isa=portable",),
    ),
)

_CONTROLS = (
    Case("idle", "", "no users"),
    Case("light", "", "one user who chats", loads=(LIGHT,)),
    Case("batch", "", "eight users with answers of 64 tokens", loads=(UserLoad(8, 24, 64),)),
    Case("long-answers", "", "one user with answers of 400 tokens", loads=(UserLoad(1, 32, 400),)),
    Case("long-prompts", "", "one user with prompts of 800 tokens", loads=(UserLoad(1, 800, 24),)),
    Case(
        "reserved-memory",
        "",
        "4 GB of KV cache for one user",
        ("--kv-cache-memory-bytes", "4G"),
        (LIGHT,),
    ),
    Case(
        "shared-prefix",
        "",
        "two users with the same system prompt of 512 tokens, which stays cached",
        loads=(UserLoad(2, 540, 24, prefix=512),),
        warm_s=6.0,  # long enough to compute the prefix once
    ),
    Case(
        "idle-neighbours",
        "",
        "eight busy processes of the lowest priority, which give the processors to the server",
        loads=(LIGHT,),
        neighbours=8,
        neighbour_policy=SCHED_IDLE,
    ),
    Case(
        "old-machine",
        "",
        "one thread: a machine that is slow, and computes as quickly as it can",
        ("--threads", "1"),
        (LIGHT,),
    ),
)

CASES = {case.name: case for case in (*_FAULTS, *_MACHINE_FAULTS, *_CONTROLS)}
