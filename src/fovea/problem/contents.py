"""Checks that read tensor contents, and so wait for the device where that is no CPU.

Lives here: what is looked at before a backend runs, on a CPU always and elsewhere under
FOVEA_CHECK=1. Not here: whether it is asked for (`dispatch.py`); gathers of a mod, which are
checked where the mod is evaluated.
Invariant: a problem that passes leads no backend out of bounds.
"""

import torch
from torch import Tensor

from fovea.errors import invalid
from fovea.mods.evaluate import is_checked
from fovea.problem.value import AttentionProblem, Varlen
from fovea.tiling.paged_kv import check_pages


def check_contents(problem: AttentionProblem) -> None:
    """Raise ValueError unless block lists, sequence bounds and page tables lie in range.

    Nothing is read where it cannot be (fake tensors, transforms).
    """
    if not is_checked(problem.q):
        return
    if problem.block_lists is not None:
        problem.block_lists.check_contents()
    varlen = problem.varlen
    if varlen is None:
        return
    segments_q = _check_cumulative("cu_seqlens_q", varlen.cu_seqlens_q, problem.q.shape[0])
    _check_lengths("q", segments_q, varlen.seqused_q, varlen.max_seqlen_q)
    if varlen.cu_seqlens_kv is not None:
        segments_kv = _check_cumulative("cu_seqlens_kv", varlen.cu_seqlens_kv, problem.k.shape[0])
        _check_lengths("kv", segments_kv, varlen.seqused_kv, varlen.max_seqlen_kv)
    else:
        _check_paged(problem, varlen)


def _check_cumulative(name: str, cu_seqlens: Tensor, total: int) -> Tensor:
    """Return the length of each segment."""
    values = cu_seqlens.to(torch.int64)
    if int(values[0]) != 0:
        raise ValueError(
            invalid(f"{name}[0]", int(values[0]), "0", "prepend 0 to the running sum of lengths")
        )
    lengths = values.diff()
    if bool((lengths < 0).any()):
        b = int((lengths < 0).nonzero()[0])
        raise ValueError(
            invalid(
                f"{name}[{b}:{b + 2}]",
                [int(value) for value in values[b : b + 2]],
                "non-decreasing values",
                "pass the running sum of the sequence lengths",
            )
        )
    if int(values[-1]) > total:
        raise ValueError(
            invalid(
                f"{name}[-1]", int(values[-1]), f"at most the {total} rows there are", "shorten it"
            )
        )
    return lengths


def _check_lengths(side: str, segments: Tensor, used: Tensor | None, maximum: int) -> None:
    lengths = segments
    if used is not None:
        lengths = used.to(torch.int64)
        is_bad = (lengths < 0) | (lengths > segments)
        if bool(is_bad.any()):
            b = int(is_bad.nonzero()[0])
            raise ValueError(
                invalid(
                    f"seqused_{side}[{b}]",
                    int(lengths[b]),
                    f"0 to {int(segments[b])}, the length of its segment",
                    "use at most what the segment holds",
                )
            )
    _check_maximum(side, lengths, maximum)


def _check_maximum(side: str, lengths: Tensor, maximum: int) -> None:
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > maximum:
        raise ValueError(
            invalid(
                f"max_seqlen_{side}",
                maximum,
                f"at least {longest}, the longest sequence",
                "pass the largest length; a smaller one leaves rows out",
            )
        )


def _check_paged(problem: AttentionProblem, varlen: Varlen) -> None:
    assert varlen.page_table is not None
    assert varlen.seqused_kv is not None
    pages, page_size = problem.k.shape[:2]
    check_pages(varlen.page_table, varlen.seqused_kv, pages=pages, page_size=page_size)
    _check_maximum("kv", varlen.seqused_kv.to(torch.int64), varlen.max_seqlen_kv)
