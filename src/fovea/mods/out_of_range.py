"""Whether a mod's result depends on what is not there: elements beyond a captured tensor, x // 0.

Lives here: a second evaluation, made where an index left its tensor or an integer was divided by 0,
that follows what depends on the missing values. Not here: the first one, which clamps such an index
and divides by 1 (`evaluate.py`). Invariant: a result is at fault only where another content of the
missing value could change it, as seen operation by operation: what `where`, `&`, `|`, `any` and
`all` leave out does no harm.
"""

from typing import Any, cast

import torch
from torch import Tensor

from fovea.errors import GatherError, invalid
from fovea.mods.divisors import has_divisors, is_integer_division
from fovea.mods.evaluate import Surroundings, apply_node, drop_axes
from fovea.mods.gathers import has_gathers
from fovea.mods.graph import REDUCTIONS, Graph, Node


def may_lack_values(graph: Graph) -> bool:
    """Return whether there may be positions at which the mod has no value."""
    return has_gathers(graph) or has_divisors(graph)


def check_outcome(graph: Graph, around: Surroundings, visible: Tensor) -> None:
    """Raise where the result at a visible position depends on a missing value.

    Raises:
        GatherError: an element outside its captured tensor.
        ValueError: an integer divided by 0.
    """
    values: list[Tensor] = []
    missing: list[Tensor | None] = []
    for node in graph.nodes:
        operands = [values[argument] for argument in node.args]
        values.append(apply_node(node, operands, around))
        missing.append(_missing(node, operands, [missing[a] for a in node.args], around))
    at_fault = missing[graph.output]
    if at_fault is None:
        return
    at_fault = drop_axes(at_fault, around.rank) & visible
    if not bool(at_fault.any()):
        return
    for node in graph.nodes:
        if is_integer_division(node) and bool((_is_zero(values[node.args[1]]) & at_fault).any()):
            raise _division_error(around.source)
        if node.op != "load":
            continue
        tensor = around.captures[int(node.attrs[0])]
        for dimension, argument in enumerate(node.args):
            outside = _outside(values[argument], tensor.shape[dimension]) & at_fault
            if bool(outside.any()):
                index = int(values[argument].expand(outside.shape)[outside][0])
                raise _error(index, dimension, tensor, around.source)


def _is_zero(divisor: Tensor) -> Tensor:
    return divisor == 0


def _outside(index: Tensor, extent: int) -> Tensor:
    return (index < -extent) | (index >= extent)


def _missing(
    node: Node, values: list[Tensor], missing: list[Tensor | None], around: Surroundings
) -> Tensor | None:
    """Return where a node depends on a missing value; None for nowhere."""
    if is_integer_division(node):
        missing.append(_is_zero(values[1]))
    if node.op == "load":
        tensor = around.captures[int(node.attrs[0])]
        for dimension, index in enumerate(values):
            missing.append(_outside(index, tensor.shape[dimension]))
    if not any(m is not None for m in missing):
        return None
    no = torch.zeros((), dtype=torch.bool, device=around.device)
    flags = [no if m is None else m for m in missing]
    if node.op == "where":
        either = flags[1] | flags[2] | (values[1] != values[2])
        return torch.where(flags[0], either, torch.where(values[0], flags[1], flags[2]))
    if node.op in ("and", "or") and node.dtype == "b1":
        (a, b), (x, y) = flags, values
        if node.op == "or":
            x, y = ~x, ~y
        # One side decides alone where it is there and false (of `or`: true).
        return (a & (b | y)) | (b & (a | x))
    if node.op in REDUCTIONS:
        dimension = -(around.rank + int(node.attrs[0]) + 1)
        found: Tensor = cast(Any, torch).broadcast_tensors(flags[0], values[0])[0]
        some = found.any(dimension, keepdim=True)
        if node.op not in ("any", "all"):
            return some
        decides = (values[0] if node.op == "any" else ~values[0]) & ~found
        return some & ~decides.any(dimension, keepdim=True)
    total = flags[0]
    for flag in flags[1:]:
        total = total | flag
    return total


def _division_error(source: str) -> ValueError:
    return ValueError(
        invalid(
            f"divisor of integers{f' (mod at {source})' if source else ''}",
            0,
            "any other number wherever the mod is asked and its result depends on it",
            "divide by .clamp(min=1) of it, or leave those positions out with torch.where",
        )
    )


def _error(index: int, dimension: int, tensor: Tensor, source: str) -> GatherError:
    extent = tensor.shape[dimension]
    return GatherError(
        invalid(
            f"index into dimension {dimension} of a captured tensor of shape {tuple(tensor.shape)}"
            f"{f' (mod at {source})' if source else ''}",
            index,
            f"{-extent}..{extent - 1} wherever the mod is asked and its result depends on it",
            "clamp the index in the mod, or capture a larger tensor",
        )
    )
