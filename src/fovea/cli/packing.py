"""The inputs of a call: dense, or packed sequences and a paged cache of the same sizes.

Lives here: the options that say which, and tensors and keywords made of a `Call`. Invariant: every
sequence has the lengths of the call, since no kernel depends on them.
"""

from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from fovea.cli.call import Call
from fovea.errors import invalid

Packed = Annotated[
    bool,
    typer.Option("--packed", help="As attention_varlen takes it: B sequences of S and Skv rows."),
]
PageSize = Annotated[
    int | None,
    typer.Option(metavar="N", help="Packed queries, keys and values in pages of N rows."),
]


class Inputs(NamedTuple):
    """What a function of fovea takes, attention or attention_varlen by the keywords."""

    q: Tensor
    k: Tensor
    v: Tensor
    keywords: dict[str, Any]


def make_inputs(
    call: Call, device: torch.device, *, is_packed: bool = False, page_size: int | None = None
) -> Inputs:
    """Return a call's tensors and keywords.

    Shapes: dense as `Call.make_inputs`; packed without the batch axis, all rows one after the
        other; pages (batch * pages of a sequence, page_size, heads_kv, head_dim).

    Raises:
        ValueError: a page size below 1.
    """
    if page_size is not None and page_size < 1:
        raise ValueError(invalid("--page-size", page_size, "at least 1", "name rows of a page"))
    dense = Inputs(*call.make_inputs(device), call.keywords)
    if page_size is None and not is_packed:
        return dense
    seqlen_q, seqlen_kv = dense.q.shape[1], dense.k.shape[1]
    lengths: dict[str, Any] = {
        "cu_seqlens_q": _bounds(dense.q),
        "max_seqlen_q": seqlen_q,
        "max_seqlen_kv": seqlen_kv,
    }
    if page_size is None:
        keywords = call.keywords | lengths | {"cu_seqlens_kv": _bounds(dense.k)}
        q, k, v = (x.flatten(0, 1) for x in dense[:3])
        return Inputs(q, k, v, keywords)
    batch = dense.q.shape[0]
    pages = -(-seqlen_kv // page_size)
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    used = torch.full((batch,), seqlen_kv, dtype=torch.int32, device=device)
    pages_of = {"cu_seqlens_kv": None, "page_table": table, "seqused_kv": used}
    k, v = (_paged(x, pages, page_size) for x in (dense.k, dense.v))
    return Inputs(dense.q.flatten(0, 1), k, v, call.keywords | lengths | pages_of)


def _bounds(x: Tensor) -> Tensor:
    """Return where each sequence of (batch, seqlen, ...) begins, and the end."""
    batch, seqlen = x.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen


def _paged(x: Tensor, pages: int, page_size: int) -> Tensor:
    """Return (batch, seqlen, ...) as pages of its own for each sequence, zeros behind its end."""
    batch, seqlen = x.shape[:2]
    whole = x.new_zeros((batch, pages * page_size, *x.shape[2:]))
    whole[:, :seqlen] = x
    return whole.view(batch * pages, page_size, *x.shape[2:])
