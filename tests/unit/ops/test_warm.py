"""Calls seen before: recognised when nothing that matters changed, and only then.

Every call is compared with the same call after the memo is cleared, which checks and traces anew.
"""

import gc
import sys
import types
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fovea
from fovea import AuxRequest
from fovea.ops import warm
from fovea.testing.inputs import normal

sys.path.insert(0, str(Path(__file__).parent))

from warm_calls import (
    HEADS,
    SEQLEN,
    assert_like_a_checked_call,
    attend,
    biased,
    block_mask,
    tensors,
)

pytestmark = pytest.mark.usefixtures("empty_memo")


def keywords_by_name():
    table, ids = normal((HEADS,), seed=5), torch.arange(SEQLEN) // 5
    return {
        "dense": {},
        "causal": {"causal": True},
        "top left": {"causal": "top_left", "window": (3, None)},
        "numbers": {"scale": 2, "softcap": 3.0},
        "sink": {"sink": normal((HEADS,), seed=6)},
        "aux": {"return_aux": AuxRequest(lse=True, max_score=True)},
        "explicit": {"backend": "reference", "deterministic": False},
        "score_mod": {"score_mod": biased(table, 0.25)},
        "mask_mod": {"mask_mod": lambda b, h, i, j: ids[i] == ids[j]},
        "library": {"score_mod": fovea.mods.alibi(HEADS), "mask_mod": fovea.mods.causal},
        "combined": {
            "mask_mod": fovea.mods.and_masks(
                fovea.mods.sliding_window(4, 0), lambda b, h, i, j: ids[j] > 0
            )
        },
        "block_mask": {"block_mask": block_mask()},
        "all": {
            "causal": True,
            "sink": normal((HEADS,), seed=6),
            "score_mod": biased(table, 0.25),
            "mask_mod": lambda b, h, i, j: ids[i] == ids[j],
            "block_mask": block_mask(),
        },
    }


@pytest.mark.parametrize("name", keywords_by_name())
@pytest.mark.parametrize("needs_grad", [False, True])
def test_repeated_call_is_recognised_and_gives_the_same(name, needs_grad, checked):
    keywords = keywords_by_name()[name]
    q, k, v = (t.requires_grad_(needs_grad) for t in tensors())
    results = []
    for _ in range(3):
        found = attend(q, k, v, **keywords)
        out, aux = found if isinstance(found, tuple) else (found, ())
        grads = torch.autograd.grad(out.square().sum(), (q, k, v)) if needs_grad else ()
        results.append((out, *aux, *grads))
        assert out.requires_grad == needs_grad
    assert len(checked) == 1
    for result in results[1:]:
        assert len(result) == len(results[0])
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


def test_results_of_recognised_calls_are_their_own():
    q, k, v = tensors()
    first, aux = attend(q, k, v, return_aux=AuxRequest(lse=True))
    kept, kept_lse = first.clone(), aux.lse.clone()
    attend(q + 1, k, v, return_aux=AuxRequest(lse=True))
    assert torch.equal(first, kept)
    assert torch.equal(aux.lse, kept_lse)


# ------------------------------------------------------------------------- arguments that change


