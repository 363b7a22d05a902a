"""Every implementation that `fovea bench` times computes the same result."""

import pytest
import torch

from fovea.cli import bench
from fovea.cli.call import Call, Shape

CPU = torch.device("cpu")


def _outputs(keywords, *, seqlen_kv=48):
    shape = Shape(
        batch=2,
        heads_q=4,
        heads_kv=2,
        seqlen_q=48,
        seqlen_kv=seqlen_kv,
        head_dim=16,
        head_dim_v=16,
    )
    call = Call(shape=shape, dtype=torch.float64, keywords=keywords)
    calls = bench._calls(call.make_inputs(CPU), call, None)
    return {name: run() for name, run in calls.items()}


def _tilted(score, b, h, q_idx, kv_idx):
    return score + 0.125 * (kv_idx - q_idx) + h  # exact in every float


def _even(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 2 == 0


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"causal": True},
        {"causal": True, "window": (7, 3)},
        {"causal": "top_left"},
        {"causal": "top_left", "window": (7, 3)},
        {"window": (None, 4)},
        {"softcap": 2.0, "score_mod": _tilted},
        {"causal": True, "mask_mod": _even, "softcap": 3.0},
    ],
    ids=lambda keywords: "+".join(keywords) or "dense",
)
@pytest.mark.parametrize("seqlen_kv", [48, 70])
def test_peers_agree_with_fovea(keywords, seqlen_kv):
    outputs = _outputs(keywords, seqlen_kv=seqlen_kv)
    expected = outputs.pop("fovea")
    assert outputs
    for out in outputs.values():
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_sdpa_is_a_peer_only_where_it_computes_the_same():
    assert "torch sdpa" in _outputs({"causal": True})
    assert "torch sdpa" not in _outputs({"causal": True}, seqlen_kv=70)
    assert "torch sdpa" in _outputs({"causal": "top_left"}, seqlen_kv=70)
    assert "torch sdpa" not in _outputs({"window": (5, 5)})
