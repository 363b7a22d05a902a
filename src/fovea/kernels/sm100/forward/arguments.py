"""Bundles that the roles of the forward kernel share.

Lives here: the run-time arguments of a problem, shared and tensor memory, each as one value. Not
here: the tensors of a call (`portable/tensors.py`). Invariant: a bundle holds DSL values only;
compile-time facts are in the plan.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.cluster import Mailbox, Rank
from fovea.kernels.device.kv_walk import BlockListTensors
from fovea.kernels.device.masking import Band
from fovea.kernels.device.pages import Pages
from fovea.kernels.device.pipeline import Ring
from fovea.kernels.device.scheduler import TileOrder
from fovea.kernels.device.sequences import SequenceTable
from fovea.kernels.device.work import WorkRing
from fovea.kernels.portable.combine import Partials
from fovea.kernels.sm100.launch_control import Launches
from fovea.kernels.sm100.signals import Signals


class Packing(NamedTuple):
    """What packed plans need beside: Q as the caller passed it, and where parts are left."""

    mQ: cute.Tensor
    partials: Partials


class Problem(NamedTuple):
    """What every role knows of the call."""

    order: TileOrder
    band: Band
    group_size: cutlass.Int32
    block_lists: BlockListTensors | None
    packing: Packing | None
    sequences: SequenceTable | None  # of a packed batch; `band` then holds what all share
    pages: Pages | None


class SharedTiles(NamedTuple):
    """Memory of the CTA: tiles with their stages last, and the barriers that guard them.

    Where K and V share a ring, `sV` is the same memory as `sK`, and `v` the same ring as `k`.
    `statistics` is (plan.statistics, streams, rows): a row's sum, reference and, if the plan joins
    maxima, maximum, from the softmax to the epilogue. `maxima` is (slots, warpgroups, rows), where
    two threads share a row. `tensor_memory` is the address of the first column, known once it is
    allocated. `mailbox` and `rank` are those of a CTA in a pair; `launches` are what a dynamic
    plan asks of its launch.
    """

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sO: cute.Tensor | None
    q: Ring
    k: Ring
    v: Ring
    work: WorkRing
    signals: Signals
    statistics: cute.Tensor
    maxima: cute.Tensor | None
    mailbox: Mailbox | None
    launches: Launches | None
    tensor_memory: cutlass.Int32
    rank: Rank | None
