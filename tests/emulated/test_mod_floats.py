"""Floats in mods: functions near zero and far away, quotients of any two numbers, 16-bit types."""

import pytest
import torch
from mod_variant import ModVariant
from torch import Tensor

import fovea
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget
from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.graph import FLOAT_UNARY, CaptureSpec, Graph, Node
from fovea.mods.trace import trace_score_mod
from fovea.runtime.emulated_module import load

EPS = torch.finfo(torch.float32).eps
LEAST = 2.0**-149  # above zero
# Sine and its like are tested in `test_trigonometry.py`, in kernels of their own.
FUNCTIONS = tuple(op for op in FLOAT_UNARY if op not in ("sin", "cos", "tan"))
# Relative errors that are bearable, in float32's epsilon.
LIMITS = dict.fromkeys(FUNCTIONS, 1.5) | {"tanh": 3.0}
# What the compiler knows: near 1, a power of two, far from it, subnormal, no divisor at all.
DIVISORS = (
    *(3.0, -0.1, 1.5, 2.0**-126, -(2.0**127), 2.0**126, 1e30, 1e-30, 3e38, -3e38),
    *(1e-39, -1e-39, LEAST, 3 * LEAST, 2.0**-127, float("inf"), float("nan"), 0.0, -0.0),
)


def _node(op: str, *args: int, dtype: str = "f32", attrs: tuple[float, ...] = ()) -> Node:
    return Node(op=op, args=args, dtype=dtype, attrs=attrs)


def _graph(*nodes: Node) -> Graph:
    return Graph("score", nodes, len(nodes) - 1, (CaptureSpec("f32", 1, False),), ("i64",))


def _run(graphs: list[Graph], score: Tensor, captured: Tensor, arch: str) -> Tensor:
    """Return what graphs make of scores, (graphs, scores); q_idx is a score's number."""
    artifact = get_artifact(
        ModVariant(graphs=tuple(graphs), wide_integers=False), CompileTarget(arch=arch)
    )
    used = artifact.record.kernels.values()
    assert all(each.stack_bytes == each.local_bytes == 0 for each in used)
    out = torch.full((len(graphs), len(score)), torch.nan)
    indices = torch.zeros((4, len(score)), dtype=torch.int32)
    indices[2] = torch.arange(len(score))
    load(artifact)(score, indices, out, (captured,), (0,))
    return out


def _spread(count: int, generator: torch.Generator) -> Tensor:
    """Return numbers of any size and sign, subnormal ones too."""
    mantissa = torch.rand(count, generator=generator, dtype=torch.float64) + 1
    exponent = torch.randint(-150, 128, (count,), generator=generator)
    sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return torch.ldexp(mantissa * sign, exponent).float()


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_functions_are_good_to_the_last_places_of_the_result(arch: str) -> None:
    generator = torch.Generator().manual_seed(1)
    dense = torch.cat((torch.randn(300, generator=generator), torch.linspace(0.5, 2, 200)))
    dense = torch.cat((dense, torch.linspace(2, 104, 150), torch.linspace(0.68, 0.73, 100)))
    score = torch.cat((dense, -dense, _spread(600, generator)))
    found = _run([_graph(_node("score"), _node(op, 0)) for op in LIMITS], score, score, arch)
    for (op, limit), values in zip(LIMITS.items(), found, strict=True):
        exact = getattr(torch, op)(score.double())
        # A sigmoid below the least normal number is flushed to 0.
        allowed = (limit * EPS * exact.abs()).clamp(min=2.0**-126 if op == "sigmoid" else LEAST)
        off = (values.double() - exact).abs()
        wrong = ~((off <= allowed) | (values == exact.float()) | (values.isnan() & exact.isnan()))
        i = int(wrong.int().argmax())
        assert not wrong.any(), (op, score[i], values[i], exact[i])


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_quotients_of_any_two_numbers_are_good_to_the_last_place(arch: str) -> None:
    generator = torch.Generator().manual_seed(2)
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 3.4e38, -7.0])
    edges = torch.cat((edges, torch.tensor([1.2e-38, LEAST, -1e-39, 2.0**126, 2.0**127, 1e-38])))
    integers = torch.randint(1, 4096, (2, 500), generator=generator)
    quotients, divisors = _spread(500, generator).double(), _spread(500, generator).double()
    a = (edges.repeat(15), _spread(900, generator), integers.prod(0), quotients * divisors)
    b = (edges.repeat_interleave(15), _spread(900, generator), integers[1], divisors)
    a, b = torch.cat(a).float(), torch.cat(b).float()
    index, divisor = _node("q_idx", dtype="i64"), _node("load", 1, attrs=(0,))
    graphs = [_graph(_node("score"), index, divisor, _node("div", 0, 2))]
    for number in DIVISORS:
        known = _node("const", attrs=(number,))
        graphs.append(_graph(_node("score"), known, _node("div", 0, 1)))
    found = _run(graphs, a, b, arch)
    _check_quotients(found[0], a, b)
    is_product = slice(len(edges) ** 2 + 900, len(edges) ** 2 + 1400)
    assert torch.equal(found[0, is_product], integers[0].float())
    for number, values in zip(DIVISORS, found[1:], strict=True):
        _check_quotients(values, a, torch.full_like(a, number))


