"""A call under many schedules: what the tests of every form of the forward share.

Not a test itself: they import it by name, as they do `tests/gpu/cases.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from fovea.arch import SM90, Arch
from fovea.emulator import Options
from fovea.problem import AttentionProblem, ForwardResult
from fovea.runtime.emulated import emulate
from fovea.testing.inputs import Shape, dense_qkv

DELAYS = ("random", "eager", "late")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Run = Callable[[int, int], ForwardResult]  # of a seed and a number of SMs


def slow_unless(quick: Iterable[Any], names: Iterable[Any]) -> list[Any]:
    """Return names as parameters, all slow but the quick ones."""
    slow, quick = pytest.mark.slow, tuple(quick)
    return [name if name in quick else pytest.param(name, marks=slow) for name in names]


def two_heads(
    sizes: tuple[int, int], head_dims: tuple[int, int], dtype: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, v of (queries, keys) and (head_dim, head_dim_v): two heads on one."""
    shape = Shape(
        seqlen_q=sizes[0],
        seqlen_kv=sizes[1],
        heads_q=2,
        heads_kv=1,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
    )
    return dense_qkv(shape, dtype=DTYPES[dtype])


def moving(q: torch.Tensor, k: torch.Tensor, height: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k by which the maximum of every row moves.

    Keys are walked from the last one down: scores fall with the keys, so rise along the walk.
    """
    ramp = torch.linspace(height, -height, k.shape[1])[None, :, None, None]
    return q.abs(), k.abs() * ramp.to(k.dtype)


def run_once(
    problem: AttentionProblem,
    arch: Arch,
    *,
    seed: int = 0,
    num_sms: int = 2,
    splits: int | None = None,
    num_launches: int | None = None,
) -> ForwardResult:
    """Return the results under one schedule, of which nothing is reported.

    On Blackwell loads of tensor memory wait as the manual says.
    """
    wait = {} if arch is SM90 else {"tensor_load_wait": "explicit"}
    options = Options(seed=seed, async_delay=DELAYS[seed % 3], **wait)
    result, launches = emulate(problem, arch, splits=splits, num_sms=num_sms, options=options)
    assert num_launches is None or len(launches) == num_launches
    assert not any(launch.warnings for launch in launches)
    return result


def check_schedules(run: Run, seeds: int, num_sms: Sequence[int] = (1, 2, 132)) -> None:
    """Check that as many schedules, in turn on so many SMs, give the same bits."""
    first = run(0, 2)
    for seed in range(1, seeds):
        other = run(seed, num_sms[seed % len(num_sms)])
        assert torch.equal(other.out, first.out)
        assert torch.equal(other.lse, first.lse)
