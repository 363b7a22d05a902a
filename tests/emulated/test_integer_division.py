"""Integer division by multiplication against Python's own, at the edges of what it is exact for."""

import random

import torch
from mod_variant import ModVariant

from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget
from fovea.mods.graph import CaptureSpec, Graph, Node
from fovea.plan.integers import (
    LARGEST_DIVIDEND,
    LARGEST_DIVISOR,
    NARROW_LIMIT,
    integer_bounds,
)
from fovea.runtime.emulated_module import load

CONSTANTS = (1, -1, 2, 3, -3, 7, 100, 641, 4096, -4096, 2**23 - 1, 2**24 - 1, 2**24, -(2**24))
_CAPTURES = (CaptureSpec("f32", 1, False),)
_FACTOR = 7


def _graph(op: str, divisor: int | None, part: int) -> Graph:
    """Return one half of (7 q_idx + h) by a constant, or by kv_idx + b where there is none."""
    nodes = [
        Node(op="q_idx", args=(), dtype="i64"),
        Node(op="const", args=(), dtype="i64", attrs=(_FACTOR,)),
        Node(op="mul", dtype="i64", args=(0, 1)),
        Node(op="h", args=(), dtype="i64"),
        Node(op="add", dtype="i64", args=(2, 3)),
    ]
    if divisor is None:
        nodes += [Node(op=name, args=(), dtype="i64") for name in ("kv_idx", "b")]
        nodes.append(Node(op="add", dtype="i64", args=(5, 6)))
    else:
        nodes.append(Node(op="const", args=(), dtype="i64", attrs=(divisor,)))
    nodes.append(Node(op=op, dtype="i64", args=(4, len(nodes) - 1)))
    # fp32 outputs show 24 bits exactly: the low 16, and what is above.
    number = 65535 if part == 0 else 16
    nodes.append(Node(op="const", args=(), dtype="i64", attrs=(number,)))
    last = len(nodes)
    nodes.append(Node(op=("and", "shr")[part], dtype="i64", args=(last - 2, last - 1)))
    nodes.append(Node(op="cast", dtype="f32", args=(last,)))
    return Graph("score", tuple(nodes), last + 1, _CAPTURES, ())


def _pairs() -> list[tuple[int, int]]:
    """Return dividends and divisors: multiples and their neighbours, both signs, all sizes."""
    generator = random.Random(5)
    largest = _FACTOR * NARROW_LIMIT
    pairs = [(a, b) for a in (0, 1, -1, largest, -largest) for b in (1, -1, 2, 3, 0)]
    while len(pairs) < 8192:
        size = 1 << generator.randint(0, 24)
        b = generator.choice((size, size - 1, size + 1, generator.randint(1, 2**24)))
        b = min(b, LARGEST_DIVISOR) * generator.choice((1, -1))
        times = generator.choice((1, largest // max(abs(b), 1), generator.randint(0, largest)))
        a = b * min(times, largest // max(abs(b), 1)) + generator.choice((-1, 0, 1))
        pairs.append((max(-largest, min(a * generator.choice((1, -1)), largest)), b))
    return pairs


def test_quotients_and_remainders_are_exact_for_all_signs_and_sizes() -> None:
    divisors = (None, *CONSTANTS)
    keys = [(op, d, part) for op in ("floordiv", "mod") for d in divisors for part in (0, 1)]
    graphs = tuple(_graph(*key) for key in keys)
    for graph in graphs:
        bounds = integer_bounds(graph, wide_integers=False)
        dividend, divisor = next(n.args for n in graph.nodes if n.op in ("floordiv", "mod"))
        # Else the kernel would divide in another way.
        assert bounds[dividend] <= LARGEST_DIVIDEND
        assert bounds[divisor] <= LARGEST_DIVISOR
    pairs = _pairs()
    columns = [
        (b - max(min(b, NARROW_LIMIT), -NARROW_LIMIT), a % _FACTOR, a // _FACTOR) for a, b in pairs
    ]
    indices = torch.tensor(columns, dtype=torch.int32).T
    kv_idx = torch.tensor([b for _, b in pairs], dtype=torch.int32) - indices[0]
    out = torch.full((len(graphs), len(pairs)), torch.nan)
    artifact = get_artifact(
        ModVariant(graphs=graphs, wide_integers=False, name="integer_division"),
        CompileTarget(arch="sm_90a"),
    )
    inputs = torch.cat((indices, kv_idx[None])).contiguous()
    load(artifact)(torch.zeros(len(pairs)), inputs, out, (torch.zeros(1),), ())
    found = dict(zip(keys, out.long(), strict=True))
    for op in ("floordiv", "mod"):
        for constant in divisors:
            actual = found[op, constant, 0] + 65536 * found[op, constant, 1]
            for (a, b), value in zip(pairs, actual.tolist(), strict=True):
                divisor = constant or b or 1  # a divisor of 0 counts as 1
                expected = a // divisor if op == "floordiv" else a % divisor
                assert value == expected, (op, a, divisor)
