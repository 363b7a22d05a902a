"""A problem survives the trip over the operator boundary, and numbers stay out of its text."""

import torch

from fovea import dispatch
from fovea.ops.program import pack, parse, unpack
from fovea.problem import Request, make_dense
from fovea.problem.parts import facts_of, numbers_of, problem_of, tensors_of


def assert_same_problem(found, expected):
    """Compare everything a backend reads, tensors by identity."""
    for name in ("causal", "window", "softcap", "scale", "has_default_scale", "deterministic"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("deterministic_warns", "wants_lse", "wants_max_score"):
        assert getattr(found, name) == getattr(expected, name), name
    for one, other in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert one is other
    for name in ("score_mod", "mask_mod", "block_mask_mod"):
        mod, other = getattr(found, name), getattr(expected, name)
        assert (mod is None) == (other is None)
        if mod is not None:
            assert (mod.graph, mod.scalars, mod.source) == (
                other.graph,
                other.scalars,
                other.source,
            )
    lists, others = found.block_lists, expected.block_lists
    assert (lists is None) == (others is None)
    if lists is not None:
        for name in ("block_q", "block_kv", "seqlen_q", "seqlen_kv", "batch", "heads"):
            assert getattr(lists, name) == getattr(others, name)
    if expected.varlen is not None:
        assert found.varlen.max_seqlen_q == expected.varlen.max_seqlen_q
        assert found.varlen.max_seqlen_kv == expected.varlen.max_seqlen_kv


def test_unpack_of_pack_is_the_problem(problem):
    assert_same_problem(unpack(pack(problem, "reference")), problem)


def test_problem_of_its_facts_and_tensors_is_the_problem(problem):
    parts = facts_of(problem), numbers_of(problem), tensors_of(problem)
    assert_same_problem(problem_of(*parts), problem)


def test_facts_hold_no_tensor_of_the_problem(problem):
    """Autograd keeps the facts: a tensor in them would bypass its hooks and live too long."""
    held = {id(t) for t in tensors_of(problem) if t is not None}

    def look(value):
        assert id(value) not in held
        if isinstance(value, tuple):
            for part in value:
                look(part)
        for name in getattr(value, "__dataclass_fields__", ()):
            look(getattr(value, name))

    look(facts_of(problem))
    look(numbers_of(problem))


def test_results_of_unpacked_problem_equal_results_of_the_problem(problem):
    unpacked = unpack(pack(problem, None))
    choice = dispatch.choose(problem, None)
    for one, other in zip(
        dispatch.forward(unpacked, choice), dispatch.forward(problem, choice), strict=True
    ):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_numbers_that_change_leave_the_text_alone():
    q = torch.randn(1, 8, 2, 8)

    def text(slope, width, window, scale, softcap):
        request = Request(
            window=(window, 0),
            scale=scale,
            softcap=softcap,
            score_mod=lambda s, b, h, q_idx, kv_idx: s * slope,
            mask_mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width,
        )
        return pack(make_dense(q, q, q, request), None).program

    assert text(0.5, 4, 3, 0.1, 2.0) == text(0.75, 5, 4, 0.2, 3.0)


def test_text_tells_backends_and_features_apart():
    q = torch.randn(1, 8, 2, 8)
    plain = make_dense(q, q, q, Request())
    causal = make_dense(q, q, q, Request(causal=True))
    texts = {
        pack(plain, None).program,
        pack(plain, "reference").program,
        pack(causal, None).program,
        pack(make_dense(q, q, q, Request(causal="top_left")), None).program,
        pack(make_dense(q, q, q, Request(window=(None, 0))), None).program,
        pack(make_dense(q, q, q, Request(wants_max_score=True)), None).program,
    }
    assert len(texts) == 6
    assert parse(pack(plain, "reference").program).backend == "reference"
