"""Start and memory of the servers: from the start of the process to a first token, then the peak
after one prompt of 2,048 tokens. Ends with one JSON line.

    python -m bench.serving_memory MODEL.gguf [--llama-server PATH] [--repeat 3]

Peak: VmHWM of the server's processes, added up, so that what they share counts twice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from time import perf_counter, sleep
from typing import Any

from bench.cpu_interference import Stream
from bench.cpu_process import Quiet
from bench.cpu_workers import tokens

PORT, PROMPT, OUTPUT, LIMIT_S = 8951, 2048, 8, 120.0
# A start should not be timed without the compiled files that any installed package has.
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": ""}


def measure(command: list[str]) -> dict[str, float]:
    server = Quiet(command, ENVIRONMENT, piped=False)
    try:
        with server.awake():
            while True:
                one = Stream(PORT, "m", tokens(8, 1), 1)
                one.join(30)
                if one.times:
                    break
                if server.dead or perf_counter() - server.started_s > LIMIT_S:
                    raise SystemExit(server.last_words())
                sleep(0.01)
            first_s = one.times[0] - server.started_s
            long = Stream(PORT, "m", tokens(PROMPT, 2), OUTPUT)
            long.join(LIMIT_S)
            if len(long.times) < OUTPUT:
                raise SystemExit(long.error or "the long prompt got no answer")
            return {"first_token_s": first_s, "peak_bytes": server.peak_bytes()}
    finally:
        server.close()


def import_s(module: str) -> float:
    start = perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--llama-server", help="its binary")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--length", type=int, default=8192, help="of the context")
    args = parser.parse_args()
    length, port = str(args.length), str(PORT)
    ours = [sys.executable, "-m", "twostroke", "serve", args.model, "--port", port]
    servers = {"twostroke serve": [*ours, "--max-model-len", length, "--served-model-name", "m"]}
    if args.llama_server:
        theirs = [args.llama_server, "-m", args.model, "--port", port, "-c", length]
        servers["llama-server"] = [*theirs, "-t", "2", "-tb", "2"]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    imports = []
    for _ in range(args.repeat):
        for name, command in servers.items():
            row = measure(command)
            print(f"{name}: first token {row['first_token_s']:.2f} s, ", end="")
            print(f"peak {row['peak_bytes'] / 1e6:.0f} MB", flush=True)
            found[name].append(row)
        imports.append(import_s("torch"))
    result: dict[str, Any] = {"bench": "serving_memory", "prompt": PROMPT, "context": args.length}
    result["import_torch_s"] = statistics.median(imports)
    for name, rows in found.items():
        result[name] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
