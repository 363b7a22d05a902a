"""Query tiles of a launch on the SMs."""

import pytest

from fovea.costs.launch import SAMPLED_VISITS, Call, TileTimes, last_end, launch_cycles


def _call(**changes):
    sizes = {"batch": 1, "heads": 1, "seqlen_q": 512, "seqlen_kv": 512}
    return Call(**{**sizes, "head_dim": 128, "head_dim_v": 128, "causal": False, **changes})


def _linear(ends, visit):
    return TileTimes.of(
        lambda walks: sum(ends + visit * each for each in walks),
        least_visit=0.0,
        is_persistent=True,
    )


def test_times_of_a_linear_kernel_are_exact_at_every_length():
    times = _linear(1000.0, 200.0)
    assert times.visit == pytest.approx(200.0)
    for visits in (*SAMPLED_VISITS, 3, 11, 500):
        assert times.at(visits) == pytest.approx(1000.0 + 200.0 * visits)


def test_memory_bounds_a_tile_from_below():
    times = TileTimes.of(lambda walks: 10.0 * sum(walks), least_visit=25.0, is_persistent=True)
    assert times.at(4) == pytest.approx(100.0)
    assert times.visit == pytest.approx(25.0)


def test_walks_of_a_causal_call_end_at_the_diagonal_longest_first():
    assert _call(causal=True).walks(256, 128) == [4, 2]
    assert _call(causal=True, seqlen_q=256).walks(256, 128) == [4]
    assert _call().walks(256, 128) == [4, 4]
    assert _call(seqlen_q=300).walks(256, 128) == [4, 4]


def test_causal_flops_are_half():
    assert 2 * _call(causal=True).flops == _call().flops == 2 * 512 * 512 * 256


def test_pieces_go_to_whoever_is_free_first():
    assert last_end([3.0, 3.0, 2.0, 2.0], 2) == 5.0
    assert last_end([4.0, 1.0, 1.0, 1.0], 2) == 4.0
    assert last_end([2.0] * 5, 2) == 6.0


def test_a_launch_takes_its_last_worker_and_a_start():
    times = _linear(0.0, 10.0)
    call = _call(heads=3)
    assert launch_cycles(call, times, shape=(256, 128), workers=3) == pytest.approx(80.0)
    assert launch_cycles(call, times, shape=(256, 128), workers=4) == pytest.approx(80.0)
    assert launch_cycles(call, times, shape=(256, 128), workers=6) == pytest.approx(40.0)
