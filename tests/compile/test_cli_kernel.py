"""The resource table of a real kernel, and `fovea compile`."""

import pytest
import torch

import fovea
from fovea.arch import SM90, SM100
from fovea.cli.call import Call, Shape
from fovea.cli.disassembly import find_nvdisasm
from fovea.cli.kernel import compile_forward, resource_table
from fovea.compile import cache
from fovea.errors import UnsupportedError
from fovea.problem import Request, make_dense

pytest.importorskip("rich", reason="the extra cli is not installed")

SHAPE = Shape(batch=1, heads_q=1, heads_kv=1, seqlen_q=64, seqlen_kv=64, head_dim=64, head_dim_v=64)


def _problem(shape=SHAPE, dtype=torch.bfloat16):
    call = Call(shape=shape, dtype=dtype, keywords={})
    return make_dense(*call.make_inputs(torch.device("cpu")), Request(causal=True))


def test_kernel_is_compiled_once_and_its_table_tells_its_record():
    kernel = compile_forward(_problem(), SM90)
    assert kernel.origin == "the compiler"
    assert compile_forward(_problem(), SM90).origin == "the disk cache"
    resources, merge = (
        next(used for name, used in kernel.artifact.record.kernels.items() if part in name)
        for part in ("forward", "combine")
    )
    local_bytes = sum(used.stack_bytes + used.local_bytes for used in (resources, merge))
    table = resource_table(kernel)
    names, values = (list(column.cells) for column in table.columns)
    rows = dict(zip(names, values, strict=True))
    assert rows["threads"] == f"at most {resources.threads} a block"
    assert rows["registers"].startswith(str(resources.registers))
    assert rows["stack and local"].startswith(str(local_bytes))
    if find_nvdisasm() is None:
        assert kernel.counts is None
        return
    counts = kernel.counts
    # S = Q K^T and O += P V, each once in the source of the loop at least.
    assert counts.products >= 2 * SHAPE.head_dim // 16
    assert counts.exp2 > 0
    assert counts.tma > 0
    assert (counts.local_accesses == 0) == (local_bytes == 0)


def test_call_without_a_kernel_raises_with_the_way_out():
    with pytest.raises(UnsupportedError, match=r"float32.*reference"):
        compile_forward(_problem(dtype=torch.float32), SM100)


@pytest.mark.slow  # compiles every variant of the call
def test_kernel_of_a_bundle_says_so(tmp_path, monkeypatch):
    problem = _problem()
    fovea.precompile(problem.q, problem.k, problem.v, causal=True, bundle=tmp_path / "b", workers=2)
    monkeypatch.setenv("FOVEA_BUNDLE", str(tmp_path / "b"))
    monkeypatch.setattr(cache, "_in_process", {})
    assert compile_forward(problem, SM90).origin == "the bundle"
