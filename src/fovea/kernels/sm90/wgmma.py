"""Warpgroup matrix products: tiled MMA objects, shared-memory layouts and the issue loop.

Lives here: what is special to Hopper's `wgmma`. Not here: when products are issued and waited for
(`forward/compute.py`). Invariant: an accumulator, and registers of A, are only touched again after
the wait for the group that uses them.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass.cute.nvgpu import warpgroup

from fovea.kernels.device.element_type import element_type
from fovea.plan.sm90 import ForwardPlan
from fovea.plan.sm90_tiles import WARPGROUP_ROWS


def scores_mma(plan: ForwardPlan) -> cute.TiledMma:
    """Return S = Q K^T of one warpgroup: both operands from shared memory, head_dim contiguous."""
    dtype = element_type(plan)
    k_major = cute.nvgpu.OperandMajorMode.K
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, k_major, k_major, cutlass.Float32, (1, 1, 1), (WARPGROUP_ROWS, plan.tile_n)
    )


def output_mma(plan: ForwardPlan) -> cute.TiledMma:
    """Return O += P V of one warpgroup: P from registers, V with head_dim_v contiguous."""
    dtype = element_type(plan)
    return hopper.make_trivial_tiled_mma(
        dtype,
        dtype,
        cute.nvgpu.OperandMajorMode.K,
        cute.nvgpu.OperandMajorMode.MN,
        cutlass.Float32,
        (1, 1, 1),
        (WARPGROUP_ROWS, plan.head_dim_v),
        warpgroup.OperandSource.RMEM,
    )


def row_major_layout(
    dtype: type[cutlass.Numeric], rows: int, columns: int, stages: int, apart: int | None = None
) -> cute.ComposedLayout:
    """Return the swizzled (rows, columns, stages) layout of an operand whose K axis is contiguous.

    The widest swizzle whose row divides the tile's row leaves no bank conflict. `apart` are the
    elements from one stage to the next, None for no gap.
    """
    row_bits = columns * dtype.width
    kinds = warpgroup.SmemLayoutAtomKind
    kind = next(
        kind
        for bits, kind in ((1024, kinds.K_SW128), (512, kinds.K_SW64), (256, kinds.K_SW32))
        if row_bits % bits == 0
    )
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    if apart is None or apart == rows * columns:
        return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))
    one = cute.tile_to_shape(atom, (rows, columns), order=(0, 1))
    gaps = cute.append(one.outer, cute.make_layout(stages, stride=apart))
    return cute.make_composed_layout(one.inner, 0, gaps)


def transposed_layout(
    dtype: type[cutlass.Numeric], rows: int, columns: int, stages: int
) -> cute.ComposedLayout:
    """Return the swizzled (rows, columns, stages) layout of B whose N axis (rows) is contiguous."""
    row_bits = rows * dtype.width
    kinds = warpgroup.SmemLayoutAtomKind
    kind = next(
        kind
        for bits, kind in ((1024, kinds.MN_SW128), (512, kinds.MN_SW64), (256, kinds.MN_SW32))
        if row_bits % bits == 0
    )
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(1, 0, 2))


def issue(
    mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, *, accumulate: bool
) -> None:
    """Issue and commit one product over all its k-steps; the first may overwrite `acc`.

    Run by a whole warpgroup. The fence orders the registers of `acc` and `a`, written by ordinary
    instructions, before the asynchronous product reads them. `mma` must be made for this call:
    setting its accumulate flag rebinds it inside the current region.
    """
    warpgroup.fence()
    for k_idx in range(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, accumulate or k_idx > 0)
        cute.gemm(mma, acc, a[None, None, k_idx], b[None, None, k_idx], acc)
    warpgroup.commit_group()
