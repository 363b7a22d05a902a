"""Calls that between them use every part of a problem, and a count of calls that are checked."""

import sys

import pytest
import torch

import fovea
from fovea.ops import warm
from fovea.problem import Request, VarlenRequest, make_dense, make_varlen


def documents(seqlen, length):
    ids = torch.arange(seqlen) // length
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


def biased(table, slope, shift):
    """A score_mod with a captured tensor, a captured float and a captured int."""
    return lambda s, b, h, q_idx, kv_idx: s + table[h] * slope * (kv_idx - q_idx + shift)


def index(*values):
    return torch.tensor(values, dtype=torch.int32)


def dense_tensors(needs_grad=True):
    q = torch.randn(2, 20, 4, 8, requires_grad=needs_grad)
    k = torch.randn(2, 24, 2, 8, requires_grad=needs_grad)
    v = torch.randn(2, 24, 2, 4, requires_grad=needs_grad)
    return q, k, v


def make_plain():
    return make_dense(*dense_tensors(), Request())


def make_mods():
    table = torch.randn(4, requires_grad=True)
    sink = torch.randn(4, requires_grad=True)
    request = Request(
        causal="top_left",
        window=(9, None),
        score_mod=biased(table, 0.25, 3),
        mask_mod=documents(24, 10),
        softcap=5.0,
        sink=sink,
        scale=0.4,
        deterministic=True,
        wants_lse=True,
        wants_max_score=True,
    )
    return make_dense(*dense_tensors(), request)


def make_blocks():
    block_mask = fovea.create_block_mask(
        lambda b, h, q_idx, kv_idx: q_idx + b >= kv_idx, 2, 1, 20, 24, device="cpu", BLOCK_SIZE=8
    )
    return make_dense(*dense_tensors(), Request(block_mask=block_mask, window=(None, 4)))


def make_packed():
    q, k, v = (tensor.detach().flatten(0, 1).requires_grad_() for tensor in dense_tensors())
    where = VarlenRequest(
        index(0, 15, 15, 38), index(0, 20, 25, 48), 23, 23, seqused_kv=index(18, 5, 20)
    )
    return make_varlen(q, k, v, where, Request(causal=True))


def make_paged():
    q, k, v = dense_tensors(needs_grad=False)
    table = index(1, 0, 0, 1).view(2, 2)
    where = VarlenRequest(
        index(0, 15, 40), None, 25, 48, seqused_kv=index(40, 11), page_table=table
    )
    return make_varlen(q.flatten(0, 1), k, v, where, Request())


MAKERS = {
    "plain": make_plain,
    "mods": make_mods,
    "blocks": make_blocks,
    "packed": make_packed,
    "paged": make_paged,
}


@pytest.fixture(params=MAKERS, ids=str)
def problem(request):
    """One problem of each kind."""
    return MAKERS[request.param]()


@pytest.fixture
def empty_memo():
    """Nothing is known of earlier calls."""
    warm.clear()
    yield
    warm.clear()


@pytest.fixture
def checked(monkeypatch, empty_memo):
    """A list that grows with every call of fovea.attention whose arguments are checked."""
    seen = []
    # The package has the function under the module's name.
    api = sys.modules["fovea.api.attention"]
    make_dense = api.make_dense

    def spy(*arguments):
        seen.append(arguments)
        return make_dense(*arguments)

    monkeypatch.setattr(api, "make_dense", spy)
    return seen
