"""What a mask graph is worth on a whole box of positions: interval analysis of its nodes.

Lives here: the walk over a graph for many boxes at a time, and what a captured tensor holds in a
range of its elements. Not here: bounds of one operation (`interval_rules.py`), exact values
(`mods/evaluate.py`), which boxes are asked about (`block_states.py`). Invariant: the bounds enclose
every value that `evaluate` gives inside the box, so "always true" and "never true" are proofs.
"""

import torch
from torch import Tensor

from fovea.mods.evaluate import is_checked
from fovea.mods.graph import TORCH_DTYPE, Graph, Node
from fovea.tiling.block_states import EMPTY, FULL, UNDECIDED, Boxes, take
from fovea.tiling.interval_rules import FLOATS, RULES, UNBOUNDED, Interval, is_integer, unknown
from fovea.tiling.range_extrema import RangeExtrema

# Bounds computed at a time, axes counted in.
_BATCH_BOUNDS = 1 << 16


class MaskIntervals:
    """Interval analysis of one traced mask, with range tables of what it captured.

    With `is_checked` nothing is known where an index may leave its tensor.
    """

    def __init__(
        self,
        graph: Graph,
        captures: tuple[Tensor, ...],
        scalars: tuple[int | float, ...],
        device: torch.device,
        is_checked: bool = False,
    ) -> None:
        self._graph = graph
        self._captures = captures
        self._scalars = scalars
        self._device = device
        self._is_checked = is_checked
        self._tables: dict[int, RangeExtrema | None] = {}

    @property
    def width(self) -> int:
        """Number of values that each box needs at once, for the axes of small reductions."""
        total = 1
        for node in self._graph.nodes:
            if node.op == "axis":
                total *= int(node.attrs[1])
        return total

    def classify(self, boxes: Boxes) -> Tensor:
        """Return (n,) int8: EMPTY or FULL where proved for the whole box, else UNDECIDED."""
        count = boxes.b.shape[0]
        step = max(1, _BATCH_BOUNDS // self.width)
        states = torch.empty(count, dtype=torch.int8, device=self._device)
        for begin in range(0, count, step):
            part = slice(begin, begin + step)
            mask = self.bounds(take(boxes, part))[self._graph.output]
            found = torch.where(mask.low, FULL, torch.where(mask.high, UNDECIDED, EMPTY))
            states[part] = found.reshape(-1)
        return states

    def bounds(self, boxes: Boxes) -> list[Interval]:
        """Return the bounds of every node, of shapes that broadcast to (axes..., n)."""
        values: list[Interval] = []
        for node in self._graph.nodes:
            operands = [values[argument] for argument in node.args]
            values.append(self._bounds(node, operands, boxes))
        return values

    def _bounds(self, node: Node, operands: list[Interval], boxes: Boxes) -> Interval:
        """Return the bounds of one node."""
        match node.op:
            case "b":
                return Interval(boxes.b, boxes.b)
            case "h":
                return Interval(boxes.h, boxes.h)
            case "q_idx":
                return Interval(boxes.q_first, boxes.q_last)
            case "kv_idx":
                return Interval(boxes.kv_first, boxes.kv_last)
            case "const":
                return self._point(node, node.attrs[0])
            case "scalar":
                return self._point(node, self._scalars[int(node.attrs[0])])
            case "axis":
                axis, extent = int(node.attrs[0]), int(node.attrs[1])
                steps = torch.arange(extent, device=self._device)
                steps = steps.reshape((extent,) + (1,) * (1 + axis))
                return Interval(steps, steps)
            case "load":
                return self._load(node, operands)
            case _:
                rule = RULES.get(node.op)
                found = rule(node, *operands) if rule is not None else None
                return unknown(node.dtype, operands) if found is None else found

    def _point(self, node: Node, number: bool | int | float) -> Interval:
        if is_integer(node.dtype) and abs(number) >= UNBOUNDED:
            zero = torch.zeros((), dtype=torch.int64, device=self._device)
            return unknown(node.dtype, [Interval(zero, zero)])
        dtype = torch.int64 if is_integer(node.dtype) else TORCH_DTYPE[node.dtype]
        value = torch.full((), number, dtype=dtype, device=self._device)
        return Interval(value, value, value.isnan() if node.dtype in FLOATS else None)

    def _load(self, node: Node, index: list[Interval]) -> Interval:
        """Return the bounds of the elements that the index ranges can reach."""
        number = int(node.attrs[0])
        tensor = self._captures[number]
        if self._is_checked and index and is_checked(index[0].low):
            for bounds, extent in zip(index, tensor.shape, strict=True):
                if bool(((bounds.low < -extent) | (bounds.high >= extent)).any()):
                    # So that every position is evaluated, and checked.
                    return unknown(node.dtype, index)
        if tensor.numel() == 0:
            return self._point(node, 0)
        if not index:
            table = self._table(number)
            place = torch.zeros((), dtype=torch.int64, device=self._device)
            first = last = place
        else:
            table = self._table(number)
            first = last = torch.zeros((), dtype=torch.int64, device=self._device)
            for bounds, extent in zip(index, tensor.shape, strict=True):
                # Row-major positions grow with every index, so the corners enclose all between.
                low, high = _wrapped_index(bounds, extent)
                first = first * extent + low
                last = last * extent + high
        if table is None:
            return unknown(node.dtype, [Interval(first, last)])
        low, high = table.query(first, last)
        if node.dtype == "b1":
            return Interval(low > 0, high > 0)
        if node.dtype in FLOATS:
            return Interval(low, high)
        # Beyond the limit a bound means "unbounded" on its own side and still bounds the other.
        return Interval(low.clamp(-UNBOUNDED, UNBOUNDED - 1), high.clamp(1 - UNBOUNDED, UNBOUNDED))

    def _table(self, number: int) -> RangeExtrema | None:
        """Return the range table of a captured tensor, made once; None if it holds NaN."""
        if number not in self._tables:
            tensor = self._captures[number].detach()
            if tensor.is_floating_point():
                self._tables[number] = None if bool(tensor.isnan().any()) else RangeExtrema(tensor)
            else:
                self._tables[number] = RangeExtrema(tensor.to(torch.int64))
        return self._tables[number]


def _wrapped_index(bounds: Interval, extent: int) -> tuple[Tensor, Tensor]:
    """Return the range of positions that an index range means: wrapped once, then clamped."""
    low, high = bounds.low.clamp(-extent, extent - 1), bounds.high.clamp(-extent, extent - 1)
    is_negative = high < 0
    is_mixed = (low < 0) & ~is_negative
    low = torch.where(is_negative, low + extent, torch.where(is_mixed, 0, low))
    high = torch.where(is_negative, high + extent, torch.where(is_mixed, extent - 1, high))
    return low, high
