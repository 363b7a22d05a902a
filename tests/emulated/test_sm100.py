"""The Blackwell forward on the emulator: right, silent under every schedule, fitting its plan."""

import math
import time

import pytest
import torch
from cases import CASES, case_named
from judge import judge, run
from schedules import check_schedules, run_once, slow_unless

import fovea
from fovea.arch import SM100, SM103, arch_named
from fovea.compile.compiler import compile_variant
from fovea.compile.target import CompileTarget
from fovea.compile.variant import ForwardVariant
from fovea.kernels.sm100.forward.rows import software_pairs
from fovea.plan import select
from fovea.plan.numerics import LN_2
from fovea.problem import AttentionProblem, Request, make_dense
from fovea.runtime.emulated import emulate
from fovea.testing.inputs import Shape, dense_qkv

BACKEND = "emulator:sm100"
# Few kernels: cases that share one are cheap. The rest is marked slow.
QUICK = (
    "dense",
    "one query",
    "seven by 127",
    "rising 300 causal",
)
_FLAT = Shape(seqlen_q=129, seqlen_kv=300, heads_q=1, heads_kv=1, head_dim=64)


def _problem(shape: Shape, dtype: torch.dtype) -> AttentionProblem:
    return make_dense(*dense_qkv(shape, dtype=dtype), Request(wants_lse=True))


@pytest.mark.parametrize("name", slow_unless(QUICK, (case.name for case in CASES)))
def test_call_is_within_the_budget_or_refused(name: str) -> None:
    call = case_named(name).build("cpu", is_small=True)
    if select.unsupported(call.problem(), SM100) is not None:
        with pytest.raises(fovea.UnsupportedError, match="backend=None"):
            run(call, BACKEND)
        return
    judgement = judge(call, run(call, BACKEND))
    assert judgement.wrong is None, judgement.wrong


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("rising 300 causal", 2),
        pytest.param("dense", 10, marks=pytest.mark.slow),
        pytest.param("causal d64", 10, marks=pytest.mark.slow),
        pytest.param("rising 300 causal", 10, marks=pytest.mark.slow),
        pytest.param("dense fp16", 10, marks=pytest.mark.slow),
        pytest.param("everything", 10, marks=pytest.mark.slow),
        pytest.param("blocks late rising", 10, marks=pytest.mark.slow),
        pytest.param("packed rising", 10, marks=pytest.mark.slow),
        pytest.param("packed causal d256", 10, marks=pytest.mark.slow),
        pytest.param("packed few causal sink max_score", 10, marks=pytest.mark.slow),
        pytest.param("packed pages d192 dv128", 10, marks=pytest.mark.slow),
        pytest.param("packed pages d256 fp16", 10, marks=pytest.mark.slow),
        pytest.param("packed few pages of 64 causal", 10, marks=pytest.mark.slow),
    ],
)
def test_every_schedule_is_silent_and_gives_the_same_bits(name: str, seeds: int) -> None:
    problem = case_named(name).build("cpu", is_small=True).problem()
    check_schedules(lambda seed, sms: run_once(problem, SM100, seed=seed, num_sms=sms), seeds)


@pytest.mark.parametrize("powers", [70.0, 90.0, 300.0, float("nan"), float("inf")])
def test_score_that_a_software_exponential_alone_sees_is_noticed(powers: float) -> None:
    # One key, in the KV tile that is walked last, in a column of the FMA pipe.
    key = 2 * min(software_pairs(select.forward_plan(_problem(_FLAT, torch.bfloat16), SM100)))
    q, k, v = dense_qkv(_FLAT, dtype=torch.bfloat16)
    score = powers * LN_2
    q, k = torch.ones_like(q), torch.zeros_like(k)
    k[0, key] = score / _FLAT.head_dim**0.5
    result, _ = emulate(make_dense(q, k, v, Request(wants_lse=True)), SM100)
    if math.isfinite(score):
        assert torch.equal(result.out, v[:, key : key + 1].expand_as(result.out))
        # k is rounded to 8 bits.
        assert (result.lse / score - 1).abs().max() < 2**-8
    else:
        assert result.out.isnan().all()
        assert result.lse.isnan().all()


def test_one_head_of_256_by_512_is_emulated_within_30_seconds() -> None:
    shape = Shape(seqlen_q=256, seqlen_kv=512, heads_q=1, heads_kv=1, head_dim=128)
    problem = _problem(shape, torch.bfloat16)
    emulate(problem, SM100)  # has the kernel compiled and parsed
    start = time.process_time()
    emulate(problem, SM100)
    assert time.process_time() - start < 30.0


@pytest.mark.parametrize(
    ("arch", "head_dim", "dtype", "seqlen_q"),
    [
        (SM100, 128, torch.bfloat16, 300),
        pytest.param(SM103, 64, torch.float16, 1, marks=pytest.mark.slow),
        pytest.param(SM100, 128, torch.bfloat16, 1, marks=pytest.mark.slow),
        pytest.param(SM100, 64, torch.bfloat16, 300, marks=pytest.mark.slow),
        pytest.param(SM100, 128, torch.float16, 300, marks=pytest.mark.slow),
        pytest.param(SM103, 128, torch.bfloat16, 300, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernel_uses_no_local_memory_and_the_plans_threads(arch, head_dim, dtype, seqlen_q) -> None:
    problem = _problem(Shape(seqlen_q=seqlen_q, seqlen_kv=1, head_dim=head_dim), dtype)
    plan = select.forward_plan(problem, arch)
    record = compile_variant(ForwardVariant(plan), CompileTarget(arch=arch.target)).record
    used = next(each for name, each in record.kernels.items() if name.startswith(record.name))
    assert sum(each.stack_bytes + each.local_bytes for each in record.kernels.values()) == 0
    assert used.threads == plan.threads
    assert record.compile_seconds < 60.0


@pytest.mark.slow
@pytest.mark.parametrize("arch", [SM100, SM103], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "packed causal top left d128",
        "packed causal d256",
        "packed few causal idle rows",
        "packed pages of 24 causal",
        "packed pages d192 dv128",
        "packed pages d256 fp16",
        "packed few pages of 64 causal",
    ],
)
def test_packed_kernels_use_no_local_memory(name, arch) -> None:
    plan = select.forward_plan(case_named(name).build("cpu", is_small=True).problem(), arch)
    record = compile_variant(ForwardVariant(plan), CompileTarget(arch=arch.target)).record
    assert len(record.kernels) == (3 if plan.packs_heads else 2)  # the table's, and the merge
    assert sum(each.stack_bytes + each.local_bytes for each in record.kernels.values()) == 0


def test_share_of_software_exponentials_follows_the_architecture() -> None:
    problem = _problem(Shape(seqlen_q=4), torch.bfloat16)
    plans = [select.forward_plan(problem, arch_named(name)) for name in ("sm100", "sm103")]
    assert [plan.software_columns for plan in plans] == [6, 0]
