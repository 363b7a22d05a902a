"""K and V of a paged cache on Hopper: a stage holds a whole tile.

Lives here: how the stages are cut into boxes. Not here: the loads of boxes (`device/pages.py`),
those of whole tiles (`tile_loads.py`).
"""

import cutlass

from fovea.kernels.device.kv_walk import Walk
from fovea.kernels.device.pages import Boxes, PagedOperand, Pages, paged_operand
from fovea.kernels.portable.tensors import TmaLoads
from fovea.kernels.sm90.forward.arguments import SharedTiles
from fovea.plan.sm90 import ForwardPlan


def k_boxes(plan: ForwardPlan) -> Boxes:
    """Return how the stages of K are cut."""
    return Boxes(plan.tile_n, plan.head_dim, plan.page_box, False, plan.k_edge)


def v_boxes(plan: ForwardPlan) -> Boxes:
    """Return how the stages of V are cut."""
    return Boxes(plan.tile_n, plan.head_dim_v, plan.page_box, True, plan.v_edge)


def paged_operands(
    plan, pages: Pages, tma: TmaLoads, shared: SharedTiles, walk: Walk, kv_head: cutlass.Int32
) -> tuple[PagedOperand, PagedOperand]:
    """Return K and V of a query tile."""
    where = (pages, walk, kv_head)
    k = paged_operand(k_boxes(plan), tma.atom_k, shared.k, shared.sK, tma.mK, *where)
    v = paged_operand(v_boxes(plan), tma.atom_v, shared.v, shared.sV, tma.mV, *where)
    return k, v
