"""The paths between GPUs, read from the log of NCCL, with a warning for each slow path.

Three kinds of lines are read. NCCL's subsystem GRAPH writes the first, INIT the others:

    … NCCL INFO Pattern 4, …, nChannels 12, bw 20.0/20.0, type NVL/PIX, …   number and link of rings
    … NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read              transport of two ranks
    … NCCL INFO 24 coll channels, 0 collnet channels, 16 nvls channels, …   numbers of channels

`logging_to` enables the log while a communicator is created, unless the user has set NCCL_DEBUG.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LOG_SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH"}
RING_PATTERN, TREE_PATTERNS = "4", ("1", "2", "3")  # numbers in "Pattern 4"
CONNECTION = re.compile(
    r"NCCL INFO (?:Channel|Ring) \S+ : (\d+)\[\S*?\] -> (\d+)\[\S*?\].* via (\S+)"
)
PATTERN = re.compile(r"Pattern (\d), crossNic \d, nChannels (\d+), bw ([\d.]+)/[\d.]+, type (\w+)/")
CHANNELS = re.compile(r"(\d+) coll channels,(?: \d+ collnet channels,)?(?: (\d+) nvls channels)?")
VERSION = re.compile(r"NCCL version ([\d.]+)")
# Links between GPUs by the names of NCCL and `nvidia-smi topo`, the fastest first.
LINKS = {
    "NVL": "NVLink",
    "NVB": "NVLink over another GPU",
    "C2C": "NVLink-C2C",
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, through the CPU's host bridge",
    "SYS": "PCIe, from one CPU to the other",
}
FAST = ("NVL", "NVB", "C2C")
NO_RDMA = "network, through the host"
SLOW = {  # advice by kind of transport, after "ranks 0 and 1 talk"
    "SHM": "through the host's memory, twice over PCIe, because their GPUs cannot access each "
    "other's memory. `nvidia-smi topo -p2p r` shows the reason. NCCL_P2P_DISABLE, NCCL_P2P_LEVEL, "
    "some containers and PCIe switches with ACS also prevent this access",
    "Socket": "over TCP, by far the slowest path: NCCL found neither peer access nor an RDMA "
    "network, or NCCL_SHM_DISABLE and NCCL_P2P_DISABLE are set",
    NO_RDMA: "over a network without GPUDirect RDMA, which copies through the host's memory. Check "
    "whether the kernel module nvidia-peermem is loaded",
}


@dataclass
class Paths:
    """The paths between the GPUs of a communicator, and the channels that use these paths."""

    version: str = ""
    ring_link: str = ""  # the link between the GPUs of a ring, a key of `LINKS`
    ring_gb_s: float = 0.0  # NCCL's estimate of the bandwidth of all rings together
    rings: int = 0
    trees: int = 0
    nvls: int = 0  # channels that reduce in the NVLink switch
    transports: dict[tuple[int, int], str] = field(default_factory=dict)  # by sender and receiver

    def __str__(self) -> str:
        parts = [f"{self.rings} rings", f"{self.trees} trees" if self.trees else ""]
        parts.append(f"{self.nvls} channels of NVLink SHARP" if self.nvls else "")
        used = sorted({_description(name, self.ring_link) for name in self.transports.values()})
        name = f"NCCL {self.version}" if self.version else "NCCL"
        return f"{name}: {', '.join(filter(None, parts))}; over {' and '.join(used) or 'nothing'}"

    def warnings(self) -> Iterator[str]:
        """Yield a warning for each kind of path that is slower than NVLink."""
        pairs_by_kind: dict[str, list[tuple[int, int]]] = {}
        for pair, transport in sorted(self.transports.items()):
            pairs_by_kind.setdefault(_kind(transport), []).append(pair)
        for kind, pairs in pairs_by_kind.items():
            advice = SLOW.get(kind)
            if kind == "P2P" and self.ring_link and self.ring_link not in FAST:
                advice = (
                    f"over {_description('P2P', self.ring_link)}, not over NVLink, which is "
                    "several times as fast; use fewer ranks to send less data"
                )
            if advice:
                yield f"{_pair_names(pairs)} talk {advice}"


def read_paths(text: str) -> Paths | None:
    """Return the paths in a log; None if the log has no line about paths."""
    paths, has_paths = Paths(), False
    for line in text.splitlines():
        if "NCCL" not in line:
            continue
        if match := CONNECTION.search(line):
            sender, receiver, transport = match.groups()
            paths.transports[int(sender), int(receiver)] = transport
            has_paths = True
        elif match := PATTERN.search(line):
            pattern, channels, bandwidth, link = match.groups()
            if pattern == RING_PATTERN:
                paths.ring_link, paths.ring_gb_s = link, int(channels) * float(bandwidth)
                # A "coll channels" line, if it came first, has the final number.
                paths.rings = paths.rings or int(channels)
            elif pattern in TREE_PATTERNS:
                paths.trees = max(paths.trees, int(channels))
            has_paths = True
        elif match := CHANNELS.search(line):
            paths.rings, paths.nvls = int(match[1]), int(match[2] or 0)
            has_paths = True
        elif match := VERSION.search(line):
            paths.version = match[1]
    return paths if has_paths else None


def _kind(transport: str) -> str:
    """Return the kind of a transport: P2P, SHM, Socket, network, …"""
    first, *rest = transport.split("/")
    if first != "NET":
        return first
    if rest[:1] == ["Socket"]:
        return "Socket"
    return "network" if any(part.startswith("GDRDMA") for part in rest) else NO_RDMA


def _description(transport: str, link: str) -> str:
    """Return a transport in words for the user. `link`: the link that P2P uses."""
    kind = _kind(transport)
    if kind == "P2P":
        return LINKS.get(link, "peer access")
    return {"SHM": "the host's memory", "Socket": "TCP"}.get(kind, kind)


def _pair_names(pairs: list[tuple[int, int]]) -> str:
    """Return the ranks of up to four pairs as text. The two directions of a pair count once."""
    unordered = sorted({(min(pair), max(pair)) for pair in pairs})
    names = ", ".join(f"{first} and {second}" for first, second in unordered[:4])
    return f"ranks {names}{' and others' if len(unordered) > 4 else ''}"


@contextmanager
def logging_to(path: str) -> Iterator[bool]:
    """Write NCCL's log to a file inside the context. Yield False if the user has set NCCL_DEBUG."""
    if "NCCL_DEBUG" in os.environ:
        yield False
        return
    settings = LOG_SETTINGS | {"NCCL_DEBUG_FILE": path}
    previous = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield True
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
