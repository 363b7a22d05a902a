"""The graph of a mod: its nodes, its canonical text, and the way back from text.

Lives here: the language that every other part speaks (reference, kernels, compile keys). Tracing a
Python function into it is `trace.py`, running it on tensors is `evaluate.py`, differentiating it is
`derivative.py`. Invariant: equal text means equal meaning, and nodes are in topological order,
free of duplicates and of dead nodes.

The language
    inputs      score b h q_idx kv_idx (grad in a derivative); indices are i64
    const       attrs = (value,)
    scalar      attrs = (slot,): a run-time number; `Graph.scalars[slot]` is its type
    load        attrs = (capture,), one index node (i64) per dimension; a negative index wraps once,
                an index out of range is clamped (allowed on invisible positions only)
    axis        attrs = (axis_id, extent): runs over 0..extent-1, an extra dimension
    sum prod any all amax amin    attrs = (axis_id,): reduce over that axis
    add sub mul div floordiv mod pow minimum maximum atan2         both operands of the node's dtype
    neg abs sign floor ceil round trunc detach                      operand of the node's dtype
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh asinh acosh
    atanh tanh sigmoid erf                                          float only
    eq ne lt le gt ge           dtype b1, both operands of one dtype
    and or xor not              bool or bitwise, by dtype
    shl shr                     integers; shr is arithmetic; a count outside 0..bits-1 gives 0
                                (shr: the sign) as torch does
    where       (condition b1, value, value)
    cast        to the node's dtype; float to integer truncates
floordiv and mod round towards minus infinity, as Python's do; round is half to even. Integer
division by zero is undefined at invisible positions and an error of the user's at visible ones.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256

import torch

from fovea.errors import TraceError

FORMAT = "mod1"
INPUTS = ("score", "b", "h", "q_idx", "kv_idx", "grad")
REDUCTIONS = ("sum", "prod", "any", "all", "amax", "amin")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
BINARY = ("add", "sub", "mul", "div", "floordiv", "mod", "pow", "minimum", "maximum", "atan2")
UNARY = ("neg", "abs", "sign", "floor", "ceil", "round", "trunc", "detach")
FLOAT_UNARY = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sigmoid", "erf"),
    *(
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "asinh",
        "acosh",
        "atanh",
        "tanh",
    ),
)
BITWISE = ("and", "or", "xor", "not", "shl", "shr")
OPS = frozenset(
    (
        *(*INPUTS, "const", "scalar", "load", "axis", "where", "cast"),
        *(*REDUCTIONS, *COMPARISONS, *BINARY, *UNARY, *FLOAT_UNARY, *BITWISE),
    )
)

TORCH_DTYPE = {
    "b1": torch.bool,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
DTYPE_NAME = {dtype: name for name, dtype in TORCH_DTYPE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation: its name, the numbers of its operands, its dtype and its constants."""

    op: str
    args: tuple[int, ...]
    dtype: str
    attrs: tuple[bool | int | float, ...] = ()


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """What a graph knows of one captured tensor; its extents are known at run time only."""

    dtype: str
    rank: int
    requires_grad: bool = False