def _check_quotients(found: Tensor, a: Tensor, b: Tensor) -> None:
    """Fail where a quotient is off by more than its last place, or two least numbers."""
    exact, expected = a.double() / b.double(), a / b
    off = (found.double() - exact).abs()
    is_near = (off <= (0.75 * EPS * exact.abs()).clamp(min=2 * LEAST)) & expected.isfinite()
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    has_sign = (found.signbit() == expected.signbit()) | expected.isnan()
    wrong = ~((is_near | is_same) & has_sign)
    i = int(wrong.int().argmax())
    assert not wrong.any(), (a[i], b[i], found[i], expected[i])


def _sixteen_bits(s, b, h, i, j):
    s = torch.where((s * 1e6).half().isinf(), s, -s)
    return s + ((i * 257 + j).bfloat16() - i * 257).float() * 0.1


def _far_quotients(s, b, h, i, j):
    return (s * 1e37) / (i * 0 + 3e38) * 10 + s * 1e-39 / 1e-39


def _wide_caps(s, b, h, i, j):
    return torch.tanh(s * 1e-6) * 1e6 + 1e7 * torch.tanh(s / 1e7) + j * 0.01


def _rounded_line(s, b, h, i, j):
    return s + 0.25 * (i * 40 - j).bfloat16()


_HALVES = torch.linspace(-3, 3, 71).half()


def _with_numbers(number):
    def score_mod(s, b, h, i, j):
        return s + _HALVES[i] * 3.3 + (s.bfloat16() * number).float() * 0.3

    return score_mod


_ROWS = torch.linspace(-1.7, 1.9, 210).reshape(70, 3).bfloat16()


def _rows(s, b, h, i, j):
    return s * (_ROWS[i] + _ROWS[j]).prod(-1) + (_ROWS[i] * _ROWS[j]).sum(-1)


_TABLE = torch.arange(66, dtype=torch.float64) / 3


def _read_in_float64(s, b, h, i, j):
    return s + _TABLE[j].float() - _TABLE[i % 66].half()


MODS = {
    "sixteen bits": {"score_mod": _sixteen_bits},
    "far quotients": {"score_mod": _far_quotients},
    "wide caps": {"score_mod": _wide_caps},
    "rounded line": {"score_mod": _rounded_line},
    "numbers": {"score_mod": _with_numbers(1.37)},
    "rows of 16 bits": {"score_mod": _rows},
    "read in float64": {"score_mod": _read_in_float64},
    "cap": {"softcap": 1e7},
    "mask of halves": {"mask_mod": lambda b, h, i, j: (i * 33).half() - (j * 33).half() > 1.5},
}

