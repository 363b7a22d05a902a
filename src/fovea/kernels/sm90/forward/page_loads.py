"""Loads of K and V from a paged cache: a KV tile in boxes of rows, each inside one page.

Lives here: the views of a paged cache and the loads of one stage from it. Not here: loads of whole
tiles (`tile_loads.py`), the bound of a view (`device/sequences.py`). Invariant: a page number is
read only where used keys lie on it; a row past the used keys arrives as zeros, whatever its page
holds.

A box has 64 columns, what the 128-byte swizzle spans, and as many rows as both a page and a tile
are multiples of. The swizzle goes by the address in shared memory, so boxes of less than 8 rows
land right too.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from fovea.kernels.device.kv_walk import Walk
from fovea.kernels.device.pipeline import Ring, expect_bytes, stage_of
from fovea.kernels.device.sequences import LARGEST, ROWS, WRAP
from fovea.kernels.sm90.forward.arguments import Pages, SharedTiles, TmaLoads
from fovea.kernels.sm90.wgmma import element_type

BOX_COLUMNS = 64


class PagedOperand(NamedTuple):
    """K or V of a head on its way into a ring.

    `boxes` is (box, row of boxes, column of boxes, stage); `mX` (rows, columns, end, page) of
    `paged_view` from its head's first column on, of V (columns, rows, ...).
    """

    atom: cute.CopyAtom
    ring: Ring
    boxes: cute.Tensor
    mX: cute.Tensor
    pages: Pages
    sequence: cutlass.Int32
    seqlen_kv: cutlass.Int32


def box_layout(plan, *, is_transposed: bool) -> cute.ComposedLayout:
    """Return the shared-memory layout of one box."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = kinds.MN_SW128 if is_transposed else kinds.K_SW128
    swizzle = warpgroup.make_smem_layout_atom(kind, element_type(plan)).inner
    rows, columns = (plan.page_box, BOX_COLUMNS), (BOX_COLUMNS, 1)
    modes = (columns, rows) if is_transposed else (rows, columns)
    shape, stride = zip(*modes, strict=True)
    return cute.make_composed_layout(swizzle, 0, cute.make_layout(shape, stride=stride))


def _boxes(plan, smem: cute.Tensor, columns: int, *, is_transposed: bool) -> cute.Tensor:
    """Return the stages of an operand cut into boxes.

    Both layouts put a row of 64 columns next to the row before it, and 64 columns of all rows
    before the next 64 (`wgmma.row_major_layout`, `transposed_layout`).
    """
    rows, size = plan.tile_n, BOX_COLUMNS
    box = ((plan.page_box, size), (size, 1))
    box = (box[1], box[0]) if is_transposed else box
    modes = (
        *box,
        (rows // plan.page_box, plan.page_box * size),
        (columns // size, rows * size),
        (plan.kv_stages, rows * columns),
    )
    shape, stride = zip(*modes, strict=True)
    return cute.make_tensor(smem.iterator, cute.make_layout(shape, stride=stride))


def paged_operands(
    plan, pages: Pages, tma: TmaLoads, shared: SharedTiles, walk: Walk, kv_head: cutlass.Int32
) -> tuple[PagedOperand, PagedOperand]:
    """Return K and V of a query tile."""
    where = (pages, walk.batch, walk.sequence.seqlen_kv)
    k_boxes = _boxes(plan, shared.sK, plan.head_dim, is_transposed=False)
    v_boxes = _boxes(plan, shared.sV, plan.head_dim_v, is_transposed=True)
    behind = (None, None, ROWS, None, None)
    mK = cute.domain_offset((0, kv_head * pages.k_head_stride, 0, 0), tma.mK[behind])
    mV = cute.domain_offset((kv_head * pages.v_head_stride, 0, 0, 0), tma.mV[behind])
    k = PagedOperand(tma.atom_k, shared.k, cute.group_modes(k_boxes, 0, 2), mK, *where)
    v = PagedOperand(tma.atom_v, shared.v, cute.group_modes(v_boxes, 0, 2), mV, *where)
    return k, v


@cute.jit
def fill_from_pages(
    plan: cutlass.Constexpr,
    edge: cutlass.Constexpr,
    operand: PagedOperand,
    use: cutlass.Int32,
    n_idx: cutlass.Int32,
):
    """Fill the stage of a use, which is free, with a KV tile. Run by one warp."""
    stage = stage_of(use, edge)
    with cute.arch.elect_one():
        expect_bytes(operand.ring, use, edge)
    for nth in cutlass.range(plan.tile_n // plan.page_box, unroll=1):
        first_row, end, page = _place(operand, n_idx * plan.tile_n + nth * plan.page_box)
        source = operand.mX[None, None, end, page]
        for block in cutlass.range_constexpr(cute.size(operand.boxes, mode=[2])):
            if cutlass.const_expr(edge.name == "v"):
                rest = cute.domain_offset((0, first_row), source)
                box = cute.local_tile(rest, (BOX_COLUMNS, plan.page_box), (block, 0))
            else:
                rest = cute.domain_offset((first_row, 0), source)
                box = cute.local_tile(rest, (plan.page_box, BOX_COLUMNS), (0, block))
            tXsX, tXgX = cpasync.tma_partition(
                operand.atom,
                0,
                cute.make_layout(1),
                operand.boxes[None, nth, block, stage],
                cute.group_modes(box, 0, 2),
            )
            cute.copy(operand.atom, tXgX, tXsX, tma_bar_ptr=operand.ring.full + stage)


@cute.jit
def _place(operand: PagedOperand, row: cutlass.Int32):
    """Return where a row of the sequence lies: row, end and page of `paged_view`."""
    pages = operand.pages
    logical = row // pages.page_size
    in_page = row - logical * pages.page_size
    used = operand.seqlen_kv - logical * pages.page_size
    used = cutlass.min(cutlass.max(used, 0), pages.page_size)
    page = cutlass.Int32(0)
    if in_page < used:
        page = pages.mTable[operand.sequence, logical]
    return ROWS - used + in_page, used, page


def paged_view(tensor: cute.Tensor, *, is_transposed: bool) -> cute.Tensor:
    """Return a (pages, page_size, heads, head_dim) tensor as (rows, columns, back, end, page).

    The bound of a view is explained in `device/sequences.py`. It takes one of the five axes that
    there are, so heads lie behind each other in the columns, each at its stride: a box reads on
    into the next one, and head dims that are not whole boxes are refused (`plan/select.py`).
    """
    num_pages, page_size, heads, head_dim = tensor.shape
    page_stride, row_stride, head_stride, column_stride = tensor.stride
    width = cutlass.Int32((heads - 1) * head_stride + head_dim)
    rows, columns = (ROWS, row_stride), (width, column_stride)
    modes = [columns, rows] if is_transposed else [rows, columns]
    modes += [(LARGEST, WRAP - row_stride), (page_size + 1, row_stride), (num_pages, page_stride)]
    shape, stride = zip(*modes, strict=True)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
