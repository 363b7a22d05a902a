"""Scores so large that a reference is rounded by more than exp2 bears, NaN, and sinks of -inf."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

import fovea
from fovea.testing.inputs import Shape, dense_qkv

BACKENDS = ("emulator:sm90", "emulator:sm100")
SLOW_ON_BLACKWELL = ("emulator:sm90", pytest.param("emulator:sm100", marks=pytest.mark.slow))
WANTED = fovea.AuxRequest(True, True)
SHAPE = Shape(seqlen_q=70, seqlen_kv=300, heads_q=1, heads_kv=1, head_dim=16)

HUGE = {
    "scale 1e8": {"scale": 1e8},
    "scale 1e9": {"scale": 1e9},
    "scale 1e30": {"scale": 1e30},
    "scale -1e9": {"scale": -1e9},
    "mod": {"score_mod": lambda score, b, h, q_idx, kv_idx: score * 1e9},
}


QUICK = (("scale 1e9", torch.bfloat16, "emulator:sm90"),)


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        pytest.param(*call, marks=[] if call in QUICK else [pytest.mark.slow])
        for call in product(HUGE, (torch.bfloat16, torch.float16), BACKENDS)
    ],
)
def test_rows_of_huge_scores_are_their_largest(name, dtype, backend):
    # Small integers, whose products are exact in float32: the largest score is one, or several.
    q, k, v = (x.mul(2).round() for x in dense_qkv(SHAPE, dtype=dtype))
    out, aux = fovea.attention(q, k, v, backend=backend, return_aux=WANTED, **HUGE[name])
    exact = [x.double() for x in (q, k, v)]
    right, expected = fovea.attention(*exact, return_aux=WANTED, **HUGE[name])
    torch.testing.assert_close(out.double(), right, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(aux.lse.double(), expected.lse.double(), rtol=2**-20, atol=0)
    torch.testing.assert_close(
        aux.max_score.double(), expected.max_score.double(), rtol=2**-20, atol=0
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1e6, pytest.param(1e7, marks=pytest.mark.slow)])
def test_scores_of_millions_keep_their_digits(scale, backend):
    """Scores that differ by a few units in the last place count both, in the right ratio."""
    q, k, v = dense_qkv(SHAPE, dtype=torch.bfloat16)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = 1
    k[..., 0] = 1
    steps = torch.arange(SHAPE.seqlen_kv) % 3

    def mod(score, b, h, q_idx, kv_idx):
        return scale * 4 + steps[kv_idx]

    out, aux = fovea.attention(q, k, v, score_mod=mod, backend=backend, return_aux=WANTED)
    right, expected = fovea.attention(
        *(x.double() for x in (q, k, v)), score_mod=mod, return_aux=WANTED
    )
    torch.testing.assert_close(out.double(), right, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(aux.lse.double(), expected.lse, rtol=2**-22, atol=0)


@pytest.mark.parametrize("backend", SLOW_ON_BLACKWELL)
def test_sink_of_minus_infinity_is_no_sink(backend):
    q, k, v = dense_qkv(SHAPE, dtype=torch.bfloat16)

    def mask(b, h, q_idx, kv_idx):
        return q_idx > 10

    sink = torch.tensor([-math.inf])
    out, aux = fovea.attention(
        q, k, v, sink=sink, mask_mod=mask, backend=backend, return_aux=WANTED
    )
    plain, without = fovea.attention(q, k, v, mask_mod=mask, backend=backend, return_aux=WANTED)
    assert torch.equal(out, plain)
    assert torch.equal(aux.lse, without.lse)
    assert aux.lse[0, 0, :11].eq(-math.inf).all()


@pytest.mark.parametrize("backend", SLOW_ON_BLACKWELL)
@pytest.mark.parametrize("seqlen_q", [70, 3])
def test_maximum_of_a_row_with_nan_is_nan(seqlen_q, backend):
    q, k, v = dense_qkv(replace(SHAPE, seqlen_q=seqlen_q), dtype=torch.bfloat16)
    q[0, 2] = math.nan
    _, aux = fovea.attention(q, k, v, backend=backend, return_aux=WANTED)
    assert aux.max_score[0, 0].isnan().nonzero().flatten().tolist() == [2]
    assert aux.lse[0, 0].isnan().nonzero().flatten().tolist() == [2]
