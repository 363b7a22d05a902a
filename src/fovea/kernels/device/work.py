"""Announcements of work: the load role tells the compute role which query tile comes next.

Lives here: the ring of announcements, the counter that CTAs draw tiles from, and the verdict by
which the compute role asks for a tile to be redone. Not here: the tile order (`scheduler.py`) and
the loads. Invariant: a slot is announced again only after every consumer warp released it, so its
verdict is final when the producer reads it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.kv_walk import Walk
from fovea.kernels.device.masking import TileSpan
from fovea.kernels.device.pipeline import Ring, phase_of, release, stage_of, wait_empty
from fovea.kernels.device.sequences import Sequence
from fovea.plan.pipeline import Edge
from fovea.plan.sequences import SEQUENCE_WORDS

STOP = -1
PAUSE = -2  # no tile, but a redo may still come: finish what you have
_TILE, _REDO, _WALK = 0, 1, 2  # words of a slot: these, then one verdict for every consumer warp
_ALIGNMENT = 4  # words: a wide load of an announcement then never touches a verdict
_WALK_WORDS = len(Walk._fields) - 2  # without the last two, which have words of their own
SPAN_WORDS = len(TileSpan._fields)
_VERDICT = -(-(_WALK + _WALK_WORDS) // _ALIGNMENT) * _ALIGNMENT


def work_words(edge: Edge) -> int:
    """Return the 32-bit words of a slot."""
    return _VERDICT + -(-edge.consumer_warps // _ALIGNMENT) * _ALIGNMENT


class WorkRing(NamedTuple):
    """Slots in shared memory and their barriers; `flags` says of rows whether to redo them.

    `sequences` has SEQUENCE_WORDS for each slot where the batch is packed, `spans` SPAN_WORDS for
    each slot and consumer where rows have ranges of keys.
    """

    words: cute.Tensor
    flags: cute.Tensor
    ring: Ring
    sequences: cute.Tensor | None = None
    spans: cute.Tensor | None = None


class Work(NamedTuple):
    """One announcement.

    `tile_number` is STOP when the CTA is done, PAUSE when that is not yet certain. `is_redo` is 0,
    or 1 + the slot whose flags say which rows to write. The walk comes ready made: its divisions
    and look-ups cost the producer, which runs ahead, and not the tensor cores.
    """

    tile_number: cutlass.Int32
    is_redo: cutlass.Int32
    walk: Walk


def _word(work: WorkRing, stage: cutlass.Int32, word, edge) -> cutlass.Int32:
    """Return the index of a slot's word."""
    return stage * work_words(edge) + word


@cute.jit
def announce(work: WorkRing, use: cutlass.Int32, item: Work, edge: cutlass.Constexpr):
    """Publish the use-th announcement. Run by the producer warp, after its slot was released.

    Signals: work_full. The arrival releases the words, written by the same warp, to the consumers.
    """
    stage = stage_of(use, edge)
    _forget_verdicts(work, stage, edge)
    if cutlass.const_expr(work.spans is not None):
        _tell_spans(work, stage, item.walk.lane_span, edge)
    if cute.arch.lane_idx() == 0:
        work.words[_word(work, stage, _TILE, edge)] = item.tile_number
        work.words[_word(work, stage, _REDO, edge)] = item.is_redo
        for field in cutlass.range_constexpr(_WALK_WORDS):
            work.words[_word(work, stage, _WALK + field, edge)] = item.walk[field]
        for field in cutlass.range_constexpr(len(item.walk.sequence)):
            work.sequences[stage * SEQUENCE_WORDS + field] = item.walk.sequence[field]
        cute.arch.mbarrier_arrive(work.ring.full + stage)
    cute.arch.sync_warp()


@cute.jit
def _forget_verdicts(work: WorkRing, stage: cutlass.Int32, edge: cutlass.Constexpr):
    """Zero the verdict words of a slot. Run by one warp."""
    lane = cute.arch.lane_idx()
    if lane < edge.consumer_warps:
        work.words[_word(work, stage, _VERDICT + lane, edge)] = cutlass.Int32(0)
    cute.arch.sync_warp()


