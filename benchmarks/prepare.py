"""Compile every kernel that the forward benchmarks launch, on a machine without a GPU.

    python -m benchmarks.prepare .carry/bundle

From the repository's root, with `src` and `.` on PYTHONPATH. The folder then serves a GPU machine
that has no compiler: `bench_forward --bundle <folder>`, or FOVEA_BUNDLE.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fovea
from benchmarks import (
    bench_block_sparse,
    bench_decode,
    bench_forward_mods,
    bench_varlen,
    shapes,
)
from fovea.api.variants import origins
from fovea.arch import SM90
from fovea.compile.aot import write_bundle
from fovea.compile.target import CompileTarget
from fovea.compile.variant import ForwardVariant
from fovea.plan import select
from fovea.problem import AttentionProblem, Request, VarlenRequest, make_dense, make_varlen


def main() -> None:
    """Compile the kernels of all suites into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--workers", type=int, default=None)
    options = parser.parse_args()
    suites = (
        *(dense_variants(), mod_variants(), block_sparse_variants()),
        *(decode_variants(), varlen_variants()),
    )
    variants = list(dict.fromkeys(variant for suite in suites for variant in suite))
    write_bundle(
        variants, [CompileTarget(arch=SM90.target)], options.bundle, workers=options.workers
    )
    for variant in variants:
        print(variant.name)


def dense_variants() -> list[ForwardVariant]:
    """Return the kernels of the dense and causal shapes, wide ones among them."""
    every = (*shapes.DENSE_SHAPES, *shapes.WIDE_SHAPES)
    return [variant_of(shape, causal=shape.causal) for shape in every]


def mod_variants() -> list[ForwardVariant]:
    """Return the kernels of the mods suite."""
    return [variant for make in bench_forward_mods.CASES for variant in mod_variants_of(make)]


def block_sparse_variants() -> list[ForwardVariant]:
    """Return the kernels of the block-sparse suite."""

    def case(make: Callable[[shapes.Shape, str], Any]) -> Callable[..., bench_forward_mods.Case]:
        return lambda shape, device: bench_forward_mods.Case(mask_mod=make(shape, device))

    makers = bench_block_sparse.MASKS.values()
    return [variant for make in makers for variant in mod_variants_of(case(make))]


def decode_variants() -> list[ForwardVariant]:
    """Return the kernels of the decode suite."""
    return [decode_variant(call) for call in bench_decode.CALLS]


def decode_variant(call: bench_decode.Call) -> ForwardVariant:
    """Return the kernel of one call of the decode suite; its keys are not allocated."""
    q, k = (
        torch.empty(call.B, length, heads, call.D, dtype=torch.bfloat16, device="meta")
        for length, heads in ((call.Sq, call.H), (call.S, call.Hkv))
    )
    if not call.page:
        return ForwardVariant(select.forward_plan(make_dense(q, k, k, Request(causal=True)), SM90))
    k = k.view(-1, call.page, call.Hkv, call.D)
    index = torch.empty(call.B + 1, dtype=torch.int32, device="meta")
    where = VarlenRequest(
        *(index, None, call.Sq, call.S),
        seqused_kv=index[1:],
        page_table=index.new_empty(call.B, call.S // call.page),
    )
    problem = make_varlen(q.flatten(0, 1), k, k, where, Request(causal=True))
    return ForwardVariant(select.forward_plan(problem, SM90))


def varlen_variants() -> list[ForwardVariant]:
    """Return the kernels of the varlen suite, and of the dense calls beside."""
    packed = [varlen_variant(call) for call in bench_varlen.CALLS]
    dense = [variant_of(call.dense, causal=call.causal) for call in bench_varlen.CALLS]
    return [*packed, *dense]


def varlen_variant(call: bench_varlen.Call) -> ForwardVariant:
    """Return the kernel of one call of the varlen suite."""
    total, longest = sum(bench_varlen.lengths()), max(bench_varlen.lengths())
    q, k = (
        torch.empty(total, heads, call.D, dtype=torch.bfloat16, device="meta")
        for heads in (call.H, call.Hkv)
    )
    starts = torch.empty(len(bench_varlen.lengths()) + 1, dtype=torch.int32, device="meta")
    where = VarlenRequest(starts, starts, longest, longest)
    problem = make_varlen(q, k, k, where, Request(causal=call.causal))
    return ForwardVariant(select.forward_plan(problem, SM90))


def mod_variants_of(
    make: Callable[[shapes.Shape, str], bench_forward_mods.Case],
) -> list[ForwardVariant]:
    """Return the kernels of one case of the mods suite, by whoever makes its block mask."""
    shape = shapes.MOD_SHAPE
    case = make(shape, "cpu")
    mask = None
    if case.mask_mod is not None:
        mask = fovea.create_block_mask(case.mask_mod, None, None, shape.S, shape.S, "cpu")
    problem = problem_of(shape, score_mod=case.score_mod, block_mask=mask)
    return [ForwardVariant(select.forward_plan(call, SM90)) for call, _ in origins(problem, SM90)]


def variant_of(shape: shapes.Shape, **keywords: Any) -> ForwardVariant:
    """Return the kernel of one call."""
    return ForwardVariant(select.forward_plan(problem_of(shape, **keywords), SM90))


def problem_of(shape: shapes.Shape, **keywords: Any) -> AttentionProblem:
    """Return one call; its tensors are allocated and never touched."""
    q, k, v = (
        torch.empty(shape.B, shape.S, heads, head_dim, dtype=torch.bfloat16, device="cpu")
        for heads, head_dim in (
            (shape.H, shape.D),
            (shape.Hkv, shape.D),
            (shape.Hkv, shape.head_dim_v),
        )
    )
    return make_dense(q, k, v, Request(**keywords))


if __name__ == "__main__":
    main()
