"""Tensors of a call that every forward kernel takes, bundled by use.

Lives here: what loads read and where results go. Not here: tiles in shared memory, which each
architecture has of its own (`<arch>/forward/arguments.py`). Invariant: a bundle holds DSL values
only; compile-time facts are in the plan.
"""

from typing import NamedTuple

import cutlass.cute as cute


class TmaLoads(NamedTuple):
    """TMA atoms and coordinate tensors: Q and K (seqlen, head_dim, head, batch), V transposed.

    Q is None where rows are packed. Packed sequences have `sequences.shifting_view`s, and a paged
    cache has `pages.paged_view`s.
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
    `mO_rows` is O as the caller passed it, for rows that threads write themselves: single ones of a
    redo, and all packed ones, which have no TMA.
    """

    atom_o: cute.CopyAtom | None
    mO: cute.Tensor | None
    mO_rows: cute.Tensor
    mLSE: cute.Tensor
    mMaxScore: cute.Tensor | None
    mSink: cute.Tensor | None