WRONG = {
    "causal": ({"causal": True}, {"causal": 1}, ValueError),
    "no causal": ({"causal": False}, {"causal": 0}, ValueError),
    "scale": ({"scale": 1}, {"scale": True}, TypeError),
    "infinite scale": ({"scale": 1.0}, {"scale": float("inf")}, ValueError),
    "scale not a number": ({"scale": 1.0}, {"scale": float("nan")}, ValueError),
    "scale that float32 loses": ({"scale": 1.0}, {"scale": 1e39}, ValueError),
    "softcap that float32 loses": ({"softcap": 1.0}, {"softcap": 1e-39}, ValueError),
    "softcap": ({"softcap": 1.0}, {"softcap": -1.0}, ValueError),
    "softcap 0": ({"softcap": 1.0}, {"softcap": 0}, ValueError),
    "window": ({"window": (1, 0)}, {"window": (True, False)}, TypeError),
    "window of floats": ({"window": (1, 0)}, {"window": (1.0, 0)}, TypeError),
    "window below 0": ({"window": (1, 0)}, {"window": (-1, 0)}, ValueError),
    "deterministic": ({"deterministic": True}, {"deterministic": 1}, TypeError),
    "backend": ({}, {"backend": "metal"}, ValueError),
    "backend of a type": ({}, {"backend": ["cuda"]}, (TypeError, ValueError)),
    "cuda": ({}, {"backend": "cuda"}, fovea.UnsupportedError),
    "aux": ({}, {"return_aux": True}, TypeError),
    "sink": ({"sink": torch.zeros(HEADS)}, {"sink": torch.zeros(HEADS + 1)}, ValueError),
    "sink of integers": (
        {"sink": torch.zeros(HEADS)},
        {"sink": torch.zeros(HEADS, dtype=torch.int32)},
        TypeError,
    ),
    "score_mod": ({"score_mod": lambda s, b, h, i, j: s}, {"score_mod": 3}, TypeError),
    "mask_mod": ({"mask_mod": lambda b, h, i, j: i > j}, {"mask_mod": "causal"}, TypeError),
    "block_mask": ({"block_mask": block_mask()}, {"block_mask": block_mask(3, 32)}, ValueError),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument_raises_after_a_right_one(name):
    right, wrong, error = WRONG[name]
    q, k, v = tensors()
    for _ in range(2):
        attend(q, k, v, **right)
    with pytest.raises(error):
        attend(q, k, v, **wrong)


def test_wrong_tensors_raise_after_right_ones():
    q, k, v = tensors()
    for _ in range(2):
        attend(q, k, v)
    for wrong in (
        (q, k[:1], v[:1]),
        (q, k, v[:, 1:]),
        (q, k.double(), v),
        (q, k, v.to("meta")),
        (q[..., :4], k, v),
        (q, k.to_sparse(), v),
        (q.tolist(), k, v),
    ):
        with pytest.raises((ValueError, TypeError)):
            attend(*wrong)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_number_in_a_tensor_is_read_in_every_call(name):
    q, k, v = tensors()
    number = torch.tensor(0.5)
    for value in (0.5, 2.0, 0.125):
        number.fill_(value)
        assert torch.equal(attend(q, k, v, **{name: number}), attend(q, k, v, **{name: value}))


def test_other_numbers_are_used_by_recognised_calls(checked):
    q, k, v = tensors()
    attend(q, k, v, scale=1.0, softcap=2.0)
    found = attend(q, k, v, scale=0.25, softcap=5)
    assert len(checked) == 1
    warm.clear()
    assert torch.equal(found, attend(q, k, v, scale=0.25, softcap=5))


@pytest.mark.parametrize("scale", [0, 0.0, -1.0])
def test_scale_of_another_sign_is_not_recognised(scale, checked):
    q, k, v = tensors()
    attend(q, k, v, scale=1.0)
    assert_like_a_checked_call(lambda: attend(q, k, v, scale=scale))
    assert len(checked) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:, 1:],
        lambda t: t[..., :4],
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.double(),
        lambda t: t[:1].expand(2, -1, -1, -1),
    ],
    ids=["seqlen", "head_dim", "strides", "dtype", "expanded"],
)
def test_other_layouts_are_checked_anew(change, checked):
    attend(*tensors())
    q, k, v = (change(t) for t in tensors())
    found = assert_like_a_checked_call(lambda: attend(q, k, v))
    assert len(checked) == 3
    assert found.dtype == q.dtype
    assert found.shape == q.shape


# ----------------------------------------------------------------------------------- surroundings


def test_gradient_is_recorded_exactly_when_it_is_needed(checked):
    q, k, v = tensors()
    table = normal((HEADS,), seed=5)
    mod = biased(table, 0.5)

    def is_recorded():
        return attend(q, k, v, score_mod=mod).requires_grad

    assert not is_recorded()
    q.requires_grad_()
    assert is_recorded()
    with torch.no_grad():
        assert not is_recorded()
    with torch.inference_mode():
        assert not is_recorded()
    q.requires_grad_(False)
    assert not is_recorded()
    assert len(checked) == 1
    table.requires_grad_()
    for _ in range(2):
        out = attend(q, k, v, score_mod=mod)
    assert len(checked) == 2
    (grad,) = torch.autograd.grad(out.square().sum(), table)
    warm.clear()
    (expected,) = torch.autograd.grad(attend(q, k, v, score_mod=mod).square().sum(), table)
    assert torch.equal(grad, expected)


