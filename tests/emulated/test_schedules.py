"""The forward under many schedules: equal bits, no report, within time and memory."""

import resource
import time

import pytest
import torch

from fovea.arch import arch_named
from fovea.emulator import Options
from fovea.problem import ForwardResult
from fovea.runtime.emulated import emulate
from fovea.testing.inputs import Shape
from fovea.testing.problems import dense_problem

_SECONDS, _GIGABYTES = 20.0, 2.0  # of one launch on one core, of the whole process
_DELAYS = ("random", "eager", "late")


def _run(seed: int, num_sms: int) -> ForwardResult:
    problem = dense_problem(
        Shape(seqlen_q=256, seqlen_kv=512, heads_q=1, heads_kv=1, head_dim=128),
        dtype=torch.bfloat16,
    )
    options = Options(seed=seed, async_delay=_DELAYS[seed % 3])
    result, launches = emulate(problem, arch_named("sm90"), num_sms=num_sms, options=options)
    assert not any(launch.warnings for launch in launches)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("num_sms", [1, 2])
def test_forward_gives_the_same_bits_under_20_schedules_in_time_and_memory(num_sms: int) -> None:
    expected = _run(0, num_sms)
    start = time.process_time()
    for seed in range(1, 20):
        result = _run(seed, num_sms)
        assert torch.equal(result.out, expected.out)
        assert torch.equal(result.lse, expected.lse)
    assert (time.process_time() - start) / 19 < _SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 < _GIGABYTES
