"""Calls seen before: recognised by what the user passed, run without checking it all again.

Lives here: the memo from layouts, keywords and code of mods to a `Call`, and the test that a call
may be looked up at all. Not here: what is run (`eager.py`), reading of captures
(`problem/known_mods.py`), block masks (`problem/block_masks.py`). Invariant: whatever decides a
check, a plan or a result is in the key, is compared here on every call, or is passed on as this
call's own tensor or number; anything of an unusual type goes the long way. The memo is bounded and
holds no tensor of the user's.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fovea.mods.trace import TracedMod
from fovea.ops import eager
from fovea.ops.eager import PLAIN_TYPES, Call
from fovea.plan.integers import NARROW_LIMIT
from fovea.problem import AttentionProblem, ForwardResult
from fovea.problem.block_masks import KnownLists, recall
from fovea.problem.known_mods import ModReader, reader_of
from fovea.problem.parts import Numbers, Scalars

# q, k, v, the fields of a `Request` in its order, backend: as the user passed them.
Passed = tuple[Tensor, Tensor, Tensor, tuple[Any, ...], str | None]

_LIMIT = 2048  # keys; a server may see a new length in every call
_MODS_LIMIT = 8  # calls of one key that differ in what their mods capture

_is_autocast_on = torch._C._is_any_autocast_enabled  # pyright: ignore
_is_deterministic = torch._C._get_deterministic_algorithms  # pyright: ignore
_NO_SCALARS: Scalars = ()


class _Known:
    """A call of one key: how it runs, its numbers where it has none of its own, its mods."""

    __slots__ = ("call", "numbers", "readers")

    def __init__(self, call: Call, numbers: Numbers, readers: tuple[ModReader | None, ...]) -> None:
        self.call = call
        self.numbers = numbers
        self.readers = readers


_known: dict[tuple[Any, ...], tuple[_Known, ...]] = {}


def attend(passed: Passed) -> ForwardResult | None:
    """Return the results of a call like an earlier one; None where it has to be checked.

    The lse is the caller's own only if it asked for it.
    """
    q, k, v, options, _ = passed
    try:
        key = _key(passed)
        found = None if key is None else _known.get(key)
        if found is None:
            return None
        _, _, score_mod, mask_mod, block_mask, softcap, sink, scale, _, wants_lse, _ = options
        if score_mod is None and mask_mod is None and block_mask is None:
            known = found[0]
            tensors: Any = (q, k, v, sink)
            scalars = None
        else:
            lists = None if block_mask is None else recall(block_mask)
            mods = (score_mod, mask_mod, None if block_mask is None else block_mask.mask_mod)
            read = _read(found, mods, q.device)
            if read is None:
                return None
            known, scalars, captures = read
            tensors = [q, k, v, sink, *captures]
            if lists is not None:
                tensors += lists.tensors
    except (RuntimeError, TypeError, ValueError, AttributeError):
        # Something unusual, such as a sparse tensor, which has no strides: its check will say so.
        return None
    numbers = known.numbers
    if scale is not None or softcap is not None or scalars is not None:
        numbers = Numbers(
            None if softcap is None else float(softcap),
            numbers.scale if scale is None else float(scale),
            numbers.scalars if scalars is None else scalars,
        )
    return eager.attend(known.call, numbers, tensors, keeps_lse=wants_lse)


def remember(passed: Passed, problem: AttentionProblem, call: Call) -> None:
    """Keep how a call was run for those like it, unless every one of them has to be checked."""
    mods = (problem.score_mod, problem.mask_mod, problem.block_mask_mod)
    if call.choice.is_nondeterministic or not all(_is_narrow(mod) for mod in mods):
        return
    try:
        key = _key(passed)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return
    if key is None:
        return
    _, _, score_mod, mask_mod, block_mask, *_ = passed[3]
    functions = (score_mod, mask_mod, None if block_mask is None else block_mask.mask_mod)
    readers: list[ModReader | None] = []
    dtype = torch.float64 if problem.dtype == torch.float64 else torch.float32
    for function, traced in zip(functions, mods, strict=True):
        if traced is None:
            readers.append(None)
            continue
        reader = reader_of(function, traced, dtype, problem.device)
        if reader is None:
            return
        readers.append(reader)
    scale = problem.q.shape[-1] ** -0.5
    numbers = Numbers(None, scale, (_NO_SCALARS, _NO_SCALARS, _NO_SCALARS))
    known = _Known(call, numbers, tuple(readers))
    if len(_known) >= _LIMIT:
        _known.clear()
    # Without mods one call is all there can be.
    others = _known.get(key, ()) if any(readers) else ()
    _known[key] = (known, *others[: _MODS_LIMIT - 1])


def clear() -> None:
    """Forget every call."""
    _known.clear()


def _key(passed: Passed) -> tuple[Any, ...] | None:
    """Return what a call is looked up by; None where it has to be checked.

    Numbers equal across types (True == 1 == 1.0), but mean different things or errors: those of
    another type than usual are not looked up.
    """
    q, k, v, options, backend = passed
    if type(q) not in PLAIN_TYPES or type(k) not in PLAIN_TYPES or type(v) not in PLAIN_TYPES:
        return None
    if eager.is_watched() or _is_autocast_on() or _is_deterministic():
        return None
    causal, window, score_mod, mask_mod, block_mask, softcap, sink, scale, fixed, *wants = options
    if causal is not False and causal is not True and type(causal) is not str:
        return None
    if fixed is not None and fixed is not False and fixed is not True:
        return None
    if (scale is not None and not _is_positive(scale)) or (
        softcap is not None and not _is_positive(softcap)
    ):
        return None
    if window is not None and not _is_window(window):
        return None
    key = (
        *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device, causal, window, backend, fixed, *wants),
        *(scale is None, softcap is None),
    )
    if score_mod is None and mask_mod is None and block_mask is None and sink is None:
        return key
    lists: KnownLists | None = None
    if block_mask is not None:
        lists = recall(block_mask)
        if lists is None:
            return None
    return (
        key,
        None if sink is None else _sink_key(sink),
        # Ids are taken as long as the entry lives: its readers hold the code.
        _code_id(score_mod),
        _code_id(mask_mod),
        None if lists is None else lists.layout,
        None if lists is None else _code_id(block_mask.mask_mod),
    )


def _is_positive(number: object) -> bool:
    return (type(number) is float or type(number) is int) and 0 < number < math.inf


def _is_window(window: Any) -> bool:
    return type(window) is tuple and all(extent is None or type(extent) is int for extent in window)


def _code_id(mod: Any) -> int | None:
    return None if mod is None else id(mod.__code__)


def _sink_key(sink: Tensor) -> tuple[Any, ...]:
    if type(sink) not in PLAIN_TYPES:
        raise TypeError
    return (sink.shape, sink.stride(), sink.dtype, sink.device)


def _read(
    found: tuple[_Known, ...], mods: tuple[Any, Any, Any], device: torch.device
) -> tuple[_Known, tuple[Scalars, ...], list[Tensor]] | None:
    """Return the first known call whose mods captured the same kinds of things, and this call's."""
    for known in found:
        captures: list[Tensor] = []
        scalars: list[Scalars] = []
        for reader, mod in zip(known.readers, mods, strict=True):
            if reader is None or mod is None:
                if reader is not mod:
                    break
                scalars.append(_NO_SCALARS)
                continue
            read = reader.read(mod, device)
            if read is None or not _are_narrow(read[1]):
                break
            captures += read[0]
            scalars.append(read[1])
        else:
            return known, tuple(scalars), captures
    return None


def _are_narrow(scalars: Scalars) -> bool:
    for number in scalars:
        if type(number) is int and not -NARROW_LIMIT < number < NARROW_LIMIT:
            return False
    return True


def _is_narrow(mod: TracedMod | None) -> bool:
    """Return whether the integers of a mod are such that calls alike run the same kernel."""
    return mod is None or _are_narrow(mod.scalars)
