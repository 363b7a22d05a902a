"""Ready-made problems: validated calls on seeded inputs, and what a test asks of them.

Lives here: builders that go through the checks of `problem/`. Not here: the tensors' making
(`inputs.py`), judging of results (`budget.py`). Invariant: a builder's result is what
`fovea.attention` would have built from the same arguments.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fovea.problem import (
    AttentionProblem,
    ForwardResult,
    GradientNeeds,
    Gradients,
    Request,
    VarlenRequest,
    make_dense,
    make_varlen,
)
from fovea.reference import tiled_backward, tiled_forward
from fovea.testing.budget import check_backward, check_forward
from fovea.testing.inputs import Shape, cumulative, dense_qkv, normal


def dense_problem(
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    **options: Any,
) -> AttentionProblem:
    """Return the problem of a dense call on normal inputs; options as in `fovea.attention`."""
    q, k, v = dense_qkv(shape, dtype=dtype, device=device, seed=seed)
    return make_dense(q, k, v, Request(wants_lse=True, wants_max_score=True, **options))


def varlen_problem(
    lengths_q: Sequence[int],
    lengths_kv: Sequence[int],
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    **options: Any,
) -> AttentionProblem:
    """Return the problem of a packed call; heads and head dims are those of `shape`."""
    q, _, _ = dense_qkv(replace(shape, batch=1, seqlen_q=sum(lengths_q)), dtype=dtype)
    _, k, v = dense_qkv(replace(shape, batch=1, seqlen_kv=sum(lengths_kv)), dtype=dtype)
    where = VarlenRequest(
        cu_seqlens_q=cumulative(lengths_q),
        cu_seqlens_kv=cumulative(lengths_kv),
        max_seqlen_q=max([*lengths_q, 0]),
        max_seqlen_kv=max([*lengths_kv, 0]),
        seqused_q=seqused_q,
        seqused_kv=seqused_kv,
    )
    request = Request(wants_lse=True, wants_max_score=True, **options)
    return make_varlen(q[0], k[0], v[0], where, request)


def all_needs(problem: AttentionProblem) -> GradientNeeds:
    """Return a request for every gradient that the problem can have."""
    captures = () if problem.score_mod is None else problem.score_mod.captures
    return GradientNeeds(
        q=True,
        k=True,
        v=True,
        sink=problem.sink is not None,
        score_captures=tuple(x.requires_grad for x in captures),
    )


def check_reference(problem: AttentionProblem, *, tile_n: int) -> tuple[ForwardResult, Gradients]:
    """Run the reference with random cotangents; raise AssertionError on a result out of budget."""
    result = tiled_forward.forward(problem, tile_n=tile_n)
    check_forward(problem, result)
    dout = normal(result.out.shape, seed=101, dtype=problem.dtype, device=problem.device)
    dlse = normal(result.lse.shape, seed=102, dtype=result.lse.dtype, device=problem.device)
    needs = all_needs(problem)
    with torch.no_grad():
        gradients = tiled_backward.backward(
            problem,
            out=result.out,
            lse=result.lse,
            dout=dout,
            dlse=dlse,
            needs=needs,
            tile_n=tile_n,
        )
    check_backward(problem, gradients, dout=dout, dlse=dlse, needs=needs)
    return result, gradients
