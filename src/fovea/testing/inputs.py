"""Makers of attention inputs: seeded, of any shape, with poison where nothing may be read.

Lives here: q, k, v, packed and paged layouts, cotangents. Not here: what is expected of a result
(`budget.py`, `reference/dense.py`). Invariant: the same arguments give the same tensors, on any
device and whatever was drawn before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a dense call; None stands for the size it usually equals."""

    batch: int = 1
    seqlen_q: int = 64
    seqlen_kv: int | None = None
    heads_q: int = 1
    heads_kv: int | None = None
    head_dim: int = 16
    head_dim_v: int | None = None

    @property
    def q(self) -> tuple[int, int, int, int]:
        """Shape of q."""
        return (self.batch, self.seqlen_q, self.heads_q, self.head_dim)

    @property
    def k(self) -> tuple[int, int, int, int]:
        """Shape of k."""
        keys = self.seqlen_q if self.seqlen_kv is None else self.seqlen_kv
        heads = self.heads_q if self.heads_kv is None else self.heads_kv
        return (self.batch, keys, heads, self.head_dim)

    @property
    def v(self) -> tuple[int, int, int, int]:
        """Shape of v."""
        dim = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return (*self.k[:3], dim)


def normal(
    shape: Sequence[int],
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Return standard normal numbers, drawn in fp32 on the CPU and then rounded and moved."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(dtype=dtype, device=device)


def dense_qkv(
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of a dense call, standard normal."""
    tensors = (
        normal(sizes, seed=seed + i, dtype=dtype, device=device)
        for i, sizes in enumerate((shape.q, shape.k, shape.v))
    )
    q, k, v = (x.requires_grad_(requires_grad) for x in tensors)
    return q, k, v


def cumulative(lengths: Sequence[int], device: str | torch.device = "cpu") -> Tensor:
    """Return (batch + 1,) int32 starts of packed sequences of these lengths."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return torch.tensor(starts, dtype=torch.int32, device=device)


def poisoned(x: Tensor, begin: int, end: int) -> Tensor:
    """Return a copy of x with rows begin..end of dimension 0 set to NaN."""
    copy = x.clone()
    copy[begin:end] = torch.nan
    return copy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedCache:
    """Keys or values scattered over pages.

    Shapes:
        pages: (num_pages, page_size, heads_kv, dim); page_table: (batch, max_pages) int32.
    """

    pages: Tensor
    page_table: Tensor


def paged(sequences: Sequence[Tensor], page_size: int, *, seed: int = 0) -> PagedCache:
    """Return sequences cut into pages at random places, NaN wherever no row lies.

    Entries of the page table that no row needs point outside the cache: nobody may follow them.

    Shapes:
        sequences: (length, heads_kv, dim) each.
    """
    counts = [-(-x.shape[0] // page_size) for x in sequences]
    # One page more than needed, so that some page belongs to nobody.
    num_pages = sum(counts) + 1
    permutation = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    order = [int(page) for page in permutation]
    first = sequences[0]
    pages = first.new_full((num_pages, page_size, *first.shape[1:]), torch.nan)
    width = max([*counts, 1]) + 1
    table = torch.full((len(sequences), width), 2**30, dtype=torch.int32, device=first.device)
    used = 0
    for i, (x, count) in enumerate(zip(sequences, counts, strict=True)):
        for page in range(count):
            rows = x[page * page_size : (page + 1) * page_size]
            pages[order[used], : rows.shape[0]] = rows
            table[i, page] = order[used]
            used += 1
    return PagedCache(pages=pages, page_table=table)
