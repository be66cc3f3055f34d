"""KV tiers on a GPU: returns of long conversations from host memory and from a disk.

    python -m bench.gpu_tiers [--shape llama-3.1-8b] [--limit-s 295] [--only link,host]
                              [--json FILE] [--folder DIR] [--device cpu --quick]

Dummy weights in bf16, token ids in and out, no HTTP. Each part is a process with a limit of its own
(`gpu_tiers_parts.py`), and the file is written anew after every figure:

    link    pinned copies between host and device, whole and in blocks, and the host tier alone
    host    conversations of 16,000 tokens in turn, three times the size of the pool: TTFT of a
            return beside computing; bytes a second of the fetch beside the link's; decode steps
            while a fetch is under way; the cost of prompts that find nothing, in alternating turns
    disk    the disk tier alone beside plain reads of the same files, by number of threads; then a
            conversation of 32,000 tokens: `kill -9` of the engine, and sleep and wake-up, each with
            the TTFT of the return
    overlap (not by default) the returns and the decode steps of `host`, with 4 conversations
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

PART_S = {"link": 60.0, "host": 190.0, "disk": 160.0, "overlap": 80.0}
USUAL = "link,host,disk"
LEAST_S = 15.0  # a part that has less left is not started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit-s", type=float, default=295.0)
    parser.add_argument("--only", default=USUAL)
    parser.add_argument("--quick", action="store_true", help="small sizes: to try it out")
    parser.add_argument("--folder", help="on the disk to measure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    begun = perf_counter()
    results: dict[str, Any] = {"bench": "gpu_tiers", "shape": args.shape, "quick": args.quick}

    def save() -> None:
        """Whole or not at all, whenever we are stopped."""
        if args.json:
            new = args.json.with_suffix(".new")
            new.write_text(json.dumps(results, indent=1) + "\n")
            new.replace(args.json)

    for name in args.only.split(","):
        if name not in PART_S:
            parser.error(f"no part is called {name}; there are {', '.join(PART_S)}")
        found = results.setdefault(name, {})
        left_s = min(PART_S[name], args.limit_s - (perf_counter() - begun))
        if left_s < LEAST_S:
            found["error"] = f"left out: {left_s:.0f} s were left"
            save()
            continue
        command = [
            "timeout",
            "-k",
            "5",
            f"{left_s:.0f}",
            sys.executable,
            "-u",
            "-X",
            "faulthandler",
        ]
        command += ["-m", "bench.gpu_tiers_parts", name, "--shape", args.shape]
        command += ["--device", args.device, *(["--quick"] if args.quick else [])]
        command += ["--folder", args.folder] if args.folder else []
        start = perf_counter()
        print(f"── {name}, at most {left_s:.0f} s", flush=True)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RESULT "):
                found |= json.loads(line.removeprefix("RESULT "))
                save()
            else:
                print(line, end="", flush=True)
        found["exit"], found["seconds"] = process.wait(), round(perf_counter() - start, 1)
        save()
        print(f"{name}: {json.dumps(found)}", flush=True)
    results["seconds"] = round(perf_counter() - begun, 1)
    save()


if __name__ == "__main__":
    main()
