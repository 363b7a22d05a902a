"""Calls seen before: recognised by what the user passed, run without checking it all again.

Lives here: the memo from layouts, keywords and code of mods to a `Call`, and the test that a call
may be looked up at all. Not here: what is run (`eager.py`), reading of captures
(`problem/known_mods.py`), block masks (`problem/block_masks.py`). Invariant: whatever decides a
check, a plan or a result is in the key, is compared here on every call, or is passed on as this
call's own tensor or number; anything of an unusual type goes the long way. The memo is bounded and
holds no tensor of the user's.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from fovea.arch import arch_of
from fovea.mods.trace import TracedMod
from fovea.ops import eager
from fovea.ops.eager import Call, is_watched
from fovea.plan.integers import NARROW_LIMIT
from fovea.plan.kernel_calls import as_kernel_call
from fovea.problem import AttentionProblem, Results
from fovea.problem.block_masks import KnownLists, recall
from fovea.problem.known_mods import ModReader, Scalars, reader_of
from fovea.problem.parts import NO_SCALARS, Numbers
from fovea.tiling.exact_lists import Exactness

# q, k, v, the fields of a `Request` in its order, backend: as the user passed them.
Passed = tuple[Tensor, Tensor, Tensor, tuple[Any, ...], str | None]

_LIMIT = 2048  # keys; a server may see a new length in every call
_BLOCK_MASK = 2  # the place of its mask_mod among the mods of a call
_MODS_LIMIT = 8  # calls of one key that differ in what their mods capture

_is_autocast_on = torch._C._is_any_autocast_enabled  # pyright: ignore
_is_deterministic = torch._C._get_deterministic_algorithms  # pyright: ignore


Readers = tuple[tuple[int, ModReader], ...]


class _Known:
    """A call of one key: how it runs, its numbers where it has none of its own, its mods.

    Attributes:
        readers: (0 for the score_mod, 1 for the mask_mod, 2 for the block mask's, its reader).
        fixed: by the same places, the numbers that a mod must have: those of a mask that became
            limits of the kernel.
        listed: canonical text of the mask that the block lists must say exactly, since the kernel
            does not read them; None where it does.
    """

    __slots__ = ("call", "fixed", "listed", "numbers", "readers")

    def __init__(
        self,
        call: Call,
        numbers: Numbers,
        readers: Readers,
        fixed: dict[int, Scalars],
        listed: str | None,
    ) -> None:
        self.call = call
        self.numbers = numbers
        self.readers = readers
        self.fixed = fixed
        self.listed = listed


# By `_key`; None, the key of calls that are not looked up, is never there.
_known: dict[tuple[Any, ...] | None, tuple[_Known, ...]] = {}


def attend(passed: Passed) -> Results | None:
    """Return the results of a call like an earlier one; None where it has to be checked.

    The lse and the max_score are there only if the caller asked for one of them.
    """
    q, k, v, options, _ = passed
    try:
        _, _, score_mod, mask_mod, block_mask, softcap, sink, scale, _, lse, top = options
        lists = None if block_mask is None else recall(block_mask)
        found = _known.get(_key(passed, lists))
        if found is None:
            return None
        known = found[0]
        numbers = known.numbers
        tensors: Any = (q, k, v, sink)
        if score_mod is not None or mask_mod is not None or block_mask is not None:
            mods = (score_mod, mask_mod, None if block_mask is None else block_mask.mask_mod)
            tensors = [q, k, v, sink]
            read = _read(found, mods, tensors, None if lists is None else lists.exactness)
            if read is None:
                return None
            known, scalars = read
            if scalars is not NO_SCALARS:
                numbers = (None, numbers[1], scalars)
            tensors = (*tensors, *(() if lists is None else lists.tensors))
    except (RuntimeError, TypeError, ValueError, AttributeError):
        # Something unusual, such as a sparse tensor, which has no strides: its check will say so.
        return None
    if scale is not None:
        numbers = (None, float(scale), numbers[2])
    if softcap is not None:
        numbers = (float(softcap), numbers[1], numbers[2])
    return eager.attend(known.call, numbers, tensors, lse or top)


def remember(passed: Passed, problem: AttentionProblem, call: Call) -> None:
    """Keep how a call was run for those like it, unless every one of them has to be checked."""
    mods = (problem.score_mod, problem.mask_mod, problem.block_mask_mod)
    if call.choice.is_nondeterministic or not all(_is_narrow(mod) for mod in mods):
        return
    _, _, score_mod, mask_mod, block_mask, *_ = passed[3]
    try:
        key = _key(passed, None if block_mask is None else recall(block_mask))
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return
    if key is None:
        return
    functions = (score_mod, mask_mod, None if block_mask is None else block_mask.mask_mod)
    readers: list[tuple[int, ModReader]] = []
    for place, traced in enumerate(mods):
        if traced is not None:
            reader = reader_of(functions[place], traced, problem)
            if reader is None:
                return
            readers.append((place, reader))
    scale = problem.q.shape[-1] ** -0.5
    numbers = (None, scale, NO_SCALARS)
    band = as_kernel_call(problem, arch_of(problem.device))
    kept = (band.score_mod, band.mask_mod, band.block_mask_mod)
    fixed = {
        place: mod.scalars
        for place, mod in enumerate(mods)
        if mod is not None and kept[place] is None
    }
    listed = problem.block_mask_mod
    text = listed.graph.text() if listed is not None and _BLOCK_MASK in fixed else None
    known = _Known(call, numbers, tuple(readers), fixed, text)
    if len(_known) >= _LIMIT:
        _known.clear()
    # Without mods one call is all there can be.
    others = _known.get(key, ()) if readers else ()
    _known[key] = (known, *others[: _MODS_LIMIT - 1])


def clear() -> None:
    """Forget every call."""
    _known.clear()


def _key(passed: Passed, lists: KnownLists | None) -> tuple[Any, ...] | None:
    """Return what a call is looked up by; None where it has to be checked.

    `lists` are those of its block mask, where that is known.

    Numbers equal across types (True == 1 == 1.0), but mean different things or errors: those of
    another type than usual are not looked up.
    """
    q, k, v, options, backend = passed
    if (
        (type(q) is not Tensor and type(q) is not Parameter)
        or (type(k) is not Tensor and type(k) is not Parameter)
        or (type(v) is not Tensor and type(v) is not Parameter)
        or is_watched()
        or _is_autocast_on()
        or _is_deterministic()
    ):
        return None
    causal, window, score_mod, mask_mod, block_mask, softcap, sink, scale, fixed, lse, top = options
    if (
        (causal is not False and causal is not True and type(causal) is not str)
        or (fixed is not None and fixed is not False and fixed is not True)
        or (scale is not None and not _is_usual(scale))
        or (softcap is not None and not _is_usual(softcap))
        or (window is not None and not _is_window(window))
    ):
        return None
    # fmt: off
    key = (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        causal, window, backend, fixed, lse, top, scale is None, softcap is None,
    )
    # fmt: on
    if score_mod is None and mask_mod is None and block_mask is None and sink is None:
        return key
    if block_mask is not None and lists is None:
        return None
    return (
        key,
        None if sink is None else _sink_key(sink),
        # Ids are taken as long as the entry lives: its readers hold the code.
        _code_id(score_mod),
        _code_id(mask_mod),
        None if lists is None else lists.layout,
        None if block_mask is None else _code_id(block_mask.mask_mod),
    )


def _is_usual(number: object) -> bool:
    """Return whether a number is positive and far from what the checks refuse in any dtype."""
    return (type(number) is float or type(number) is int) and 1e-30 < number < 1e30


def _is_window(window: Any) -> bool:
    return type(window) is tuple and all(
        extent is None or type(extent) is int for extent in cast(tuple[object, ...], window)
    )


def _code_id(mod: Any) -> int | None:
    return None if mod is None else id(mod.__code__)


def _sink_key(sink: Tensor) -> tuple[Any, ...]:
    if type(sink) is not Tensor and type(sink) is not Parameter:
        raise TypeError
    return (sink.shape, sink.stride(), sink.dtype, sink.device)


def _read(
    found: tuple[_Known, ...],
    mods: tuple[Any, Any, Any],
    tensors: list[Any],
    exact: Exactness | None,
) -> tuple[_Known, tuple[Scalars, Scalars, Scalars]] | None:
    """Return the first known call whose mods captured the same kinds of things, and the scalars.

    The captures of this call go to the end of `tensors`.
    """
    count = len(tensors)
    for known in found:
        scalars = NO_SCALARS
        # Which mods there are is part of the key.
        for place, reader in known.readers:
            before = len(tensors)
            read = reader.read(mods[place], tensors)
            if read is None:
                break
            if place == _BLOCK_MASK and known.listed is not None:
                captures = tuple(tensors[before:])
                if exact is None or not exact.says(known.listed, read, captures):
                    break
            if read:
                if not _are_narrow(read) or known.fixed.get(place, read) != read:
                    break
                changed = list(scalars)
                changed[place] = read
                scalars = (changed[0], changed[1], changed[2])
        else:
            return known, scalars
        del tensors[count:]
    return None


def _are_narrow(scalars: Scalars) -> bool:
    for number in scalars:
        if type(number) is int and not -NARROW_LIMIT < number < NARROW_LIMIT:
            return False
    return True


def _is_narrow(mod: TracedMod | None) -> bool:
    """Return whether the integers of a mod are such that calls alike run the same kernel."""
    return mod is None or _are_narrow(mod.scalars)
