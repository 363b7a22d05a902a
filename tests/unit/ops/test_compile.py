"""torch.compile and torch.export: equal to eager, few graphs, no breaks."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import fovea
from fovea import AuxRequest, dispatch

# Inductor takes tens of seconds here; what it adds to AOTAutograd is tested in the slow set.
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter), counter


def assert_same(function, other, tensors, *numbers):
    """Compare results and gradients of two functions."""
    grads = [tensor for tensor in tensors if tensor.requires_grad]
    results = []
    for f in (function, other):
        outputs = f(*tensors, *numbers)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum(o.square().sum() for o in outputs)
        results.append((*outputs, *(torch.autograd.grad(loss, grads) if grads else ())))
    for one, expected in zip(*results, strict=True):
        torch.testing.assert_close(one, expected)


def leaves(*shapes):
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_call_with_everything_equals_eager(backend):
    ids = torch.arange(24) // 10

    def call(q, k, v, table, sink):
        out, aux = fovea.attention(
            q,
            k,
            v,
            causal=True,
            window=(9, None),
            score_mod=lambda s, b, h, i, j: s + table[h] * (j - i),
            mask_mod=lambda b, h, i, j: ids[i] == ids[j],
            softcap=5.0,
            sink=sink,
            return_aux=AuxRequest(lse=True, max_score=True),
        )
        lse = aux.lse.masked_fill(aux.lse == -torch.inf, 0.0)
        return out, lse

    tensors = leaves((2, 20, 4, 8), (2, 24, 2, 8), (2, 24, 2, 4), (4,), (4,))
    assert_same(compiled(call, backend)[0], call, tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ten_values_of_captured_floats_compile_at_most_two_graphs(backend):
    def call(q, k, v, slope, softcap, scale):
        return fovea.attention(
            q,
            k,
            v,
            score_mod=lambda s, b, h, i, j: s + slope * (j - i),
            softcap=softcap,
            scale=scale,
        )

    function, counter = compiled(call, backend)
    tensors = tuple(t.detach() for t in leaves((1, 6, 2, 8), (1, 7, 2, 8), (1, 7, 2, 8)))
    for i in range(10):
        numbers = (0.1 * i, 5.0 + i, 0.3 + 0.01 * i)
        torch.testing.assert_close(function(*tensors, *numbers), call(*tensors, *numbers))
    assert counter.frame_count <= 2


def test_ten_values_of_captured_ints_compile_at_most_two_graphs():
    def call(q, width, left):
        return fovea.attention(
            q, q, q, mask_mod=lambda b, h, i, j: (i - j).abs() <= width, window=(left, None)
        )

    function, counter = compiled(call, "aot_eager")
    q = torch.randn(1, 20, 2, 8)
    for i in range(10):
        torch.testing.assert_close(function(q, 3 + i, 5 + i), call(q, 3 + i, 5 + i))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_that_change_compile_at_most_two_graphs(backend):
    def call(q, k):
        return fovea.attention(q, k, k, causal=True)

    function, counter = compiled(call, backend)
    for seqlen in (6, 7, 9, 12, 30):
        assert_same(function, call, leaves((2, seqlen, 4, 8), (2, seqlen + 3, 2, 8)))
    assert counter.frame_count <= 2


def test_dynamic_shapes_from_the_start_equal_eager():
    def call(q, k):
        return fovea.attention(q, k, k, causal=True, window=(4, None))

    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    # No two extents are equal in the first call: torch takes equal ones for one symbol.
    for batch, seqlen in ((5, 6), (3, 7), (4, 9)):
        assert_same(function, call, leaves((batch, seqlen, 4, 8), (batch, seqlen + 3, 2, 8)))
    assert counter.frame_count == 1


def test_compiled_self_attention_with_one_tensor_equals_eager():
    def call(x):
        return fovea.attention(x, x, x, causal=True)

    assert_same(compiled(call, "aot_eager")[0], call, leaves((2, 6, 4, 8)))


def test_compiled_flex_attention_with_block_mask_equals_eager():
    block_mask = fovea.create_block_mask(
        lambda b, h, i, j: i >= j, 1, 1, 40, 40, device="cpu", BLOCK_SIZE=16
    )

    def call(q, k, v):
        return fovea.flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

    tensors = leaves((2, 4, 40, 8), (2, 2, 40, 8), (2, 2, 40, 8))
    assert_same(compiled(call, "aot_eager")[0], call, tensors)


def test_compiled_varlen_equals_eager():
    bounds = torch.tensor([0, 3, 3, 10], dtype=torch.int32)

    def call(q, k):
        return fovea.attention_varlen(q, k, k, bounds, bounds, 7, 7, causal=True)

    assert_same(compiled(call, "aot_eager")[0], call, leaves((10, 4, 8), (10, 2, 8)))


def test_compiled_under_autocast_equals_eager():
    def call(q, k, v):
        return fovea.attention(q, k, v)

    tensors = leaves((1, 6, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        function = compiled(call, "aot_eager")[0]
        assert function(*tensors).dtype == torch.bfloat16
        assert_same(function, call, tensors)


@pytest.mark.parametrize("warn_only", [False, True])
def test_compiled_call_follows_the_global_determinism(warn_only, monkeypatch):
    seen = []
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda p, b: seen.append(p) or choose(p, b))
    function = compiled(lambda q: fovea.attention(q, q, q), "aot_eager")[0]
    try:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        function(torch.randn(1, 6, 2, 8))
    finally:
        torch.use_deterministic_algorithms(False)
    function(torch.randn(1, 6, 2, 8))
    found = [(problem.deterministic, problem.deterministic_warns) for problem in seen]
    assert found == [(True, warn_only), (False, False)]


def test_wrong_softcap_in_a_compiled_call_raises_when_it_runs():
    function = compiled(lambda q, c: fovea.attention(q, q, q, softcap=c), "aot_eager")[0]
    with pytest.raises(ValueError, match="above 0"):
        function(torch.randn(1, 6, 2, 8), -1.0)


def test_transform_inside_compile_raises_and_names_the_way_out():
    """Dynamo drops the autograd function there, so a gradient would be silently wrong."""

    def call(q):
        return torch.func.grad(lambda q: fovea.attention(q, q, q).square().sum())(q)

    with pytest.raises(Exception, match=r"torch\.func transform"):
        compiled(call, "aot_eager")[0](torch.randn(1, 6, 2, 8))


class Layer(torch.nn.Module):
    """A module with a learnable sink, for export."""

    def __init__(self):
        super().__init__()
        self.sink = torch.nn.Parameter(torch.randn(4))

    def forward(self, q, k, v):
        return fovea.attention(q, k, v, sink=self.sink, causal=True, softcap=5.0)


def test_exported_module_is_one_node_and_equals_eager_at_other_lengths():
    layer = Layer()
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 4)
    seqlen_q, seqlen_kv = torch.export.Dim("seqlen_q"), torch.export.Dim("seqlen_kv")
    program = torch.export.export(
        layer, (q, k, v), dynamic_shapes=({1: seqlen_q}, {1: seqlen_kv}, {1: seqlen_kv})
    )
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.fovea.attention_forward.default) == 1
    longer = torch.randn(2, 11, 4, 8), torch.randn(2, 13, 2, 8), torch.randn(2, 13, 2, 4)
    torch.testing.assert_close(program.module()(*longer), layer(*longer))


def test_exported_module_survives_saving(tmp_path):
    layer = Layer()
    tensors = torch.randn(2, 6, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 4)
    torch.export.save(torch.export.export(layer, tensors), tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    torch.testing.assert_close(loaded(*tensors), layer(*tensors))


class ModLayer(torch.nn.Module):
    """A module whose mods capture a buffer, a parameter, a number and an argument."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", torch.rand(4))
        self.bias = torch.nn.Parameter(torch.randn(32))
        self.width = 3

    def forward(self, q, k, factor):
        slopes, bias, width = self.slopes, self.bias, self.width
        return fovea.attention(
            q,
            k,
            k,
            score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i) * factor + bias[(i - j) % 32],
            mask_mod=lambda b, h, i, j: (i - j).abs() <= width,
        )


