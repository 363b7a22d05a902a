import torch

from fovea.problem import Request, VarlenRequest, make_dense, make_varlen
from fovea.reference.sequences import Span, join_packed, pieces
from fovea.testing.inputs import cumulative, normal, paged


def _packed(seqused_q=None, seqused_kv=None):
    q = normal((10, 2, 8), seed=0)
    k = normal((12, 1, 8), seed=1)
    where = VarlenRequest(
        cu_seqlens_q=cumulative([3, 0, 5]),
        cu_seqlens_kv=cumulative([4, 6, 2]),
        max_seqlen_q=5,
        max_seqlen_kv=6,
        seqused_q=seqused_q,
        seqused_kv=seqused_kv,
    )
    return make_varlen(q, k, k, where, Request())


def test_pieces_of_a_dense_call_is_the_call_itself():
    q, k = normal((2, 3, 4, 8), seed=0), normal((2, 5, 2, 8), seed=1)
    (piece,) = pieces(make_dense(q, k, k, Request()))
    assert piece.q is q
    assert piece.k is k
    assert piece.batch_index.flatten().tolist() == [0, 1]
    assert (piece.sequence, piece.rows) == (None, None)


def test_pieces_of_a_packed_call_are_its_sequences():
    problem = _packed()
    parts = pieces(problem)
    assert [(p.seqlen_q, p.seqlen_kv) for p in parts] == [(3, 4), (0, 6), (5, 2)]
    assert [p.batch_index.item() for p in parts] == [0, 1, 2]
    assert torch.equal(parts[2].q[0], problem.q[3:8])
    assert torch.equal(parts[2].k[0], problem.k[10:12])


def test_pieces_with_used_lengths_stop_there():
    used_q = torch.tensor([2, 0, 5], dtype=torch.int32)
    used_kv = torch.tensor([0, 6, 1], dtype=torch.int32)
    parts = pieces(_packed(used_q, used_kv))
    assert [(p.seqlen_q, p.seqlen_kv) for p in parts] == [(2, 0), (0, 6), (5, 1)]
    assert parts[0].rows == Span(begin=0, used=2, end=3)


def test_pieces_of_a_paged_cache_are_gathered_in_logical_order():
    keys = [normal((n, 1, 8), seed=n) for n in (5, 0, 7)]
    cache = paged(keys, page_size=3)
    where = VarlenRequest(
        cu_seqlens_q=cumulative([1, 1, 1]),
        cu_seqlens_kv=None,
        max_seqlen_q=1,
        max_seqlen_kv=7,
        seqused_kv=torch.tensor([5, 0, 7], dtype=torch.int32),
        page_table=cache.page_table,
    )
    q = normal((3, 2, 8), seed=0)
    parts = pieces(make_varlen(q, cache.pages, cache.pages, where, Request()))
    for part, expected in zip(parts, keys, strict=True):
        assert torch.equal(part.k[0], expected)


def test_join_packed_fills_gaps_and_the_tail():
    spans = [
        Span(begin=0, used=2, end=3),
        Span(begin=3, used=0, end=5),
        Span(begin=5, used=1, end=6),
    ]
    parts = [torch.full((span.used,), i + 1.0) for i, span in enumerate(spans)]
    joined = join_packed(
        parts, spans, total=8, axis=0, empty=lambda rows: torch.full((rows,), -1.0)
    )
    assert joined.tolist() == [1, 1, -1, -1, -1, 3, -1, -1]
