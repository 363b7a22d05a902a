"""K and V of a paged cache on Blackwell: a stage holds a part of a tile, K by columns, V by keys.

Lives here: how the stages are cut into boxes. Not here: the loads of boxes (`device/pages.py`), the
order of parts (`tile_loads.py`).
"""

from fovea.kernels.device.kv_walk import Walk
from fovea.kernels.device.pages import Boxes, PagedOperand, Pages, paged_operand
from fovea.kernels.portable.tensors import TmaLoads
from fovea.kernels.sm100.forward.arguments import SharedTiles
from fovea.plan.sm100 import ForwardPlan


def k_boxes(plan: ForwardPlan) -> Boxes:
    """Return how the stages of K are cut."""
    columns = plan.head_dim // plan.k_parts
    return Boxes(plan.tile_n, columns, plan.page_box, False, plan.k_edge)


def v_boxes(plan: ForwardPlan) -> Boxes:
    """Return how the stages of V are cut."""
    rows = plan.tile_n // plan.v_parts
    return Boxes(rows, plan.head_dim_v, plan.v_page_box, True, plan.v_edge)


def paged_operands(
    plan, pages: Pages, tma: TmaLoads, shared: SharedTiles, walk: Walk, kv_head
) -> tuple[PagedOperand, PagedOperand]:
    """Return K and V of a query tile."""
    where = (pages, walk, kv_head)
    k = paged_operand(k_boxes(plan), tma.atom_k, shared.k, shared.sK, tma.mK, *where)
    v = paged_operand(v_boxes(plan), tma.atom_v, shared.v, shared.sV, tma.mV, *where)
    return k, v
