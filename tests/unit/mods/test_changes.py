"""Changes in place: exact as torch's, or an error; never lost, never made to a captured tensor."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.errors import TraceError
from fovea.mods import closures
from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.trace import trace_score_mod

LEAF = torch.linspace(-2.0, 2.0, 6)
WEIGHT = torch.linspace(-3.0, 3.0, 27).reshape(9, 3)
SHAPE = (1, 2, 4, 5)
SCORE = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def no_remembered_traces() -> None:
    closures.clear()


def along(extent: int, dimension: int) -> Tensor:
    return torch.arange(extent).reshape([extent if d == dimension else 1 for d in range(4)])


def traced_values(mod: Any) -> Tensor:
    """Return the values of a traced mod."""
    traced = trace_score_mod(mod)
    positions = Positions(b=along(1, 0), h=along(2, 1), q_idx=along(4, 2), kv_idx=along(5, 3))
    value = evaluate(
        traced.graph, positions, score=SCORE, captures=traced.captures, scalars=traced.scalars
    )
    return value.broadcast_to(SHAPE)


def eager_values(mod: Any) -> Tensor:
    """Return the values of a mod that torch runs position by position."""
    expected = torch.empty(SHAPE)
    for place in torch.cartesian_prod(*(torch.arange(extent) for extent in SHAPE)):
        at = tuple(place.tolist())
        expected[at] = mod(SCORE[at].clone(), *place.unbind())
    return expected


def changing(change: Any) -> Any:
    """Return a mod that changes a value it computed, and returns that value."""

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        y = s + i - 2.5
        change(y)
        return y

    return mod


ACTIVATIONS: dict[str, Any] = {
    name: lambda y, name=name: getattr(F, name)(y, inplace=True)
    for name in (
        *("elu", "celu", "selu", "relu", "relu6", "leaky_relu", "silu", "mish", "hardswish"),
        *("hardsigmoid", "hardtanh"),
    )
}
ACTIVATIONS["threshold"] = lambda y: F.threshold(y, 0.5, -2.0, inplace=True)
ACTIVATIONS["by_position"] = lambda y: F.leaky_relu(y, 0.2, True)
ACTIVATIONS["module"] = torch.nn.ReLU(inplace=True)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_inplace_changes_its_argument(name: str) -> None:
    mod = changing(ACTIVATIONS[name])
    assert torch.allclose(traced_values(mod), eager_values(mod), rtol=1e-6, atol=1e-6)


SAME: dict[str, Any] = {
    "reshape": lambda y: y.reshape(()),
    "view": lambda y: y.view(()),
    "ellipsis": lambda y: y[...],
    "squeeze": lambda y: y.squeeze(),
    "t": lambda y: y.t(),
    "expand": lambda y: y.expand(()),
    "contiguous": lambda y: y.contiguous(),
    "float": lambda y: y.float(),
    "to": lambda y: y.to(torch.float32),
    "type_as": lambda y: y.type_as(y),
    "as_tensor": lambda y: torch.as_tensor(y),
    "positive": lambda y: +y,
    "copy": lambda y: y.to(torch.float32, copy=True),
    "clone": lambda y: y.clone(),
    "abs": lambda y: y.abs(),
}


@pytest.mark.parametrize("name", SAME)
def test_change_through_the_whole_value_equals_torch(name: str) -> None:
    mod = changing(lambda y: SAME[name](y).add_(1).mul_(2))
    assert torch.equal(traced_values(mod), eager_values(mod))


VIEWS: dict[str, Any] = {
    "view": lambda y: y.view(1),
    "unsqueeze": lambda y: y.unsqueeze(0),
    "none": lambda y: y[None],
    "expand": lambda y: y.expand(1),
    "twice": lambda y: y[None][0],
    "detach": lambda y: y.detach(),
    "aten": lambda y: torch.ops.aten.view(y, [1]),
    "einsum": lambda y: torch.einsum("i->i", y[None]),
    "loop": lambda y: next(iter(y[None])),
}


@pytest.mark.parametrize("name", VIEWS)
def test_change_through_a_view_then_read_raises(name: str) -> None:
    for change in (lambda v: v.add_(1), lambda v: v.__imul__(2), lambda v: F.relu(v, True)):
        mod = changing(lambda y, change=change: change(VIEWS[name](y)))
        with pytest.raises(TraceError, match=r"changed in place at .*test_changes\.py.*y = y \+ 1"):
            trace_score_mod(mod)


def test_change_of_the_base_then_read_of_a_view_raises() -> None:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        y = s * 2
        view = y.view(1)
        y += 1
        return view[0]

    with pytest.raises(TraceError, match="changed in place"):
        trace_score_mod(mod)


@pytest.mark.parametrize(
    "part", [lambda r: r[0], lambda r: r.unbind()[0], lambda r: r.select(0, 0)]
)
def test_change_of_a_part_then_read_of_the_row_raises(part: Any) -> None:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        row = torch.stack([s, i * 1.0])
        part(row).add_(5)
        return row.sum()

    with pytest.raises(TraceError, match="changed in place"):
        trace_score_mod(mod)


def test_change_of_a_view_that_alone_is_read_equals_torch() -> None:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        view = (s * 2).unsqueeze(0)
        view += i
        return view[0]

    assert torch.equal(traced_values(mod), eager_values(mod))


@pytest.mark.parametrize(
    "change",
    [
        lambda i: i.add_(0.5),
        lambda i: i.sqrt_(),
        lambda i: i.mul_(LEAF[:3]),
        lambda i: (i > 1).add_(i),
    ],
)
def test_change_that_does_not_fit_raises(change: Any) -> None:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        change(i * 1)
        return s

    with pytest.raises(TraceError, match="cannot store"):
        trace_score_mod(mod)


@pytest.mark.parametrize(
    "call",
    [
        lambda y: torch.add(y, 1, out=y),
        lambda y: torch.mul(y, 2, out=y),
        lambda y: torch.exp(y, out=y),
        lambda y: torch.where(y > 0, y, y, out=y),
        lambda y: torch.clamp(y, 0, out=y),
        lambda y: torch.pow(y, 2, out=y),
        lambda y: torch.amax(y, (), out=y),
        lambda y: torch.add(y, 1, out=torch.empty(())),
    ],
)
def test_out_raises(call: Any) -> None:
    with pytest.raises(TraceError, match="out= cannot be traced"):
        trace_score_mod(changing(call))


@pytest.mark.parametrize(
    "change",
    [
        lambda: LEAF.add_(1),
        lambda: LEAF[:3].mul_(2),
        lambda: LEAF.view(2, 3).T.zero_(),
        lambda: LEAF.unbind()[0].fill_(1),
        lambda: LEAF.__iadd__(1),
        lambda: LEAF.__setitem__(0, 5.0),
        lambda: LEAF.data.add_(1),
        lambda: LEAF.numpy() is None or torch.from_numpy(LEAF.numpy()).add_(1),
        lambda: setattr(LEAF, "data", torch.ones(6)),
        lambda: LEAF.requires_grad_(),
        lambda: torch.relu_(LEAF),
        lambda: F.relu(LEAF, inplace=True),
        lambda: F.threshold(LEAF, 0.0, 1.0, True),
        lambda: torch.add(LEAF, 1, out=LEAF),
        lambda: torch.aminmax(WEIGHT, dim=1, out=(LEAF[:3], LEAF[3:])),
        lambda: torch.nn.init.zeros_(LEAF),
        lambda: getattr(torch, "_foreach_add_")([LEAF], 1),  # noqa: B009  # private
        lambda: torch.ops.aten.add_(LEAF, 1),
        lambda: torch.ops.aten.add_.Tensor(LEAF, LEAF),
        lambda: F.embedding(torch.arange(3), WEIGHT, max_norm=0.5),
    ],
)
def test_change_of_a_captured_tensor_raises_before_it_happens(change: Any) -> None:
    before = (LEAF.clone(), WEIGHT.clone())

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        change()
        return s

    with pytest.raises(TraceError, match=r"would change a captured tensor.*test_changes\.py"):
        trace_score_mod(mod)
    assert torch.equal(LEAF, before[0])
    assert torch.equal(WEIGHT, before[1])
    assert not LEAF.requires_grad


@pytest.mark.parametrize(
    "make",
    [
        lambda: LEAF.clone().add_(1),
        lambda: (LEAF * 2)[:4].mul_(3),
        lambda: torch.zeros(5).fill_(2.0),
        lambda: torch.add(LEAF, 1, out=torch.empty(6)),
    ],
)
def test_change_of_a_tensor_made_in_the_mod_equals_torch(make: Any) -> None:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + make()[h]

    assert torch.equal(traced_values(mod), eager_values(mod))
