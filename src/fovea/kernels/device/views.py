"""Global tensors as the copy engine takes them, and as the merge of parts does.

Lives here: which view a call's Q, K, V and O get. Not here: the views of packed sequences
(`sequences.py`) and pages (`pages.py`). Invariant: rows or columns come first, then what a tile
chooses by.
"""

import cutlass.cute as cute

from fovea.kernels.device.pages import paged_view
from fovea.kernels.device.sequences import shifting_view

_ROWS_FIRST = (1, 3, 2, 0)  # (seqlen, head_dim, head, batch)
_COLUMNS_FIRST = (3, 1, 2, 0)  # (head_dim, seqlen, head, batch)


def copy_view(
    tensor: cute.Tensor, *, is_packed: bool, is_paged: bool = False, is_transposed: bool = False
) -> cute.Tensor:
    """Return a (batch, seqlen, heads, head_dim) tensor with rows, or columns, first.

    Packed tensors have no batch axis, paged ones (pages, page_size) in its place.
    """
    if is_paged:
        return paged_view(tensor, is_transposed=is_transposed)
    if is_packed:
        return shifting_view(tensor, is_transposed=is_transposed)
    order = _COLUMNS_FIRST if is_transposed else _ROWS_FIRST
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(order)))


def as_batch(tensor: cute.Tensor | None, *, is_packed: bool) -> cute.Tensor | None:
    """Return a tensor with a batch axis: packed sequences are one entry."""
    if tensor is None or not is_packed:
        return tensor
    shape, stride = (1, *tensor.shape), (0, *tensor.stride)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