@pytest.mark.parametrize("strict", [False, True])
def test_exported_module_with_mods_equals_eager(strict):
    layer = ModLayer()
    tensors = torch.randn(2, 10, 4, 8), torch.randn(2, 10, 2, 8)
    program = torch.export.export(layer, (*tensors, 0.5), strict=strict)
    torch.testing.assert_close(program.module()(*tensors, 0.5), layer(*tensors, 0.5))


def test_make_fx_records_the_operator():
    def call(q, k):
        return fovea.attention(q, k, k, causal=True, scale=0.3)

    q, k = torch.randn(2, 6, 4, 8), torch.randn(2, 7, 2, 8)
    traced = make_fx(call)(q, k)
    targets = [node.target for node in traced.graph.nodes]
    assert targets.count(torch.ops.fovea.attention_forward.default) == 1
    other = torch.randn(2, 6, 4, 8)
    torch.testing.assert_close(traced(other, k), call(other, k))


HALF, THREE, TWO = np.float32(0.5), np.int64(3), np.float64(2.0)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, i, j: s + HALF * (i - j),
        lambda s, b, h, i, j: s * THREE,
        lambda s, b, h, i, j: s * TWO + float(HALF),
    ],
)
def test_numpy_numbers_of_a_module_are_numbers_of_a_mod(mod):
    (q,) = leaves((1, 32, 2, 16))

    def call(q):
        return fovea.attention(q, q, q, score_mod=mod)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), call(q))


