"""What a mod sees while it is traced, and tracing under transforms, modes and threads."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fovea.mods import closures
from fovea.mods.trace import TracedMod, trace_mask_mod, trace_score_mod


@pytest.fixture(autouse=True)
def no_remembered_traces() -> None:
    closures.clear()


def window(w: int) -> Any:
    return lambda b, h, q, kv: q - kv < w


def test_trace_inside_sees_tensor_attributes() -> None:
    seen: dict[str, Any] = {}

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        seen.update(
            dtype=(s.dtype, q.dtype, (q > 0).dtype),
            shape=(tuple(s.shape), s.ndim, s.dim(), s.numel()),
            device=s.device,
            is_tensor=torch.is_tensor(s),
            floating=(s.is_floating_point(), torch.is_floating_point(q)),
            text=repr(s),
        )
        return s

    trace_score_mod(mod, torch.float64, torch.device("cuda", 1))
    assert seen["dtype"] == (torch.float64, torch.int64, torch.bool)
    assert seen["shape"] == ((), 0, 0, 1)
    assert seen["device"] == torch.device("cuda", 1)
    assert seen["is_tensor"] is True
    assert seen["floating"] == (True, False)
    assert seen["text"] == "<traced f64>"


def test_trace_autograd_function_is_followed_in_a_mask() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return torch.ops.aten.mul(x, 2)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    table = torch.ones(4)
    traced = trace_mask_mod(lambda b, h, q, kv: Doubled.apply(table[q]) > 1)
    found = [node.op for node in traced.graph.nodes if node.op != "detach"]
    expected = trace_mask_mod(lambda b, h, q, kv: table[q] * 2 > 1).graph
    assert found == [node.op for node in expected.nodes]


def in_fake_mode(run: Callable[[Tensor], TracedMod]) -> TracedMod:
    with FakeTensorMode():
        return run(torch.empty(4))


def in_vmap(run: Callable[[Tensor], TracedMod]) -> TracedMod:
    traced: list[TracedMod] = []

    def inner(x: Tensor) -> Tensor:
        traced.append(run(x))
        return x

    torch.vmap(inner)(torch.ones(2, 4))
    return traced[0]


def in_func_grad(run: Callable[[Tensor], TracedMod]) -> TracedMod:
    traced: list[TracedMod] = []

    def inner(x: Tensor) -> Tensor:
        traced.append(run(x))
        return x.sum()

    torch.func.grad(inner)(torch.ones(4))
    return traced[0]


def in_make_fx(run: Callable[[Tensor], TracedMod]) -> TracedMod:
    traced: list[TracedMod] = []

    def inner(x: Tensor) -> Tensor:
        traced.append(run(x))
        return x.sum()

    make_fx(inner, tracing_mode="symbolic")(torch.ones(4))
    return traced[0]


def in_export(run: Callable[[Tensor], TracedMod]) -> TracedMod:
    traced: list[TracedMod] = []

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            traced.append(run(x))
            return x.sum()

    torch.export.export(Model(), (torch.ones(4),), strict=False)
    return traced[0]


def with_default_device(run: Callable[[Tensor], TracedMod]) -> TracedMod:
    with torch.device("meta"):
        return run(torch.empty(4, device="cpu"))


@pytest.mark.parametrize(
    "surround",
    [in_fake_mode, in_vmap, in_func_grad, in_make_fx, in_export, with_default_device],
)
def test_trace_works_under_transforms_and_modes(surround: Any) -> None:
    def run(table: Tensor) -> TracedMod:
        return trace_score_mod(lambda s, b, h, q, kv: s + table[h] * (q - kv) + torch.tensor(2.0))

    outside = run(torch.empty(4))
    closures.clear()
    inside = surround(run)
    text = inside.graph.text().replace("f32*1!", "f32*1")
    assert text == outside.graph.text()


def test_trace_in_threads_gives_one_graph() -> None:
    results: list[str] = []
    mod = window(5)
    workers = [
        threading.Thread(target=lambda: results.append(trace_mask_mod(mod).graph.text()))
        for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 8
    assert len(set(results)) == 1


def test_trace_follows_attention_gyms_approximate_tanh() -> None:
    @torch.library.custom_op("approx::tanh", mutates_args=())
    def tanh(x: Tensor) -> Tensor:
        return torch.tanh(x)

    traced = trace_score_mod(lambda s, b, h, q, kv: torch.ops.approx.tanh(s / 2.0) * 2.0)
    assert traced.graph == trace_score_mod(lambda s, b, h, q, kv: torch.tanh(s / 2.0) * 2.0).graph


def test_trace_disabled_torch_function_raises_instead_of_computing_on_nothing() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return s * 2

    with torch._C.DisableTorchFunction(), pytest.raises(TypeError):
        trace_score_mod(lambda s, b, h, q, kv: s * 2)
    assert trace_score_mod(mod).graph.nodes[-1].op == "mul"
