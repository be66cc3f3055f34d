"""A summary of the paths between GPUs from NCCL's log, with a warning for each slow path.

    … NCCL INFO Pattern 4, …, nChannels 12, bw 20.0/20.0, type NVL/PIX, …   links of the rings
    … NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read              path of two ranks
    … NCCL INFO 24 coll channels, 0 collnet channels, 16 nvls channels, …   rings, and NVLink SHARP

The log is enabled while a communicator is created, unless the user has set NCCL_DEBUG. The patterns
belong to NCCL's subsystem GRAPH, the other lines to INIT.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

ASKED = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH"}
RING, TREES = "4", ("1", "2", "3")  # patterns
VIA = re.compile(r"NCCL INFO (?:Channel|Ring) \S+ : (\d+)\[\S*?\] -> (\d+)\[\S*?\].* via (\S+)")
PATTERN = re.compile(r"Pattern (\d), crossNic \d, nChannels (\d+), bw ([\d.]+)/[\d.]+, type (\w+)/")
CHANNELS = re.compile(r"(\d+) coll channels,(?: \d+ collnet channels,)?(?: (\d+) nvls channels)?")
VERSION = re.compile(r"NCCL version ([\d.]+)")
# Types of paths between GPUs, from near to far, as NCCL and `nvidia-smi topo` name them.
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


@dataclass
class Paths:
    """The paths between the GPUs of a communicator."""

    version: str = ""
    link: str = ""  # NCCL's name for the link of the rings
    ring_gb_s: float = 0.0  # of all rings, NCCL's estimate
    rings: int = 0
    trees: int = 0
    nvls: int = 0  # channels that reduce in the NVLink switch
    via: dict[tuple[int, int], str] = field(default_factory=dict)  # sender, receiver: transport

    def __str__(self) -> str:
        parts = [f"{self.rings} rings", f"{self.trees} trees" if self.trees else ""]
        parts.append(f"{self.nvls} channels of NVLink SHARP" if self.nvls else "")
        over = sorted({_in_words(one, self.link) for one in self.via.values()})
        name = f"NCCL {self.version}" if self.version else "NCCL"
        return f"{name}: {', '.join(filter(None, parts))}; over {' and '.join(over) or 'nothing'}"

    def warnings(self) -> Iterator[str]:
        """Yield a warning for each path slower than the best between GPUs of one machine."""
        pairs: dict[str, list[tuple[int, int]]] = {}
        for pair, transport in sorted(self.via.items()):
            pairs.setdefault(_kind(transport), []).append(pair)
        for kind, of in pairs.items():
            advice = SLOW.get(kind)
            if kind == "P2P" and self.link and self.link not in FAST:
                advice = (
                    f"over {_in_words('P2P', self.link)}, not NVLink, which is several times as "
                    "fast; fewer ranks send less"
                )
            if advice:
                yield f"{_named(of)} talk {advice}"


SLOW = {
    "SHM": "through the host's memory, twice over PCIe: their GPUs cannot reach each other's "
    "memory. `nvidia-smi topo -p2p r` says why; NCCL_P2P_DISABLE and NCCL_P2P_LEVEL forbid it, and "
    "so do some containers and PCIe switches with ACS",
    "Socket": "over TCP, by far the slowest path: NCCL found neither peer access nor an RDMA "
    "network, or NCCL_SHM_DISABLE and NCCL_P2P_DISABLE are set",
    "network, through the host": "over a network that copies through the host's memory: without "
    "GPUDirect RDMA (is nvidia-peermem loaded?)",
}


def read_paths(text: str) -> Paths | None:
    """Return the paths, or None if the log has none."""
    paths, found = Paths(), False
    for line in text.splitlines():
        if "NCCL" not in line:
            continue
        if match := VIA.search(line):
            sender, receiver, transport = match.groups()
            paths.via[int(sender), int(receiver)] = transport
            found = True
        elif match := PATTERN.search(line):
            pattern, channels, bandwidth, link = match.groups()
            if pattern == RING:
                paths.link, paths.ring_gb_s = link, int(channels) * float(bandwidth)
                paths.rings = paths.rings or int(channels)
            elif pattern in TREES:
                paths.trees = max(paths.trees, int(channels))
            found = True
        elif match := CHANNELS.search(line):
            paths.rings, paths.nvls = int(match[1]), int(match[2] or 0)
            found = True
        elif match := VERSION.search(line):
            paths.version = match[1]
    return paths if found else None


def _kind(transport: str) -> str:
    """Return the kind of a transport: P2P, SHM, Socket, network, …"""
    first, *rest = transport.split("/")
    if first != "NET":
        return first
    if rest[:1] == ["Socket"]:
        return "Socket"
    return "network" if any(part.startswith("GDRDMA") for part in rest) else NO_RDMA


NO_RDMA = "network, through the host"


def _in_words(transport: str, link: str) -> str:
    kind = _kind(transport)
    if kind == "P2P":
        return LINKS.get(link, "peer access")
    return {"SHM": "the host's memory", "Socket": "TCP"}.get(kind, kind)


def _named(pairs: list[tuple[int, int]]) -> str:
    """Return the names of the pairs, each once in either direction."""
    each = sorted({(min(pair), max(pair)) for pair in pairs})
    named = ", ".join(f"{first} and {second}" for first, second in each[:4])
    return f"ranks {named}{' and others' if len(each) > 4 else ''}"


@contextmanager
def logging_to(path: str, environ: Mapping[str, str] = os.environ) -> Iterator[bool]:
    """Write NCCL's log to a file inside the context. Yield False if the user has set NCCL_DEBUG."""
    if "NCCL_DEBUG" in environ:
        yield False
        return
    given = ASKED | {"NCCL_DEBUG_FILE": path}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield True
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
