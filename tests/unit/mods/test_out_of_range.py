"""A gather out of range is an error exactly where what it would have read decides the result."""

from typing import Any

import pytest
import torch

from fovea.errors import GatherError
from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.trace import trace_mask_mod, trace_score_mod

LENGTH, SHORT = 12, 8
INDEX = torch.arange(LENGTH)
POSITIONS = Positions(
    b=torch.zeros((1, 1), dtype=torch.int64),
    h=torch.zeros((1, 1), dtype=torch.int64),
    q_idx=INDEX.view(-1, 1),
    kv_idx=INDEX.view(1, -1),
)


def masks(f: Any, rows: Any) -> dict[str, Any]:
    """Return masks over a bool table f and a table of rows, each of some length."""
    return {
        "plain": lambda b, h, i, j: f[j],
        "not": lambda b, h, i, j: ~f[i],
        "and": lambda b, h, i, j: (j < SHORT) & f[j],
        "and of two tables": lambda b, h, i, j: f[i] & f[j],
        "or": lambda b, h, i, j: f[i] | (i >= SHORT),
        "or of two tables": lambda b, h, i, j: f[i] | f[j],
        "where": lambda b, h, i, j: torch.where(i > j, f[i], j > 3),
        "where chooses by it": lambda b, h, i, j: torch.where(f[i], j > 3, i > 2),
        "xor": lambda b, h, i, j: f[i] ^ (j > 2),
        "any": lambda b, h, i, j: rows[i].any() | (j == 0),
        "all": lambda b, h, i, j: rows[i].all() & (j > 3),
        "any of two": lambda b, h, i, j: (rows[i] & rows[j]).any(),
        "all of two": lambda b, h, i, j: (rows[i] | rows[j]).all(),
        "negative": lambda b, h, i, j: (i < 4) & f[i - 10],
        "wraps": lambda b, h, i, j: f[j % SHORT - SHORT],
    }


def _lengthened(table: torch.Tensor, value: bool) -> torch.Tensor:
    """Return a table without an end, as far as indices go: what lies outside is `value`."""
    long = torch.full((3 * LENGTH, *table.shape[1:]), value)
    long[:SHORT] = table
    long[-SHORT:] = table  # negative indices
    return long


def _value(mod: Any, check: torch.Tensor | None = None) -> torch.Tensor:
    traced = trace_mask_mod(mod)
    found = evaluate(
        traced.graph,
        POSITIONS,
        captures=traced.captures,
        scalars=traced.scalars,
        check=check,
        source=traced.source,
    )
    return found.expand(LENGTH, LENGTH)


@pytest.mark.parametrize("name", masks(None, None))
@pytest.mark.parametrize("seed", range(3))
def test_gather_raises_exactly_where_the_missing_element_decides(name, seed):
    generator = torch.Generator().manual_seed(seed)
    flags = torch.rand(SHORT, generator=generator) < 0.5
    rows = torch.rand(SHORT, 3, generator=generator) < 0.5
    by_value = [
        _value(masks(_lengthened(flags, value), _lengthened(rows, value))[name])
        for value in (False, True)
    ]
    decides = by_value[0] != by_value[1]
    mod = masks(flags, rows)[name]
    # Nothing where it does not matter ...
    assert torch.equal(_value(mod, check=~decides)[~decides], by_value[0][~decides])
    # ... and at every single position where it does.
    for i, j in decides.nonzero().tolist()[::7]:
        check = torch.zeros_like(decides)
        check[i, j] = True
        with pytest.raises(GatherError, match=r"test_out_of_range\.py"):
            _value(mod, check=check)


def test_guarded_score_passes_and_an_unguarded_one_raises():
    table = torch.rand(SHORT)
    score = torch.rand(LENGTH, LENGTH)
    everywhere = torch.ones((), dtype=torch.bool)

    def value(mod: Any) -> torch.Tensor:
        traced = trace_score_mod(mod)
        return evaluate(
            traced.graph,
            POSITIONS,
            score=score,
            captures=traced.captures,
            scalars=traced.scalars,
            check=everywhere,
        )

    guarded = value(lambda s, b, h, i, j: torch.where(j < SHORT, s + table[j], s))
    expected = score.clone()
    expected[:, :SHORT] += table
    assert torch.equal(guarded, expected)
    with pytest.raises(GatherError, match=r"=8 is not valid \(allowed: -8\.\.7"):
        value(lambda s, b, h, i, j: torch.where(j <= SHORT, s + table[j], s))
