"""The kernels that a call can run, as facts.

Lives here: from a problem to the plans of its kernel and of the variants of it that other lengths
or numbers would select. Not here: choosing (`plan/select.py`), compiling (`precompile.py`).
Invariant: the list of variants of a call is finite, and this is all of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from fovea.arch import Arch
from fovea.mods.bands import band_of_mask
from fovea.problem import AttentionProblem
from fovea.tiling.key_ranges import KeyRanges
from fovea.tiling.mask_bits import BLOCK, MaskBits

if TYPE_CHECKING:
    from fovea.plan.forward import ForwardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The forward kernel of a call on one architecture, or why there is none.

    Attributes:
        lack: what the kernels lack for this call; None where one takes it.
        name: of the kernel, as profiles show it.
        tile: query rows and keys of a tile.
        v_slices: in how many parts of its columns V is read, each after a QK product of its own.
        registers: of a thread, by role.
        packing: how few queries are spread over tiles and SMs; None for many.
        variants: all kernels that calls like this one can select, this one first, each with what
            selects it.
    """

    arch: Arch
    is_chosen: bool
    lack: str | None
    name: str | None = None
    tile: tuple[int, int] | None = None
    kv_stages: int | None = None
    threads: int | None = None
    registers: tuple[tuple[str, int], ...] = ()
    shared_bytes: int | None = None
    v_slices: int = 1
    packing: str | None = None
    variants: tuple[str, ...] = ()

    def _origin(self) -> str:
        """Return why the name has another architecture: kernels are named by their source."""
        if f"_{self.arch}_" in (self.name or ""):
            return ""
        return f", one source for both, compiled for {self.arch.target}"

    def _slices(self) -> str:
        return f"its columns in {self.v_slices} slices; all scores are made for each of them"

    def lines(self) -> list[str]:
        """Return the text of this kernel."""
        title = f"on {self.arch}"
        if self.tile is None or self.shared_bytes is None:
            return [f"{title:13} no kernel: {self.lack}"]
        registers = ", ".join(f"{role} {count}" for role, count in self.registers)
        return [
            f"{title:13} {self.name}{self._origin()}",
            f"{'':13} tile {self.tile[0]} x {self.tile[1]}, {self.kv_stages} K/V stages, "
            f"{self.threads} threads, registers: {registers}, "
            f"{self.shared_bytes / 1024:.0f} KiB shared",
            *([] if self.v_slices == 1 else [f"{'  wide V':13} {self._slices()}"]),
            *([] if self.packing is None else [f"{'  few queries':13} {self.packing}"]),
            *(
                f"{'  variants' if i == 0 else '':13} {text}"
                for i, text in enumerate(self.variants)
            ),
        ]


def kernel_of(problem: AttentionProblem, arch: Arch, *, is_chosen: bool = False) -> Kernel:
    """Return the facts of a call's kernel on an architecture."""
    from fovea.plan import select

    lack = select.unsupported(problem, arch)
    if lack is not None:
        return Kernel(arch=arch, is_chosen=is_chosen, lack=lack)
    plan = select.forward_plan(problem, arch)
    return Kernel(
        arch=arch,
        is_chosen=is_chosen,
        lack=None,
        name=plan.name,
        tile=(plan.tile_m, plan.tile_n),
        kv_stages=plan.kv_stages,
        threads=plan.threads,
        registers=tuple((role.name, role.registers) for role in plan.roles),
        shared_bytes=plan.shared_bytes,
        v_slices=getattr(plan, "v_slices", 1),
        packing=_packing(problem, plan, arch),
        variants=tuple(
            f"{variant.name}: {condition}" for variant, condition in variants_of(problem, arch)
        ),
    )


def _packing(problem: AttentionProblem, plan: "ForwardPlan", arch: Arch) -> str | None:
    """Return how few queries are spread over tiles and SMs."""
    from fovea.plan import select
    from fovea.plan.kernel_calls import as_kernel_call

    if not plan.packs_heads:
        return None
    num_sms = arch.num_sms
    if problem.device.type == "cuda":
        cuda = cast(Any, torch.cuda)  # its functions have no types
        num_sms = int(cuda.get_device_properties(problem.device).multi_processor_count)
    splits = select.num_splits(as_kernel_call(problem), plan, num_sms)
    heads = problem.group_size
    parts = "keys in one part"
    if splits > 1:
        parts = f"keys in {splits} parts, merged by a second kernel"
    return (
        f"a tile's rows are queries times the {heads} head{'s' if heads > 1 else ''} of a group; "
        f"{parts} ({num_sms} SMs)"
    )


