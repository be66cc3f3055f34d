"""A fuzzer of model files: each mutated file must load or be refused with a clear message.

    python -m bench.fuzz_models [--seed 0] [--sample N] [--workers 2] [--json FILE]
    python -m bench.fuzz_models --about granite   # all with this word in the description
    python -m bench.fuzz_models --only 1234       # repeat one mutation, and print its effect

Small valid models (a folder of every family and rope scaling, shards, GGUF files with each kind of
vocabulary) are mutated in one place at a time: every field of every JSON file and of the GGUF
metadata takes every nasty value (removed, null, another type, negative, zero, huge, NaN, infinite,
nested, long), tensors get NaN, other shapes, types and names, bytes are flipped, files are cut
short, and some files are made to take for ever. The mutations follow from the seed alone.

Each model is opened in a separate process like in `twostroke run`, up to a generated token and its
log-probability, within 5 s and 1 GiB of further address space. Failures: a traceback, a process
that dies, a hang, too much memory, a log-probability that is not a number, and an unclear message.
A clear message names the file and the mutated field or its object. For damaged bytes the file is
enough; for weights the message names the tensor, and for errors of a chat template the template.
Exit status 1 if there is a failure. Ends with one JSON
line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.fuzz_model_files import Mutation, all_mutations, write_bases

TIMEOUT_S = 5.0
GROWTH_BYTES = 1 << 30
SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 16, "threads": 1, "max_num_seqs": 4}


def attempt(path: Path) -> dict[str, str]:
    """Open a model like `twostroke run`, and return the outcome."""
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
    """Write the outcome of a mutation to `answer`, and exit."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    folder.mkdir()
    path = mutation.write(folder)
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + GROWTH_BYTES,) * 2)
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)  # without a handler the signal ends the process
    answer.write_text(json.dumps(attempt(path)))
    os._exit(0)


def try_all(
    mutations: list[tuple[int, Mutation]], work: Path, workers: int
) -> Iterator[tuple[int, Mutation, dict[str, str]]]:
    """Run one process for each worker, forked from this process, which has imported everything and
    has no threads."""
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
    """Return the problem of an outcome, or an empty text."""
    if result["end"] == "loaded":
        return "it must not load" if mutation.must_fail else ""
    if result["end"] != "refused":
        return result["end"]
    says = result["says"]
    if "chat template" in says:  # the template's source is clear
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