@dataclass(frozen=True, eq=False)
class Graph:
    """A traced mod: `output` is the number of the node that gives the new score or the mask.

    A graph traced by Dynamo has no nodes, only its text (`known_text`); `Graph.parse` gives them.
    """

    kind: str
    nodes: tuple[Node, ...]
    output: int
    captures: tuple[CaptureSpec, ...] = ()
    scalars: tuple[str, ...] = ()
    known_text: str = ""

    def text(self) -> str:
        """Return the canonical text: one line without newlines, equal for equal meaning."""
        return self.known_text if self.known_text != "" else self._text

    def digest(self) -> str:
        """Return 32 hexadecimal digits that stand for the text in file names and keys."""
        return self._digest

    @staticmethod
    def parse(text: str) -> "Graph":
        """Return the graph that `text()` of another graph described.

        Raises:
            TraceError: the text is not of this version's form.
        """
        return parse_graph(text)

    @property
    def dtype(self) -> str:
        """Return the dtype of the output."""
        return self.nodes[self.output].dtype

    @cached_property
    def _text(self) -> str:
        head = (
            f"{FORMAT} {self.kind} {captures_text(self.captures)} {','.join(self.scalars) or '-'}"
        )
        return f"{head} | {nodes_text(self.nodes)} | {self.output}"

    @cached_property
    def _digest(self) -> str:
        return sha256(self.text().encode()).hexdigest()[:32]

    @property
    def outputs(self) -> tuple[int, ...]:
        """Return the one output, as a program's outputs."""
        return (self.output,)

    @cached_property
    def has_axes(self) -> bool:
        """Return whether the graph reduces over rows of captured tensors."""
        return any(node.op == "axis" for node in self.nodes)

    @cached_property
    def widened(self) -> "Graph":
        """Return the same mod with fp32 arithmetic done in fp64; captures stay as they are."""
        nodes, place = widen_nodes(self.nodes)
        return Graph(self.kind, nodes, place[self.output], self.captures, self.scalars)

    def __eq__(self, other: object) -> bool:
        return self.text() == other.text() if isinstance(other, Graph) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text())

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """One addition to the gradient of a captured tensor: grad[index] += value.

    It happens for every (b, h, q_idx, kv_idx) and for every value of the free axes.
    """

    capture: int
    index: tuple[int, ...]
    value: int
    axes: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class ScoreDerivative:
    """The derivative of a score graph as a program of the same language, with the input `grad`.

    `d_score` is the node of dL/dscore; `scatters` lists what captured tensors that require grad
    receive. Values are fp32 (fp64 where the mod computes in it), whatever the capture's dtype is.
    """

    nodes: tuple[Node, ...]
    d_score: int
    scatters: tuple[Scatter, ...]
    captures: tuple[CaptureSpec, ...]
    scalars: tuple[str, ...]

    def text(self) -> str:
        """Return the canonical text: one line, equal for equal meaning."""
        return self._text

    def digest(self) -> str:
        """Return 32 hexadecimal digits that stand for the text in file names and keys."""
        return sha256(self._text.encode()).hexdigest()[:32]

    @property
    def outputs(self) -> tuple[int, ...]:
        """Return every node that is read after the end, without repeats."""
        wanted = [self.d_score]
        for scatter in self.scatters:
            wanted += [*scatter.index, scatter.value]
        return tuple(dict.fromkeys(wanted))

    def axis_extent(self, axis: int) -> int:
        """Return the extent of an axis of the program."""
        return next(
            int(node.attrs[1]) for node in self.nodes if node.op == "axis" and node.attrs[0] == axis
        )

    @cached_property
    def widened(self) -> "ScoreDerivative":
        """Return the same program with fp32 arithmetic done in fp64."""
        nodes, place = widen_nodes(self.nodes)
        scatters = tuple(
            Scatter(
                capture=s.capture,
                index=tuple(place[number] for number in s.index),
                value=place[s.value],
                axes=s.axes,
            )
            for s in self.scatters
        )
        return ScoreDerivative(nodes, place[self.d_score], scatters, self.captures, self.scalars)

    @cached_property
    def _text(self) -> str:
        head = f"{FORMAT} derivative {captures_text(self.captures)} {','.join(self.scalars) or '-'}"
        tail = " ".join(
            f"{s.capture}[{','.join(map(str, s.index))}]+={s.value}{{{','.join(map(str, s.axes))}}}"
            for s in self.scatters
        )
        return f"{head} | {nodes_text(self.nodes)} | {self.d_score} | {tail}"

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, ScoreDerivative) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)


def widen_nodes(nodes: tuple[Node, ...]) -> tuple[tuple[Node, ...], list[int]]:
    """Return nodes with fp64 in the place of fp32, and where each old node went."""
    wide: list[Node] = []
    place: list[int] = []
    for node in nodes:
        args = tuple(place[argument] for argument in node.args)
        if node.op == "cast" and node.dtype == "f32" and wide[args[0]].dtype == "f64":
            place.append(args[0])
            continue
        is_load = node.op == "load"
        dtype = "f64" if node.dtype == "f32" and not is_load else node.dtype
        wide.append(Node(op=node.op, args=args, dtype=dtype, attrs=node.attrs))
        if is_load and node.dtype == "f32":
            wide.append(Node(op="cast", args=(len(wide) - 1,), dtype="f64"))
        place.append(len(wide) - 1)
    return tuple(wide), place


