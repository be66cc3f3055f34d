"""The choice of the device, and when torch is imported for it."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import pytest

from twostroke.config import EngineConfig
from twostroke.engine import device
from twostroke.errors import ConfigError


class Machine:
    """A machine with or without driver and GPUs; notes whether torch was imported."""

    def __init__(self, driver: bool, amd: bool, gpu: bool) -> None:
        self.driver, self.amd, self.gpu, self.asked = driver, amd, gpu, False

    def load(self, name: str) -> object:
        if not self.driver:
            raise OSError(f"{name}: cannot open shared object file")
        return object()

    def finds_gpu(self) -> bool:
        self.asked = True
        return self.gpu

    def put_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device.sys, "platform", "linux")
        monkeypatch.setattr(ctypes, "CDLL", self.load)
        monkeypatch.setattr(os.path, "exists", lambda path: path == device.AMD and self.amd)
        monkeypatch.setattr(device, "_finds_gpu", self.finds_gpu)
        monkeypatch.setattr(device, "has_torch", lambda: True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("driver", "amd", "gpu", "asked", "found", "torch_is_asked"),
    [
        (False, False, False, "auto", "cpu", False),
        (True, False, True, "auto", "cuda:0", True),
        (True, False, False, "auto", "cpu", True),  # a driver without a device
        (False, True, True, "auto", "cuda:0", True),
        (True, False, True, "cpu", "cpu", False),
        (True, False, True, "cuda", "cuda:0", True),
        (True, False, True, "cuda:1", "cuda:1", True),
    ],
)
def test_torch_is_imported_only_if_there_may_be_a_gpu(
    driver: bool,
    amd: bool,
    gpu: bool,
    asked: str,
    found: str,
    torch_is_asked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(driver, amd, gpu)
    machine.put_in_place(monkeypatch)
    assert device.find_device(EngineConfig(device=asked)) == found
    assert machine.asked is torch_is_asked


def test_several_engines_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(driver=True, amd=False, gpu=True).put_in_place(monkeypatch)
    monkeypatch.setattr(device, "_num_gpus", lambda: 2)
    engines = [EngineConfig(engines_on_host=3, engine_index=n) for n in range(3)]
    assert [device.find_device(one) for one in engines] == ["cuda:0", "cuda:1", "cuda:0"]
    found = [device.engines_on_gpu(one, device.find_device(one)) for one in engines]
    assert found == [2, 1, 2]
    named = EngineConfig(engines_on_host=3, engine_index=1, device="cuda:1")
    assert device.find_device(named) == "cuda:1"
    assert device.engines_on_gpu(named, "cuda:1") == 3
    assert device.engines_on_gpu(EngineConfig(), "cuda:0") == 1


def test_engines_on_one_gpu_start_one_after_another() -> None:
    build_torch = pytest.importorskip("twostroke.engine.build_torch")
    order: list[str] = []
    config = EngineConfig(engines_on_host=2)

    def second() -> None:
        with build_torch.gpu_turn(config, "cuda:7"):
            order.append("second")

    with build_torch.gpu_turn(config, "cuda:7"):
        thread = threading.Thread(target=second)
        thread.start()
        with build_torch.gpu_turn(config, "cuda:6"):
            order.append("on another GPU")
        thread.join(0.1)
        order.append("first")
    thread.join(60)
    assert order == ["on another GPU", "first", "second"]


@pytest.mark.parametrize("hidden", ["", " ", "-1"])
def test_hidden_gpus_are_not_searched(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(driver=True, amd=False, gpu=True)
    machine.put_in_place(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert device.find_device(EngineConfig()) == "cpu"
    assert not machine.asked
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert device.find_device(EngineConfig()) == "cuda:0"


def test_a_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(driver=False, amd=False, gpu=False).put_in_place(monkeypatch)
    with pytest.raises(ConfigError, match="torch finds no GPU; use device='cpu' or 'auto'"):
        device.find_device(EngineConfig(device="cuda"))


class Driver:
    """A fake of NVIDIA's driver that counts devices."""

    def __init__(self, devices: int, starts: bool = True) -> None:
        self.devices, self.starts = devices, starts

    def cuInit(self, flags: int) -> int:  # noqa: N802, the driver's own name
        return 0 if self.starts else 100  # no device

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.devices
        return 0


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (Driver(1), "this machine has a GPU, but torch is not installed; running on the CPU"),
        (Driver(8), "this machine has 8 GPUs, but torch is not installed; running on the CPU"),
        (Driver(0), None),
        (Driver(1, starts=False), None),
    ],
)
def test_a_gpu_without_torch_is_reported(
    driver: Driver,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Machine(driver=True, amd=False, gpu=True).put_in_place(monkeypatch)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(device, "has_torch", lambda: False)
    assert device.find_device(EngineConfig()) == "cpu"
    assert (says in caplog.text) if says else not caplog.records
    with pytest.raises(ConfigError, match=r"not installed: pip install 'twostroke\[gpu\]'"):
        device.find_device(EngineConfig(device="cuda:1"))
