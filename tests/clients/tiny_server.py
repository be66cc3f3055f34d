"""A real server with a tiny random model, for tools that send many requests.

python -m tests.clients.tiny_server [PORT]
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

from tests.server.running import running
from tests.tiny import tiny_folder, tiny_llm


def main(port: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        llm = tiny_llm(tiny_folder(Path(folder)), max_num_seqs=64)
        with running(llm, port=port) as server:
            print(server.url, flush=True)
            threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
