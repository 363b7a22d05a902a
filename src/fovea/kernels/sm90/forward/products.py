"""The two products of a warpgroup: their operands, their accumulators, and how they are issued.

Lives here: S = Q K^T and O += P V as wgmma on the stages of the rings. Not here: when they are
issued and waited for (`steps.py`), descriptors and layouts (`sm90/wgmma.py`). Invariant: P keeps a
row's values in the order in which S has them, so that rounding is all that lies between.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.pipeline import stage_of
from fovea.kernels.device.ptx import pack_pair
from fovea.kernels.sm90.forward.arguments import SharedTiles
from fovea.kernels.sm90.wgmma import issue, output_mma, scores_mma
from fovea.plan.sm90_tiles import WARPGROUP_ROWS


class Products(NamedTuple):
    """The two products of one warpgroup with their operands and accumulators in registers."""

    scores: cute.TiledMma
    output: cute.TiledMma
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    tOrP: cute.Tensor
    acc_s: cute.Tensor
    acc_o: cute.Tensor


@cute.jit
def make_products(plan: cutlass.Constexpr, shared: SharedTiles, thread: cutlass.Int32) -> Products:
    """Return the products' operand views and fresh register fragments."""
    scores = scores_mma(plan)
    output = output_mma(plan)
    scores_thread = scores.get_slice(thread)
    output_thread = output.get_slice(thread)
    acc_s_shape = scores_thread.partition_shape_C((WARPGROUP_ROWS, plan.tile_n))
    acc_o_shape = output_thread.partition_shape_C((WARPGROUP_ROWS, plan.head_dim_v))
    p_shape = output_thread.partition_shape_A((WARPGROUP_ROWS, plan.tile_n))
    return Products(
        scores=scores,
        output=output,
        tSrQ=scores_thread.make_fragment_A(scores_thread.partition_A(shared.sQ)),
        tSrK=scores_thread.make_fragment_B(scores_thread.partition_B(shared.sK)),
        tOrV=output_thread.make_fragment_B(output_thread.partition_B(shared.sV)),
        tOrP=cute.make_rmem_tensor(p_shape, shared.sV.element_type),
        acc_s=cute.make_rmem_tensor(acc_s_shape, cutlass.Float32),
        acc_o=cute.make_rmem_tensor(acc_o_shape, cutlass.Float32),
    )


def issue_scores(plan, products: Products, q_use: cutlass.Int32, kv_use: cutlass.Int32) -> None:
    """Issue S = Q K^T of the stages of these uses."""
    q_stage = products.tSrQ[None, None, None, stage_of(q_use, plan.q_edge)]
    k_stage = products.tSrK[None, None, None, stage_of(kv_use, plan.k_edge)]
    issue(scores_mma(plan), products.acc_s, q_stage, k_stage, accumulate=False)


def issue_output(plan, products: Products, kv_use: cutlass.Int32) -> None:
    """Issue O += P V of the stage of this use."""
    v_stage = products.tOrV[None, None, None, stage_of(kv_use, plan.v_edge)]
    issue(output_mma(plan), products.acc_o, products.tOrP, v_stage, accumulate=True)


def store_p(products: Products) -> None:
    """Round P into the A operand of the second product; both hold a row's values in one order."""
    pairs = cute.make_tensor(
        cute.recast_ptr(products.tOrP.iterator, dtype=cutlass.Int32),
        cute.make_layout(cute.size(products.tOrP) // 2),
    )
    acc_s = products.acc_s
    for pair in range(cute.size(acc_s) // 2):
        pairs[pair] = pack_pair(acc_s[2 * pair], acc_s[2 * pair + 1], products.tOrP.element_type)
