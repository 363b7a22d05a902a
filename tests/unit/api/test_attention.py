"""What the public functions add to a problem: autocast, auxiliary outputs, backends."""

import pytest
import torch

import fovea
from fovea import AuxRequest


def tensors(dtype=torch.float32):
    q = torch.randn(2, 5, 4, 8, dtype=dtype)
    return q, torch.randn(2, 7, 2, 8, dtype=dtype), torch.randn(2, 7, 2, 8, dtype=dtype)


def test_autocast_casts_q_k_v_and_leaves_sink_and_captures_alone():
    q, k, v = tensors()
    table = torch.full((4,), 1e-4)
    sink = torch.full((4,), 1.0001)
    expected = fovea.attention(
        q.bfloat16(),
        k.bfloat16(),
        v.bfloat16(),
        sink=sink,
        score_mod=lambda s, b, h, i, j: s + table[h],
        return_aux=AuxRequest(lse=True),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fovea.attention(
            q,
            k.bfloat16(),
            v,
            sink=sink,
            score_mod=lambda s, b, h, i, j: s + table[h],
            return_aux=AuxRequest(lse=True),
        )
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1].lse, expected[1].lse)


def test_autocast_leaves_float64_alone():
    q, k, v = tensors(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fovea.attention(q, k, v).dtype == torch.float64


def test_autocast_gradients_come_back_in_the_dtype_of_the_inputs():
    q, k, v = (t.requires_grad_() for t in tensors())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fovea.attention(q, k, v)
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_aux_holds_what_was_asked():
    arguments = tensors()
    for lse in (False, True):
        for max_score in (False, True):
            _, aux = fovea.attention(*arguments, return_aux=AuxRequest(lse, max_score))
            assert (aux.lse is not None, aux.max_score is not None) == (lse, max_score)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_backend_reference_runs_the_reference(backend):
    q, k, v = tensors()
    assert torch.equal(fovea.attention(q, k, v, backend=backend), fovea.attention(q, k, v))


def test_backend_cuda_on_cpu_raises_unsupported_error():
    with pytest.raises(fovea.UnsupportedError, match=r"backend='cuda'.*q is on cpu"):
        fovea.attention(*tensors(), backend="cuda")


def test_attention_on_meta_tensors_has_shapes_and_no_data():
    q, k, v = (t.to("meta") for t in tensors())
    out, aux = fovea.attention(q, k, v, return_aux=AuxRequest(True, True))
    assert out.is_meta
    assert (out.shape, aux.lse.shape, aux.max_score.shape) == ((2, 5, 4, 8), (2, 4, 5), (2, 4, 5))


def test_varlen_equals_dense_calls_on_each_sequence():
    q, k = torch.randn(10, 4, 8), torch.randn(12, 2, 8)
    bounds_q, bounds_kv = (0, 3, 3, 10), (0, 4, 6, 12)
    out = fovea.attention_varlen(
        q,
        k,
        k,
        torch.tensor(bounds_q, dtype=torch.int32),
        torch.tensor(bounds_kv, dtype=torch.int32),
        7,
        6,
        causal=True,
        score_mod=lambda s, b, h, i, j: s + b * (i - j),
    )
    for b in range(3):
        rows, keys = slice(*bounds_q[b : b + 2]), slice(*bounds_kv[b : b + 2])
        one = fovea.attention(
            q[None, rows],
            k[None, keys],
            k[None, keys],
            causal=True,
            score_mod=lambda s, _, h, i, j, b=b: s + b * (i - j),
        )
        torch.testing.assert_close(out[rows], one[0])
