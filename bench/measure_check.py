"""Do the measuring tools agree with the server that they measure, and with other people's tools?

    python -m bench.measure_check [MODEL] [--guidellm BIN] [--aiperf BIN] [--json FILE]

Starts `twostroke serve` (the default model, unless one is named) and loads it with `twostroke bench
serve`, then with guidellm and aiperf where they are given: the same number of users, prompts and
outputs of the same length. While each runs, the server's step and request records are gathered,
which say what the engine did by a clock of its own. The tool's figures, other tools' restated by
`twostroke import`, are held against the records of that very run, so that no two runs need to be
alike. Prints tables, ends with one JSON line; exit status 1 if a figure is out of bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.witness import Json, Witness, gaps_s, get_json, largest, request_figures, tpot_s
from twostroke.measure.compare.arms import serving
from twostroke.measure.compare.imports import import_result
from twostroke.measure.load.result import environment

USERS, PROMPT, OUTPUT = 4, 128, 48
# The client may see more than the engine, never less: HTTP, the network and the client itself. A
# median is held against the records' 45th to 55th percentile: where it lies between two kinds of
# gaps (steps with a prompt in them and without), a few of either move it far.
BOUND_MS = {"ttft": 25.0, "tpot": 0.5, "itl": 0.5, "e2el": 30.0}
BOUND_SHARE = {"ttft": 0.05, "tpot": 0.02, "itl": 0.02, "e2el": 0.02}
BOUND_THROUGHPUT = 0.02
STATISTICS = ("mean", "median")
LIMIT_S = 120.0  # for one tool


def bench_serve(url: str, count: int, folder: Path) -> Path:
    words = ["bench", "serve", "--base-url", url, "--max-concurrency", str(USERS)]
    words += ["--num-prompts", str(count), "--random-input-len", str(PROMPT)]
    words += ["--random-output-len", str(OUTPUT), "--metric-percentiles", "90", "--save-detailed"]
    words += ["--result-dir", str(folder), "--result-filename", "twostroke.json"]
    run([sys.executable, "-m", "twostroke", *words], folder, allowed=(0, 3))
    return folder / "twostroke.json"


def guidellm(binary: str, url: str, model: str, count: int, folder: Path, tokenizer: Path) -> Path:
    out = folder / "guidellm.json"
    backend = f"kind=openai_http,target={url},model={model},request_format=/v1/completions"
    data = f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}"
    words = [binary, "run", "--backend", backend, "--data", data]
    words += ["--profile", f"kind=concurrent,streams={USERS}"]
    words += ["--constraint", f"kind=max_requests,count={count}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    words += ["--output", f"kind=json,path={out}", "--disable-progress"]
    run(words, folder, environment={"GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"})
    return out


def aiperf(binary: str, url: str, model: str, count: int, folder: Path, tokenizer: Path) -> Path:
    out = folder / "aiperf"
    words = [binary, "profile", "--model", model, "--url", url, "--endpoint-type", "completions"]
    words += ["--streaming", "--concurrency", str(USERS), "--request-count", str(count)]
    words += ["--synthetic-input-tokens-mean", str(PROMPT), "--synthetic-input-tokens-stddev", "0"]
    words += ["--output-tokens-mean", str(OUTPUT), "--output-tokens-stddev", "0"]
    words += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
    words += ["--tokenizer", str(tokenizer), "--artifact-dir", str(out), "--ui", "none"]
    words += ["--workers-max", "1"]
    run(words, folder)
    return next(out.rglob("profile_export_aiperf.json"))


def run(
    words: list[str],
    folder: Path,
    allowed: tuple[int, ...] = (0,),
    environment: dict[str, str] | None = None,
) -> None:
    print(f"$ {shlex.join(words)}", flush=True)
    env = os.environ | (environment or {})
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=said, stderr=said)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
    if code not in allowed:
        last = (folder / "said").read_text()[-2000:]
        raise SystemExit(f"{words[0]} ended with {code}: {last}")


def save_tokenizer(model: str, folder: Path) -> Path:
    """The model's own, as other tools read it."""
    from twostroke.model.gguf.gguf_file import GGUFFile
    from twostroke.model.text.tokenizer import Tokenizer

    found = Tokenizer.from_gguf(GGUFFile.open(Path(model)).metadata, model)
    target = folder / "tokenizer"
    target.mkdir()
    (target / "tokenizer.json").write_text(found.to_json())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": found.eos_token}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target


# ── a tool's figures beside the records ─────────────────────────────────────────────────────────


def compared(tool: Json, server: Json) -> list[Json]:
    """A row a figure: the tool's, the server's, the difference, and whether it is within bounds."""
    rows = []
    for name, bound in BOUND_MS.items():
        for statistic in STATISTICS:
            theirs = tool["metrics"].get(name, {}).get(statistic)
            if theirs is None:
                continue
            own = server["metrics"][name]
            low, high = (own[statistic],) * 2 if statistic == "mean" else (own["p45"], own["p55"])
            allowed = max(bound, BOUND_SHARE[name] * own[statistic])
            within = low - allowed <= theirs <= high + allowed
            rows.append(row(f"{statistic}_{name}_ms", theirs, own[statistic], within))
    for name in ("output_throughput", "request_throughput"):
        own, theirs = server[name], tool.get(name)
        if theirs is not None:
            within = abs(theirs / own - 1) <= BOUND_THROUGHPUT
            rows.append(row(name, theirs, own, within))
    return rows


def row(name: str, tool: float, server: float, within: bool) -> Json:
    difference = tool - server
    share = difference / server if server else 0.0
    return {
        "figure": name,
        "tool": tool,
        "server": server,
        "difference": difference,
        "share": share,
        "within": within,
    }


