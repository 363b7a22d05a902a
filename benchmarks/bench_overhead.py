"""Python overhead of a warm call above its raw launch, without and with grad recorded.

Needs no GPU: CPU tensors pose as a GPU's, and a launcher that does nothing takes the arguments of a
real one. So all of fovea is timed (recognising the call, reading mods and block masks, outputs,
arguments, autograd), with torch's CPU allocator in the place of its CUDA one. Figures are the least
of many short batches of calls, less that of the launcher with ready arguments: what other processes
take, and what they do to caches, is not overhead of a call.
`scripts/gpu/measure_overhead.py` measures the same on a GPU. Run: `python -m
benchmarks.bench_overhead`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

import fovea
from fovea import dispatch
from fovea.arch import SM90
from fovea.ops import warm
from fovea.problem import Request, make_dense
from fovea.runtime import cuda, stream_memory

BUDGET_US = {"no grad": 25.0, "grad recorded": 45.0}
BATCHES, CALLS = 4000, 6
_SHAPE = (1, 256, 4, 128)
_CHOICE = dispatch.Choice("cuda", "posing as a GPU", "reference", SM90)


def launcher(*arguments: Any) -> None:
    """Take what a kernel's launcher takes."""


@contextmanager
def posing_gpu(launch: Callable[..., Any] = launcher) -> Iterator[None]:
    """Let CPU tensors go the way of CUDA tensors, to `launch` instead of a compiled launcher."""
    places: list[tuple[Any, str, Any]] = [
        (dispatch, "choose", lambda problem, backend: _CHOICE),
        (cuda, "arch_of", lambda device: SM90),
        (cuda, "_launcher", lambda plan, arch, device: launch),
        (cuda, "_num_sms", lambda device: 132),
        (cuda, "is_capturing", lambda: False),
        (stream_memory, "_current_device", lambda: None),
        (stream_memory, "_current_stream", lambda index: 0),
        (stream_memory, "is_capturing", lambda: False),
    ]
    with ExitStack() as stack:
        for where, name, stand_in in places:
            stack.enter_context(mock.patch.object(where, name, stand_in))
        for table in (cuda._launches, stream_memory._memories):
            stack.enter_context(mock.patch.dict(table, clear=True))
        warm.clear()
        yield
    warm.clear()


def least_us(call: Callable[[], object]) -> float:
    """Return the time of one call in microseconds, undisturbed."""
    least = float("inf")
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        least = min(least, time.perf_counter() - start)
    return 1e6 * least / CALLS


def cases() -> dict[str, dict[str, Any]]:
    """Return keyword arguments by name of the case."""
    slopes = torch.rand(16)
    slope, width = 0.05, 100

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    def distance(score, b, h, q_idx, kv_idx):
        return score + slope * (kv_idx - q_idx)

    def sliding(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= width

    block_mask = fovea.create_block_mask(sliding, 1, 1, 256, 256, device="cpu")
    return {
        "dense": {},
        "causal": {"causal": True},
        "window, softcap": {"causal": True, "window": (1024, 0), "softcap": 30.0},
        "score_mod": {"score_mod": alibi},
        "captured float": {"score_mod": distance},
        "score_mod, mask_mod": {"score_mod": alibi, "mask_mod": sliding},
        "block_mask": {"block_mask": block_mask},
    }


def main() -> None:
    """Print one row a case, and whether it keeps to the budget."""
    torch.set_num_threads(1)
    q = torch.randn(_SHAPE, dtype=torch.bfloat16)
    budget = ", ".join(f"{name} {limit:.0f}" for name, limit in BUDGET_US.items())
    with posing_gpu():
        print(f"{'case':24}{'no grad':>12}{'grad recorded':>16}   us; budget: {budget}")
        for name, keywords in cases().items():
            take, arguments = cuda.arguments_of(make_dense(q, q, q, Request(**keywords)))
            raw = least_us(lambda take=take, arguments=arguments: take(*arguments))
            row = []
            for needs_grad in (False, True):
                q.requires_grad_(needs_grad)
                row.append(
                    least_us(lambda keywords=keywords: fovea.attention(q, q, q, **keywords)) - raw
                )
            q.requires_grad_(False)
            print(f"{name:24}{row[0]:12.1f}{row[1]:16.1f}")


if __name__ == "__main__":
    main()
