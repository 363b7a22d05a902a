"""Loads of K and V from a paged cache: a tile in boxes of rows, each inside one page.

Lives here: the views of a paged cache and the loads of one stage of a ring from it. Not here: which
part of a tile a stage holds (`sm90/forward/page_loads.py`, `sm100/forward/page_loads.py`), the
bound of a view (`sequences.py`). Invariant: a page number is read only where used keys lie on it; a
row past the used keys arrives as zeros, whatever its page holds.

A box has 64 columns, what the 128-byte swizzle spans, and as many rows as both a page and a stage
are multiples of. The swizzle goes by the address in shared memory, so boxes of less than 8 rows
land right too.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from fovea.kernels.device.kv_walk import Walk
from fovea.kernels.device.pipeline import Ring, expect_bytes, stage_of
from fovea.kernels.device.sequences import LARGEST, ROWS, WRAP
from fovea.kernels.device.values import from_lane
from fovea.plan.pipeline import Edge
from fovea.plan.roles import WARP_SIZE

BOX_COLUMNS = 64


class Pages(NamedTuple):
    """Physical page of each logical page, (batch, max_pages), and how a page is laid out."""

    mTable: cute.Tensor
    page_size: cutlass.Int32
    k_head_stride: cutlass.Int32  # elements from a head's rows to the next one's
    v_head_stride: cutlass.Int32


class Boxes(NamedTuple):
    """How the stages of an operand are cut, as compile-time numbers.

    Attributes:
        rows, columns: keys and columns that a stage holds.
        box_rows: of which a copy takes so many from one page.
        is_transposed: of V, whose columns come first.
        edge: the operand's ring.
    """

    rows: int
    columns: int
    box_rows: int
    is_transposed: bool
    edge: Edge


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


def box_layout(
    whole: cute.ComposedLayout, box_rows: int, *, is_transposed: bool
) -> cute.ComposedLayout:
    """Return the shared-memory layout of one box of an operand whose stages have that layout."""
    rows, columns = (box_rows, BOX_COLUMNS), (BOX_COLUMNS, 1)
    modes = (columns, rows) if is_transposed else (rows, columns)
    shape, stride = zip(*modes, strict=True)
    return cute.make_composed_layout(whole.inner, 0, cute.make_layout(shape, stride=stride))


def _cut(smem: cute.Tensor, boxes: Boxes) -> cute.Tensor:
    """Return the stages of an operand cut into boxes.

    Every layout of a tile puts a row of 64 columns next to the row before it, and 64 columns of all
    rows before the next 64 (`sm90/wgmma.py`, `sm100/umma.py`).
    """
    rows, size = boxes.rows, BOX_COLUMNS
    box = ((boxes.box_rows, size), (size, 1))
    box = (box[1], box[0]) if boxes.is_transposed else box
    modes = (
        *box,
        (rows // boxes.box_rows, boxes.box_rows * size),
        (boxes.columns // size, rows * size),
        (boxes.edge.stages, rows * boxes.columns),
    )
    shape, stride = zip(*modes, strict=True)
    return cute.make_tensor(smem.iterator, cute.make_layout(shape, stride=stride))


def paged_operand(
    boxes: Boxes,
    atom: cute.CopyAtom,
    ring: Ring,
    smem: cute.Tensor,
    mX: cute.Tensor,
    pages: Pages,
    walk: Walk,
    kv_head: cutlass.Int32,
) -> PagedOperand:
    """Return K or V of a query tile; `mX` is the coordinate tensor of its `paged_view`."""
    stride = pages.v_head_stride if boxes.is_transposed else pages.k_head_stride
    first = kv_head * stride
    start = (first, 0, 0, 0) if boxes.is_transposed else (0, first, 0, 0)
    return PagedOperand(
        atom=atom,
        ring=ring,
        boxes=cute.group_modes(_cut(smem, boxes), 0, 2),
        mX=cute.domain_offset(start, mX[None, None, ROWS, None, None]),
        pages=pages,
        sequence=walk.batch,
        seqlen_kv=walk.sequence.seqlen_kv,
    )


@cute.jit
def fill_from_pages(
    boxes: cutlass.Constexpr,
    operand: PagedOperand,
    use: cutlass.Int32,
    nth_keys: cutlass.Int32,
    nth_columns: cutlass.Constexpr = 0,
):
    """Fill the stage of a use, which is free. Run by one warp.

    Keys and columns of the sequence are counted by as many as a stage holds.
    """
    edge = boxes.edge
    stage = stage_of(use, edge)
    with cute.arch.elect_one():
        expect_bytes(operand.ring, use, edge)
    num_boxes = boxes.rows // boxes.box_rows
    first, end, page = _lane_place(boxes, operand, nth_keys, cutlass.Int32(0))
    for nth in cutlass.range(num_boxes, unroll=1):
        if cutlass.const_expr(num_boxes > WARP_SIZE):
            if nth % WARP_SIZE == 0:
                first, end, page = _lane_place(boxes, operand, nth_keys, nth)
        lane = nth % WARP_SIZE
        first_row = from_lane(first, lane)
        source = operand.mX[None, None, from_lane(end, lane), from_lane(page, lane)]
        for block in cutlass.range_constexpr(boxes.columns // BOX_COLUMNS):
            column = nth_columns * (boxes.columns // BOX_COLUMNS) + block
            if cutlass.const_expr(boxes.is_transposed):
                rest = cute.domain_offset((0, first_row), source)
                box = cute.local_tile(rest, (BOX_COLUMNS, boxes.box_rows), (column, 0))
            else:
                rest = cute.domain_offset((first_row, 0), source)
                box = cute.local_tile(rest, (boxes.box_rows, BOX_COLUMNS), (0, column))
            tXsX, tXgX = cpasync.tma_partition(
                operand.atom,
                0,
                cute.make_layout(1),
                operand.boxes[None, nth, block, stage],
                cute.group_modes(box, 0, 2),
            )
            cute.copy(operand.atom, tXgX, tXsX, tma_bar_ptr=operand.ring.full + stage)


def _lane_place(
    boxes: Boxes, operand: PagedOperand, nth_keys: cutlass.Int32, nth: cutlass.Int32
) -> tuple[cutlass.Int32, cutlass.Int32, cutlass.Int32]:
    """Return where the box lies that is so many behind the nth one as this lane is in its warp.

    All look-ups of a stage, or of 32 boxes of one, are then under way together.
    """
    box = nth + cute.arch.lane_idx()
    return _place(operand, nth_keys * boxes.rows + box * boxes.box_rows)


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

    The bound of a view is explained in `sequences.py`. It takes one of the five axes that
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
