"""Bounds of every node of random graphs enclose what `evaluate` gives inside a box."""

import random

import pytest
import torch

from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.graph import CaptureSpec, Graph, Node
from fovea.tiling.block_states import EMPTY, FULL, UNDECIDED, Boxes
from fovea.tiling.mask_intervals import MaskIntervals

INTEGERS = ("i64", "i32", "u8", "i8")
FLOATS = ("f32", "f64", "f16")
INTEGER_BINARY = (
    "add", "sub", "mul", "floordiv", "mod", "minimum", "maximum", "and", "or", "xor", "shl", "shr",
)  # fmt: skip
FLOAT_BINARY = ("add", "sub", "mul", "div", "minimum", "maximum")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def captures_of(generator: torch.Generator) -> tuple[tuple[torch.Tensor, str], ...]:
    def integers(low, high, shape, dtype):
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    floats = torch.randn(9, generator=generator)
    floats[4] = float("inf")
    return (
        (integers(0, 6, (40,), torch.int64).sort().values, "i64"),
        (integers(-(2**40), 2**62, (7,), torch.int64), "i64"),
        (integers(-9, 9, (5, 8), torch.int32), "i32"),
        (integers(0, 2, (12, 30), torch.bool), "b1"),
        (floats, "f32"),
        (torch.tensor(3, dtype=torch.int32), "i32"),
        (torch.tensor([1.0, float("nan"), 2.0]), "f64"),
    )


class Builder:
    """Appends random nodes whose operands have the dtypes that the language asks for."""

    def __init__(self, seed: int, with_axis: bool) -> None:
        self.random = random.Random(seed)
        self.nodes: list[Node] = []
        self.varies: list[bool] = []
        for op in ("b", "h", "q_idx", "kv_idx"):
            self.add(op, (), "i64")
        self.add("scalar", (), "i64", (0,))
        self.add("scalar", (), "f64", (1,))
        if with_axis:
            self.add("axis", (), "i64", (0, 3))

    def add(self, op, args, dtype, attrs=()) -> int:
        self.nodes.append(Node(op=op, args=tuple(args), dtype=dtype, attrs=tuple(attrs)))
        is_axis = op == "axis" or any(self.varies[a] for a in args)
        self.varies.append(is_axis and op not in ("any", "all", "amax", "amin", "sum"))
        return len(self.nodes) - 1

    def operand(self, dtype: str) -> int:
        """Return a node of `dtype`: a recent one, a cast or a constant."""
        same = [i for i, n in enumerate(self.nodes) if n.dtype == dtype]
        choice = self.random.random()
        if same and choice < 0.7:
            return self.random.choice(same[-6:] if choice < 0.4 else same)
        if choice < 0.85:
            source = self.random.randrange(len(self.nodes))
            return self.add("cast", (source,), dtype)
        return self.add("const", (), dtype, (self.constant(dtype),))

    def constant(self, dtype: str):
        if dtype == "b1":
            return self.random.random() < 0.5
        if dtype in FLOATS:
            return self.random.choice([0.0, 1.5, -2.25, 7.0, 1e5])
        low, high = {"u8": (0, 200), "i8": (-100, 100)}.get(dtype, (-5, 70))
        values = [0, 1, 2, 3, 7, 8, 16, self.random.randint(low, high)]
        if dtype == "i64":
            values.append(2**62)
        return self.random.choice(values)

    def grow(self, captures) -> None:
        kind = self.random.random()
        integer = "i64" if self.random.random() < 0.7 else self.random.choice(INTEGERS)
        floating = self.random.choice(FLOATS)
        pick = self.random.choice
        if kind < 0.4:
            operands = (self.operand(integer), self.operand(integer))
            self.add(pick(INTEGER_BINARY), operands, integer)
        elif kind < 0.48:
            self.add(pick(("neg", "abs", "sign", "not")), (self.operand(integer),), integer)
        elif kind < 0.62:
            dtype = pick((integer, integer, floating, "b1"))
            operands = (self.operand(dtype), self.operand(dtype))
            self.add(pick(("eq", "ne") if dtype == "b1" else COMPARISONS), operands, "b1")
        elif kind < 0.7:
            operands = (self.operand("b1"), self.operand("b1"))
            self.add(pick(("and", "or", "xor")), operands, "b1")
        elif kind < 0.74:
            self.add("not", (self.operand("b1"),), "b1")
        elif kind < 0.8:
            dtype = pick((integer, floating, "b1"))
            self.add("where", (self.operand("b1"), self.operand(dtype), self.operand(dtype)), dtype)
        elif kind < 0.86:
            operands = (self.operand(floating), self.operand(floating))
            self.add(pick(FLOAT_BINARY), operands, floating)
        elif kind < 0.9:
            op = pick(("floor", "ceil", "round", "trunc", "neg", "abs", "exp"))
            self.add(op, (self.operand(floating),), floating)
        else:
            number = self.random.randrange(len(captures))
            tensor, dtype = captures[number]
            index = [self.operand("i64") for _ in range(tensor.dim())]
            self.add("load", index, dtype, (number,))

    def reduce(self) -> None:
        source = self.random.choice([i for i, v in enumerate(self.varies) if v])
        dtype = self.nodes[source].dtype
        ops = ("any", "all") if dtype == "b1" else ("amax", "amin")
        if dtype == "i64":
            ops = (*ops, "sum")
        self.add(self.random.choice(ops), (source,), dtype, (0,))


