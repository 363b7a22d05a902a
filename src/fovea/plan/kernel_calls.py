"""Calls whose mods say what a kernel can do better without them.

Lives here: the step from a mask_mod or block mask that says "causal" or "window" to limits, and
from the block mask of any mask by which a row sees one range of keys to those ranges. Both cost a
kernel two comparisons a row instead of a function a score, and let it choose its tiles freely. The
step from any other mask of a block mask to its bits, and from a score_mod that is a soft cap to the
number. Not here: the reading of mods (`mods/bands.py`, `mods/softcaps.py`, `tiling/key_ranges.py`,
`tiling/mask_bits.py`), which lists are exact (`tiling/exact_lists.py`). Invariant: the same keys
are visible, with the same scores; block lists that fovea did not make from their mask itself are
always honoured.
"""

from dataclasses import replace

from fovea.arch import Arch
from fovea.mods.bands import band_of_mask
from fovea.mods.softcaps import softcap_of_mod
from fovea.mods.trace import TracedMod
from fovea.problem import AttentionProblem
from fovea.problem.value import Window
from fovea.tiling.exact_lists import exact_for
from fovea.tiling.key_ranges import KeyRanges
from fovea.tiling.mask_bits import MaskBits

_LEAST_CAP, _LARGEST_CAP = 1e-20, 1e20


def as_kernel_call(problem: AttentionProblem, arch: Arch | None = None) -> AttentionProblem:
    """Return the same call with mods that are limits or a soft cap as such; else the problem.

    For an architecture block masks may become ranges of keys, where its kernels take them, or bits.
    In packed calls positions count from each sequence's start, while a bottom-right diagonal
    differs between them: those stay as they are.
    """
    problem = _with_softcap(problem)
    if problem.varlen is not None:
        return problem
    mask_mod, limits = _without(problem.mask_mod, problem.limits)
    lists, listed_mod = problem.block_lists, problem.block_mask_mod
    ranges: KeyRanges | None = None
    bits: MaskBits | None = None
    exact = None if lists is None or listed_mod is None else exact_for(lists, listed_mod)
    if exact is not None:
        if exact.shows_mask:
            listed_mod, limits = _without(listed_mod, limits)
        if listed_mod is not None and arch is not None and _is_made_for(problem, listed_mod):
            ranges = exact.ranges if arch.name == "sm90" else None
            bits = exact.bits if ranges is None else None
        if listed_mod is None or ranges is not None:
            lists = listed_mod = None
        elif bits is not None:
            lists, listed_mod = bits.lists, None
    is_as_was = listed_mod is problem.block_mask_mod and lists is problem.block_lists
    if mask_mod is problem.mask_mod and is_as_was:
        return problem
    return replace(
        problem,
        mask_mod=mask_mod,
        block_lists=lists,
        block_mask_mod=listed_mod,
        limits=limits,
        key_ranges=ranges,
        mask_bits=bits,
    )


def _is_made_for(problem: AttentionProblem, mask: TracedMod) -> bool:
    """Return whether lists were made at every batch entry and head that their mask looks at.

    Lists of one head serve all; the mask of another head may still hide other keys in them.
    """
    lists = problem.block_lists
    assert lists is not None
    inputs = {node.op for node in mask.graph.nodes}
    return not (
        ("b" in inputs and lists.batch != problem.batch)
        or ("h" in inputs and lists.heads != problem.heads_q)
    )


def _with_softcap(problem: AttentionProblem) -> AttentionProblem:
    """Return the call with its score_mod as the number that it is, where it is one."""
    mod = problem.score_mod
    if mod is None or problem.softcap is not None:
        return problem
    cap = softcap_of_mod(mod.graph)
    value = 0.0 if cap is None else cap.value(mod.scalars)
    # Those beyond, the formula itself takes to infinity or NaN.
    if not _LEAST_CAP < value < _LARGEST_CAP:
        return problem
    return replace(problem, score_mod=None, softcap=value)


def _without(mask: TracedMod | None, limits: Window) -> tuple[TracedMod | None, Window]:
    """Return (None, limits with those of the mask) for a band, else both as they are."""
    band = None if mask is None else band_of_mask(mask.graph)
    if mask is None or band is None:
        return mask, limits
    least, largest = band.limits(mask.scalars)
    above = [limit for limit in (limits[0], least) if limit is not None]
    below = [limit for limit in (limits[1], largest) if limit is not None]
    return None, (max(above, default=None), min(below, default=None))
