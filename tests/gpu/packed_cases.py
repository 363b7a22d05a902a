"""Named calls on packed sequences, each with NaN wherever no used row lies.

Lives here: lengths, layout and options of each call. Not here: dense calls (`cases.py`, which lists
these too), running and judging them (`judge.py`). Invariant: both sizes of a case have the same
plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from call import BF16, FP16, Call
from case_inputs import Transform, ramp
from case_options import (
    MakeOptions,
    alibi,
    bool_capture,
    fixed,
    joined,
    late_keys,
    random_blocks,
    sink,
)
from torch import Tensor

from fovea.testing.inputs import Shape, cumulative, dense_qkv, paged

Layout = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Lengths of the sequences, (rows, keys) each.

    Attributes:
        idle: how many rows and keys at the end of every other sequence are not used.
        behind: rows and keys behind the last sequence.
        slack: how much larger than the longest sequence the call says it to be.
    """

    lengths: tuple[tuple[int, int], ...]
    idle: tuple[int, int] = (0, 0)
    behind: int = 0
    slack: int = 0

    def used(self, side: int) -> list[int]:
        """Return how many rows (side 0) or keys (1) of each sequence are used."""
        return [
            max(pair[side] - (self.idle[side] if number % 2 == 0 else 0), 0)
            for number, pair in enumerate(self.lengths)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCase:
    """One call on packed sequences; fields as `call.Case` has them, heads and dims in `shape`."""

    name: str
    packing: Packing
    small_packing: Packing
    shape: Shape
    dtype: torch.dtype = BF16
    options: MakeOptions = lambda shape, device: {}
    transform: Transform | None = None
    layout: Layout | None = None
    page_size: int | None = None
    wants_max_score: bool = False
    checks_gradients: bool = False

    def keys(self, *, is_small: bool) -> int:
        """Return how many keys the longest sequence may have."""
        return self._largest(self.small_packing if is_small else self.packing).k[1]

    def queries(self, *, is_small: bool) -> int:
        """Return how many queries the longest sequence may have."""
        return self._largest(self.small_packing if is_small else self.packing).seqlen_q

    def build(self, device: torch.device | str, *, is_small: bool) -> Call:
        """Return the call's tensors and options."""
        device = torch.device(device)
        packing = self.small_packing if is_small else self.packing
        parts = [self._sequence(packing, number) for number in range(len(packing.lengths))]
        shape = self._largest(packing)
        tensors: list[Tensor] = []
        for place in range(3):
            rest = parts[0][place].new_full((packing.behind, *parts[0][place].shape[1:]), torch.nan)
            packed = torch.cat([*(part[place] for part in parts), rest]).to(device)
            tensors.append(packed if self.layout is None else self.layout(packed))
        where: dict[str, Any] = {}
        if self.page_size is not None:
            where["page_table"] = self._into_pages(packing, parts, tensors)
        for side, name in enumerate(("q", "kv")):
            lengths = [pair[side] for pair in packing.lengths]
            used = packing.used(side)
            where[f"cu_seqlens_{name}"] = cumulative(lengths, device)
            where[f"max_seqlen_{name}"] = max([*used, 0]) + packing.slack
            if packing.idle[side]:
                where[f"seqused_{name}"] = torch.tensor(used, dtype=torch.int32, device=device)
        if self.page_size is not None:
            where["cu_seqlens_kv"] = None
            used = torch.tensor(packing.used(1), dtype=torch.int32, device=device)
            where["seqused_kv"] = used
        q, k, v = tensors
        return Call(q=q, k=k, v=v, options=self.options(shape, device), case=self, where=where)

    def _into_pages(
        self, packing: Packing, parts: list[tuple[Tensor, ...]], tensors: list[Tensor]
    ) -> Tensor:
        """Put pages in the place of the packed keys and values; return the page table."""
        assert self.page_size is not None
        table = torch.empty(0)
        for place in (1, 2):
            used = zip(parts, packing.used(1), strict=True)
            rows = [part[place][:keys] for part, keys in used]
            cache = paged(rows, self.page_size)
            device = tensors[place].device
            pages = cache.pages.to(device)
            tensors[place] = pages if self.layout is None else self.layout(pages)
            # Not contiguous: nothing says that it has to be.
            table = cache.page_table.to(device).t().contiguous().t()
        return table

    def _largest(self, packing: Packing) -> Shape:
        """Return the shape that holds every sequence: what mods and block masks are made for."""
        longest = [max([*packing.used(side), 0]) + packing.slack for side in (0, 1)]
        return replace(
            self.shape,
            batch=len(packing.lengths),
            seqlen_q=longest[0],
            seqlen_kv=longest[1],
        )

    def _sequence(self, packing: Packing, number: int) -> tuple[Tensor, ...]:
        """Return q, k and v of one sequence, NaN where they are not used."""
        rows, keys = packing.used(0)[number], packing.used(1)[number]
        shape = replace(self.shape, batch=1, seqlen_q=rows, seqlen_kv=keys)
        tensors = dense_qkv(shape, dtype=self.dtype, seed=100 + 3 * number)
        if self.transform is not None and keys > 0:
            tensors = self.transform(*tensors)
        found: list[Tensor] = []
        for side, x in zip((0, 1, 1), tensors, strict=True):
            segment = x.new_full((packing.lengths[number][side], *x.shape[2:]), torch.nan)
            segment[: x.shape[1]] = x[0]
            found.append(segment)
        return tuple(found)


# --- layouts --------------------------------------------------------------------------------------


def heads_first(x: Tensor) -> Tensor:
    """Memory order (heads, total, head_dim)."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def inside_nan(x: Tensor) -> Tensor:
    """A view of the same values in a buffer that is NaN elsewhere, with odd strides."""
    rows, heads, dim = x.shape
    buffer = x.new_full((rows + 9, heads + 1, -(-dim // 8) * 8 + 8), torch.nan)
    view = buffer[3 : rows + 3, :heads, :dim]
    view.copy_(x)
    return view


def pages_heads_first(x: Tensor) -> Tensor:
    """Memory order (pages, heads, page_size, head_dim) of a cache; (heads, total, ...) of q."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


# --- the list -------------------------------------------------------------------------------------

_SHAPE = Shape(heads_q=2, heads_kv=1, head_dim=64)
_WIDE = replace(_SHAPE, heads_q=4, heads_kv=2, head_dim=128)
_LARGE = Packing(lengths=((700, 1000), (1, 900), (0, 30), (300, 0), (513, 129), (64, 1020)))
_SMALL = Packing(lengths=((70, 130), (1, 9), (0, 3), (7, 0), (30, 200)))
_IDLE = {
    "packing": replace(_LARGE, idle=(65, 130), behind=77),
    "small_packing": replace(_SMALL, idle=(5, 33), behind=9),
}
# Few rows and many keys: heads of a group share a tile, keys are cut into parts.
_FEW_LARGE = Packing(lengths=((1, 1900), (5, 700), (0, 30), (8, 0), (3, 129), (1, 1500)))
_FEW_SMALL = Packing(lengths=((1, 700), (5, 9), (0, 3), (4, 0), (3, 130)))
_FEW = {"packing": _FEW_LARGE, "small_packing": _FEW_SMALL, "shape": replace(_WIDE, heads_q=8)}
_FEW_IDLE = {
    **_FEW,
    "packing": replace(_FEW_LARGE, idle=(2, 130), behind=77),
    "small_packing": replace(_FEW_SMALL, idle=(2, 33), behind=9),
}
_MANY = {
    "packing": Packing(lengths=tuple((1 + n * 37 % 200, 1 + n * 53 % 400) for n in range(300))),
    "small_packing": Packing(lengths=tuple((1 + n % 3, 1 + n * 5 % 7) for n in range(9)), slack=70),
}
CAUSAL = fixed(causal=True)
WINDOW = fixed(window=(60, 10))


def _case(name: str, options: MakeOptions | None = None, **fields: Any) -> PackedCase:
    chosen = {
        "packing": _LARGE,
        "small_packing": _SMALL,
        "shape": _SHAPE,
        "options": options or fixed(),
        **fields,
    }
    return PackedCase(name=f"packed {name}", **chosen)


PACKED_CASES: tuple[PackedCase, ...] = (
    _case("plain"),
    _case("idle rows", **_IDLE),
    _case("causal idle rows", CAUSAL, **_IDLE),
    _case("causal top left d128", fixed(causal="top_left"), shape=_WIDE, **_IDLE),
    _case("d128 fp16", shape=_WIDE, dtype=FP16),
    _case("d256", shape=replace(_SHAPE, head_dim=256)),
    _case("causal d256", CAUSAL, shape=replace(_SHAPE, head_dim=256), **_IDLE),
    _case("d64 dv512 idle rows", shape=replace(_SHAPE, head_dim_v=512), **_IDLE),
    _case("d512 causal idle rows", CAUSAL, shape=replace(_SHAPE, head_dim=512), **_IDLE),
    _case(
        "d512 fp16 max_score", shape=replace(_SHAPE, head_dim=512), dtype=FP16, wants_max_score=True
    ),
    _case("d40 dv24 in NaN", layout=inside_nan, shape=replace(_SHAPE, head_dim=40, head_dim_v=24)),
    _case("d5 dv3", CAUSAL, shape=replace(_SHAPE, head_dim=5, head_dim_v=3)),
    _case("heads first", CAUSAL, layout=heads_first, **_IDLE),
    _case("window sink", joined(WINDOW, sink), **_IDLE),
    _case("softcap", fixed(softcap=5.0)),
    _case("scale negative", fixed(scale=-0.2)),
    _case("max_score", sink, wants_max_score=True, **_IDLE),
    _case("max_score negative", fixed(scale=-0.2), wants_max_score=True, **_IDLE),
    _case("alibi causal", joined(CAUSAL, alibi), **_IDLE),
    _case("padding by sequence", bool_capture),
    _case("late keys rising", late_keys, transform=ramp(-300.0, 300.0)),
    _case("rising", CAUSAL, transform=ramp(-300.0, 300.0), **_IDLE),
    _case("blocks", random_blocks(128, 128), **_IDLE),
    _case("blocks causal rising", joined(random_blocks(128, 128), CAUSAL), **_IDLE),
    _case(
        "everything",
        joined(random_blocks(128, 128), late_keys, CAUSAL, WINDOW, sink, alibi),
        wants_max_score=True,
        **_IDLE,
    ),
    _case("few", **_FEW),
    _case("few causal idle rows", CAUSAL, **_FEW_IDLE),
    _case("few causal sink max_score", joined(CAUSAL, sink), wants_max_score=True, **_FEW_IDLE),
    _case("few window alibi fp16", joined(WINDOW, alibi), dtype=FP16, **_FEW_IDLE),
    _case("few padding by sequence", joined(bool_capture, sink), **_FEW),
    _case("many", CAUSAL, **_MANY),
    _case("gqa 5 heads", CAUSAL, shape=replace(_SHAPE, heads_q=5, heads_kv=1)),
    _case(
        "slack",
        CAUSAL,
        packing=replace(_LARGE, slack=100_000),
        small_packing=replace(_SMALL, slack=10_000),
    ),
    _case(
        "nothing but idle rows",
        sink,
        packing=Packing(lengths=((0, 0),), behind=500),
        small_packing=Packing(lengths=((0, 0),), behind=5),
    ),
    _case(
        "no keys",
        sink,
        packing=Packing(lengths=((300, 0), (30, 0)), idle=(9, 0), behind=5),
        small_packing=Packing(lengths=((70, 0), (3, 0)), idle=(2, 0), behind=5),
    ),
    *(_case(f"pages of {size}", page_size=size, **_IDLE) for size in (16, 64, 256)),
    *(_case(f"pages of {size} causal", CAUSAL, page_size=size) for size in (1, 7, 24, 128)),
    _case("pages d128", CAUSAL, shape=_WIDE, page_size=16, **_IDLE),
    _case("pages d256 fp16", shape=replace(_SHAPE, head_dim=256), dtype=FP16, page_size=64),
    _case("pages d192 dv128", page_size=32, shape=replace(_SHAPE, head_dim=192, head_dim_v=128)),
    _case("pages d512", CAUSAL, page_size=16, shape=replace(_SHAPE, head_dim=512)),
    _case("pages d64 dv512", page_size=24, shape=replace(_SHAPE, head_dim_v=512), **_IDLE),
    _case("pages heads first", CAUSAL, page_size=16, layout=pages_heads_first, **_IDLE),
    _case("pages window sink max_score", joined(WINDOW, sink), page_size=48, wants_max_score=True),
    _case("pages alibi late keys", joined(alibi, late_keys), page_size=64),
    _case(
        "pages blocks rising", random_blocks(128, 128), page_size=32, transform=ramp(-300.0, 300.0)
    ),
    _case("few pages of 16", page_size=16, **_FEW),
    _case("few pages of 64 causal", CAUSAL, page_size=64, **_FEW_IDLE),
    _case(
        "few pages of 256 sink max_score", sink, page_size=256, wants_max_score=True, **_FEW_IDLE
    ),
    _case("few pages of 7 window alibi", joined(WINDOW, alibi), page_size=7, **_FEW),
    _case("gradients", joined(CAUSAL, sink), checks_gradients=True, **_IDLE),
)
