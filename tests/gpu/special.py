"""Checks of the CUDA backend that are no single call: streams, graphs, devices, large tensors.

Lives here: one function a check; it raises AssertionError or returns a note. Not here: features of
the kernels (`cases.py`). Invariant: `bundle_problems` names a problem for every variant that these
checks launch.
"""

from collections.abc import Callable
from typing import Any

import torch
from call import Call
from cases import case_named
from judge import judge, judge_problem, run
from torch import Tensor

import fovea
from fovea import mods
from fovea.problem import AttentionProblem, ForwardResult, Request, make_dense
from fovea.testing.inputs import Shape, dense_qkv

BF16 = torch.bfloat16
CUDA = "cuda"


def _causal(*, is_small: bool = False) -> Call:
    return case_named("causal").build(CUDA, is_small=is_small)


def _right(call: Call, result: ForwardResult) -> str:
    judgement = judge(call, result)
    assert judgement.wrong is None, judgement.wrong
    return f"error {judgement.error:.1e}"


def check_second_stream() -> str:
    """The launch waits for what was put on the current stream before it, and runs there."""
    call = _causal()
    expected = run(call, CUDA).out
    stream = torch.cuda.Stream()
    late = torch.zeros_like(call.q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # about 50 ms: a launch elsewhere would overtake the copy
        late.copy_(call.q)
        out = fovea.attention(late, call.k, call.v, causal=True, backend=CUDA)
    stream.synchronize()
    assert torch.equal(out, expected), "the launch ignored the current stream"
    return ""


def check_graph() -> str:
    """A captured call replays with new contents: its tile counter reset, its keys merged."""
    for name in ("causal", "few one causal"):
        _replay(case_named(name).build(CUDA, is_small=False))
    return ""


def _replay(call: Call) -> None:
    q = torch.zeros_like(call.q)
    fovea.attention(q, call.k, call.v, causal=True, backend=CUDA)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fovea.attention(q, call.k, call.v, causal=True, backend=CUDA)
    expected = run(call, CUDA).out
    for _ in range(3):
        q.copy_(call.q)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected), "a replayed graph gave other numbers"


def check_other_device() -> str:
    """Tensors on another GPU than the current one."""
    if torch.cuda.device_count() < 2:
        return "not run: one GPU"
    with torch.cuda.device(0):
        call = case_named("causal").build("cuda:1", is_small=False)
        note = _right(call, run(call, CUDA))
        assert torch.cuda.current_device() == 0, "the current device was changed"
    return note


def check_contents_check() -> str:
    """FOVEA_CHECK=1 changes no result."""
    import os

    call = case_named("relative bias").build(CUDA, is_small=False)
    before = os.environ.get("FOVEA_CHECK")
    os.environ["FOVEA_CHECK"] = "1"
    try:
        return _right(call, run(call, CUDA))
    finally:
        os.environ.pop("FOVEA_CHECK")
        if before is not None:
            os.environ["FOVEA_CHECK"] = before


def check_repeats() -> str:
    """Twenty launches of every kind of grid give the same bits."""
    names = ("causal", "late keys", "blocks late rising", "rising 300 causal", "window")
    for name in (*names, "few five of eight causal"):
        call = case_named(name).build(CUDA, is_small=False)
        first = run(call, CUDA)
        for _ in range(20):
            again = run(call, CUDA)
            same = torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)
            assert same, f"{name}: two launches differ"
    return ""


def check_large_tensor() -> str:
    """Q, K, V and O of 2^31 elements and some: offsets of batches pass 32 bits."""
    shape = Shape(batch=2**14 + 1, seqlen_q=128, heads_q=8, head_dim=128)
    q = torch.empty(shape.q, dtype=BF16, device=CUDA).normal_()
    assert q.numel() > 2**31
    k, v = q.roll(1, 1), q.roll(2, 1)
    return _ends_right(q, k, v)