def variants_of(problem: AttentionProblem, arch: Arch) -> list[tuple["ForwardPlan", str]]:
    """Return every plan that calls like this one can select, its own first, and what selects it.

    Like this one: the same dtype, head dims, features and mods, with any lengths and numbers.
    """
    from fovea.plan import select

    # Different conditions may select one plan.
    found: dict[ForwardPlan, list[str]] = {select.forward_plan(problem, arch): []}
    cases = [
        (like, scale, f"{scale_text}{origin}")
        for like, origin in origins(problem, arch)
        for scale, scale_text in ((1.0, "scale > 0"), (-1.0, "scale <= 0"))
    ]
    for like, scale, scale_text in cases:
        by_plan: dict[ForwardPlan, list[str]] = {}
        for seqlen_q, seqlen_kv, text in _lengths(like):
            plan = select.forward_plan(_like(like, scale, seqlen_q, seqlen_kv), arch)
            by_plan.setdefault(plan, []).append(f"{scale_text}, {text}")
        for plan, texts in by_plan.items():
            found.setdefault(plan, []).extend([scale_text] if len(by_plan) == 1 else _merged(texts))
    return [(plan, "; or ".join(texts) or "this call") for plan, texts in found.items()]


def origins(problem: AttentionProblem, arch: Arch) -> list[tuple[AttentionProblem, str]]:
    """Return the problem as a kernel takes it, and as others whose block mask says the same.

    What a kernel gets beside the tensors depends on where the lists of a mask come from and on what
    they show: each row's range of keys, bits, or nothing but themselves.
    """
    from fovea.plan import select
    from fovea.plan.kernel_calls import as_kernel_call

    lists = problem.block_lists
    call = as_kernel_call(problem, arch)
    found = [(call, "")]
    if lists is None:
        return found
    # Exact are the very tensors that fovea made (`tiling/exact_lists.py`), and no others.
    others = replace(lists, kv_num_blocks=lists.kv_num_blocks.clone())
    read = replace(problem, block_lists=others)
    if call.block_lists is not lists and select.unsupported(read, arch) is None:
        found.append((read, ", block lists that changed since they were made"))
    if problem.varlen is None:
        found.extend(_shown(problem, call, arch))
    return found


def _shown(
    problem: AttentionProblem, call: AttentionProblem, arch: Arch
) -> Iterator[tuple[AttentionProblem, str]]:
    """Yield the call as with lists that show ranges, or bits, where this one's do not."""
    from fovea.plan.kernel_calls import as_kernel_call

    lists = problem.block_lists
    assert lists is not None
    mask = problem.block_mask_mod
    is_band = mask is not None and band_of_mask(mask.graph) is not None
    nothing = lists.kv_num_blocks.new_empty(0)
    bare = as_kernel_call(replace(problem, block_lists=None, block_mask_mod=None), arch)
    maker = " that torch made" if is_band else ""
    if call.key_ranges is None and arch.name == "sm90":
        ranges = KeyRanges(nothing, nothing, (nothing,))
        yield replace(bare, key_ranges=ranges), f", a block mask{maker} of one range of keys a row"
    # Where kernels take no ranges, masks that have some are bits, too.
    may_be_bits = not is_band or arch.name != "sm90"
    if call.mask_bits is None and may_be_bits:
        listed = replace(
            lists,
            block_q=BLOCK,
            block_kv=BLOCK,
            full_kv_num_blocks=lists.kv_num_blocks,
            full_kv_indices=lists.kv_indices,
        )
        bits = MaskBits(listed, nothing, nothing)
        yield (
            replace(bare, block_lists=listed, mask_bits=bits),
            f", a block mask{maker} whose partial blocks are kept as bits",
        )


