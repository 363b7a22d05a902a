"""Bundles that the roles of the forward kernel share.

Lives here: the run-time arguments of a problem, the TMA views and the shared-memory tiles, each as
one value. Not here: anything that computes. Invariant: a bundle holds DSL values only; compile-time
facts are in the plan.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.cluster import Mailbox
from fovea.kernels.device.key_ranges import KeyRangeTensors
from fovea.kernels.device.kv_walk import BlockListTensors
from fovea.kernels.device.masking import Band
from fovea.kernels.device.pages import Pages
from fovea.kernels.device.pipeline import Ring
from fovea.kernels.device.scheduler import TileOrder
from fovea.kernels.device.sequences import SequenceTable
from fovea.kernels.device.work import WorkRing
from fovea.kernels.portable.combine import Partials


class Packing(NamedTuple):
    """What packed plans need beside: Q as the caller passed it, and where parts are left."""

    mQ: cute.Tensor
    group_size: cutlass.Int32
    partials: Partials


class Problem(NamedTuple):
    """What every role knows of the call."""

    order: TileOrder
    band: Band
    group_size: cutlass.Int32
    block_lists: BlockListTensors | None
    key_ranges: KeyRangeTensors | None
    counter: cute.Tensor | None  # (1,), 0 at launch: tiles drawn beyond each CTA's first
    packing: Packing | None
    sequences: SequenceTable | None  # of a packed batch; the band is then what they share
    pages: Pages | None


class TmaLoads(NamedTuple):
    """TMA atoms and coordinate tensors: Q and K (seqlen, head_dim, head, batch), V transposed.

    Q is None where rows are packed. Packed sequences have `sequences.shifting_view`s, and
    a paged cache has `pages.paged_view`s.
    """

    atom_q: cute.CopyAtom | None
    mQ: cute.Tensor | None
    atom_k: cute.CopyAtom
    mK: cute.Tensor
    atom_v: cute.CopyAtom
    mV: cute.Tensor


class Outputs(NamedTuple):
    """Where results go: O through TMA, lse and max_score (batch, heads, seqlen_q) directly.

    Of packed sequences they are (total, heads, head_dim_v) and (heads, total).
    `mO_rows` is O as the caller passed it, for the single rows that a redo writes; packed rows are
    all written so, and have no TMA.
    """

    atom_o: cute.CopyAtom | None
    mO: cute.Tensor | None
    mO_rows: cute.Tensor
    mLSE: cute.Tensor
    mMaxScore: cute.Tensor | None
    mSink: cute.Tensor | None


class SharedTiles(NamedTuple):
    """Shared memory of the CTA: tiles with their stages last, and the rings that guard them.

    sO aliases sQ: a warpgroup's Q is dead once its last product with it is done.
    """

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sO: cute.Tensor
    q: Ring
    k: Ring
    v: Ring
    work: WorkRing
    visits: cute.Tensor  # of block lists: `visit_word` of the tile in each K stage
    partials: cute.Tensor  # with bits: the number of the partial block in each K stage
    mailbox: Mailbox | None  # of a cluster