def test_backward_of_a_recognised_call_uses_the_numbers_of_its_forward():
    q, k, v = (t.requires_grad_() for t in tensors())
    table = normal((HEADS,), seed=5)
    attend(q, k, v, score_mod=biased(table, 0.5), scale=0.5)
    out = attend(q, k, v, score_mod=biased(table, -2.0), scale=2.0)
    attend(q, k, v, score_mod=biased(table, 0.25), scale=0.25)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    warm.clear()
    fresh = attend(q, k, v, score_mod=biased(table, -2.0), scale=2.0)
    for one, other in zip(found, torch.autograd.grad(fresh.square().sum(), (q, k, v)), strict=True):
        assert torch.equal(one, other)


def test_second_order_of_a_recognised_call():
    q, k, v = (t.requires_grad_() for t in tensors(seqlen=4, dtype=torch.float64))
    attend(q, k, v)
    assert torch.autograd.gradgradcheck(attend, (q, k, v), fast_mode=True)


def test_autocast_casts_a_call_that_was_known_without_it():
    q, k, v = tensors()
    attend(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(q, k, v).dtype == torch.bfloat16
    assert attend(q, k, v).dtype == torch.float32


def test_deterministic_algorithms_are_asked_about_in_every_call(checked):
    q, k, v = tensors()
    attend(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        attend(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(checked) == 2
    assert checked[1][3].deterministic is None


def test_modes_and_profilers_see_the_operator_of_a_known_call():
    q, k, v = tensors()
    attend(q, k, v)
    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Spy():
        attend(q, k, v)
    assert "fovea.attention_forward.default" in seen
    with torch.profiler.profile() as profile:
        attend(q, k, v)
    assert any("fovea::attention_forward" in event.name for event in profile.events())


def test_transforms_subclasses_and_graphs_of_a_known_call():
    q, k, v = tensors()
    expected = attend(q, k, v)

    class Named(torch.Tensor):
        pass

    torch.testing.assert_close(
        torch.func.vmap(lambda x: attend(x, k, v))(q.expand(3, *q.shape))[1], expected
    )
    grad = torch.func.grad(lambda x: attend(x, k, v).sum())(q)
    assert grad.shape == q.shape
    torch.testing.assert_close(
        attend(q.as_subclass(Named), k, v).as_subclass(torch.Tensor), expected
    )
    graph = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(q, k, v), expected)


# ------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("needs_grad", [False, True])
def test_memo_keeps_nothing_of_the_user_alive(needs_grad):
    def call():
        q, k, v = (t.requires_grad_(needs_grad) for t in tensors())
        table, sink = normal((HEADS,), seed=5), normal((HEADS,), seed=6)
        mod, mask = biased(table, 0.5), block_mask()
        for _ in range(2):
            attend(q, k, v, score_mod=mod, sink=sink, block_mask=mask)
        held = (q, k, v, table, sink, mod, mask, mask.kv_indices)
        return [weakref.ref(value) for value in held]

    references = call()
    gc.collect()
    assert len(warm._known) == 1
    assert [reference() for reference in references] == [None] * len(references)


def test_memo_is_bounded(monkeypatch):
    monkeypatch.setattr(warm, "_LIMIT", 4)
    for seqlen in range(1, 11):
        attend(*tensors(seqlen=seqlen))
        assert len(warm._known) <= 4
    q, k, v = tensors()
    for extra in range(2 * warm._MODS_LIMIT):  # of one code, each with a shape of its own
        attend(q, k, v, score_mod=biased(normal((HEADS + extra,), seed=1), 1.0))
    assert max(len(found) for found in warm._known.values()) == warm._MODS_LIMIT


def multiplied(s, b, h, i, j, factor):
    return s * factor


def test_code_object_in_the_memo_keeps_its_id():
    """Keys hold ids of code: another function must never get the id of one that is gone."""
    q, k, v = tensors()
    for number in range(30):
        space: dict[str, object] = {}
        exec(f"def mod(s, b, h, i, j): return s * {number}", space)
        mod = space["mod"]
        assert isinstance(mod, types.FunctionType)
        found = attend(q, k, v, score_mod=mod)
        space.clear()  # the cycle through the function's globals
        del mod
        assert torch.equal(found, attend(q, k, v, score_mod=partial(multiplied, factor=number)))