@cute.jit
def _tell_spans(work: WorkRing, stage: cutlass.Int32, span: TileSpan, edge: cutlass.Constexpr):
    """Write the KV tiles of each consumer into a slot. Run by one warp."""
    lane = cute.arch.lane_idx()
    consumers = _spans_per_slot(work, edge)
    if lane < consumers:
        for field in cutlass.range_constexpr(SPAN_WORDS):
            work.spans[(stage * consumers + lane) * SPAN_WORDS + field] = span[field]
    cute.arch.sync_warp()


def _spans_per_slot(work: WorkRing, edge) -> int:
    return cute.size(work.spans) // (edge.stages * SPAN_WORDS)


def span_of(work: WorkRing, use: cutlass.Int32, consumer: cutlass.Int32, edge) -> TileSpan:
    """Return the KV tiles of a consumer's rows in the use-th announcement, already waited for."""
    first = (stage_of(use, edge) * _spans_per_slot(work, edge) + consumer) * SPAN_WORDS
    return TileSpan(*(work.spans[first + field] for field in range(SPAN_WORDS)))


def receive(work: WorkRing, use: cutlass.Int32, edge) -> Work:
    """Wait for the use-th announcement and return it. Run by every consumer thread."""
    stage = stage_of(use, edge)
    cute.arch.mbarrier_wait(work.ring.full + stage, phase_of(use, edge))

    def word(place: int) -> cutlass.Int32:
        return work.words[_word(work, stage, place, edge)]

    sequence = ()
    if work.sequences is not None:
        first = stage * SEQUENCE_WORDS
        sequence = Sequence(*(work.sequences[first + i] for i in range(len(Sequence._fields))))
    walk = Walk(*(word(_WALK + field) for field in range(_WALK_WORDS)), sequence, ())
    return Work(word(_TILE), word(_REDO), walk)


def demand_redo(work: WorkRing, slot: cutlass.Int32, warp: cutlass.Int32, edge) -> None:
    """Ask for a slot's tile to be computed again. Run by one lane of a warp, before it releases.

    `warp` counts the consumer warps; each has its own word, so no two write one.
    """
    work.words[_word(work, slot, _VERDICT + warp, edge)] = cutlass.Int32(1)


def release_work(work: WorkRing, use: cutlass.Int32, edge) -> None:
    """Release the use-th announcement. Run by every consumer warp."""
    # What the lanes wrote must be there before one lane arrives for all of them.
    cute.arch.sync_warp()
    release(work.ring, use, edge)


class Verdict(NamedTuple):
    """What the consumers said of a slot's last announcement."""

    tile_number: cutlass.Int32
    wants_redo: cutlass.Boolean


@cute.jit
def await_verdict(work: WorkRing, use: cutlass.Int32, edge: cutlass.Constexpr) -> Verdict:
    """Wait until the slot of the use-th announcement is free; return what became of its last one.

    Run by the producer warp. Before a slot's first announcement its words say "no redo".
    """
    wait_empty(work.ring, use, edge)
    stage = stage_of(use, edge)
    lane = cute.arch.lane_idx()
    said = cutlass.Int32(0)
    if lane < edge.consumer_warps:
        said = work.words[_word(work, stage, _VERDICT + lane, edge)]
    wants_redo = cute.arch.vote_any_sync(said != 0)
    return Verdict(work.words[_word(work, stage, _TILE, edge)], wants_redo)


@cute.jit
def clear(work: WorkRing, edge: cutlass.Constexpr):
    """Give every word of every slot a first value. Run by one thread."""
    for word in cutlass.range(edge.stages * work_words(edge), unroll_full=True):
        work.words[word] = cutlass.Int32(0)


@cute.jit
def draw_tile(counter: cute.Tensor) -> cutlass.Int32:
    """Return the next number of the grid's counter in lane 0, 0 in the others. Run by one warp."""
    number = cutlass.Int32(0)
    if cute.arch.lane_idx() == 0:
        number = cute.arch.atomic_add(
            counter.iterator, cutlass.Int32(1), scope="gpu", sem="relaxed"
        )
    return number
