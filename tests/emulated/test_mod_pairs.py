"""Captured vectors that a mod reads by the key itself: two elements an instruction, every dtype."""

import pytest
import torch
from mod_variant import ModVariant

import fovea
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget
from fovea.mods.graph import DTYPE_NAME, CaptureSpec, Graph, Node
from fovea.plan.captures import is_pair
from fovea.runtime.emulated_module import load

LENGTH = 64
_BYTES = torch.arange(LENGTH) * 7 % 256
VECTORS = (
    _BYTES % 3 == 0,
    _BYTES.to(torch.uint8),
    (_BYTES - 128).to(torch.int8),
    (_BYTES * 257 - 2**15).to(torch.int16),
    (_BYTES * 65537 - 2**23).to(torch.int32),
    _BYTES * 65537 - 2**23,
    (_BYTES - 100.5).half(),
    (_BYTES - 100.0).bfloat16(),
    _BYTES * 1.1,
    _BYTES.double() * 1.1,
)


def _graph(number: int, specs: tuple[CaptureSpec, ...]) -> Graph:
    key = Node(op="kv_idx", args=(), dtype="i64")
    value = Node(op="load", args=(0,), dtype=specs[number].dtype, attrs=(number,))
    nodes = (key, value, Node(op="cast", args=(1,), dtype="f32"))
    return Graph("score", nodes, 1 if value.dtype == "f32" else 2, specs, ("i64",))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_vectors_of_every_dtype_are_read_in_pairs(arch: str) -> None:
    specs = tuple(CaptureSpec(DTYPE_NAME[each.dtype], 1, False) for each in VECTORS)
    graphs = tuple(_graph(number, specs) for number in range(len(VECTORS)))
    assert all(is_pair(graph, 1) for graph in graphs)
    assert {spec.dtype for spec in specs} == set(DTYPE_NAME.values())
    variant = ModVariant(graphs=graphs, wide_integers=False, in_pairs=True)
    out = torch.full((len(VECTORS), LENGTH), torch.nan)
    indices = torch.arange(LENGTH, dtype=torch.int32).repeat(4, 1)
    passed = tuple(x.view(torch.uint8) if x.dtype == torch.bool else x for x in VECTORS)
    artifact = get_artifact(variant, CompileTarget(arch=arch))
    assert artifact.ptx.count("ld.global.v2") == len(VECTORS)
    load(artifact)(torch.zeros(LENGTH), indices, out, passed, (0,))
    for vector, found in zip(VECTORS, out, strict=True):
        assert torch.equal(found, vector.float()), vector.dtype


def test_a_vector_at_a_shortened_key_is_not_read_at_the_key() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 1, 16, generator=generator).bfloat16() for n in (65, 140, 140))
    table = torch.arange(140) * 0.01

    def score_mod(s, b, h, i, j):  # from the key 128 on an index counts from the end
        return s * 0 + table[j.to(torch.int8).long()]

    found, expected = (
        fovea.attention(q, k, v, backend=backend, score_mod=score_mod, return_aux=_AUX)
        for backend in ("emulator:sm90", "reference")
    )
    torch.testing.assert_close(found[1].max_score, expected[1].max_score, rtol=0, atol=0)
    torch.testing.assert_close(found[1].lse, expected[1].lse, rtol=1e-6, atol=0)


_AUX = fovea.AuxRequest(lse=True, max_score=True)
