"""Gathers and scatters of four rows: values against numpy, bounds, swizzle, and wrong maps."""

import numpy as np
import pytest
from test_tensor_copy import aligned, load_kernel, map_of, run, store_kernel

from fovea.emulator import IllegalOperand, PtxError, UnsupportedForm

ROWS, COLUMNS, BOX = 16, 64, 32  # bf16: a box of one row has 64 bytes


def gather(column, rows, *, count=None, target="sm_100a"):
    """A kernel that gathers rows to shared memory and dumps them."""
    at = ", ".join(map(str, (column, *rows)))
    text = load_kernel(2, (0, 0), 4 * BOX * 2, instruction=(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes "
        f"[%base], [%map, {{{at}}}], [%bar];"
    ), announced=count)  # fmt: skip
    return text.replace("sm_90a", target)


def scatter(column, rows):
    """A kernel that fills shared memory and scatters it to rows."""
    at = ", ".join(map(str, (column, *rows)))
    text = store_kernel(2, (0, 0), 4 * BOX * 2, wait="@%first cp.async.bulk.wait_group 0;",
        instruction="cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group "
        f"[%map, {{{at}}}], [%base];",
    )  # fmt: skip
    return text.replace("sm_90a", "sm_100a")


def numbered():
    array = aligned((ROWS, COLUMNS), np.uint16)
    array[...] = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    return array


def unswizzled(data, width):
    """Rows of `width` bytes as they were before the swizzle of that width."""
    chunks = data.reshape(4, -1).view(np.uint8).reshape(4, -1, 16)
    out = np.empty_like(chunks)
    for row in range(4):
        line = row * width // 128 % (width // 16)
        for chunk in range(chunks.shape[1]):
            out[row, chunk] = chunks[row, chunk ^ line]
    return out.reshape(4, -1).view(np.uint16)


@pytest.mark.parametrize("swizzle", [0, 64])
def test_gather_reads_four_rows_in_their_order(swizzle):
    array, out = numbered(), aligned((4, BOX), np.uint16)
    rows = (9, 2, 15, 2)
    run(gather(16, rows), map_of(array, (BOX, 1), swizzle=swizzle), out, array)
    got = unswizzled(out, swizzle) if swizzle else out
    assert np.array_equal(got, array[list(rows), 16 : 16 + BOX])


def test_gather_fills_what_lies_outside_with_zero():
    array, out = numbered(), aligned((4, BOX), np.uint16)
    out[...] = 7
    run(gather(48, (3, -1, 16, 5)), map_of(array, (BOX, 1)), out, array)
    expected = np.zeros((4, BOX), np.uint16)
    expected[[0, 3], :16] = array[[3, 5], 48:]
    assert np.array_equal(out, expected)


def test_scatter_writes_the_rows_that_lie_inside():
    array, box = aligned((ROWS, COLUMNS), np.uint16), aligned((4, BOX), np.uint16)
    array[...] = 0
    box[...] = 1 + np.arange(4 * BOX).reshape(4, BOX)
    run(scatter(32, (5, 16, 0, 7)), map_of(array, (BOX, 1)), box, array)
    expected = np.zeros((ROWS, COLUMNS), np.uint16)
    expected[[5, 0, 7], 32:] = box[[0, 2, 3]]
    assert np.array_equal(array, expected)


def test_gather_needs_a_map_whose_box_is_one_row():
    array, out = numbered(), aligned((4, BOX), np.uint16)
    with pytest.raises(IllegalOperand, match="box of one row"):
        run(gather(0, (0, 1, 2, 3)), map_of(array, (BOX, 4)), out, array)


def test_gather_takes_five_coordinates():
    array, out = numbered(), aligned((4, BOX), np.uint16)
    with pytest.raises(PtxError, match="it takes 5"):
        run(gather(0, (0, 1, 2)), map_of(array, (BOX, 1)), out, array)


def test_gather_does_not_exist_on_sm_90():
    array, out = numbered(), aligned((4, BOX), np.uint16)
    with pytest.raises(UnsupportedForm, match="gather4"):
        run(gather(0, (0, 1, 2, 3), target="sm_90a"), map_of(array, (BOX, 1)), out, array)