def request_by_request(detail: Json, requests: dict[str, Json]) -> Json:
    """Of `bench serve`'s own result: every request beside its record, in ms."""
    pairs = list(zip(detail["request_ids"], detail["ttfts"], detail["itls"], strict=True))
    missing = [name for name, _, _ in pairs if name not in requests]
    known = [(requests[name], ttft, itls) for name, ttft, itls in pairs if name in requests]
    counts = zip(detail["request_ids"], detail["output_lens"], strict=True)
    wrong = [n for n, count in counts if n in requests and len(requests[n]["token_s"]) != count]
    return {
        "requests": len(pairs),
        "without_record": len(missing),
        "other_token_count": len(wrong),
        "ttft_more_ms": largest(
            1e3 * (ttft - one["first_token_s"] + one["received_s"]) for one, ttft, _ in known
        ),
        "tpot_more_ms": largest(
            1e3 * (sum(itls) / (len(one["token_s"]) - 1) - tpot_s(one)) for one, _, itls in known
        ),
        "itl_more_ms": largest(
            1e3 * (seen - gap)
            for one, _, itls in known
            if len(itls) == len(gaps_s(one))
            for seen, gap in zip(itls, gaps_s(one), strict=True)
        ),
    }


def steps_and_requests(steps: list[Json], requests: dict[str, Json]) -> Json:
    """Whether the two kinds of record say the same of the tokens."""
    written = sum(
        step["regular"] + len(step["late"]) + len(step["first"]) + step["drafted"] for step in steps
    )
    committed = {step["step"]: step["committed_s"] for step in steps}
    times = [
        (when, committed.get(step))
        for one in requests.values()
        for when, step in zip(one["token_s"], one["token_step"], strict=True)
    ]
    return {
        "steps": len(steps),
        "tokens_in_steps": written,
        "tokens_in_requests": len(times),
        "tokens_of_unknown_steps": sum(when is None for _, when in times),
        "tokens_dated_otherwise": sum(at != when for at, when in times if when is not None),
    }


def show(name: str, rows: list[Json]) -> None:
    print(f"\n{name:24} {'tool':>10} {'server':>10} {'more':>9} {'share':>7}")
    for one in rows:
        print(
            f"{one['figure']:24} {one['tool']:10.2f} {one['server']:10.2f} "
            f"{one['difference']:9.2f} {one['share']:7.1%}{'' if one['within'] else '  OUT'}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file; the default model if none is named")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--guidellm", metavar="BIN")
    parser.add_argument("--aiperf", metavar="BIN")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    found: dict[str, Any] = {
        "bench": "measure_check",
        "environment": environment(),
        "load": {"users": USERS, "prompt": PROMPT, "output": OUTPUT, "requests": args.requests},
        "bounds": {
            "ms": BOUND_MS,
            "or_share": BOUND_SHARE,
            "throughput_share": BOUND_THROUGHPUT,
            "median_within_percentiles": [45, 55],
        },
        "tools": {},
        "out_of_bounds": [],
    }
    outside = {"guidellm": (guidellm, args.guidellm), "aiperf": (aiperf, args.aiperf)}
    outside = {name: one for name, one in outside.items() if one[1]}
    with (
        tempfile.TemporaryDirectory() as name,
        serving([shlex.quote(args.model) if args.model else ""]) as (url,),
    ):
        folder = Path(name)
        tokenizer = save_tokenizer(model_file(args.model), folder) if outside else folder
        served = model_name(url)
        for tool in ("twostroke", *outside):
            with Witness(url) as witness:
                if tool == "twostroke":
                    path = bench_serve(url, args.requests, folder)
                else:
                    command, binary = outside[tool]
                    path = command(binary, url, served, args.requests, folder, tokenizer)
            result = checked(tool, path, witness)
            found["tools"][tool] = result
            out = [one["figure"] for one in result["rows"] if not one["within"]]
            found["out_of_bounds"] += [f"{tool}: {name}" for name in [*out, *result["wrong"]]]
            save(found, args.json)
    print(json.dumps(found))
    if found["out_of_bounds"]:
        raise SystemExit(f"out of bounds: {', '.join(found['out_of_bounds'])}")


def checked(tool: str, path: Path, witness: Witness) -> Json:
    """A tool's result beside the records of its run."""
    restated, known = import_result(str(path)), witness.requests
    # Other tools try the server first; and a warm-up is no request of the run.
    counted = {n: one for n, one in known.items() if len(one["token_s"]) == OUTPUT}
    more: Json = {"wrong": []}
    if tool == "twostroke":
        detail = json.loads(path.read_text())
        counted = {n: one for n, one in counted.items() if n in set(detail["request_ids"])}
        each = request_by_request(detail, known)
        both = steps_and_requests(witness.steps, known)
        names = ("without_record", "other_token_count", "tokens_dated_otherwise")
        more["wrong"] = [name for name in names if (each | both)[name]]
        more |= {"request_by_request": each, "records": both}
        more |= {name: detail[name] for name in ("server_says", "certified", "problems")}
        print(json.dumps(more, indent=1))
    server = request_figures(counted.values())
    rows = compared(restated, server)
    show(f"{tool}, {server['requests']} requests", rows)
    return {
        "requests": restated["requests"],
        "recorded": server["requests"],
        "rows": rows,
        **more,
    }


def save(found: Json, path: str | None) -> None:
    if path:
        Path(path).write_text(json.dumps(found) + "\n")


def model_name(url: str) -> str:
    return str(get_json(f"{url}/v1/models")["data"][0]["id"])


def model_file(model: str | None) -> str:
    from twostroke.model.find.hub import resolve

    return str(resolve(model).path)


if __name__ == "__main__":
    main()
