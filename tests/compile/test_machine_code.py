"""What the assembler made of the Blackwell forward: the instructions that the plan stands for.

Counted in the basic blocks of the disassembly: a block with exponentials is the straight line of
one KV tile's softmax, a block with tcgen05 products issues one of them.
"""

from collections import Counter

import pytest
import torch

from fovea.arch import ARCHS
from fovea.cli.disassembly import EXP2, count_blocks, disassemble, find_nvdisasm
from fovea.compile.compiler import compile_variant
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.plan import sm100
from fovea.plan.select import forward_plan
from fovea.plan.sm100_tiles import CHUNK_COLUMNS
from fovea.problem import Request, make_dense

PRODUCT_DEPTH = 16  # of one tcgen05.mma on 16-bit elements
# Of a pair of exponentials on the FMA pipe, the packed multiply-adds: floor, what is left above it,
# the fraction, and a polynomial of degree 4. What held the argument in range is a scalar one.
FMAS_OF_A_PAIR = 7

needs_nvdisasm = pytest.mark.skipif(
    find_nvdisasm() is None,
    reason="no nvdisasm on PATH or in an installed wheel (pip install nvidia-cuda-nvdisasm)",
)
CASES = [
    ("sm100", (128, 128), False),
    pytest.param("sm100", (128, 128), True, marks=pytest.mark.slow),
    pytest.param("sm100", (64, 64), False, marks=pytest.mark.slow),
    pytest.param("sm100", (192, 128), False, marks=pytest.mark.slow),
    pytest.param("sm103", (128, 128), False, marks=pytest.mark.slow),
]


def _plan(arch: str, head_dims: tuple[int, int], causal: bool) -> sm100.ForwardPlan:
    q, k = (torch.empty(1, 4096, 1, head_dims[0], dtype=torch.bfloat16) for _ in "qk")
    v = torch.empty(1, 4096, 1, head_dims[1], dtype=torch.bfloat16)
    plan = forward_plan(make_dense(q, k, v, Request(causal=causal)), ARCHS[arch])
    assert isinstance(plan, sm100.ForwardPlan)
    return plan


def _blocks(arch: str, plan: sm100.ForwardPlan) -> list[Counter[str]]:
    target = CompileTarget(arch=ARCHS[arch].target, host_triple=native_host_triple())
    listing = disassemble(compile_variant(ForwardVariant(plan), target).cubin)
    assert listing is not None, "nvdisasm does not take the cubin"
    return count_blocks(listing)


@needs_nvdisasm
@pytest.mark.parametrize(("arch", "head_dims", "causal"), CASES)
def test_machine_code_has_the_instructions_that_the_plan_means(arch, head_dims, causal):
    plan = _plan(arch, head_dims, causal)
    blocks = _blocks(arch, plan)

    software = plan.software_columns * plan.tile_n // CHUNK_COLUMNS
    hardware = plan.tile_n - software
    tiles = [block for block in blocks if block[EXP2] >= plan.tile_n // 4]
    # One more where O may be rescaled: its factor.
    assert {block[EXP2] - hardware for block in tiles} <= {0, 1}
    plain = [block for block in tiles if block[EXP2] == hardware]
    assert plain
    packed = (hardware + software * FMAS_OF_A_PAIR) // 2
    assert all(block["FFMA2"] == packed for block in plain), [block["FFMA2"] for block in plain]
    # P rounded in pairs, S read and P written in chunks of 32 columns.
    chunks = plan.tile_n // CHUNK_COLUMNS
    assert all(block["F2FP"] >= plan.tile_n // 2 - 8 for block in plain)
    assert all(block["LDTM"] == block["STTM"] == chunks for block in plain)

    issued = Counter(block["UTCHMMA"] for block in blocks if block["UTCHMMA"])
    scores = plan.head_dim // plan.k_parts // PRODUCT_DEPTH
    assert scores in issued, issued
    assert "HGMMA" not in set().union(*blocks)
    assert sum(n * count for n, count in issued.items()) % (plan.tile_n // PRODUCT_DEPTH) == 0
    assert not any(block["LDL"] or block["STL"] for block in blocks)
