"""Python overhead of a warm call above its backend, without and with grad recorded.

The backend is replaced by one that returns ready tensors, so that what is left is fovea: argument
checks, tracing of mods, the choice of a backend, autograd. Figures are medians over batches of
calls, less the time of the bare backend. Run: `python benchmarks/bench_overhead.py`.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager

import torch

import fovea
from fovea import dispatch
from fovea.problem import AttentionProblem, ForwardResult

BUDGET_US = {"no grad": 25.0, "grad recorded": 45.0}
BATCHES, CALLS = 41, 200


def ready(result: ForwardResult) -> ForwardResult:
    """Return new tensors over ready memory, as autograd wants outputs to be."""
    return ForwardResult(result.out.detach(), result.lse.detach(), None)


@contextmanager
def ready_backend(result: ForwardResult):
    """Put a backend that only returns `result` in the place of the reference."""
    original = dispatch._forward

    def forward(problem: AttentionProblem, choice: dispatch.Choice) -> ForwardResult:
        return ready(result)

    dispatch._forward = forward
    try:
        yield
    finally:
        dispatch._forward = original


def median_us(call: Callable[[], object]) -> float:
    """Return the median time of one call in microseconds."""
    for _ in range(CALLS):
        call()
    times = []
    for _ in range(BATCHES):
        # Processor time: what other processes take between two calls is not overhead of a call.
        start = time.process_time()
        for _ in range(CALLS):
            call()
        times.append((time.process_time() - start) / CALLS)
    return 1e6 * statistics.median(times)


def cases() -> dict[str, dict]:
    """Return keyword arguments by name of the case."""
    slopes = torch.rand(16)
    width = 1024

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    def sliding(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= width

    block_mask = fovea.create_block_mask(sliding, 1, 1, 256, 256, device="cpu")
    return {
        "dense": {},
        "causal": {"causal": True},
        "window, softcap": {"causal": True, "window": (1024, 0), "softcap": 30.0},
        "score_mod": {"score_mod": alibi},
        "score_mod, mask_mod": {"score_mod": alibi, "mask_mod": sliding},
        "block_mask": {"block_mask": block_mask},
    }


def main() -> None:
    """Print one row a case, and whether it keeps to the budget."""
    torch.set_num_threads(1)
    q = torch.randn(1, 256, 16, 64)
    out, lse = torch.empty_like(q), torch.empty(1, 16, 256)
    result = ForwardResult(out, lse, None)
    bare = median_us(lambda: ready(result))
    budget = ", ".join(f"{name} {limit:.0f}" for name, limit in BUDGET_US.items())
    with ready_backend(result):
        print(f"{'case':24}{'no grad':>12}{'grad recorded':>16}   us; budget: {budget}")
        for name, keywords in cases().items():
            row = []
            for needs_grad in (False, True):
                q.requires_grad_(needs_grad)
                row.append(
                    median_us(lambda keywords=keywords: fovea.attention(q, q, q, **keywords)) - bare
                )
            print(f"{name:24}{row[0]:12.1f}{row[1]:16.1f}")


if __name__ == "__main__":
    main()
