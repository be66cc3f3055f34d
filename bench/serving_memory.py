"""Start and memory of the servers: from the start of the process to a first token, then the peak
after one prompt of 2,048 tokens. Ends with one JSON line.

    python -m bench.serving_memory MODEL.gguf [--llama-server PATH] [--repeat 3]

Peak: VmHWM of the server's processes, added up, so that what they share counts twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

from bench.cpu_interference import first_answer, planned
from bench.cpu_process import Quiet
from twostroke.measure.load.http_client import Connections, Endpoint
from twostroke.measure.load.sample_client import OpenAIClient

PORT, PROMPT, OUTPUT, LIMIT_S = 8951, 2048, 8, 120.0
# A start should not be timed without the compiled files that any installed package has.
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": ""}


def measure(command: list[str]) -> dict[str, float]:
    server = Quiet(command, ENVIRONMENT, piped=False)
    client = OpenAIClient(Connections(Endpoint(f"http://127.0.0.1:{PORT}")), "m")
    try:
        with server.awake():
            first = asyncio.run(first_answer(server, client, LIMIT_S, 0.01))
            first_s = first.content_s[0] - server.started_s
            long = asyncio.run(client.send(planned(PROMPT, 2, OUTPUT), perf_counter()))
            if not long.ok or long.output_tokens < OUTPUT:
                raise SystemExit(long.error or "the long prompt got no answer")
            return {"first_token_s": first_s, "peak_bytes": server.peak_bytes()}
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
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
