"""Products of the tensor core in tensor memory: tcgen05.mma, and tcgen05.commit.

What lives here: the forms of kinds f16, tf32, f8f6f4 and i8: dense, sparse (`.sp`), weight
stationary (`.ws`); commit. Not here: what a product does (`isa/tcgen05_product.py`), block-scaled
kinds (`isa/tcgen05_scaled.py`), loads and stores (`isa/tcgen05_memory.py`). Not implemented:
`.ashift`.

Invariant: a form is decoded once; every issue checks descriptor, addresses and masks before
anything is submitted.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from fovea.emulator.async_engine import Operation
from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa import instruction
from fovea.emulator.isa.copy_engine import (
    SharedPlace,
    issues,
    multicast_ranks,
    shared_place,
    signal,
)
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.isa.tcgen05_product import (
    Issue,
    blocks_of,
    check_addresses,
    multiply,
    offsets_of_a,
    offsets_of_b,
)
from fovea.emulator.isa.tensor_core import (
    SM100,
    commit_tracked,
    member_ctas,
    shared_address,
    submit_tracked,
)
from fovea.emulator.layout.column_mask import ColumnMask, decode_column_mask
from fovea.emulator.layout.instruction_descriptor import (
    InstructionDescriptor,
    decode_instruction_descriptor,
)
from fovea.emulator.ptx import syntax

_SOURCE = "PTX ISA 9.7.16"
_KINDS = "kind::f16 kind::tf32 kind::f8f6f4 kind::i8"
_A_HINTS = "collector::a::fill collector::a::use collector::a::lastuse collector::a::discard"
_B_HINTS = " ".join(
    f"collector::b{n}::{use}" for n in range(4) for use in ("fill", "use", "lastuse", "discard")
)
_REUSE_SHIFTS = (0, 8, 16, 32)  # by bits 30 and 31 of the instruction descriptor

_decode = lru_cache(maxsize=256)(decode_instruction_descriptor)


@instruction(
    "tcgen05.mma.group.what{.collector} [d], a-desc|a-tmem, b-desc, idesc, e1{, e2}{, e3}",
    source=f"{_SOURCE}.10.9.1",
    evidence="manual-only",
    targets=SM100,
    kind="mma",
    group="cta_group::1 cta_group::2",
    what=_KINDS,
    collector=_A_HINTS,
)
@instruction(
    "tcgen05.mma.sp.group.what{.collector} "
    "[d], a-desc|a-tmem, b-desc, [sp-meta], idesc, e1{, e2}{, e3}",
    source=f"{_SOURCE}.10.9.2",
    evidence="inferred",
    targets=SM100,
    kind="mma",
    group="cta_group::1 cta_group::2",
    what=_KINDS,
    collector=_A_HINTS,
)
def tcgen05_mma(i: Instruction) -> Any:
    """D = A B + D * 2^-scale, or A B if enable-input-d is false, asynchronously.

    Collector hints have no effect: A is read again by every product.
    """
    group, kind = int(i["group"][-1]), i["what"].removeprefix("kind::")
    read_mask, enable, scale = _trailing(i, group, kind)
    return _product_form(i, group, enable, read_lanes=read_mask, scale=scale)


@instruction(
    "tcgen05.mma.ws.group.what{.collector} "
    "[d], a-desc|a-tmem, b-desc, idesc, e1{, zero-column-mask-desc}",
    source=f"{_SOURCE}.10.9.3",
    evidence="inferred",
    targets=SM100,
    kind="mma",
    group="cta_group::1",
    what=_KINDS,
    collector=_B_HINTS,
)
@instruction(
    "tcgen05.mma.ws.sp.group.what{.collector} "
    "[d], a-desc|a-tmem, b-desc, [sp-meta], idesc, e1{, zero-column-mask-desc}",
    source=f"{_SOURCE}.10.9.4",
    evidence="inferred",
    targets=SM100,
    kind="mma",
    group="cta_group::1",
    what=_KINDS,
    collector=_B_HINTS,
)
def tcgen05_mma_ws(i: Instruction) -> Any:
    """As tcgen05.mma, for the reuse of B, with a mask of the columns of B that count as zero.

    Collector hints have no effect: B is read again by every product.
    """
    return _product_form(i, 1, i.operands["e1"], is_ws=True)


def _product_form(
    i: Instruction,
    group: int,
    enable: syntax.Operand,
    *,
    read_lanes: Callable[[Any, int], Array] | None = None,
    scale: int = 0,
    is_ws: bool = False,
) -> Any:
    """Return the action of a form.

    Args:
        group: CTAs that take part.
        enable: operand that says whether D is added.
        read_lanes: reader of the disabled lanes (None: there are none).
        scale: D is divided by 2^scale before it is added.
        is_ws: whether the form is `.ws`.
    """
    kind = i["what"].removeprefix("kind::")
    if kind == "i8" and i.program.target.endswith("f"):
        raise i.error(f".kind::i8 is not available on {i.program.target} (use sm_100a)")
    is_sparse = "sp-meta" in i.operands
    a_in_tensor_memory = isinstance(i.operands["a-desc"], syntax.Memory)
    reads = [
        i.address("d"),
        i.address("a-desc") if a_in_tensor_memory else i.read("a-desc", "b64"),
        i.read("b-desc", "b64"),
        i.read("idesc", "b32"),
        i.read_operand(enable, "pred"),
    ]
    if is_sparse:
        reads.append(i.address("sp-meta"))
    if "zero-column-mask-desc" in i.operands:
        reads.append(i.read("zero-column-mask-desc", "b64"))

    def issued(warp: Any, lane: int, values: list[int]) -> Issue:
        d, a, b, idesc, enabled, *more = values
        try:
            shape = _decode(idesc, kind, group, is_sparse=is_sparse, is_weight_stationary=is_ws)
            metadata = more.pop(0) if is_sparse else None
            mask = _column_mask(more[0], shape, idesc) if more else None
        except ValueError as error:
            raise IllegalOperand(str(error), warp.where(i, lane=lane)) from error
        issue = Issue(
            instruction=i,
            warp=warp,
            ctas=member_ctas(i, warp, group),
            shape=shape,
            blocks=blocks_of(shape, group, is_ws=is_ws),
            d_address=d,
            a_address=a if a_in_tensor_memory else None,
            a_offsets=None if a_in_tensor_memory else offsets_of_a(i, warp, a, shape, group),
            b_offsets=offsets_of_b(i, warp, b, shape, group, mask),
            adds_d=bool(enabled),
            d_scale=scale,
            disabled=None if read_lanes is None else read_lanes(warp, lane),
            metadata=metadata,
            mask=mask,
        )
        check_addresses(issue)
        return issue

    def run(warp: Any, mask: Array) -> None:
        values = [read(warp) for read in reads]
        for lane, *_ in issues(mask, *values):
            _submit(issued(warp, lane, [int(value[lane]) for value in values]), lane)

    return run


def _submit(issue: Issue, lane: int) -> None:
    """Count a product and start it."""
    warp, shape = issue.warp, issue.shape
    flops = 2 * shape.rows * shape.columns * shape.k_extent
    warp.machine.counters.add(f"mma_flops.{shape.a_type}", flops)
    effects = [partial(multiply, issue)]
    group = len(issue.ctas)
    submit_tracked(issue.instruction, warp, effects, kind="tcgen05.mma", group=group, lane=lane)


def _column_mask(value: int, shape: InstructionDescriptor, idesc: int) -> ColumnMask:
    return decode_column_mask(value, shape.rows, shape.columns, _REUSE_SHIFTS[idesc >> 30 & 3])


def _trailing(
    i: Instruction, group: int, kind: str
) -> tuple[Callable[[Any, int], Array] | None, syntax.Operand, int]:
    """Return (reader of the disabled lanes, enable-input-d, scale-input-d)."""
    rest = [i.operands[name] for name in ("e1", "e2", "e3") if name in i.operands]
    read_mask = None
    if isinstance(rest[0], syntax.Vector):
        words = rest.pop(0)
        assert isinstance(words, syntax.Vector)
        if len(words.items) != 4 * group:
            raise i.error(f"disable-output-lane has {len(words.items)} words, not {4 * group}")
        reads = [i.read_operand(item, "b32") for item in words.items]

        def read(warp: Any, lane: int) -> Array:
            values = np.array([int(read(warp)[lane]) for read in reads], np.uint32)
            return np.unpackbits(values.view(np.uint8), bitorder="little").astype(np.bool_)

        read_mask = read
    if not rest or len(rest) > 2:
        raise i.error("operands after idesc are {disable-output-lane}, enable-input-d, scale")
    scale = 0
    if len(rest) == 2:
        amount = rest[1]
        if not isinstance(amount, syntax.Immediate) or kind not in ("f16", "tf32"):
            raise i.error("scale-input-d is a constant of kind::f16 and kind::tf32 only")
        scale = int(amount.value)
        if not 0 <= scale <= 15:
            raise i.error(f"scale-input-d is {scale}; allowed: 0 to 15")
    return read_mask, rest[0], scale


# --- commit ---------------------------------------------------------------------------------------


@instruction(
    "tcgen05.commit.group.mbarrier::arrive::one{.shared::cluster}{.multicast::cluster}.b64 "
    "[mbar]{, ctaMask}",
    source=f"{_SOURCE}.12.1",
    evidence="manual-only",
    targets=SM100,
    kind="sync",
    group="cta_group::1 cta_group::2",
)
def tcgen05_commit(i: Instruction) -> Any:
    """Arrive at an mbarrier when the thread's earlier mma, cp and shift are complete."""
    address, group = i.address("mbar"), int(i["group"][-1])
    read_mask = i.read("ctaMask", "u16") if i.has("ctaMask") else None

    def run(warp: Any, mask: Array) -> None:
        addresses = address(warp)
        ctas = None if read_mask is None else read_mask(warp)
        for lane, *_ in issues(mask, addresses, ctas):
            at = int(addresses[lane])
            if not i.has("shared::cluster"):
                at = shared_address(i, warp, lane, at)
            place = shared_place(i, warp, lane, at, alignment=8, what="mbarrier")
            places = [place]
            if ctas is not None:
                ranks = multicast_ranks(i, warp, lane, int(ctas[lane]))
                places = [place.in_cta(rank) for rank in ranks]
            commit_tracked(
                i,
                warp,
                [lambda operation, place=place: _arrive(place, operation) for place in places],
                group=group,
                lane=lane,
            )

    return run


def _arrive(place: SharedPlace, operation: Operation) -> None:
    signal(place, operation, lambda barrier, access: barrier.arrive(1, access))
