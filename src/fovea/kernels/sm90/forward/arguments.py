"""Bundles that the roles of the forward kernel share.

Lives here: the run-time arguments of a problem and the shared-memory tiles, each as one value. Not
here: the tensors of a call (`portable/tensors.py`). Invariant: a bundle holds DSL values only;
compile-time facts are in the plan.
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
