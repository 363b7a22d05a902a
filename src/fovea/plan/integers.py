"""Which integers of a mod fit 32-bit registers.

Lives here: a static bound on every node of a mod graph. Index arithmetic is 64-bit by meaning; a
GPU does it in pairs of 32-bit instructions, so a kernel narrows what provably fits. Not here: the
device code (`kernels/device/mods.py`). Invariant: a node called narrow cannot leave 32 bits while
positions and run-time integers stay below NARROW_LIMIT, which `plan/select.py` checks per call.
"""

from fovea.mods.graph import REDUCTIONS, Graph, Node

NARROW_LIMIT = 2**23
INT32_MAX = 2**31 - 1
EXACT_FLOAT_MAX = 2**24  # integers up to here are exact in fp32
# What kernels/device/integer_division.py is exact for.
LARGEST_DIVIDEND, LARGEST_DIVISOR = 2**26, EXACT_FLOAT_MAX
_UNBOUNDED = 2**63
_INTEGERS = ("u8", "i8", "i16", "i32", "i64")
_STORED_BOUND = {"b1": 1, "u8": 2**8, "i8": 2**7, "i16": 2**15, "i32": INT32_MAX}


def integer_bounds(graph: Graph, *, wide_integers: bool) -> tuple[int, ...]:
    """Return, per node, a bound on the absolute value of an integer; floats are unbounded."""
    bounds: list[int] = []
    extents = {n.attrs[0]: int(n.attrs[1]) for n in graph.nodes if n.op == "axis"}
    for node in graph.nodes:
        operands = [bounds[arg] for arg in node.args]
        bound = _bound(node, operands, graph, extents, wide_integers)
        # An unsigned byte wraps upwards: -1 becomes 255.
        bounds.append(_STORED_BOUND["u8"] if node.dtype == "u8" else min(bound, _UNBOUNDED))
    return tuple(bounds)


def narrow_nodes(graph: Graph, bounds: tuple[int, ...]) -> tuple[bool, ...]:
    """Return, per node, whether it is an integer that may be computed in 32 bits.

    Its operands must fit too, or they would be cut before it is computed.
    """

    def fits(node: Node, bound: int) -> bool:
        return bound <= INT32_MAX and all(
            bounds[arg] <= INT32_MAX
            for arg in node.args
            if graph.nodes[arg].dtype in _INTEGERS and node.op != "load"
        )

    return tuple(
        node.dtype in _INTEGERS and fits(node, bound)
        for node, bound in zip(graph.nodes, bounds, strict=True)
    )


def _bound(
    node: Node,
    operands: list[int],
    graph: Graph,
    extents: dict[bool | int | float, int],
    wide_integers: bool,
) -> int:
    """Return a bound on the absolute value of an integer or boolean node."""
    if node.dtype == "b1":
        return 1
    if node.dtype not in _INTEGERS:
        return _UNBOUNDED
    if node.op in ("b", "h", "q_idx", "kv_idx"):
        return _UNBOUNDED if wide_integers else NARROW_LIMIT
    if node.op == "scalar":
        return _UNBOUNDED if wide_integers else NARROW_LIMIT
    if node.op == "const":
        return abs(int(node.attrs[0]))
    if node.op == "axis":
        return extents[node.attrs[0]]
    if node.op == "load":
        return _STORED_BOUND.get(graph.captures[int(node.attrs[0])].dtype, _UNBOUNDED)
    if node.op in REDUCTIONS:
        extent = extents[node.attrs[0]]
        return operands[0] * extent if node.op == "sum" else _grown(node.op, operands[0], extent)
    return _operation_bound(node.op, operands)


def _grown(op: str, bound: int, extent: int) -> int:
    return _UNBOUNDED if op == "prod" and bound > 1 and extent > 1 else bound


def _operation_bound(op: str, operands: list[int]) -> int:
    if op in ("add", "sub"):
        return sum(operands)
    if op == "mul":
        return operands[0] * operands[1]
    if op == "floordiv":
        return operands[0] + 1
    if op == "mod":
        return operands[1]
    if op in ("neg", "abs", "cast", "shr"):
        # An integer division by a shift; a cast keeps the value or, from a float, is unbounded.
        return operands[0] + 1
    if op in ("minimum", "maximum"):
        return max(operands)
    if op == "where":
        return max(operands[1:])
    if op in ("and", "or", "xor", "not"):
        # The result of bitwise operations stays below the next power of two.
        return (1 << max(operands).bit_length()) if max(operands) < _UNBOUNDED else _UNBOUNDED
    if op == "sign":
        return 1
    return _UNBOUNDED