def check_large_stride() -> str:
    """Heads 2^31 elements apart."""
    buffer = torch.empty(2**31 + 2**20, dtype=BF16, device=CUDA)

    def far(seed: int) -> Tensor:
        view = buffer[seed * 2**18 :].as_strided((1, 512, 2, 128), (2**31 + 2**19, 128, 2**31, 1))
        return view.copy_(torch.randn(view.shape, device=CUDA))

    q, k, v = far(0), far(1), far(2)
    call_options = {"causal": True}
    problem = make_dense(q, k, v, Request(wants_lse=True, **call_options))
    out, aux = fovea.attention(
        q, k, v, return_aux=fovea.AuxRequest(lse=True), backend=CUDA, **call_options
    )
    judgement = judge_problem(problem, ForwardResult(out, aux.lse, None))
    assert judgement.wrong is None, judgement.wrong
    return f"error {judgement.error:.1e}"


def _far_bias(device: str, far: int) -> Tensor:
    """Return a (1, 2, 300, 300) bias whose heads are `far` elements apart."""
    buffer = torch.empty(far + 300 * 300, dtype=torch.float16, device=device)
    bias = buffer.as_strided((1, 2, 300, 300), (2 * far, far, 300, 1))
    return bias.copy_(torch.randn(bias.shape, device=device))


def _far_bias_call(device: str, far: int) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    shape = Shape(seqlen_q=300, heads_q=2, head_dim=64)
    options = {"score_mod": mods.dense_bias(_far_bias(device, far))}
    return dense_qkv(shape, dtype=BF16, device=device), options


def check_large_capture() -> str:
    """A captured tensor whose second head lies 2^31 elements after the first."""
    (q, k, v), options = _far_bias_call(CUDA, 2**31)
    problem = make_dense(q, k, v, Request(wants_lse=True, **options))
    out, aux = fovea.attention(
        q, k, v, return_aux=fovea.AuxRequest(lse=True), backend=CUDA, **options
    )
    judgement = judge_problem(problem, ForwardResult(out, aux.lse, None))
    assert judgement.wrong is None, judgement.wrong
    return f"error {judgement.error:.1e}"


def _ends_right(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Run causally and judge the first and the last two batch entries."""
    aux = fovea.AuxRequest(lse=True)
    out, got = fovea.attention(q, k, v, causal=True, return_aux=aux, backend=CUDA)
    worst = 0.0
    for part in (slice(0, 2), slice(-2, None)):
        problem = make_dense(q[part], k[part], v[part], Request(causal=True, wants_lse=True))
        result = ForwardResult(out[part], got.lse[part].contiguous(), None)
        judgement = judge_problem(problem, result)
        assert judgement.wrong is None, judgement.wrong
        worst = max(worst, judgement.error)
    return f"error {worst:.1e}"


def check_empty() -> str:
    """No queries, no keys, no batch: right shapes and values, no launch."""
    for size in ({"seqlen_q": 0, "seqlen_kv": 5}, {"seqlen_kv": 0}, {"batch": 0}):
        shape = Shape(**{"seqlen_q": 3, "heads_q": 2, "head_dim": 64, **size})
        q, k, v = dense_qkv(shape, dtype=BF16, device=CUDA)
        out, aux = fovea.attention(q, k, v, return_aux=fovea.AuxRequest(lse=True), backend=CUDA)
        assert out.shape == shape.q
        assert not bool(out.any())
        assert bool((aux.lse == -torch.inf).all())
    return ""


CHECKS: dict[str, Callable[[], str]] = {
    "second stream": check_second_stream,
    "CUDA graph": check_graph,
    "other device": check_other_device,
    "FOVEA_CHECK": check_contents_check,
    "repeats": check_repeats,
    "empty": check_empty,
    "large tensor": check_large_tensor,
    "large stride": check_large_stride,
    "large capture": check_large_capture,
}


def bundle_problems() -> dict[str, AttentionProblem]:
    """Return problems, on the CPU, of variants that no case has."""
    (q, k, v), options = _far_bias_call("cpu", 300 * 300)
    return {"large capture": make_dense(q, k, v, Request(wants_lse=True, **options))}
