"""Small device memory that launches of one stream take turns with, in place of an allocation each.

Lives here: zeroed counters, each used once, memory for results that nobody asked for, numbers of
the host, and the order of a block mask's query tiles. Not here: the launches (`cuda.py`).
Invariant: only launches in the order of one stream share memory, and none that a CUDA graph
records: a graph may be replayed on any stream, and after this memory is gone.
"""

from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from fovea.runtime.capture import is_capturing

# Of builds of torch without CUDA they are absent, and so is every caller.
_torch_c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_current_device: Any = getattr(_torch_c, "_cuda_getDevice", None)
_current_stream: Any = getattr(_torch_c, "_cuda_getCurrentRawStream", None)

_COUNTERS = 256  # made with one memset
_SCRATCH_BYTES = 2**20  # larger results are worth an allocation
_SCRATCH_SHAPES = 16
_ORDERS = 64
_NUMBERS = 64


class StreamMemory:
    """What launches on one stream share; freed memory waits for the stream, as torch's does."""

    __slots__ = ("_counters", "_device", "_numbers", "_orders", "_scratch")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counters: list[Tensor] = []
        self._scratch: dict[tuple[int, ...], Tensor] = {}
        self._numbers: dict[tuple[torch.dtype, str], Tensor] = {}
        self._orders: dict[tuple[int, int, int], tuple[ref[Tensor], Tensor]] = {}

    def counter(self) -> Tensor:
        """Return an int32 tensor of shape (1,) that is 0 when the stream comes to it."""
        try:
            return self._counters.pop()  # of two threads on one stream each gets its own
        except IndexError:
            zeros = torch.zeros(_COUNTERS, dtype=torch.int32, device=self._device)
            self._counters = list(cast(Any, zeros).split(1))
            return self._counters.pop()

    def scratch(self, shape: tuple[int, ...]) -> Tensor | None:
        """Return fp32 memory whose contents are lost; None where it would be large."""
        found = self._scratch.get(shape)
        if found is None:
            found = torch.empty(shape, dtype=torch.float32, device=self._device)
            if found.nbytes > _SCRATCH_BYTES:
                return None
            if len(self._scratch) >= _SCRATCH_SHAPES:
                self._scratch.clear()
            self._scratch[shape] = found
        return found

    def number(self, value: float, dtype: torch.dtype) -> Tensor:
        """Return a number of the host on the device, shape (1,), for launches that read it."""
        key = (dtype, repr(value))  # not the value: -0.0 equals 0.0, and NaN nothing
        found = self._numbers.get(key)
        if found is None:
            found = torch.full((1,), value, dtype=dtype, device=self._device)
            if len(self._numbers) >= _NUMBERS:
                self._numbers.clear()
            self._numbers[key] = found
        return found

    def tile_order(
        self, counts: Tensor, full_counts: Tensor | None, tiles_per_block: int, num_tiles: int
    ) -> Tensor:
        """Return the query tiles of a block mask as int32, those with most KV blocks first.

        Computed once a mask. It is a permutation whatever the lists say, so one of lists that
        changed since costs time and not the result.

        Args:
            counts, full_counts: `kv_num_blocks` and `full_kv_num_blocks` of the mask.
            tiles_per_block: query tiles of a block of queries.
            num_tiles: query tiles of the call.
        """
        key = (id(counts), tiles_per_block, num_tiles)
        found = self._orders.get(key)
        if found is not None and found[0]() is counts:
            return found[1]
        blocks = counts if full_counts is None else counts + full_counts
        work = blocks.sum(dim=(0, 1)).repeat_interleave(tiles_per_block)[:num_tiles]
        order = work.argsort(descending=True, stable=True).to(torch.int32)
        if len(self._orders) >= _ORDERS:
            self._orders.clear()
        self._orders[key] = (ref(counts), order)
        return order


_memories: dict[tuple[int, int], StreamMemory] = {}


def stream_memory(device: torch.device) -> StreamMemory | None:
    """Return the memory of a device's current stream.

    None under CUDA graph capture, and where another device is current: only the current device's
    stream says whether it is capturing.
    """
    index = device.index
    if _current_device() != index or is_capturing():
        return None
    key = (index, _current_stream(index))
    found = _memories.get(key)
    if found is None:
        found = _memories[key] = StreamMemory(device)
    return found
