"""Model files that nobody should write, by the thousand: each loads, or is refused in words.

    python bench/mutate.py [--seed 0] [--sample N] [--workers 2] [--json FILE]
    python bench/mutate.py --about granite               # all whose description has it
    python bench/mutate.py --only 1234                   # one of them again, and what it does

Small sound models (a folder of every family and rope scaling, shards, GGUF files with each kind of
vocabulary) are spoilt one thing at a time: every field of every JSON file and of the GGUF metadata
takes every nasty value (removed, null, another type, negative, zero, huge, NaN, infinite, nested,
long), tensors get NaN, other shapes, types and names, bytes are flipped, files are cut short, and
some files are made to take for ever. Which ones there are follows from the seed alone.

Each is opened in a process of its own as `twostroke run` opens it, up to a generated token and its
log-probability, within 5 s and 1 GiB of further address space. What is a failure: a traceback, a
process that dies, a hang, too much memory, a log-probability that is no number, and a message that
does not say what is wrong. It does if it names the file and, where one field was spoilt, that field
or the object it is in; of damaged bytes the file is enough, of weights it is the tensor, and of a
chat template's own mistakes that they are its. Exit status 1 if there is any. Ends with one JSON
line.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # `bench` and `tests` are found there
    sys.path[0] = __file__.rpartition("/bench/")[0] or "."

import argparse
import contextlib
import json
import math
import os
import platform
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.mutations import Mutation, all_mutations, write_bases

TIMEOUT_S = 5.0
GROWTH_BYTES = 1 << 30
SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 16, "threads": 1, "max_num_seqs": 4}


def attempt(path: Path) -> dict[str, str]:
    """What `twostroke run` would do with a model, and how it ends."""
    from twostroke import LLM, SamplingParams
    from twostroke.errors import RequestError, TwostrokeError

    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    try:
        llm = LLM(str(path), **SETTINGS)
        with contextlib.suppress(RequestError):  # that harms only the request: the model is there
            llm.generate("the dog", params)
        with contextlib.suppress(RequestError):
            llm.chat(CHAT, params)
        (output,) = llm.generate([[5]], params)
        logprob = output.outputs[0].cumulative_logprob
        if logprob is None or not math.isfinite(logprob):
            return {"end": "nonsense", "says": f"a log-probability of {logprob}"}
        return {"end": "loaded", "says": ""}
    except TwostrokeError as error:
        return {"end": "refused", "says": str(error)}
    except MemoryError:
        return {"end": "memory", "says": traceback.format_exc()[-2000:]}
    except BaseException:
        return {"end": "traceback", "says": traceback.format_exc()[-2000:]}


CHAT = [{"role": "user", "content": "the dog"}]


def child(mutation: Mutation, folder: Path, answer: Path) -> None:
    """Never returns."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    folder.mkdir()
    path = mutation.write(folder)
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + GROWTH_BYTES,) * 2)
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)  # nobody handles it, so that it ends us
    answer.write_text(json.dumps(attempt(path)))
    os._exit(0)


def try_all(
    mutations: list[tuple[int, Mutation]], work: Path, workers: int
) -> Iterator[tuple[int, Mutation, dict[str, str]]]:
    """As many processes at a time as there are workers, each forked from this one, which has
    imported everything and has no threads."""
    import twostroke.engine.build_native
    import twostroke.engine.output_processor
    import twostroke.llm
    import twostroke.model.text.tokenizer  # noqa: F401

    running: dict[int, tuple[int, Mutation]] = {}
    pending = iter(mutations)
    while True:
        while len(running) < workers and (following := next(pending, None)) is not None:
            number, mutation = following
            pid = os.fork()
            if pid == 0:
                try:
                    child(mutation, work / f"{number}", work / f"{number}.json")
                finally:
                    os._exit(1)
            running[pid] = (number, mutation)
        if not running:
            return
        for pid, (number, mutation) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del running[pid]
            path = work / f"{number}.json"
            if path.exists():
                result = json.loads(path.read_text())
                path.unlink()
            elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
                result = {"end": "hang", "says": f"nothing within {TIMEOUT_S} s"}
            else:
                result = {"end": "died", "says": f"wait status {status}"}
            shutil.rmtree(work / f"{number}", ignore_errors=True)
            yield number, mutation, result
        time.sleep(0.002)


def problem_of(mutation: Mutation, result: dict[str, str]) -> str:
    """What is wrong with how it ended; nothing if it is as it should be."""
    if result["end"] == "loaded":
        return "it must not load" if mutation.must_fail else ""
    if result["end"] != "refused":
        return result["end"]
    says = result["says"]
    if "chat template" in says:  # it came from the one place there is, or from --chat-template
        return ""
    if mutation.file not in says:
        return f"the message does not name {mutation.file}"
    if mutation.names and not any(name in says for name in mutation.names):
        return f"the message names none of {', '.join(mutation.names)}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--about", default="")
    parser.add_argument("--only", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bases = Path(folder) / "bases"
        if (pid := os.fork()) == 0:  # training vocabularies starts threads, which a fork would lose
            try:
                write_bases(bases)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        if os.waitpid(pid, 0)[1]:
            return 1
        mutations = list(enumerate(all_mutations(bases, args.seed)))
        if args.sample:
            import random

            mutations = sorted(random.Random(args.seed).sample(mutations, args.sample))
        if args.only is not None:
            mutations = [mutations[args.only]]
        mutations = [one for one in mutations if args.about in one[1].what]
        ends: Counter[str] = Counter()
        kinds: dict[str, Counter[str]] = {}
        failures = []
        for number, mutation, result in try_all(mutations, Path(folder), args.workers):
            problem = problem_of(mutation, result)
            ends[result["end"]] += 1
            kinds.setdefault(mutation.kind, Counter())[result["end"]] += 1
            if problem:
                failures.append({"number": number, "what": mutation.what, "problem": problem})
                print(f"{number} {mutation.what}: {problem}\n    {result['says']}", flush=True)
            elif args.only is not None:
                print(f"{number} {mutation.what}: {result['end']}\n    {result['says']}")
    report = {
        "machine": platform.machine(),
        "seed": args.seed,
        "files": sum(ends.values()),
        "seconds": round(time.monotonic() - started, 1),
        "ends": dict(sorted(ends.items())),
        "by_kind": {kind: dict(sorted(counts.items())) for kind, counts in sorted(kinds.items())},
        "failures": failures,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report | {"failures": len(failures)}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
