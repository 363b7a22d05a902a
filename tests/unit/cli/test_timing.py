"""The timing loop, with calls whose length is known."""

import time

import pytest
import torch

from fovea.cli.timing import ratio_text, time_interleaved

CPU = torch.device("cpu")


def test_calls_take_turns_after_one_warm_up_each():
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = time_interleaved(calls, CPU, budget_s=0.0)
    assert order == ["a", "b"] * 4
    assert {timing.num_rounds for timing in timings.values()} == {3}


def test_median_is_not_moved_by_one_slow_round():
    lengths = iter([0.0, 0.3, 0.002, 0.002])
    timings = time_interleaved({"x": lambda: time.sleep(next(lengths))}, CPU, budget_s=0.0)
    assert 0.002 <= timings["x"].median_s < 0.1


def test_rounds_end_at_the_most_that_was_asked_for():
    timings = time_interleaved({"x": lambda: None}, CPU, budget_s=60.0, most_rounds=7)
    assert timings["x"].num_rounds == 7


class Gpu:
    """A queue of kernels with a clock of its own, and a host that needs time for every launch."""

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def launch(self, seconds: float, host_seconds: float = 0.0) -> None:
        self.host += host_seconds
        self.device = max(self.device, self.host) + seconds

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def sleep(self, cycles: int) -> None:
        self.launch(cycles / 1.5e9)

    def event(self, enable_timing: bool) -> "Event":
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.at = max(self.gpu.device, self.gpu.host)

    def synchronize(self) -> None:
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, later: "Event") -> float:
        return (later.at - self.at) * 1e3


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: gpu.host)
    return gpu


@pytest.mark.parametrize("kernel_s", [3e-6, 50e-6, 2e-3, 0.3])
@pytest.mark.parametrize("host_s", [10e-6, 150e-6])
def test_time_on_a_gpu_is_the_kernels_and_not_the_hosts(gpu, kernel_s, host_s):
    calls = {"x": lambda: gpu.launch(kernel_s, host_s)}
    timings = time_interleaved(calls, torch.device("cuda"), budget_s=0.0)
    # Of a kernel that fills a reading alone, one launch of the host is all there is beside it.
    assert timings["x"].median_s == pytest.approx(kernel_s, rel=1e-3)
    assert timings["x"].num_rounds == 3


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(1.25, "1.25x"), (317.4, "317.40x"), (0.075, "0.075x"), (1.23e-5, "0.000012x"), (0, "0.00x")],
)
def test_small_ratio_keeps_two_digits(ratio, text):
    assert ratio_text(ratio) == text
