"""Run the graph of a mod on tensors: the definition of what every node means.

Lives here: evaluation in plain torch, differentiable by autograd through the score and the captured
tensors. Not here: tracing (`trace.py`), derivatives as graphs (`derivative.py`), what their
scatters mean (`pull_back.py`), device code
(`kernels/device/mods.py`, which agrees with this file on every input). Invariant: the result
broadcasts as the inputs do; a reduction's axes are extra leading dimensions that never leave here.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fovea import env
from fovea.errors import invalid
from fovea.mods.graph import TORCH_DTYPE, Graph, Node, ScoreDerivative, last_uses

Scalar = int | float | Tensor
_has_transform = torch._C._are_functorch_transforms_active  # pyright: ignore[reportPrivateUsage]
_mode_of = torch._C._get_dispatch_mode  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
_PROXY = torch._C._TorchDispatchModeKey.PROXY  # pyright: ignore[reportPrivateUsage]
_FAKE = torch._C._TorchDispatchModeKey.FAKE  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Positions:
    """What a mod is called with, beside the score: batch, query head, query and key indices.

    Shapes:
        any that broadcast, for example b (B, 1, 1, 1), h (1, H, 1, 1), q_idx (1, 1, M, 1),
        kv_idx (1, 1, 1, N); indices count from the start of a sequence and lie inside it.
    """

    b: Tensor
    h: Tensor
    q_idx: Tensor
    kv_idx: Tensor

    def inputs(self) -> dict[str, Tensor | None]:
        """Return the indices by the names that nodes have for them."""
        return {"b": self.b, "h": self.h, "q_idx": self.q_idx, "kv_idx": self.kv_idx}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surroundings:
    """All that nodes read from outside: inputs by name, captures, scalars.

    `rank` is the number of dimensions of the inputs; axis `i` lies at dimension `-(rank + i + 1)`.
    Where it is a list, `suspects` gets the nodes' names that lack a value somewhere: loads that an
    index leaves, divisions of integers by 0.
    """

    inputs: dict[str, Tensor]
    captures: Sequence[Tensor]
    scalars: Sequence[Scalar]
    rank: int
    device: torch.device
    source: str = ""
    suspects: list[str] | None = None


def evaluate(
    graph: Graph,
    positions: Positions,
    *,
    score: Tensor | None = None,
    captures: Sequence[Tensor],
    scalars: Sequence[Scalar],
    check: Tensor | None = None,
    source: str = "",
) -> Tensor:
    """Return the new score, or the mask, at every position the inputs broadcast to.

    A float64 score widens a graph traced for fp32 scores: what was fp32 is computed in fp64.

    Shapes: score (B, H, M, N), or whatever broadcasts with the positions. The result broadcasts to
        the same shape, but has extent 1 along dimensions that the mod does not read.

    Args:
        graph: a traced mod's graph.
        positions: where it is evaluated.
        score: needed by a score graph.
        captures: the tensors of `TracedMod.captures`, in order.
        scalars: the numbers of `TracedMod.scalars`, or 0-d tensors.
        check: visible positions; a gather out of range that matters there raises, and so does an
            integer divided by 0.
        source: where the mod was written, for that error.

    Raises:
        GatherError: the result at a position that `check` says is visible depends on an element
            outside a captured tensor.
        ValueError: or on an integer divided by 0.
    """
    if score is not None and score.dtype == torch.float64 and graph.dtype == "f32":
        graph = graph.widened
    inputs = positions.inputs() | {"score": score}
    suspects: list[str] | None = None if check is None else []
    surroundings = surround(inputs, captures, scalars, suspects, source)
    result = run_nodes(graph, surroundings)[0]
    if check is not None and suspects:
        from fovea.mods.out_of_range import check_outcome  # which evaluates by this module

        check_outcome(graph, surroundings, check)
    return result


def surround(
    inputs: dict[str, Tensor | None],
    captures: Sequence[Tensor],
    scalars: Sequence[Scalar],
    suspects: list[str] | None = None,
    source: str = "",
) -> Surroundings:
    """Return the inputs that were given, with their common rank and device."""
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    lead = given.get("score", given["q_idx"])
    return Surroundings(
        inputs=given,
        captures=captures,
        scalars=scalars,
        rank=max(tensor.dim() for tensor in given.values()),
        device=lead.device,
        suspects=suspects,
        source=source,
    )


def run_nodes(
    program: Graph | ScoreDerivative, surroundings: Surroundings, keep_axes: bool = False
) -> list[Tensor]:
    """Return the values of the outputs; every other one is let go after its last reader."""
    nodes, plan = program.nodes, schedule(program)
    values: list[Tensor | None] = [None] * len(nodes)
    for number, node in enumerate(nodes):
        if number in plan.products:
            continue  # its factors go to the sum that reads it
        is_dot = node.op == "sum" and node.args[0] in plan.products
        args = nodes[node.args[0]].args if is_dot else node.args
        # operands are in place: nodes are in topological order and live until their last use
        operands = [values[argument] for argument in args]
        if is_dot:
            values[number] = _dot(node, operands, surroundings.rank)  # pyright: ignore[reportArgumentType]
        else:
            values[number] = apply_node(node, operands, surroundings)  # pyright: ignore[reportArgumentType]
        for argument in args:
            if plan.last_use[argument] == number:
                values[argument] = None
    results: list[Tensor] = []
    for output in program.outputs:
        value = values[output]
        assert value is not None
        results.append(value if keep_axes else drop_axes(value, surroundings.rank))
    return results


@dataclass(frozen=True, slots=True)
class Schedule:
    """When values die, and which products are computed inside the sum that reads them."""

    last_use: tuple[int, ...]
    products: frozenset[int]


@lru_cache(maxsize=512)
def schedule(program: Graph | ScoreDerivative) -> Schedule:
    """Return the schedule of a program."""
    nodes = program.nodes
    last = list(last_uses(nodes, program.outputs))
    readers = Counter(argument for node in nodes for argument in node.args)
    products: set[int] = set()
    for number, node in enumerate(nodes):
        if node.op != "sum" or node.dtype not in ("f32", "f64"):
            continue
        product = node.args[0]
        if nodes[product].op != "mul" or readers[product] > 1 or product in program.outputs:
            continue
        if all(_is_row(nodes, factor) for factor in nodes[product].args):
            products.add(product)
            for factor in nodes[product].args:
                last[factor] = max(last[factor], number)
    return Schedule(tuple(last), frozenset(products))


def _is_row(nodes: tuple[Node, ...], number: int) -> bool:
    """Return whether a node is an element of a captured tensor, in its own dtype or a wider one."""
    node = nodes[number]
    return node.op == "load" or (node.op == "cast" and nodes[node.args[0]].op == "load")


def _dot(node: Node, factors: list[Tensor], rank: int) -> Tensor:
    """Return the sum over an axis of the product of two captured rows.

    Where one row belongs to the query and the other to the key, as a matrix product: the product of
    all pairs of elements would need the head dim times as much memory.
    """
    x, y = factors
    dimension = -(rank + int(node.attrs[0]) + 1)
    has_both = x.dim() == y.dim() == -dimension and x.shape[0] == y.shape[0]
    for left, right in ((x, y), (y, x)):
        if rank >= 2 and has_both and left.shape[-1] == 1 and right.shape[-2] == 1:
            rows, columns = left.squeeze(-1).movedim(0, -1), right.squeeze(-2).movedim(0, -2)
            return (rows @ columns).unsqueeze(0)
    return torch.sum(x * y, dimension, keepdim=True)


def drop_axes(value: Tensor, rank: int) -> Tensor:
    """Return the value without the leading dimensions of reduced axes, all of extent 1."""
    return value.reshape(value.shape[-rank:]) if value.dim() > rank else value


def apply_node(node: Node, operands: list[Tensor], around: Surroundings) -> Tensor:
    """Return the value of one node."""
    function = _POINTWISE.get(node.op)
    if function is not None:
        return function(*operands)
    dtype = TORCH_DTYPE[node.dtype]
    match node.op:
        case "cast":
            return operands[0].to(dtype)
        case "const":
            return torch.full((), node.attrs[0], dtype=dtype, device=around.device)
        case "scalar":
            value = around.scalars[int(node.attrs[0])]
            if isinstance(value, Tensor):
                return value.to(device=around.device, dtype=dtype)
            return torch.full((), value, dtype=dtype, device=around.device)
        case "load":
            return _load(int(node.attrs[0]), operands, around)
        case "axis":
            axis, extent = int(node.attrs[0]), int(node.attrs[1])
            steps = torch.arange(extent, device=around.device)
            return steps.reshape((extent,) + (1,) * (around.rank + axis))
        case "floordiv" | "mod":
            divisor = operands[1]
            if not dtype.is_floating_point:
                # torch raises on an integer division by zero, even at a position nobody looks at
                is_zero = divisor == 0
                if around.suspects is not None and bool(is_zero.any()):
                    around.suspects.append(node.op)
                divisor = torch.where(is_zero, 1, divisor)
            return _DIVISION[node.op](operands[0], divisor)
        case "sum" | "prod" | "any" | "all" | "amax" | "amin":
            return _reduce(node, operands[0], around.rank)
        case _:
            value = around.inputs.get(node.op)
            if value is None:
                raise ValueError(invalid(node.op, None, "a tensor", "pass it to evaluate"))
            return value.to(dtype)


def _reduce(node: Node, operand: Tensor, rank: int) -> Tensor:
    dimension = -(rank + int(node.attrs[0]) + 1)
    if node.op == "prod" and node.dtype in ("f16", "bf16"):
        # Rounded once, as torch's sums are everywhere and its products on a GPU, not on a CPU.
        product = torch.prod(operand.float(), dimension, keepdim=True)
        return product.to(TORCH_DTYPE[node.dtype])
    if node.op in ("sum", "prod"):
        return _REDUCTION[node.op](operand, dimension, keepdim=True, dtype=TORCH_DTYPE[node.dtype])
    return _REDUCTION[node.op](operand, dimension, keepdim=True)


def _load(capture: int, index: list[Tensor], around: Surroundings) -> Tensor:
    """Return the elements of a captured tensor at broadcasting index tensors."""
    tensor = around.captures[capture]
    if tensor.device != around.device:
        if tensor.dim() > 0:
            allowed = f"a tensor on {around.device}, or one with 0 dimensions"
            what = f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(
                invalid(
                    "captured tensor", what, allowed, f"move it with .to({str(around.device)!r})"
                )
            )
        tensor = tensor.to(around.device)
    if not index:
        return tensor
    inside: list[Tensor] = []
    for dimension, numbers in enumerate(index):
        extent = tensor.shape[dimension]
        if around.suspects is not None and _leaves(numbers, extent):
            around.suspects.append("load")
        if extent == 0:
            zero = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
            return zero.expand_as(sum(index[1:], start=index[0]))
        inside.append(numbers.clamp(-extent, extent - 1))
    return gather(tensor, inside)


def is_checked(index: Tensor) -> bool:
    """Return whether contents of tensors like `index` are looked at: on a CPU always.

    Elsewhere that would wait for the device, so it is for FOVEA_CHECK=1. Where values cannot be
    read (fake tensors, transforms, tracing) nothing is checked.
    """
    if (
        type(index) not in (Tensor, torch.nn.Parameter)
        or index.is_meta
        or _has_transform()
        or _is_tracing()
    ):
        return False
    return index.is_cpu or env.check()


def _is_tracing() -> bool:
    return _mode_of(_PROXY) is not None or _mode_of(_FAKE) is not None


def _leaves(index: Tensor, extent: int) -> bool:
    """Return whether any index lies outside -extent..extent-1."""
    if index.numel() == 0:
        return False
    low, high = index.aminmax()
    return int(low) < -extent or int(high) >= extent


def gather(tensor: Tensor, index: Sequence[Tensor]) -> Tensor:
    """Return tensor[index] for one index a dimension; -extent..-1 wraps, as in the mod itself.

    Its derivative adds up repeats in a fixed order, in float64: a tensor of one slope a head is
    read at millions of positions.
    """
    if not tensor.requires_grad and not _has_transform():
        return tensor[tuple(index)]
    wide = tensor.to(torch.float64) if tensor.is_floating_point() else tensor
    if tensor.is_cuda:
        # The derivative of indexing sorts on CUDA; that of index_select uses atomics there.
        return wide[tuple(index)].to(tensor.dtype)
    # On a CPU it is the other way round: index_put adds in parallel, index_add one by one.
    flat = flat_index(index, tensor.shape)
    return wide.reshape(-1).index_select(0, flat.reshape(-1)).reshape(flat.shape).to(tensor.dtype)


def flat_index(index: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the number of each indexed element of a dense tensor; -extent..-1 wraps."""
    flat = torch.zeros((), dtype=torch.int64, device=index[0].device)
    for numbers, extent in zip(index, shape, strict=True):
        flat = flat * extent + torch.where(numbers < 0, numbers + extent, numbers)
    return flat


# and, or, xor and not of torch's bitwise family are logical on bool tensors
_POINTWISE: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "atan2": torch.atan2,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "detach": torch.detach,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "tanh": torch.tanh,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "where": torch.where,
}
_DIVISION: dict[str, Callable[..., Tensor]] = {
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
}
_REDUCTION: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "prod": torch.prod,
    "any": torch.any,
    "all": torch.all,
    "amax": torch.amax,
    "amin": torch.amin,
}
