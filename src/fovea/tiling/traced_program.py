"""A traced mask as the searches over blocks need it.

Lives here: interval analysis and evaluation of a `TracedMod` on one device. Not here: the searches
(`block_states.py`, `key_ranges.py`, `mask_bits.py`). Invariant: what it says depends on the mask's
inputs and captured tensors alone.
"""

import torch
from torch import Tensor

from fovea.errors import invalid
from fovea.mods.evaluate import Positions, evaluate, is_checked
from fovea.mods.trace import TracedMod
from fovea.tiling.block_states import Boxes
from fovea.tiling.mask_intervals import MaskIntervals


class TracedProgram:
    """A traced mask with its captured tensors on one device."""

    def __init__(self, mask: TracedMod, device: torch.device) -> None:
        self._mask = mask
        self._captures = tuple(_on_device(tensor, device, mask) for tensor in mask.captures)
        self._intervals = MaskIntervals(
            mask.graph, self._captures, mask.scalars, device, is_checked=True
        )
        self.width = self._intervals.width

    def reads(self, name: str) -> bool:
        """Return whether the mask depends on the input `name`."""
        return any(node.op == name for node in self._mask.graph.nodes)

    def classify(self, boxes: Boxes) -> Tensor:
        """Return EMPTY or FULL where that is proved for the whole box, else UNDECIDED."""
        return self._intervals.classify(boxes)

    def evaluate(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the mask at broadcast positions."""
        return evaluate(
            self._mask.graph,
            Positions(b=b, h=h, q_idx=q_idx, kv_idx=kv_idx),
            captures=self._captures,
            scalars=self._mask.scalars,
            check=torch.ones_like(q_idx, dtype=torch.bool) if is_checked(q_idx) else None,
            source=self._mask.source,
        )


def _on_device(tensor: Tensor, device: torch.device, mask: TracedMod) -> Tensor:
    if tensor.device != device and tensor.dim() > 0:
        raise ValueError(
            invalid(
                "device",
                device,
                f"{tensor.device}, where a tensor of shape {tuple(tensor.shape)} is that the "
                f"mask_mod captured ({mask.source})",
                "move the captured tensor, or build the mask where it is",
            )
        )
    return tensor.detach().to(device)