GRID = (2, 3, 24, 30)
SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 300))]


def random_boxes(seed: int, count: int) -> list[tuple[int, ...]]:
    """Return boxes (b, h, q_first, q_last, kv_first, kv_last) inside the grid."""
    generator = random.Random(seed)
    boxes = []
    for _ in range(count):
        q_size, kv_size = generator.choice([(1, 1), (4, 4), (8, 2), (16, 16), (1, 30)])
        q, kv = generator.randint(0, GRID[2] - q_size), generator.randint(0, GRID[3] - kv_size)
        b, h = generator.randrange(GRID[0]), generator.randrange(GRID[1])
        boxes.append((b, h, q, q + q_size - 1, kv, kv + kv_size - 1))
    return boxes


def as_boxes(boxes: list[tuple[int, ...]]) -> Boxes:
    b, h, q_first, q_last, kv_first, kv_last = torch.tensor(boxes).unbind(1)
    return Boxes(
        b=b, h=h, q_first=q_first, q_last=q_last, kv_first=kv_first, kv_last=kv_last
    )  # fmt: skip


def check_node(node: Node, values: torch.Tensor, low, high, may_be_nan) -> None:
    """Check that every value lies inside the bounds."""
    if node.dtype == "b1":
        assert not bool(low) or bool(values.all())
        assert bool(high) or not bool(values.any())
        return
    if values.is_floating_point():
        assert not bool(values.isnan().any()) or (may_be_nan is not None and bool(may_be_nan))
        values = values[~values.isnan()]
        if values.numel() == 0:
            return
        assert float(values.min()) >= float(low)
        assert float(values.max()) <= float(high)
        return
    unbounded = 1 << 61
    assert int(low) <= -unbounded or int(values.min()) >= int(low)
    assert int(high) >= unbounded or int(values.max()) <= int(high)


