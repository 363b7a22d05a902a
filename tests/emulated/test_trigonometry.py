"""Sine, cosine and tangent in mods: small angles, large ones, and those next to a quarter turn."""

import math

import pytest
import torch
from mod_variant import ModVariant

from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget
from fovea.mods.graph import CaptureSpec, Graph, Node
from fovea.runtime.emulated_module import load

# Relative errors that are bearable, in float32's epsilon: of the quotient more than of both sines.
LIMITS = {"sin": 1.5, "cos": 1.5, "tan": 3.0}
# The float32 that is nearest to a multiple of pi / 2 for its size.
NEAREST = math.ldexp(16367173.0, 72)


def _angles() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    turns = torch.arange(-40, 41) * (math.pi / 2)
    edges = torch.tensor([2.0**16, 3.4e38, NEAREST, 1e30, 1e-38, 105615.0, 48039.0])
    spread = torch.ldexp(torch.rand(600, generator=generator) + 1, torch.arange(600) % 255 - 127)
    dense = torch.randn(300, generator=generator) * 1000
    angles = torch.cat((turns, edges, edges.nextafter(torch.tensor(torch.inf)), spread, dense))
    return torch.cat((angles, -angles)).float()


def _graph(op: str) -> Graph:
    score, result = Node(op="score", args=(), dtype="f32"), Node(op=op, args=(0,), dtype="f32")
    return Graph("score", (score, result), 1, (CaptureSpec("f32", 1, False),), ("i64",))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_circular_functions_of_any_angle_are_good_to_the_last_places(arch: str) -> None:
    angles = _angles()
    variant = ModVariant(graphs=tuple(_graph(op) for op in LIMITS), wide_integers=False)
    artifact = get_artifact(variant, CompileTarget(arch=arch))
    assert all(used.stack_bytes == 0 for used in artifact.record.kernels.values())
    out = torch.full((len(LIMITS), len(angles)), torch.nan)
    indices = torch.zeros((4, len(angles)), dtype=torch.int32)
    load(artifact)(angles, indices, out, (torch.zeros(1),), (0,))
    for (op, limit), found in zip(LIMITS.items(), out, strict=True):
        exact = getattr(torch, op)(angles.double())
        off = (found.double() - exact).abs() / torch.finfo(torch.float32).eps
        worst = int((off - limit * exact.abs()).argmax())
        assert bool((off <= limit * exact.abs()).all()), (op, angles[worst], found[worst])
