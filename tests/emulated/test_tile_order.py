"""The device decodes tile numbers as `tiling.order` specifies."""

import pytest
import torch
from tile_order_variant import TileOrderVariant

from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget
from fovea.runtime.emulated_module import load
from fovea.tiling.order import TileOrder


@pytest.mark.parametrize(
    ("num_tiles", "heads", "batch", "section"),
    [(1, 1, 1, 1), (5, 3, 2, 4), (7, 4, 3, 12), (3, 5, 2, 3), (4, 2, 1, 1)],
)
def test_device_tile_order_equals_the_specification(num_tiles, heads, batch, section):
    order = TileOrder(
        num_tiles=num_tiles, heads=heads, batch=batch, section=section, is_longest_last=True
    )
    out = torch.full((3, order.total), -1, dtype=torch.int32)
    run = load(get_artifact(TileOrderVariant(), CompileTarget(arch="sm_90a")))
    run(out, (num_tiles, heads, heads * batch, section))
    expected = torch.tensor([order.at(i) for i in range(order.total)], dtype=torch.int32)
    assert torch.equal(out.T, expected)