def _merged(texts: list[str]) -> list[str]:
    """Return the conditions, those that differ in keys or in queries alone made one."""
    few, some, many = (text for _, text in _query_lengths())
    more = few.replace("at most", "more than")
    texts = _joined(texts, (some, many), f", {more}")
    short, medium, long = (text for _, text in _seqlens())
    beyond_short = short.replace("at most", "more than")
    up_to_medium = long.replace("more than", "at most")
    texts = _joined(texts, (medium, long), f", {beyond_short}")
    texts = _joined(texts, (short, beyond_short), "")
    texts = _joined(texts, (short, medium), f", {up_to_medium}")
    return _joined(texts, (few, more), "")


def _joined(texts: list[str], halves: tuple[str, str], whole: str) -> list[str]:
    """Return the conditions, those that differ in one of two halves made one with the whole."""
    joined = [
        text.replace(f", {halves[0]}", whole).replace(f", {halves[1]}", whole) for text in texts
    ]
    pairs = zip(texts, joined, strict=True)
    return list(dict.fromkeys(both if joined.count(both) > 1 else text for text, both in pairs))


def _seqlens() -> list[tuple[int, str]]:
    from fovea.plan.select import MEDIUM_SEQLEN, SHORT_SEQLEN

    return [
        (1, f"at most {SHORT_SEQLEN} keys"),
        (SHORT_SEQLEN + 1, f"{SHORT_SEQLEN + 1} to {MEDIUM_SEQLEN} keys"),
        (MEDIUM_SEQLEN + 1, f"more than {MEDIUM_SEQLEN} keys"),
    ]


def _query_lengths() -> list[tuple[int, str]]:
    from fovea.plan.select import FEW_QUERIES, PAIR_QUERIES

    return [
        (1, f"at most {FEW_QUERIES} queries"),
        (FEW_QUERIES + 1, f"{FEW_QUERIES + 1} to {PAIR_QUERIES - 1} queries"),
        (PAIR_QUERIES, f"at least {PAIR_QUERIES} queries"),
    ]


def _lengths(problem: AttentionProblem) -> list[tuple[int, int, str]]:
    """Return lengths between which the kernel of a call changes, and what they stand for."""
    return [
        (seqlen_q, seqlen_kv, f"{queries}, {keys}")
        for seqlen_q, queries in _query_lengths()
        for seqlen_kv, keys in _key_lengths(problem)
    ]


def _key_lengths(problem: AttentionProblem) -> list[tuple[int, str]]:
    from fovea.plan.integers import NARROW_LIMIT

    if problem.score_mod is None and problem.mask_mod is None and problem.block_mask_mod is None:
        return _seqlens()
    return [
        *((seqlen, f"{keys}, mods in 32-bit integers") for seqlen, keys in _seqlens()),
        (NARROW_LIMIT, "mods in 64-bit integers (long sequences, large numbers)"),
    ]


def _like(
    problem: AttentionProblem, scale: float, seqlen_q: int, seqlen_kv: int
) -> AttentionProblem:
    """Return the call with other numbers and key lengths; nothing of it can be run."""
    # Pages keep their size; how many keys there are is said beside them.
    keys = problem.k.shape[1] if problem.is_paged else seqlen_kv
    tensors = {
        name: torch.empty(
            (1, length, tensor.shape[-2], tensor.shape[-1]), dtype=tensor.dtype, device="meta"
        )
        for name, tensor, length in (
            ("q", problem.q, seqlen_q),
            ("k", problem.k, keys),
            ("v", problem.v, keys),
        )
    }
    mods = {
        name: replace(mod, scalars=tuple(type(scalar)(0) for scalar in mod.scalars))
        for name in ("score_mod", "mask_mod", "block_mask_mod")
        if (mod := getattr(problem, name)) is not None
    }
    varlen = problem.varlen
    if varlen is not None:
        varlen = replace(varlen, max_seqlen_q=seqlen_q, max_seqlen_kv=seqlen_kv)
    window = tuple(None if extent is None else 0 for extent in problem.window)
    return replace(problem, **tensors, **mods, varlen=varlen, scale=scale, window=window)