def last_uses(nodes: tuple[Node, ...], outputs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the last reader of every node; outputs are read after the end."""
    last = list(range(len(nodes)))
    for number, node in enumerate(nodes):
        for argument in node.args:
            last[argument] = number
    for output in outputs:
        last[output] = len(nodes)
    return tuple(last)


# ------------------------------------------------------------------------------------- text


def number_text(value: bool | int | float) -> str:
    """Return the text of a constant, exact for floats (hexadecimal) and distinct by type."""
    if isinstance(value, float):
        # float.hex writes inf and nan in words, and keeps the sign of zero.
        return value.hex()
    return repr(value)


def parse_number(text: str) -> bool | int | float:
    """Return the constant that `number_text` wrote."""
    if text in ("True", "False"):
        return text == "True"
    return float.fromhex(text) if "0x" in text or text.endswith(("inf", "nan")) else int(text)


def node_text(node: Node) -> str:
    """Return `op:dtype{attributes}(operands)`, empty parts left out."""
    attrs = f"{{{','.join(number_text(value) for value in node.attrs)}}}" if node.attrs else ""
    args = f"({','.join(str(number) for number in node.args)})" if node.args else ""
    return f"{node.op}:{node.dtype}{attrs}{args}"


def nodes_text(nodes: tuple[Node, ...]) -> str:
    """Return the nodes' texts in order, separated by spaces."""
    return " ".join(node_text(node) for node in nodes)


def captures_text(captures: tuple[CaptureSpec, ...]) -> str:
    """Return `dtype*rank` for each capture, with `!` where it requires grad; `-` for none."""
    return ",".join(f"{c.dtype}*{c.rank}{'!' if c.requires_grad else ''}" for c in captures) or "-"


def _parse_node(text: str) -> Node:
    head, _, args = text.partition("(")
    head, _, attrs = head.partition("{")
    op, _, dtype = head.partition(":")
    args, attrs = args.rstrip(")"), attrs.rstrip("}")
    if op not in OPS or dtype not in TORCH_DTYPE:
        raise TraceError(
            f"mod text has an unknown node {text!r}; it was written by another version"
        )
    return Node(
        op=op,
        args=tuple(int(number) for number in args.split(",")) if args else (),
        dtype=dtype,
        attrs=tuple(parse_number(value) for value in attrs.split(",")) if attrs else (),
    )


def parse_nodes(text: str) -> tuple[Node, ...]:
    """Return the nodes that `nodes_text` wrote."""
    return tuple(_parse_node(word) for word in text.split())


def parse_captures(text: str) -> tuple[CaptureSpec, ...]:
    """Return the captures that `captures_text` wrote."""
    specs: list[CaptureSpec] = []
    for word in () if text == "-" else text.split(","):
        dtype, _, rank = word.partition("*")
        specs.append(CaptureSpec(dtype, int(rank.rstrip("!")), rank.endswith("!")))
    return tuple(specs)


@lru_cache(maxsize=1024)
def parse_graph(text: str) -> Graph:
    """Return the graph of a canonical text; an operator asks for the same few on every call."""
    parts = text.split(" | ")
    head = parts[0].split(" ")
    if len(parts) != 3 or len(head) != 4 or head[0] != FORMAT or head[1] not in ("score", "mask"):
        raise TraceError(
            f"mod text {text[:60]!r} is not of the form {FORMAT!r}; trace the mod again"
        )
    return Graph(
        kind=head[1],
        nodes=parse_nodes(parts[1]),
        output=int(parts[2]),
        captures=parse_captures(head[2]),
        scalars=() if head[3] == "-" else tuple(head[3].split(",")),
    )
