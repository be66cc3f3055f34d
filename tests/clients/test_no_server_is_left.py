"""Scripts that run clients of other projects leave no server behind, even if they are killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

PATIENCE_S = 120
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end children")
@pytest.mark.parametrize("script", ["tests.clients.__main__", "tests.clients.coding_agents"])
def test_a_killed_script_leaves_no_server(script: str) -> None:
    code = f"""if True:
        import time, {script} as script
        with script.server() as url:
            print(url, flush=True)
            time.sleep({PATIENCE_S})
    """
    command = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert listens(url)
        process.kill()
    until = time.monotonic() + PATIENCE_S
    while listens(url):
        assert time.monotonic() < until
        time.sleep(0.05)


def listens(url: str) -> bool:
    address = urlsplit(url)
    assert address.port is not None, url
    try:
        socket.create_connection((address.hostname, address.port), 5).close()
    except OSError:
        return False
    return True
