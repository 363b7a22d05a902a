"""Tensor maps whose base is not the tensor's: what an address that wraps, or lies nowhere, does."""

import numpy as np
import pytest
from test_tensor_copy import aligned, load_kernel, run, store_kernel

from fovea.emulator import OutOfBounds
from fovea.emulator.layout.tensor_map import make_tensor_map

ROWS, COLUMNS = 8, 32
ROW_BYTES = 2 * COLUMNS
FAR = 1000  # rows from the base to the tensor
BOX_BYTES = ROWS * ROW_BYTES


def far_map(array):
    """A map from FAR rows before an array, with an axis of rows and one that shifts by rows."""
    base = array.ctypes.data - FAR * ROW_BYTES
    sizes, strides = (COLUMNS, FAR, ROWS + 1), (ROW_BYTES, ROW_BYTES)
    return make_tensor_map(base, "bf16", sizes, strides, (COLUMNS, ROWS, 1))


def test_load_through_a_base_without_memory_is_a_fault():
    array = aligned((ROWS, COLUMNS), np.uint16)
    text = load_kernel(3, (0, FAR - ROWS, ROWS), BOX_BYTES)
    with pytest.raises(OutOfBounds, match=r"whose base .* is in no allocation"):
        run(text, far_map(array), np.zeros(array.size, np.uint16), array)


def test_store_through_a_base_without_memory_reaches_its_rows():
    array = aligned((ROWS, COLUMNS), np.uint16)
    rows = np.arange(array.size, dtype=np.uint16)[::-1].copy()
    at, wait = (0, FAR - ROWS, ROWS), "@%first cp.async.bulk.wait_group 0;"
    run(store_kernel(3, at, BOX_BYTES, wait=wait), far_map(array), rows.view(np.uint32), array)
    assert np.array_equal(array.ravel(), rows)


def test_load_whose_address_wraps_around_reaches_its_rows():
    array = aligned((ROWS, COLUMNS), np.uint16)
    count = 2**30
    # 2^30 places of the third axis lead 2^64 bytes, less 2^30 rows, further on.
    back = 2**64 // count - ROW_BYTES
    sizes = (COLUMNS, count, 2**31 - 1, ROWS + 1)
    strides = (ROW_BYTES, back, ROW_BYTES)
    tensor = make_tensor_map(array.ctypes.data, "bf16", sizes, strides, (COLUMNS, ROWS, 1, 1))
    out = np.zeros(array.size, np.uint16)
    run(load_kernel(4, (0, count - ROWS, count, ROWS), BOX_BYTES), tensor, out, array)
    assert np.array_equal(out, array.ravel())
    # A sequence of three rows that ends at the fifth: the rest of the box is zeros.
    run(load_kernel(4, (0, count - 3, count, 5), BOX_BYTES), tensor, out, array)
    assert np.array_equal(out.reshape(array.shape)[:3], array[2:5])
    assert not out.reshape(array.shape)[3:].any()
