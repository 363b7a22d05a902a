"""Tensor layouts of one piece: GQA groups packed into rows, heads folded into the batch.

Lives here: the views and copies between (batch, seqlen, heads, dim) and what `bmm` takes. Not
here: arithmetic. Invariant: packed row `g * M + m` of KV head h is query m of query head
`h * group_size + g`, so packed scores are a view of (batch, heads_q, M, N).
"""

from torch import Tensor


def pack_rows(x: Tensor, heads_kv: int) -> Tensor:
    """Return (batch * heads_kv, group_size * M, dim) of (batch, M, heads_q, dim)."""
    batch, rows, heads_q, dim = x.shape
    group = heads_q // heads_kv
    grouped = x.reshape(batch, rows, heads_kv, group, dim).permute(0, 2, 3, 1, 4)
    return grouped.reshape(batch * heads_kv, group * rows, dim)


def unpack_rows(x: Tensor, batch: int, heads_kv: int, group: int) -> Tensor:
    """Return (batch, M, heads_q, dim) of (batch * heads_kv, group_size * M, dim)."""
    rows, dim = x.shape[1] // group, x.shape[2]
    grouped = x.view(batch, heads_kv, group, rows, dim).permute(0, 3, 1, 2, 4)
    return grouped.reshape(batch, rows, heads_kv * group, dim)


def pack_keys(x: Tensor) -> Tensor:
    """Return (batch * heads_kv, N, dim) of (batch, N, heads_kv, dim)."""
    batch, rows, heads, dim = x.shape
    return x.transpose(1, 2).reshape(batch * heads, rows, dim)


def unpack_keys(x: Tensor, batch: int) -> Tensor:
    """Return (batch, N, heads_kv, dim) of (batch * heads_kv, N, dim)."""
    _, rows, dim = x.shape
    return x.view(batch, x.shape[0] // max(batch, 1), rows, dim).transpose(1, 2)


def rows_per_step(num_heads: int, seqlen_q: int, tile_n: int, *, is_cuda: bool) -> int:
    """Return how many query rows one step of the loops takes.

    Rows do not see each other, so this changes no bit of the forward: it only trades Python
    overhead against the size of a score tile. On a CPU two tiles should stay in the L2 (4 MiB
    shared by two cores where this was measured); a GPU wants all its SMs busy. Small enough chunks
    keep skipping the tiles that a diagonal hides.
    """
    elements = (1 << 24) if is_cuda else (1 << 18)
    rows = elements // max(num_heads * tile_n, 1)
    rows = max(min(rows, seqlen_q // 4), 64)
    return max(min(rows // 16 * 16, seqlen_q), 1)
