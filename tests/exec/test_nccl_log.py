"""Logs of real machines, a few lines of each: what they say, and what is warned of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from twostroke.exec.nccl_log import logging_to, read_paths

# Eight H100s on an NVSwitch, two A100s, two GPUs of a desktop, GPUs without peer access, and two
# machines: hosts and processes renamed.
NVSWITCH = """\
NCCL version 2.19.3+cuda12.3
host:66:931 [0] NCCL INFO NVLS multicast support is available on dev 0
host:66:931 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 12, bw 30.000000/30.000000, type NVL/PIX, sameChannels 1
host:66:931 [0] NCCL INFO Pattern 1, crossNic 0, nChannels 12, bw 30.000000/30.000000, type NVL/PIX, sameChannels 1
host:66:931 [0] NCCL INFO Channel 16/24 :    0   1   2   3   4   5   6   7
host:66:935 [4] NCCL INFO Trees [0] 5/-1/-1->4->3 [1] 5/-1/-1->4->3
host:66:935 [4] NCCL INFO P2P Chunksize set to 524288
host:66:931 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
host:67:932 [1] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/CUMEM
host:66:931 [0] NCCL INFO Connected all rings
host:66:931 [0] NCCL INFO 24 coll channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer
"""  # noqa: E501
A100S = """\
host:18:44 [0] NCCL INFO === System : maxBw 240.0 totalBw 240.0 ===
host:18:44 [0] NCCL INFO                                           + NVL[240.0] - NVS/0
host:18:44 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 12, bw 20.000000/20.000000, type NVL/PIX, sameChannels 1
host:18:44 [0] NCCL INFO Channel 00/24 :    0   1
host:18:44 [0] NCCL INFO Ring 00 : 1 -> 0 -> 1
host:18:44 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
host:18:44 [0] NCCL INFO 24 coll channels, 0 collnet channels, 0 nvls channels, 32 p2p channels, 32 p2p channels per peer
"""  # noqa: E501
DESKTOP = """\
host:82:55 [0] NCCL INFO GPU/0-3000 :GPU/0-3000 (0/5000.0/LOC) GPU/0-d000 (6/6.0/PHB) CPU/0-0 (2/24.0/PHB)
host:82:55 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 1, bw 6.000000/6.000000, type PHB/PIX, sameChannels 1
host:82:55 [0] NCCL INFO Pattern 1, crossNic 0, nChannels 1, bw 6.000000/6.000000, type PHB/PIX, sameChannels 1
host:82:55 [0] NCCL INFO Channel 00/0 : 0[3000] -> 1[d000] via P2P/IPC
"""  # noqa: E501
NO_PEERS = """\
host:5186:5235 [7] NCCL INFO Channel 00 : 7[ca000] -> 6[c7000] via SHM/direct/direct
host:5180:5231 [1] NCCL INFO Channel 00 : 1[2a000] -> 0[27000] via SHM/direct/direct
host:5180:5231 [1] NCCL INFO Channel 01 : 1[2a000] -> 0[27000] via SHM/direct/direct
host:5182:5233 [3] NCCL INFO Connected all rings
"""
PAIRS = """\
host:1893:1893 [3] NCCL INFO Channel 02 : 3[3] -> 0[0] via SHM/direct/direct
host:1891:1891 [1] NCCL INFO Channel 02 : 1[1] -> 2[2] via SHM/direct/direct
host:1892:1892 [2] NCCL INFO Channel 00/0 : 2[2] -> 3[3] via P2P/CUMEM/read
host:1890:1890 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
"""
TWO_MACHINES = """\
host:40:52 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
host:40:53 [1] NCCL INFO Channel 01/0 : 3[1] -> 1[1] [send] via NET/IBext_v8/4
host:41:54 [1] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [send] via NET/Socket/0
host:41:54 [1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
"""


def told(text: str) -> tuple[str, list[str]]:
    paths = read_paths(text)
    assert paths is not None
    return str(paths), list(paths.warnings())


def test_nvlink_is_told_without_a_warning() -> None:
    said, warnings = told(NVSWITCH)
    assert said == ("NCCL 2.19.3: 24 rings, 12 trees, 16 channels of NVLink SHARP; over NVLink")
    assert warnings == []
    paths = read_paths(A100S)
    assert paths is not None
    assert paths.ring_gb_s == 240
    assert told(A100S) == ("NCCL: 24 rings; over NVLink", [])


def test_pcie_through_the_cpu_is_warned_of() -> None:
    said, (warning,) = told(DESKTOP)
    assert said == "NCCL: 1 rings, 1 trees; over PCIe, through the CPU's host bridge"
    assert warning.startswith(
        "ranks 0 and 1 talk over PCIe, through the CPU's host bridge, not over "
    )


def test_gpus_that_cannot_reach_each_other_are_named() -> None:
    said, (warning,) = told(NO_PEERS)
    assert said.endswith("over the host's memory")
    assert warning.startswith("ranks 0 and 1, 6 and 7 talk through the host's memory")
    assert "nvidia-smi topo -p2p r" in warning


def test_only_the_slow_pairs_of_a_machine_are_named() -> None:
    _, (warning,) = told(PAIRS)
    assert warning.startswith("ranks 0 and 3, 1 and 2 talk through the host's memory")


def test_networks_are_told_apart() -> None:
    said, warnings = told(TWO_MACHINES)
    assert said.endswith("over TCP and network and network, through the host and peer access")
    copied, tcp = sorted(warnings, key=lambda warning: "TCP" in warning)
    assert copied.startswith("ranks 1 and 3 talk over a network without")
    assert "without GPUDirect RDMA" in copied
    assert tcp.startswith("ranks 0 and 15 talk over TCP")


@pytest.mark.parametrize("text", ["", "NCCL version 2.27.5+cuda12.9\n", "Channel 00 via P2P\n"])
def test_a_log_that_says_nothing_is_nothing(text: str) -> None:
    assert read_paths(text) is None


def test_the_log_is_asked_for_unless_the_user_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "ALL")
    with logging_to(str(tmp_path / "log")) as asked:
        assert asked
        assert os.environ["NCCL_DEBUG"] == "INFO"
        assert os.environ["NCCL_DEBUG_SUBSYS"] == "INIT,GRAPH"
        assert os.environ["NCCL_DEBUG_FILE"] == str(tmp_path / "log")
    assert "NCCL_DEBUG" not in os.environ
    assert os.environ["NCCL_DEBUG_SUBSYS"] == "ALL"
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with logging_to(str(tmp_path / "log")) as asked:
        assert not asked
        assert os.environ["NCCL_DEBUG"] == "WARN"
