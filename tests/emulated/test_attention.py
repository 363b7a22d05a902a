"""The forward kernel on the emulator, from the public function to the float64 oracle."""

import pytest
import torch
from cases import CASES, case_named
from judge import judge, judge_gradients, judge_problem, run

import fovea
from fovea.arch import SM90, arch_named
from fovea.emulator import Options
from fovea.plan.select import FEW_QUERIES, forward_plan, length_of
from fovea.plan.sm90 import ForwardPlan
from fovea.problem import ForwardResult, Request, make_dense
from fovea.runtime.emulated import emulate
from fovea.testing.inputs import Shape, dense_qkv

BACKEND = "emulator:sm90"

# A feature each, in few kernels: those that share one are cheap. The rest is marked slow.
QUICK = (
    "dense",
    "one key",
    "seven by 127",
    "d5 dv3",
    "NaN around",
    "causal dead rows",
    "rising 300 causal",
    "huge values",
    "window sink",
    "everything",
    "packed causal idle rows",
    "packed pages of 24 causal",
)


def _check(name: str) -> None:
    case = case_named(name)
    call = case.build("cpu", is_small=True)
    judgement = judge(call, run(call, BACKEND))
    assert judgement.wrong is None, judgement.wrong
    if case.checks_gradients:
        wrong = judge_gradients(call, BACKEND)
        assert wrong is None, wrong


@pytest.mark.parametrize("name", QUICK)
def test_call_is_within_the_budget(name: str) -> None:
    _check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in CASES if case.name not in QUICK])
def test_other_call_is_within_the_budget(name: str) -> None:
    _check(name)


def test_ctas_that_find_no_packed_tile_load_nothing() -> None:
    problem = case_named("packed causal idle rows").build("cpu", is_small=True).problem()
    few = emulate(problem, arch_named("sm90"))[0]
    # Lengths are known to the device alone, so the grid may have more CTAs than there are tiles.
    many = emulate(problem, arch_named("sm90"), num_sms=60, options=Options(async_delay="late"))[0]
    assert torch.equal(few.out, many.out)
    assert torch.equal(few.lse, many.lse)


def test_machine_smaller_than_a_cluster_runs_one() -> None:
    problem = case_named("d5 dv3").build("cpu", is_small=True).problem()
    assert forward_plan(problem, SM90).cluster == 2
    result, (launch,) = emulate(problem, SM90, num_sms=1)
    assert {cta for cta, _ in launch.counters_by_warp} == {(0, 0, 0), (1, 0, 0)}
    judgement = judge_problem(problem, result)
    assert judgement.wrong is None, judgement.wrong


def test_pair_that_passes_over_uses_waits_once_for_each_of_its_own() -> None:
    q, k, v = dense_qkv(
        Shape(seqlen_q=384, seqlen_kv=2048, heads_q=1, heads_kv=1, head_dim=256),
        dtype=torch.bfloat16,
    )
    # A window: few of the long plan's tiles are computed.
    problem = make_dense(q, k, v, Request(causal=True, window=(128, 0), wants_lse=True))
    plan = forward_plan(problem, SM90)
    assert isinstance(plan, ForwardPlan)
    assert plan.passes_uses
    result, _ = emulate(problem, SM90, num_sms=2)
    judgement = judge_problem(problem, result)
    assert judgement.wrong is None, judgement.wrong


def test_machine_without_sms_is_refused() -> None:
    problem = case_named("d5 dv3").build("cpu", is_small=True).problem()
    with pytest.raises(ValueError, match=r"num_sms=0 is not valid .*from 1 to 65536"):
        emulate(problem, SM90, num_sms=0)


def test_both_sizes_of_a_case_have_one_plan() -> None:
    def side(case, is_small: bool) -> str:
        # Wide heads have no plan for few queries.
        is_narrow = case.shape.v[-1] <= 256 >= case.shape.k[-1]
        is_few = case.queries(is_small=is_small) <= FEW_QUERIES and is_narrow
        return "few" if is_few else length_of(case.keys(is_small=is_small))

    assert not [case.name for case in CASES if side(case, False) != side(case, True)]


def _schedules(name: str) -> list[ForwardResult]:
    problem = case_named(name).build("cpu", is_small=True).problem()
    schedules = (
        (0, "random", 2),
        (1, "late", 3),
        (2, "eager", 132),
    )
    return [
        emulate(
            problem,
            arch_named("sm90"),
            num_sms=num_sms,
            options=Options(seed=seed, async_delay=delay),
        )[0]
        for seed, delay, num_sms in schedules
    ]


@pytest.mark.parametrize(
    "name",
    [
        "rising 300 causal",
        pytest.param("packed rising", marks=pytest.mark.slow),
        pytest.param("everything", marks=pytest.mark.slow),
        pytest.param("blocks late rising", marks=pytest.mark.slow),
        pytest.param("late keys d64 rising", marks=pytest.mark.slow),
        pytest.param("causal d256 fp16", marks=pytest.mark.slow),
    ],
)
def test_every_schedule_gives_the_same_bits(name: str) -> None:
    first, *others = _schedules(name)
    for other in others:
        assert torch.equal(other.out, first.out)
        assert torch.equal(other.lse, first.lse)


@pytest.mark.parametrize("size", [{"seqlen_q": 0}, {"seqlen_kv": 0}, {"batch": 0}])
def test_empty_call_gives_zeros_without_a_launch(size: dict[str, int]) -> None:
    shape = Shape(**{"seqlen_q": 3, "seqlen_kv": 4, "heads_q": 2, **size})
    q, k, v = dense_qkv(shape, dtype=torch.bfloat16)
    sink = torch.tensor([-1.0, 2.0])
    problem = make_dense(q, k, v, Request(sink=sink, wants_lse=True, wants_max_score=True))
    result, launches = emulate(problem, arch_named("sm90"))
    assert launches == ()
    judgement = judge_problem(problem, result)
    assert judgement.wrong is None, judgement.wrong


def test_unsupported_call_names_what_the_kernel_lacks() -> None:
    q, k, v = dense_qkv(Shape(seqlen_q=4))
    with pytest.raises(fovea.UnsupportedError, match="float32"):
        fovea.attention(q, k, v, backend=BACKEND)


@pytest.mark.slow
def test_numbers_beyond_a_small_integer_wrap_as_in_torch() -> None:
    def mask_mod(b: object, h: object, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        byte, char = j.to(torch.uint8), (j * 5 + i).to(torch.int8)
        wraps = (byte * 40 + 300 > 100) | (byte == 300) | (byte > -250)
        cut = torch.div(char - 128, -3, rounding_mode="trunc") < 20
        return wraps & cut | (torch.fmod(char, 200) == -3) | (i == j)

    q, k, v = (torch.randn(1, 24, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    visible = mask_mod(0, 0, torch.arange(24)[:, None], torch.arange(24))
    assert 100 < int(visible.sum()) < 500
    out = fovea.attention(q, k, v, mask_mod=mask_mod, backend=BACKEND)
    wanted = fovea.attention(q, k, v, mask_mod=lambda b, h, i, j: visible[i, j], backend=BACKEND)
    assert torch.equal(out, wanted)
