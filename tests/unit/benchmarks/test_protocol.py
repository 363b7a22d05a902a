"""The measuring loop on a simulated GPU, and what a result file holds."""

import json
import math
import time

import pytest

from benchmarks import protocol
from benchmarks.protocol import Samples, Timing


def test_measure_gives_the_time_of_a_launch_and_the_power(gpu):
    launches = {
        "a": lambda: gpu.launch("a", 2e-3),
        "b": lambda: gpu.launch("b", 5e-4),
    }
    samples = protocol.measure(launches, gpu, Timing(rounds=2, segment_seconds=1.0))
    for name, seconds in (("a", 2e-3), ("b", 5e-4)):
        taken = samples[name]
        assert taken.burst_seconds == pytest.approx([seconds] * 2, rel=1e-3)
        assert taken.steady_seconds == pytest.approx(
            [seconds] * len(taken.steady_seconds), rel=1e-3
        )
        # Half of each of two segments of a second, in chunks of 0.03 s.
        assert 28 <= len(taken.steady_seconds) <= 36
        assert taken.watts == pytest.approx([650.0] * 2, rel=1e-3)
        assert set(taken.clocks_mhz) == {1500}


def test_measure_runs_the_implementations_in_turns(gpu):
    launches = {name: (lambda name=name: gpu.launch(name, 1e-2)) for name in "ab"}
    protocol.measure(launches, gpu, Timing(rounds=3, segment_seconds=0.3))
    order = [x for x, y in zip(gpu.launched, [None, *gpu.launched]) if x != y]
    # First launches, bursts, warm-up and steady turns, every second round the other way.
    assert "".join(order) == "ab" + "ababab" + "ab" + "a" + "b"


def test_measure_keeps_the_gpu_busy_in_a_segment(gpu):
    samples = Samples()
    protocol._steady(lambda: gpu.launch("a", 1e-3), 30, gpu, 1.0, samples)
    assert gpu.idle < 1e-3


def test_rates_are_work_over_the_median_time():
    samples = {
        "fovea": Samples(
            burst_seconds=[0.5, 0.4], steady_seconds=[1.0, 2.0, 9.0], clocks_mhz=[1500, 1510],
            watts=[100.0],
        )
    }  # fmt: skip
    assert protocol.rates(samples, 600.0) == {
        "fovea": 300.0,
        "fovea_burst": 1333.3,
        "fovea_mhz": 1505,
        "fovea_watts": 100,
        "fovea_per_joule": 3.0,
    }


def test_result_file_is_one_object_with_stamp_unit_and_rows(tmp_path):
    path = tmp_path / "deep" / "forward.json"
    rows = [{"B": 1, "causal": True, "fovea": 1.5}, {"B": 2, "causal": False, "fovea": 2.5}]
    protocol.write_result(path, {"gpu": "H200", "commit": "abc"}, "TFLOP/s", rows)
    assert json.loads(path.read_text()) == {
        "stamp": {"gpu": "H200", "commit": "abc"},
        "unit": "TFLOP/s",
        "rows": rows,
    }
    assert [p.name for p in path.parent.iterdir()] == ["forward.json"]


def test_table_line_shows_ratios_of_the_first_to_the_others():
    row = {"fovea": 600.0, "fovea_burst": 650.0, "fa3": 500.0, "fa3_burst": 510.0,
           "fovea_mhz": 1500, "fovea_per_joule": 0.9}  # fmt: skip
    line = protocol.table_line(row, ["fovea", "fa3", "flex"], "S16384")
    assert " ".join(line.split()) == "S16384 fovea 600/650 fa3 500/510 x1.20 fa3 1500 MHz 0.90/J"


def test_meter_takes_energy_and_time_between_steps_of_the_counter():
    begin = time.monotonic()

    def joules() -> float:  # 500 W, counted every 20 ms
        return 10.0 * ((time.monotonic() - begin) // 0.02)

    meter = protocol.Meter(joules)
    time.sleep(0.15)
    assert meter.watts() == pytest.approx(500.0, rel=0.2)


def test_meter_of_a_counter_that_stands_still_says_nothing():
    meter = protocol.Meter(lambda: 7.0)
    assert math.isnan(meter.watts())
