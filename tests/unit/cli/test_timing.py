"""The timing loop, with calls whose length is known."""

import time

import torch

from fovea.cli.timing import time_interleaved

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
