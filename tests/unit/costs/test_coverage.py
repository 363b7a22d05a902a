"""What the cost model says it knows is what it knows."""

import itertools

import pytest
import torch

from fovea.arch import ARCHS
from fovea.costs.calibration import frozen
from fovea.costs.coverage import counted_head_dims, coverage
from fovea.costs.machine import machine_of
from fovea.costs.predict import kernel_of
from fovea.errors import UnsupportedError
from fovea.plan import select
from fovea.problem import Request, make_dense

QUERIES, KEYS = (65, 1100, 2047, 2048, 16384), (65, 1024, 1025, 2049, 5000)


def _plan(arch, dims, seqlen_q, seqlen_kv, causal):
    q, k, v = (
        torch.empty(1, rows, 2, columns, dtype=torch.bfloat16, device="meta")
        for rows, columns in ((seqlen_q, dims[0]), (seqlen_kv, dims[0]), (seqlen_kv, dims[1]))
    )
    return select.forward_plan(make_dense(q, k, v, Request(causal=causal)), arch)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (40, 64), (128, 128), (192, 128), (256, 256), (96, 96)])
def test_every_call_that_it_names_has_a_kernel_and_no_other(arch, dims):
    for seqlen_q, seqlen_kv, causal in itertools.product(QUERIES, KEYS, (False, True, "top_left")):
        plan = _plan(arch, dims, seqlen_q, seqlen_kv, causal)
        arguments = (plan, machine_of(arch.name), frozen().calibration)
        if (plan.head_dim, plan.head_dim_v) in counted_head_dims(arch.name):
            assert kernel_of(*arguments).rows >= 128
        else:
            with pytest.raises(UnsupportedError, match="no figure for kernels of head dims"):
                kernel_of(*arguments)


def test_sentence_names_the_head_dims_of_each_architecture():
    assert coverage("sm90").endswith("round up to 64, 128 or 256 on sm90")
    assert coverage("sm90", "sm103").endswith("on sm90; 64, 128 or (192, 128) on sm103")
