"""Names of a launcher's arguments, and tensors of a call, for the tests beside."""

import torch

from fovea.testing.inputs import normal

NAMES = (
    *("q", "k", "v", "out", "lse", "max_score", "sink", "partials", "counter", "lists"),
    *("sequences", "scores", "integers", "captures", "scalars"),
)


def tensors(seqlen=256, heads=4, head_dim=64):
    shape = (2, seqlen, heads, head_dim)
    return tuple(normal(shape, dtype=torch.bfloat16, seed=seed) for seed in range(3))
