"""Smallest and largest element of any range of a captured tensor, in constant time a query.

Lives here: a sparse table over chunks of the flattened tensor. Invariant: an answer encloses every
element of the range; it is exact for one element, and for a range that starts and ends at chunk
boundaries. A tensor of up to 65536 elements has chunks of one element.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# 17 levels of this many entries, two tables, 8 bytes: at most 18 MB a captured tensor.
_MOST_CHUNKS = 1 << 16


class RangeExtrema:
    """Answers for one tensor without NaN and with at least one element."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.reshape(-1)
        count = self._values.numel()
        self._chunk = 1
        while count > self._chunk * _MOST_CHUNKS:
            self._chunk *= 2
        chunks = -(-count // self._chunk)
        padding = self._values[-1:].expand(chunks * self._chunk - count)
        grouped = torch.cat((self._values, padding)).view(chunks, self._chunk)
        # Row k holds the extrema of 2**k chunks from each chunk on, cut at the end.
        lows, highs = [grouped.amin(1)], [grouped.amax(1)]
        reach = 1
        while 2 * reach <= chunks:
            lows.append(_joined(torch.minimum, lows[-1], reach))
            highs.append(_joined(torch.maximum, highs[-1], reach))
            reach *= 2
        self._lows = torch.stack(lows)
        self._highs = torch.stack(highs)

    def query(self, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Return (smallest, largest) of elements `first` to `last`, `0 <= first <= last < size`."""
        begin, end = first // self._chunk, last // self._chunk
        # frexp, not log2: exact at powers of two.
        level = torch.frexp((end - begin + 1).double()).exponent.long() - 1
        second = end + 1 - (1 << level)
        low = torch.minimum(self._lows[level, begin], self._lows[level, second])
        high = torch.maximum(self._highs[level, begin], self._highs[level, second])
        if self._chunk > 1:
            element = self._values[first]
            is_one = first == last
            low = torch.where(is_one, element, low)
            high = torch.where(is_one, element, high)
        return low, high


def _joined(function: Callable[[Tensor, Tensor], Tensor], row: Tensor, reach: int) -> Tensor:
    """Return the extrema of twice `reach` chunks; the tail, never asked for, repeats `row`."""
    whole = function(row[:-reach], row[reach:])
    return torch.cat((whole, row[-reach:]))
