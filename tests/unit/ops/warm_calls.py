"""What tests of recognised calls share: inputs, mods, the comparison with a checked call."""

import torch

import fovea
from fovea.ops import warm
from fovea.testing.inputs import normal

HEADS, SEQLEN = 4, 24


def tensors(seqlen=SEQLEN, head_dim=8, dtype=torch.float32, batch=2):
    shape = (batch, seqlen, HEADS, head_dim)
    return tuple(normal(shape, dtype=dtype, seed=seed) for seed in range(3))


def attend(q, k, v, **keywords):
    return fovea.attention(q, k, v, **keywords)


def assert_like_a_checked_call(call):
    """Compare a call with itself, everything forgotten."""
    found = call()
    warm.clear()
    expected = call()
    assert torch.equal(found, expected)
    return found


def block_mask(width=3, seqlen=SEQLEN):
    return fovea.create_block_mask(
        lambda b, h, i, j: (i - j).abs() <= width, 1, 1, seqlen, seqlen, "cpu", BLOCK_SIZE=8
    )


def biased(table, slope):
    return lambda s, b, h, i, j: s + table[h] * slope * (j - i)
