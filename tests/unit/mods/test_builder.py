"""Promotion against torch.result_type; integer semantics against Python's."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fovea.mods.builder import Term, promote, result_dtype
from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.graph import DTYPE_NAME, TORCH_DTYPE
from fovea.mods.trace import trace_score_mod

NAMES = tuple(TORCH_DTYPE)


@pytest.mark.parametrize("a", NAMES)
def test_promote_equals_torch(a: str) -> None:
    for b in NAMES:
        expected = torch.promote_types(TORCH_DTYPE[a], TORCH_DTYPE[b])
        assert promote(a, b) == DTYPE_NAME[expected]


def operands() -> list[tuple[Term, Any]]:
    """Return terms and what they stand for: rows, 0-d tensors and Python numbers."""
    rows = [(Term(0, n, (0,)), torch.ones(2, dtype=TORCH_DTYPE[n])) for n in NAMES]
    zeros = [(Term(0, n), torch.ones((), dtype=TORCH_DTYPE[n])) for n in NAMES]
    numbers = [
        (Term(-1, "b1", (), True, True), True),
        (Term(-1, "i64", (), True, 1), 1),
        (Term(-1, "f64", (), True, 1.0), 1.0),
    ]
    return [*rows, *zeros, *numbers]


def test_result_dtype_equals_torch_for_every_pair() -> None:
    for (a, x), (b, y) in itertools.product(operands(), repeat=2):
        if a.weak and b.weak:
            continue
        assert TORCH_DTYPE[result_dtype((a, b))] == torch.result_type(x, y), (a.dtype, b.dtype)


def run(mod: Any, q: Tensor, kv: Tensor) -> list[int]:
    traced = trace_score_mod(mod, torch.float64)
    zero = torch.zeros((), dtype=torch.int64)
    score = torch.zeros((), dtype=torch.float64)
    result = evaluate(
        traced.graph,
        Positions(b=zero, h=zero, q_idx=q, kv_idx=kv),
        score=score,
        captures=traced.captures,
        scalars=traced.scalars,
    )
    return [int(value) for value in result.expand(torch.broadcast_shapes(q.shape, kv.shape))]


INTEGERS = st.integers(-(2**40), 2**40)


@settings(max_examples=25)
@given(st.lists(st.tuples(INTEGERS, INTEGERS.filter(bool)), min_size=1, max_size=8))
def test_floor_division_and_modulo_have_pythons_sign(pairs: list[tuple[int, int]]) -> None:
    q, kv = (torch.tensor(column) for column in zip(*pairs))
    assert run(lambda s, b, h, q, kv: q // kv, q, kv) == [a // d for a, d in pairs]
    assert run(lambda s, b, h, q, kv: q % kv, q, kv) == [a % d for a, d in pairs]
    a, d = pairs[0]
    assert run(lambda s, b, h, q, kv: q // d, q[:1], kv[:1]) == [a // d]
    assert run(lambda s, b, h, q, kv: q % d, q[:1], kv[:1]) == [a % d]
    assert run(lambda s, b, h, q, kv: a // kv + a % kv, q[:1], kv[:1]) == [a // d + a % d]


@settings(max_examples=25)
@given(st.lists(st.tuples(INTEGERS, st.integers(0, 20)), min_size=1, max_size=8))
def test_shifts_equal_pythons(pairs: list[tuple[int, int]]) -> None:
    q, kv = (torch.tensor(column) for column in zip(*pairs))
    assert run(lambda s, b, h, q, kv: q >> kv, q, kv) == [a >> n for a, n in pairs]
    assert run(lambda s, b, h, q, kv: (q << kv) >> 8, q, kv) == [(a << n) >> 8 for a, n in pairs]
    a, n = pairs[0]
    assert run(lambda s, b, h, q, kv: (a >> kv) + (q >> n), q[:1], kv[:1]) == [(a >> n) * 2]


@settings(max_examples=25)
@given(st.lists(st.tuples(INTEGERS, INTEGERS), min_size=1, max_size=8))
def test_bit_operations_equal_pythons(pairs: list[tuple[int, int]]) -> None:
    q, kv = (torch.tensor(column) for column in zip(*pairs))
    expected = [(a & c) - (a | c) + (a ^ ~c) for a, c in pairs]
    assert run(lambda s, b, h, q, kv: (q & kv) - (q | kv) + (q ^ ~kv), q, kv) == expected


FINITE = st.floats(-1e6, 1e6, allow_subnormal=False)


@settings(max_examples=25)
@given(FINITE, FINITE.filter(lambda x: abs(x) > 1e-3))
def test_float_modulo_equals_torch_and_has_the_divisors_sign(a: float, d: float) -> None:
    traced = trace_score_mod(lambda s, b, h, q, kv: s % d, torch.float64)
    zero = torch.zeros((), dtype=torch.int64)
    value = evaluate(
        traced.graph,
        Positions(b=zero, h=zero, q_idx=zero, kv_idx=zero),
        score=torch.tensor(a, dtype=torch.float64),
        captures=(),
        scalars=traced.scalars,
    )
    assert value == torch.remainder(torch.tensor(a, dtype=torch.float64), d)
    assert value == 0 or (value > 0) == (d > 0)