@pytest.mark.parametrize("with_axis", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_of_random_graphs_enclose_every_value(seed, with_axis):
    captures = captures_of(torch.Generator().manual_seed(seed))
    builder = Builder(seed, with_axis)
    for step in range(30):
        builder.grow(captures)
        if with_axis and step % 5 == 4:
            builder.reduce()
    nodes = tuple(builder.nodes)
    specs = tuple(CaptureSpec(dtype, tensor.dim()) for tensor, dtype in captures)
    tensors = tuple(tensor for tensor, _ in captures)
    scalars = (5, 0.5)
    boxes = random_boxes(seed, 12)
    graph = Graph("mask", nodes, len(nodes) - 1, specs, ("i64", "f64"))
    bounds = MaskIntervals(graph, tensors, scalars, torch.device("cpu")).bounds(as_boxes(boxes))
    b, h, q, kv = (torch.arange(extent) for extent in GRID)
    for number, node in enumerate(nodes):
        if builder.varies[number]:
            continue
        values = evaluate(
            Graph("mask", nodes[: number + 1], number, specs, ("i64", "f64")),
            Positions(b=b[:, None, None, None], h=h[:, None, None], q_idx=q[:, None], kv_idx=kv),
            captures=tensors,
            scalars=scalars,
        ).expand(GRID)
        for place, box in enumerate(boxes):
            low, high, may_be_nan = (
                None if x is None else x.reshape(-1).expand(len(boxes))[place]
                for x in bounds[number]
            )
            inside = values[box[0], box[1], box[2] : box[3] + 1, box[4] : box[5] + 1]
            check_node(node, inside, low, high, may_be_nan)


def mask_of(*nodes: Node, captures=(), scalars=()) -> MaskIntervals:
    specs = tuple(CaptureSpec("i64", tensor.dim()) for tensor in captures)
    graph = Graph("mask", nodes, len(nodes) - 1, specs, ("i64",) * len(scalars))
    return MaskIntervals(graph, tuple(captures), tuple(scalars), torch.device("cpu"))


def node(op, *args, dtype="i64", attrs=()) -> Node:
    return Node(op=op, args=args, dtype=dtype, attrs=attrs)


def states_of(mask: MaskIntervals, *ranges: tuple[int, int, int, int]) -> list[int]:
    return mask.classify(as_boxes([(0, 0, *r) for r in ranges])).tolist()


def test_causal_boxes_are_decided_unless_the_diagonal_crosses_them():
    mask = mask_of(node("q_idx"), node("kv_idx"), node("ge", 0, 1, dtype="b1"))
    boxes = [(0, 7, 8, 15), (8, 15, 0, 8), (8, 15, 0, 9), (7, 7, 7, 7)]
    assert states_of(mask, *boxes) == [EMPTY, FULL, UNDECIDED, FULL]


def test_document_boxes_are_decided_from_the_captured_ids():
    ids = torch.tensor([0] * 10 + [1] * 6 + [2] * 4)
    mask = mask_of(
        node("q_idx"), node("kv_idx"), node("load", 0, attrs=(0,)), node("load", 1, attrs=(0,)),
        node("eq", 2, 3, dtype="b1"), captures=[ids],
    )  # fmt: skip
    boxes = [(0, 9, 0, 9), (0, 9, 10, 19), (10, 15, 16, 19), (8, 11, 0, 3), (0, 3, 4, 10)]
    assert states_of(mask, *boxes) == [FULL, EMPTY, EMPTY, UNDECIDED, UNDECIDED]


def test_modulo_inside_one_period_is_exact():
    mask = mask_of(
        node("q_idx"), node("const", attrs=(64,)), node("mod", 0, 1), node("const", attrs=(32,)),
        node("lt", 2, 3, dtype="b1"),
    )  # fmt: skip
    boxes = [(64, 95, 0, 0), (96, 127, 0, 0), (64, 127, 0, 0), (60, 66, 0, 0)]
    assert states_of(mask, *boxes) == [FULL, EMPTY, UNDECIDED, UNDECIDED]


def test_bits_that_a_range_has_in_common_are_known():
    mask = mask_of(
        node("kv_idx"), node("const", attrs=(0x20,)), node("and", 0, 1),
        node("cast", 2, dtype="b1"),
    )  # fmt: skip
    boxes = [(0, 0, 32, 63), (0, 0, 64, 95), (0, 0, 16, 47)]
    assert states_of(mask, *boxes) == [FULL, EMPTY, UNDECIDED]


def test_any_over_a_captured_row_is_decided_element_by_element():
    rows = torch.tensor([[0, 2], [1, 3]])
    mask = mask_of(
        node("q_idx"), node("const", attrs=(16,)), node("floordiv", 0, 1),
        node("axis", attrs=(0, 2)), node("load", 2, 3, attrs=(0,)),
        node("kv_idx"), node("floordiv", 5, 1), node("eq", 4, 6, dtype="b1"),
        node("any", 7, dtype="b1", attrs=(0,)), captures=[rows],
    )  # fmt: skip
    boxes = [(0, 15, 32, 47), (0, 15, 16, 31), (16, 31, 48, 63), (0, 31, 0, 15), (0, 15, 40, 50)]
    assert states_of(mask, *boxes) == [FULL, EMPTY, FULL, UNDECIDED, UNDECIDED]


def test_product_that_wraps_proves_nothing():
    mask = mask_of(
        node("q_idx"), node("const", attrs=(2**60,)), node("mul", 0, 1), node("const", attrs=(0,)),
        node("ge", 2, 3, dtype="b1"),
    )  # fmt: skip
    # 8 * 2**60 wraps to a negative number
    assert states_of(mask, (0, 1, 0, 0), (8, 9, 0, 0)) == [FULL, UNDECIDED]