TABLE = torch.randn(2, 17)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {"mask_mod": fovea.mods.document(torch.arange(24) // 10)},
        {"score_mod": lambda s, b, h, i, j: s + TABLE[h, (i - j).clamp(-8, 8) + 8].abs()},
        {"score_mod": lambda s, b, h, i, j: s + (torch.arange(4) * i).sum() * torch.tensor(0.1)},
        {"block_mask": fovea.create_block_mask(fovea.mods.causal, None, None, 24, 24)},
    ],
    ids=["mask", "table", "made inside", "block mask"],
)
def test_checkpoint_in_a_compiled_graph_takes_mods(options, backend):
    def call(q, k, v):
        return fovea.attention(q, k, v, **options)

    def checkpointed(q, k, v):
        return torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)

    graph, counter = compiled(checkpointed, backend)
    assert_same(graph, call, leaves((2, 24, 2, 16), (2, 24, 2, 16), (2, 24, 2, 16)))
    assert counter.frame_count == 1


def test_checkpoint_in_a_compiled_graph_still_refuses_effects_of_a_mod():
    seen = []

    def mask(b, h, i, j):
        seen.append(1)
        return i >= j

    def call(q):
        return torch.utils.checkpoint.checkpoint(
            lambda q: fovea.attention(q, q, q, mask_mod=mask), q, use_reentrant=False
        )

    with pytest.raises(torch._dynamo.exc.Unsupported, match="side effect"):
        torch.compile(call, fullgraph=True, backend="eager")(torch.randn(1, 8, 2, 16))


def test_branch_on_an_index_in_a_compiled_call_raises_and_names_the_way_out():
    def call(q):
        return fovea.attention(q, q, q, score_mod=lambda s, b, h, i, j: s if i >= j else s - 1)

    with pytest.raises(fovea.TraceError, match=r"a Python if on an index.*torch\.where"):
        torch.compile(call, backend="eager")(torch.randn(1, 8, 2, 16))
