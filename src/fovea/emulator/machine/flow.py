"""Control flow of a kernel: segments, their successors, and where diverged lanes meet.

A segment is a run of instructions that executes without a switch to another warp: it ends at a
branch, before a label, and after every instruction that synchronises or may wait.
Lives here: cutting, and immediate post-dominators. Not here: code (`machine/blocks.py`).
Invariant: segment numbers follow the order of the text.
"""

from dataclasses import dataclass, field

from fovea.emulator.errors import PtxError
from fovea.emulator.ptx import syntax

EXIT = -1
JUMPS = ("bra", "brx", "ret", "exit", "trap", "call")
SWITCH_KINDS = ("sync", "copy", "mma")


@dataclass(slots=True)
class Piece:
    """One segment before compilation: indices of statements, successors, meeting place."""

    start: int
    end: int
    successors: list[int] = field(default_factory=list[int])
    meet: int = EXIT


def cut(
    body: list[syntax.Statement | syntax.LabelMark],
    switches: list[bool],
    branch_targets: dict[str, tuple[str, ...]],
) -> tuple[list[Piece], dict[str, int]]:
    """Return the segments of a function body and the segment of each label.

    Args:
        body: statements and labels in order.
        switches: for each item, whether a segment ends after it.
        branch_targets: targets of each `.branchtargets` list.
    """
    pieces: list[Piece] = []
    labels: dict[str, int] = {}
    start = 0
    for position, item in enumerate(body):
        if isinstance(item, syntax.LabelMark):
            if position > start:
                pieces.append(Piece(start, position))
            labels[item.name] = len(pieces)
            start = position + 1
        elif switches[position]:
            pieces.append(Piece(start, position + 1))
            start = position + 1
    pieces.append(Piece(start, len(body)))
    for number, piece in enumerate(pieces):
        piece.successors = _successors(number, piece, body, labels, branch_targets, len(pieces))
    _find_meetings(pieces)
    return pieces, labels


def _successors(
    number: int,
    piece: Piece,
    body: list[syntax.Statement | syntax.LabelMark],
    labels: dict[str, int],
    branch_targets: dict[str, tuple[str, ...]],
    count: int,
) -> list[int]:
    following = number + 1 if number + 1 < count else EXIT
    last = body[piece.end - 1] if piece.end > piece.start else None
    if not isinstance(last, syntax.Statement):
        return [following]
    mnemonic = last.opcode.split(".")[0]
    if mnemonic == "bra":
        target = labels[_label(last)]
        return [target] if last.guard is None else [target, following]
    if mnemonic == "brx":
        name = _label(last)
        if name not in branch_targets:
            raise PtxError(f"`{last.text}`: {name} is no .branchtargets list", last.line)
        targets = [labels[target] for target in branch_targets[name]]
        return list(dict.fromkeys(targets if last.guard is None else [*targets, following]))
    if mnemonic in ("ret", "exit", "trap"):
        return [EXIT] if last.guard is None else [EXIT, following]
    return [following]


def _label(statement: syntax.Statement) -> str:
    target = statement.operands[-1]
    if not isinstance(target, syntax.Label):
        raise PtxError(f"`{statement.text}`: the target is not a label", statement.line)
    return target.name


def _find_meetings(pieces: list[Piece]) -> None:
    """Set `meet` of each piece to its immediate post-dominator (Cooper, Harvey, Kennedy 2001)."""
    exit_node = len(pieces)
    predecessors: list[list[int]] = [[] for _ in range(exit_node + 1)]
    for number, piece in enumerate(pieces):
        for successor in piece.successors:
            predecessors[exit_node if successor == EXIT else successor].append(number)
    order: list[int] = []  # post-order of the reversed graph from the exit
    seen = {exit_node}
    stack = [(exit_node, iter(predecessors[exit_node]))]
    while stack:
        node, children = stack[-1]
        for child in children:
            if child not in seen:
                seen.add(child)
                stack.append((child, iter(predecessors[child])))
                break
        else:
            order.append(node)
            stack.pop()
    rank = {node: position for position, node in enumerate(order)}
    dominator = {exit_node: exit_node}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            new = -1
            for successor in pieces[node].successors:
                other = exit_node if successor == EXIT else successor
                if other not in dominator:
                    continue
                new = other if new < 0 else _common(new, other, dominator, rank)
            if new >= 0 and dominator.get(node) != new:
                dominator[node] = new
                changed = True
    for number, piece in enumerate(pieces):
        meet = dominator.get(number, exit_node)
        piece.meet = EXIT if meet == exit_node else meet


def _common(a: int, b: int, dominator: dict[int, int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = dominator[a]
        while rank[b] < rank[a]:
            b = dominator[b]
    return a
