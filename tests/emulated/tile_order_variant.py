"""A kernel that decodes tile numbers, for the test of the device's tile order."""

from dataclasses import dataclass
from typing import Any

THREADS = 128
NAME = "tile_order"


@dataclass(frozen=True, slots=True)
class TileOrderVariant:
    """out[:, i] = (query tile, head, sequence) of tile number i."""

    name: str = NAME

    def key_text(self) -> str:
        """Return the canonical text."""
        return NAME

    def build(self) -> tuple[Any, list[Any]]:
        """Return the host function and its fake arguments."""
        import tile_order_kernel

        return tile_order_kernel.host(), tile_order_kernel.arguments()
