"""What a CTA works on next: a redo that was asked for, a fresh tile, a pause, or nothing more.

Lives here: the decision, and how two CTAs of a cluster agree on it. Not here: where fresh tiles
come from (`work.py`, `sm100/launch_control.py`), the announcement (`work.py`). Invariant: a CTA
stops only after the verdict on its last tile was heard, in a cluster on both CTAs' last ones.
"""

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.cluster import Mailbox, Rank, receive, send
from fovea.kernels.device.kv_walk import Share
from fovea.kernels.device.pipeline import stage_of
from fovea.kernels.device.scheduler import TileOrder, num_tiles, split_of
from fovea.kernels.device.sequences import SequenceTable, packed_tiles
from fovea.kernels.device.values import select
from fovea.kernels.device.work import PAUSE, STOP, Verdict, WorkRing, await_verdict


@cute.jit
def total_tiles(order: TileOrder, sequences: SequenceTable | None) -> cutlass.Int32:
    """Return the number of query tiles of the call, or pairs of them in a cluster."""
    total = cutlass.Int32(0)
    if cutlass.const_expr(sequences is None):
        total = cutlass.Int32(num_tiles(order))
    else:
        total = packed_tiles(sequences, order)
    return total


def share_of(plan, problem, tile_number: cutlass.Int32) -> Share | None:
    """Return which part of its keys a packed tile works on."""
    if not plan.packs_heads:
        return None
    num_splits = problem.packing.partials.num_splits
    return Share(problem.group_size, split_of(tile_number, problem.order), num_splits)


@cute.jit
def next_work(
    plan: cutlass.Constexpr,
    work: WorkRing,
    mailbox: Mailbox | None,
    rank: Rank | None,
    use: cutlass.Int32,
    fresh: cutlass.Int32,
    last: cutlass.Int32,
    total: cutlass.Int32,
):
    """Return the tile to announce and the redo word: 0, or 1 + the slot whose flags say which rows.

    The first CTA of a cluster decides for both, once it has heard the other's verdict; a redo of
    either is one of both. Run by the load warp.
    """
    verdict = await_verdict(work, use, plan.work_edge)
    if cutlass.const_expr(plan.cluster == 1):
        tile_number, is_redo = _decide(plan, use, fresh, last, total, verdict)
    else:
        said = select(verdict.wants_redo, cutlass.Int32(1), cutlass.Int32(0))
        tile_number, is_redo = last, cutlass.Int32(0)
        if rank.is_first:
            heard, _ = receive(mailbox, use)
            both = verdict._replace(wants_redo=verdict.wants_redo | (heard != 0))
            tile_number, is_redo = _decide(plan, use, fresh, last, total, both)
            send(mailbox, rank, tile_number, is_redo)
        else:
            send(mailbox, rank, said, cutlass.Int32(0))
            tile_number, is_redo = receive(mailbox, use)
    return tile_number, is_redo


@cute.jit
def _decide(
    plan: cutlass.Constexpr,
    use: cutlass.Int32,
    fresh: cutlass.Int32,
    last: cutlass.Int32,
    total: cutlass.Int32,
    verdict: Verdict,
):
    """Return the tile to announce and the redo word.

    A redo that a slot's last tile asked for comes before fresh tiles. When those are used up, the
    tile announced `last` has to be heard too before the CTA may stop: a pause goes between, since
    who looks ahead to the next announcement gives that verdict only after it.
    """
    tile_number = fresh
    is_redo = cutlass.Int32(0)
    if verdict.wants_redo:
        tile_number = verdict.tile_number
        is_redo = 1 + stage_of(use, plan.work_edge)
    elif fresh >= total:
        tile_number = select(last == PAUSE, cutlass.Int32(STOP), cutlass.Int32(PAUSE))
    return tile_number, is_redo
