"""Where a logical KV row lies in a paged cache, and the gather that the reference uses.

Lives here: page arithmetic (the specification of `kernels/device/paged_kv.py`) and a gather in
plain torch. Invariant: a row at or past its sequence's used length comes out as 0 whatever bits
the cache or the page table hold there.
"""

import torch
from torch import Tensor

from fovea import env
from fovea.errors import invalid
from fovea.tiling.bounds import Integer


def locate(row: Integer, page_size: int) -> tuple[Integer, Integer]:
    """Return (logical page, row inside it) of logical row `row >= 0`."""
    page = row // page_size
    return page, row - page * page_size


def gather_rows(
    cache: Tensor, page_table: Tensor, seqused_kv: Tensor, *, begin: int, end: int
) -> Tensor:
    """Return logical rows `begin <= row < end` of every sequence.

    Differentiable with respect to `cache`, without a device sync unless FOVEA_CHECK=1.

    Shapes:
        cache: (pages, page_size, heads_kv, head_dim); page_table: (batch, max_pages) integer;
        seqused_kv: (batch,) integer; result (batch, end - begin, heads_kv, head_dim).

    Raises:
        ValueError: under FOVEA_CHECK=1, a page that holds used rows is missing or out of range.
    """
    pages, page_size = cache.shape[:2]
    row = torch.arange(begin, end, device=cache.device)
    is_used = row < seqused_kv.to(torch.int64).unsqueeze(1)
    if env.check():
        check_pages(page_table, seqused_kv, pages=pages, page_size=page_size)
    if pages == 0 or page_table.shape[1] == 0:
        return cache.new_zeros((page_table.shape[0], end - begin, *cache.shape[2:]))
    logical = row // page_size
    # Entries behind the used ones may be anything: read page 0 there and drop what it holds.
    physical = page_table[:, logical.clamp(max=page_table.shape[1] - 1)].to(torch.int64)
    physical = physical.clamp(0, pages - 1)
    rows = cache[physical, row - logical * page_size]
    return torch.where(is_used[:, :, None, None], rows, torch.zeros((), dtype=cache.dtype))


def check_pages(
    page_table: Tensor,
    seqused_kv: Tensor,
    *,
    pages: int,
    page_size: int,
    table_name: str = "page_table",
    lengths_name: str = "seqused_kv",
) -> None:
    """Raise ValueError unless every page that holds used rows exists; reads the tensors.

    `table_name` and `lengths_name` are what the user calls the two.
    """
    capacity = page_table.shape[1] * page_size
    is_too_long = (seqused_kv < 0) | (seqused_kv > capacity)
    if bool(is_too_long.any()):
        b = int(is_too_long.nonzero()[0])
        raise ValueError(
            invalid(
                f"{lengths_name}[{b}]",
                int(seqused_kv[b]),
                f"0 to {capacity}, what {page_table.shape[1]} pages of {page_size} rows hold",
                f"give {table_name} more columns or shorten the sequence",
            )
        )
    logical_begin = torch.arange(page_table.shape[1], device=page_table.device) * page_size
    is_read = logical_begin < seqused_kv.unsqueeze(1)
    is_bad = is_read & ((page_table < 0) | (page_table >= pages))
    if bool(is_bad.any()):
        b, page = (int(x) for x in is_bad.nonzero()[0])
        raise ValueError(
            invalid(
                f"{table_name}[{b}, {page}]",
                int(page_table[b, page]),
                f"0 to {pages - 1}, a page of k and v",
                f"fill the first {-(-int(seqused_kv[b]) // page_size)} entries of that row",
            )
        )
