"""Turn the nodes of a finished trace into a canonical graph.

Lives here: removal of dead nodes and renumbering. Not here: building (`builder.py`). Invariant: two
traces that compute the same nodes from the same output give the same text, however they got there.
"""

from dataclasses import dataclass

from fovea.mods.builder import NodeKey
from fovea.mods.graph import CaptureSpec, Graph, Node, parse_captures, parse_nodes


@dataclass(frozen=True, slots=True)
class Assembled:
    """A graph, and which of the trace's captures and scalars it kept, in the graph's order."""

    graph: Graph
    captures: tuple[int, ...]
    scalars: tuple[int, ...]


def assemble(
    kind: str,
    nodes: list[NodeKey],
    output: int,
    captures: tuple[CaptureSpec, ...],
    scalars: tuple[str, ...],
) -> Assembled:
    """Return the canonical graph of what `output` needs."""
    renumbering = Renumbering(nodes)
    new_output = renumbering.visit(output)
    kept_captures, kept_scalars = tuple(renumbering.captures), tuple(renumbering.scalars)
    graph = Graph(
        kind,
        tuple(renumbering.done),
        new_output,
        tuple(captures[number] for number in kept_captures),
        tuple(scalars[number] for number in kept_scalars),
    )
    return Assembled(graph, kept_captures, kept_scalars)


class Renumbering:
    """Numbers nodes, captures, scalars and axes in the order a walk from the outputs meets them."""

    def __init__(self, nodes: list[NodeKey]):
        self.nodes = nodes
        self.place: dict[int, int] = {}
        self.done: list[Node] = []
        self.captures: list[int] = []
        self.scalars: list[int] = []
        self.axes: list[int] = []

    def visit(self, root: int) -> int:
        """Return the new number of a node, its operands first; no recursion, graphs may be deep."""
        stack = [root]
        while stack:
            number = stack[-1]
            if number in self.place:
                stack.pop()
                continue
            waiting = [a for a in self.nodes[number][1] if a not in self.place]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            self._finish(number)
        return self.place[root]

    def _finish(self, number: int) -> None:
        op, args, dtype, attrs = self.nodes[number]
        known = {"load": self.captures, "scalar": self.scalars, "axis": self.axes}
        known |= dict.fromkeys(("sum", "prod", "any", "all", "amax", "amin"), self.axes)
        if op in known:
            seen = known[op]
            if attrs[0] not in seen:
                seen.append(int(attrs[0]))
            attrs = (seen.index(int(attrs[0])), *attrs[1:])
        self.place[number] = len(self.done)
        new_args = tuple(self.place[argument] for argument in args)
        self.done.append(Node(op=op, args=new_args, dtype=dtype, attrs=attrs))


def assemble_text(kind: str, nodes: str, output: int, captures: str, scalars: str) -> str:
    """Return the text of the canonical graph, the kept captures and the kept scalars.

    The three parts are separated by semicolons. Dynamo calls this as it is: from a constant text to
    a constant text.
    """
    keys = [(node.op, node.args, node.dtype, node.attrs) for node in parse_nodes(nodes)]
    types = tuple(scalars.split(",")) if scalars else ()
    done = assemble(kind, keys, output, parse_captures(captures), types)
    kept = (",".join(map(str, numbers)) for numbers in (done.captures, done.scalars))
    return ";".join((done.graph.text(), *kept))


# What torch.compiler.assume_constant_result sets; calling that would import torch._dynamo now.
assemble_text._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