QUICK = (("sixteen bits", "sm90"), ("numbers", "sm90"))


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, marks=[] if (name, arch) in QUICK else [pytest.mark.slow])
        for name in MODS
        for arch in ("sm90", "sm100")
    ],
)
def test_kernels_score_as_the_reference_does(name: str, arch: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 16, generator=generator).bfloat16() for n in (70, 66, 66))
    found, expected = (
        fovea.attention(q, k, v, backend=backend, return_aux=_AUX, **MODS[name])[1]
        for backend in (f"emulator:{arch}", "reference")
    )
    torch.testing.assert_close(found.max_score, expected.max_score, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found.lse, expected.lse, rtol=2e-6, atol=2e-6)


_AUX = fovea.AuxRequest(lse=True, max_score=True)


def test_float64_in_a_mod_is_refused_and_the_reference_takes_it() -> None:
    q = torch.randn(1, 8, 1, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = torch.arange(8, dtype=torch.float64)

    def score_mod(s, b, h, i, j):
        return s + (wide[i] - wide[j]).float()

    with pytest.raises(fovea.UnsupportedError, match=r"float64 in the score_mod .*\.float\(\)"):
        fovea.attention(q, q, q, backend="emulator:sm90", score_mod=score_mod)
    found = fovea.attention(q, q, q, backend="reference", score_mod=score_mod)
    plain = fovea.attention(
        q, q, q, backend="reference", score_mod=lambda s, b, h, i, j: s + (i - j)
    )
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


COMPOSITES = {
    "logsigmoid": torch.nn.functional.logsigmoid,
    "xlogy": lambda s: torch.xlogy(s, 2.5) + torch.xlogy(0.0 * s, s),
    "fmod": lambda s: torch.fmod(s, 1.5),
    "fmax": lambda s: torch.fmax(s, 0.5 * s) + torch.fmin(s, s * 0.0 + 0.25),
    "half hypot": lambda s: torch.hypot(s.half() * 100, s.half() * 200).float(),
    "half softplus": lambda s: torch.nn.functional.softplus(s.half() * 4).float(),
    "half norm": lambda s: torch.stack([s.half() * 100, s.half() * 50]).norm().float(),
    "half mean": lambda s: torch.stack([s.half() * 9000, s.half() * 9000]).mean().float(),
}


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_functions_of_several_nodes_are_those_of_the_reference_at_their_kinks(arch: str) -> None:
    generator = torch.Generator().manual_seed(3)
    edges = torch.tensor([0.0, -0.0, 0.25, -0.25, 0.5, 1.5, -1.5, 3.0, -3.0, 5.0, -5.0])
    score = torch.cat((edges, torch.randn(200, generator=generator) * 2))
    traced = [
        trace_score_mod(lambda s, b, h, i, j, f=function: f(s)).graph
        for function in COMPOSITES.values()
    ]
    specs = (CaptureSpec("f32", 1, False),)
    graphs = [Graph("score", graph.nodes, graph.output, specs, ("i64",)) for graph in traced]
    found = _run(graphs, score, score, arch)
    zero = torch.zeros(len(score), dtype=torch.int64)
    positions = Positions(b=zero, h=zero, q_idx=zero, kv_idx=zero)
    for name, graph, values in zip(COMPOSITES, traced, found, strict=True):
        expected = evaluate(graph, positions, score=score, captures=(), scalars=())
        assert torch.equal(values.isnan(), expected.isnan()), name
        # Both round a value good to a few last places of float32: to the same half, or the next.
        eps = torch.finfo(torch.float16).eps if name.startswith("half") else 8 * EPS
        off = (values - expected).abs().nan_to_num()
        assert (off <= eps * expected.abs().nan_to_num() + LEAST).all(), name
