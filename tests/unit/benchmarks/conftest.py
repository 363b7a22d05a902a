"""A simulated GPU, and the repository's root on the path, where `benchmarks` lives."""

import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = str(Path(__file__).parents[3])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


class SimulatedGpu:
    """A queue of launches with a clock of its own; the host pays a little for each call.

    It also stands for `protocol.Board`.
    """

    def __init__(self) -> None:
        self.host = 0.0
        self.device = 0.0
        self.idle = 0.0
        self.launched: list[str] = []

    def launch(self, name: str, seconds: float) -> None:
        self.host += 5e-6
        self.idle += max(0.0, self.host - self.device)
        self.device = max(self.device, self.host) + seconds
        self.launched.append(name)

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def sleep(self, seconds: float) -> None:
        self.host += seconds

    def monotonic(self) -> float:
        self.host += 1e-6
        return self.host

    def meter(self) -> "SimulatedMeter":
        return SimulatedMeter()

    def clock_mhz(self) -> int:
        return 1500

    def power_limit_watts(self) -> float:
        return 700.0

    def driver(self) -> str:
        return "580.1"


class SimulatedMeter:
    def is_ready(self) -> bool:
        return True

    def watts(self) -> float:
        return 650.0


@pytest.fixture
def gpu(monkeypatch) -> SimulatedGpu:
    gpu = SimulatedGpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = max(gpu.device, gpu.host)

        def synchronize(self) -> None:
            gpu.host = max(gpu.host, self.at)

        def elapsed_time(self, later: "Event") -> float:
            return (later.at - self.at) * 1000

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(time, "sleep", gpu.sleep)
    monkeypatch.setattr(time, "monotonic", gpu.monotonic)
    return gpu
