"""FLOP counts and DTensor shardings."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fovea
from fovea.ops import watchers


def count(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return {
        str(operator): flops
        for operator, flops in counter.get_flop_counts()["Global"].items()
        if "fovea" in str(operator)
    }


def tensors():
    q = torch.randn(2, 5, 4, 8, requires_grad=True)
    return q, torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 16)


def test_flops_of_dense_call_are_those_of_its_products():
    q, k, v = tensors()
    found = count(lambda: fovea.attention(q, k, v).sum().backward())
    pairs = 2 * 4 * 5 * 7
    assert found == {
        "fovea.attention_forward": 2 * pairs * (8 + 16),
        "fovea.attention_backward": 2 * pairs * (3 * 8 + 2 * 16),
    }


def test_flops_of_packed_call_count_each_sequence():
    q, k = torch.randn(10, 4, 8), torch.randn(12, 2, 8)
    bounds_q = torch.tensor([0, 3, 10], dtype=torch.int32)
    bounds_kv = torch.tensor([0, 4, 12], dtype=torch.int32)
    used = torch.tensor([2, 8], dtype=torch.int32)
    arguments = (q, k, k, bounds_q, bounds_kv, 7, 8)
    dense = 2 * 4 * (8 + 8)
    assert count(lambda: fovea.attention_varlen(*arguments)) == {
        "fovea.attention_forward": dense * (3 * 4 + 7 * 8)
    }
    assert count(lambda: fovea.attention_varlen(*arguments, seqused_kv=used)) == {
        "fovea.attention_forward": dense * (3 * 2 + 7 * 8)
    }


def test_first_call_under_a_counter_is_counted(monkeypatch):
    """The counter copies torch's table of formulas before fovea can add to it."""
    monkeypatch.setattr(watchers, "_registered", set())
    for operator in (torch.ops.fovea.attention_forward, torch.ops.fovea.attention_backward):
        monkeypatch.delitem(flop_registry, operator, raising=False)
    q = torch.randn(1, 4, 2, 8)
    assert count(lambda: fovea.attention(q, q, q)) == {
        "fovea.attention_forward": 2 * 2 * 4 * 4 * 16
    }


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def distribute(mesh, placement, *plain):
    return [distribute_tensor(t.detach(), mesh, [placement]).requires_grad_() for t in plain]


def run(q, k, v, sink, **keywords):
    """Return placements of out, lse, and the gradients of q, k and sink."""
    out, aux = fovea.attention(
        q, k, v, sink=sink, return_aux=fovea.AuxRequest(lse=True), **keywords
    )
    (out.sum() + aux.lse.sum()).backward()
    found = (out, aux.lse, q.grad, k.grad, sink.grad)
    return tuple(tensor.placements[0] for tensor in found)


def test_heads_stay_sharded(mesh):
    inputs = distribute(mesh, Shard(2), *tensors())
    (sink,) = distribute(mesh, Shard(0), torch.randn(4))
    expected = (Shard(2), Shard(1), Shard(2), Shard(2), Shard(0))
    assert run(*inputs, sink, causal=True, scale=0.3) == expected


def test_batch_stays_sharded_and_shared_gradients_are_partial(mesh):
    inputs = distribute(mesh, Shard(0), *tensors())
    (sink,) = distribute(mesh, Replicate(), torch.randn(4))
    expected = (Shard(0), Shard(0), Shard(0), Shard(0), Partial())
    assert run(*inputs, sink, softcap=3.0) == expected


def test_sequence_shards_are_gathered(mesh):
    q, k, v = distribute(mesh, Shard(1), *tensors())
    (sink,) = distribute(mesh, Replicate(), torch.randn(4))
    assert run(q, k, v, sink)[:2] == (Replicate(), Replicate())


def test_one_kv_head_is_shared_by_sharded_query_heads(mesh):
    q, k, v = tensors()
    (sharded,) = distribute(mesh, Shard(2), q)
    shared = distribute(mesh, Replicate(), k[:, :, :1], v[:, :, :1])
    (sink,) = distribute(mesh, Shard(0), torch.randn(4))
    expected = (Shard(2), Shard(1), Shard(2), Partial(), Shard(0))
    assert run(sharded, *shared, sink) == expected


def test_kv_heads_that_do_not_divide_stay_whole(mesh):
    """Three of them on two ranks: a rank's query heads would meet keys of another group."""
    q, k = torch.randn(2, 5, 6, 8), torch.randn(2, 7, 3, 8)
    out = fovea.attention(*distribute(mesh, Shard(2), q, k, k))
    assert out.placements == (Replicate(),)


def test_mod_that_reads_h_keeps_heads_whole(mesh):
    """A shard would count its heads from 0. Two programs, one signature: no stale decision."""
    q, k, v = distribute(mesh, Shard(2), *tensors())
    table = distribute_tensor(torch.randn(8), mesh, [Replicate()])
    by_key = fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[j])
    by_head = fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h])
    assert by_key.placements == (Shard(2),)
    assert by_head.placements == (Replicate(),)


@pytest.mark.parametrize(
    ("placement", "expected"), [(Shard(2), Partial()), (Replicate(), Replicate())]
)
def test_captured_gradient_is_a_part_only_where_the_call_is_split(mesh, placement, expected):
    """A part of an unsplit call would count every gradient once a rank."""
    q, k, v = distribute(mesh, placement, *tensors())
    (table,) = distribute(mesh, Replicate(), torch.randn(8))
    fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[j]).sum().backward()
    assert table.grad.placements == (expected,)


def test_mod_that_reads_b_keeps_the_batch_whole(mesh):
    q, k, v = distribute(mesh, Shard(0), *tensors())
    out = fovea.attention(q, k, v, mask_mod=lambda b, h, i, j: i + b >= j)
    assert out.placements == (Replicate(),)


def test_shard_of_heads_holds_the_local_result(mesh):
    """Rank 0 of two: its shard is the first half of the heads."""
    q, k, v = (t.detach() for t in tensors())
    out = fovea.attention(*distribute(mesh, Shard(2), q, k, v), causal=True)
    assert isinstance(out, DTensor)
    expected = fovea.attention(q, k, v, causal=True)[:, :, :2]
    torch.testing.assert_close(out.to_local(), expected)
