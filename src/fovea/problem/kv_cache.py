"""A KV cache that a call appends to: what its arguments may be, its page table, and the writing.

Lives here: the checks of `flash_attn_with_kvcache` on caches, new rows, lengths and pages. Not
here: the checks that every paged call has (`build.py`). Invariant: contents are looked at on a CPU
always, elsewhere under FOVEA_CHECK=1, and `append` is the one function that writes.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fovea.errors import UnsupportedError, invalid
from fovea.mods.evaluate import is_checked
from fovea.problem.checks import check_device, check_layout, check_rank
from fovea.tiling.paged_kv import check_pages

INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_CACHE_AXES = "batch or pages, seqlen or page_size, heads_k, head_dim"
_NEW_AXES = "batch, seqlen_new, heads_k, head_dim"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """The tensors of a call on caches, as the user passed them.

    Shapes:
        q: (batch, seqlen_q, heads, head_dim); k_cache, v_cache: (rows, seqlen, heads_k, head_dim)
            or (pages, page_size, heads_k, head_dim); k, v: (batch, seqlen_new, heads_k, head_dim).
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None

    @property
    def new_rows(self) -> int:
        """Rows that the call appends to each sequence."""
        return 0 if self.k is None else self.k.shape[1]

    def check(self) -> None:
        """Raise unless the tensors fit each other; no content is read.

        Raises:
            TypeError, ValueError: wrong input.
            UnsupportedError: a gradient of the new rows is required.
        """
        check_argument("q", self.q, "batch, seqlen_q, heads, head_dim")
        for name, cache in (("k_cache", self.k_cache), ("v_cache", self.v_cache)):
            check_argument(name, cache, _CACHE_AXES)
            check_device(name, cache, self.q)
            if cache.dtype != self.q.dtype and not _is_cast(self.q):
                allowed = f"{self.q.dtype}, the dtype of q"
                raise TypeError(invalid(f"{name}.dtype", cache.dtype, allowed, "cast q"))
        extents = tuple(self.v_cache.shape[:2])
        if extents != tuple(self.k_cache.shape[:2]):
            allowed = f"{tuple(self.k_cache.shape[:2])}, as those of k_cache"
            remedy = "allocate both caches alike"
            raise ValueError(invalid("v_cache.shape[:2]", extents, allowed, remedy))
        if self.k is None and self.v is None:
            return
        if self.k is None or self.v is None:
            name, remedy = "k" if self.k is None else "v", "pass both k and v or neither"
            raise ValueError(invalid(name, None, "a tensor like the other", remedy))
        self._check_new("k", self.k, self.k_cache, self.k)
        self._check_new("v", self.v, self.v_cache, self.k)

    def _check_new(self, name: str, rows: Tensor, cache: Tensor, k: Tensor) -> None:
        check_argument("k", k, _NEW_AXES)
        check_argument(name, rows, _NEW_AXES)
        check_device(name, rows, self.q)
        wanted = (self.q.shape[0], k.shape[1], *cache.shape[2:])
        if tuple(rows.shape) != wanted:
            allowed = f"{wanted}: batch of q, seqlen of k, heads and head_dim of its cache"
            raise ValueError(invalid(f"{name}.shape", tuple(rows.shape), allowed, "match them"))
        if rows.dtype != cache.dtype:
            allowed = f"{cache.dtype}, the dtype of {name}_cache"
            remedy = f"pass {name}.to({name}_cache.dtype)"
            raise TypeError(invalid(f"{name}.dtype", rows.dtype, allowed, remedy))
        if torch.is_grad_enabled() and rows.requires_grad:
            raise UnsupportedError(
                f"a cache with gradients required by {name} is not supported (allowed: no gradient "
                f"through a cache); call it under torch.no_grad(), or pass {name}.detach()."
            )
        if _overlaps(cache):
            raise ValueError(
                invalid(
                    f"strides of {name}_cache",
                    f"{cache.stride()} with shape {tuple(cache.shape)}",
                    "a cache that is appended to has each element at an address of its own",
                    f"pass {name}_cache.contiguous(), or an allocated cache where it is expanded",
                )
            )

    def pages(self, block_table: Tensor | None, rows: Tensor | None) -> Tensor:
        """Return the page table (batch, max_pages) int32; a cache without pages has one a row."""
        batch, num_rows = self.q.shape[0], self.k_cache.shape[0]
        if block_table is not None:
            if rows is not None:
                got, allowed = "given with block_table", "None with a block_table"
                remedy = "index the block_table instead"
                raise ValueError(invalid("cache_batch_idx", got, allowed, remedy))
            check_argument("block_table", block_table, "batch, max_pages", (torch.int32,))
            check_device("block_table", block_table, self.q)
            _check_batch("block_table", block_table, batch)
            return block_table
        if rows is None:
            if num_rows < batch:
                allowed = f"at least {batch}"
                raise ValueError(
                    invalid("batch of k_cache", num_rows, allowed, "enlarge the cache")
                )
            return torch.arange(batch, dtype=torch.int32, device=self.q.device).unsqueeze(1)
        check_argument("cache_batch_idx", rows, "batch", INTEGERS)
        check_device("cache_batch_idx", rows, self.q)
        _check_batch("cache_batch_idx", rows, batch)
        allowed = f"0 to {num_rows - 1}, a row of k_cache"
        _check_range("cache_batch_idx", rows, (0, num_rows - 1), allowed, "index the cache's rows")
        return rows.to(torch.int32).unsqueeze(1)

    def lengths(self, seqlens: int | Tensor | None, table: Tensor) -> Tensor:
        """Return the used length (batch,) int32 of each sequence before rows are appended."""
        capacity = table.shape[1] * self.k_cache.shape[1]
        most, batch = capacity - self.new_rows, table.shape[0]
        allowed = f"0 to {most}, the {capacity} rows of a sequence without {self.new_rows} new ones"
        remedy = "enlarge the cache or shorten the sequence"
        if isinstance(seqlens, Tensor):
            check_layout("cache_seqlens", seqlens)
            if seqlens.dtype not in INTEGERS or tuple(seqlens.shape) != (batch,):
                got = f"{tuple(seqlens.shape)} {seqlens.dtype}"
                kinds = f"({batch},) of an integer dtype, or one int"
                raise ValueError(invalid("cache_seqlens", got, kinds, "give one length a row"))
            check_device("cache_seqlens", seqlens, self.q)
            _check_range("cache_seqlens", seqlens, (0, most), allowed, remedy)
            return seqlens.to(torch.int32)
        is_index = hasattr(seqlens, "__index__") and getattr(seqlens, "shape", ()) == ()
        if seqlens is not None and (isinstance(seqlens, bool) or not is_index):
            kinds = "None, an int, or an integer tensor (batch,)"
            raise TypeError(invalid("cache_seqlens", repr(seqlens), kinds, "pass an int"))
        length = capacity if seqlens is None else seqlens
        if not 0 <= length <= most:
            got = f"{seqlens} ({capacity} rows)" if seqlens is None else seqlens
            raise ValueError(invalid("cache_seqlens", got, allowed, remedy))
        return torch.full((batch,), length, dtype=torch.int32, device=table.device)

    def check_contents(self, table: Tensor, seqlens: Tensor, *, name: str) -> None:
        """Raise ValueError unless used and new rows have pages, new ones pages of their own.

        Args:
            table, seqlens: as `pages` and `lengths` return them.
            name: what the user calls the table.
        """
        if torch.compiler.is_compiling() or not is_checked(seqlens):
            return
        pages, page_size = self.k_cache.shape[:2]
        after = seqlens + self.new_rows
        check_pages(table, after, pages=pages, page_size=page_size, table_name=name)
        if self.new_rows == 0:
            return
        page, row = self._places(table, seqlens)
        place = (page * page_size + row).flatten()
        by_place = place.argsort()
        is_twice = place[by_place][1:] == place[by_place][:-1]
        if bool(is_twice.any()):
            first = int(is_twice.nonzero()[0])
            rows = by_place[first : first + 2] // self.new_rows
            one, other = sorted(int(b) for b in rows)
            allowed = "sequences that append to rows of their own"
            got = f"the same place of the cache for new rows of sequences {one} and {other}"
            raise ValueError(invalid(name, got, allowed, "give each a page or row of its own"))

    def append(self, table: Tensor, seqlens: Tensor) -> None:
        """Write the new rows behind the used ones."""
        page, row = self._places(table, seqlens)
        k, v = self._kept(cast(Tensor, self.k)), self._kept(cast(Tensor, self.v))
        with torch.no_grad():
            self.k_cache[page, row] = k
            self.v_cache[page, row] = v

    def _kept(self, rows: Tensor) -> Tensor:
        """Return new rows, copied where the caches hold them: writing would change them."""
        if torch.compiler.is_compiling():  # which cannot ask; the copy is fused there
            return rows.clone()
        return rows.clone() if any(_shares(rows, c) for c in (self.k_cache, self.v_cache)) else rows

    def _places(self, table: Tensor, seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (page, row in it) of each new row, both (batch, seqlen_new) int64."""
        page_size = self.k_cache.shape[1]
        row = seqlens.long().unsqueeze(1) + torch.arange(self.new_rows, device=seqlens.device)
        return table.long().gather(1, row // page_size), row % page_size


def check_argument(
    name: str, value: Any, axes: str, dtypes: tuple[torch.dtype, ...] | None = None
) -> None:
    """Raise unless `value` is a strided tensor with these axes and one of these dtypes."""
    if not isinstance(value, Tensor):
        raise TypeError(invalid(name, type(value).__name__, f"a tensor ({axes})", "pass a tensor"))
    check_layout(name, value)
    check_rank(name, value, axes, "add or flatten axes")
    if dtypes is not None and value.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(invalid(f"{name}.dtype", value.dtype, allowed, f"cast {name}"))


def _check_batch(name: str, tensor: Tensor, batch: int) -> None:
    if tensor.shape[0] != batch:
        allowed = f"{batch}, the batch of q"
        raise ValueError(
            invalid(f"{name}.shape[0]", tensor.shape[0], allowed, "give each sequence one entry")
        )


def _check_range(
    name: str, values: Tensor, bounds: tuple[int, int], allowed: str, remedy: str
) -> None:
    """Raise ValueError where a value lies outside both inclusive bounds; before any narrowing."""
    if torch.compiler.is_compiling() or not is_checked(values):
        return
    is_bad = (values < bounds[0]) | (values > bounds[1])
    if bool(is_bad.any()):
        b = int(is_bad.nonzero()[0])
        raise ValueError(invalid(f"{name}[{b}]", int(values[b]), allowed, remedy))


def _is_cast(q: Tensor) -> bool:
    """Return whether autocast casts q and the caches alike."""
    return not q.is_meta and torch.is_autocast_enabled(q.device.type)


def _shares(a: Tensor, b: Tensor) -> bool:
    return bool(torch._C._is_alias_of(a, b))  # pyright: ignore


def _overlaps(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may share an address, as those of an expanded one do."""
    if torch.compiler.is_compiling():  # sizes may be symbolic there, and cannot be sorted
        return any(stride == 0 for stride in tensor.stride())
    reach = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride < reach:
                return True
            reach += (extent - 1) * stride
    return False
