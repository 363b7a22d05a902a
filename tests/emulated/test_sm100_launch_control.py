"""Cluster launch control on Blackwell: a CTA a tile, taken over by running ones or started."""

import re
from functools import cache

import pytest
import torch
from cases import case_named
from judge import judge_problem

from fovea.arch import SM100
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.emulator import Options, RaceError, Result, UninitialisedRead, load_launcher
from fovea.plan.kernel_calls import as_kernel_call
from fovea.plan.select import forward_plan
from fovea.problem import ForwardResult
from fovea.problem.parts import numbers_of, tensors_of
from fovea.runtime.arguments import ForwardLaunch

PACKED = "packed causal idle rows"
_WAIT = re.compile(
    r"mbarrier\.try_wait[^;]*;([^{}]*\}\s+// end inline asm\s+(?:add\.s32 [^;]*;\s+)?"
    r"ld\.shared\.v2\.b64 [^;]*;\s+\{\s+\.reg \.b128)"
)


@cache
def _kernel(name: str):
    """Return a case's problem, and a function that runs its kernel with changed text."""
    problem = as_kernel_call(case_named(name).build("cpu", is_small=True).problem(), SM100)
    plan = forward_plan(problem, SM100)
    assert plan.is_dynamic
    target = CompileTarget(arch=SM100.target, host_triple=native_host_triple())
    artifact = get_artifact(ForwardVariant(plan), target)
    text = artifact.ptx if isinstance(artifact.ptx, str) else artifact.ptx.decode()

    def run(options: Options, change=lambda text: text) -> tuple[ForwardResult, Result]:
        launcher = load_launcher(artifact.launcher_object, change(text))
        results: list[Result] = []
        launch = ForwardLaunch(
            problem,
            plan,
            1,
            lambda *arguments: results.extend(launcher(*arguments, options=options)),
        )
        out, lse, max_score = launch(tensors_of(problem), numbers_of(problem))
        # Beside it there may be a table of sequences and a merge.
        (own,) = [each for each in results if re.fullmatch(rf"{plan.name}(_\d+)?", each.kernel)]
        return ForwardResult(out, lse, max_score), own

    return problem, run


def _ctas(launch: Result) -> list[int]:
    """Return the CTAs that did more than see that they are behind the last tile."""
    return sorted({cta[0] for cta, warp in launch.counters_by_warp if warp == 0})


@pytest.mark.slow
def test_ctas_whose_request_is_declined_end_and_others_are_started() -> None:
    problem, run = _kernel(PACKED)
    first, launch = run(Options(async_delay="eager"))
    assert judge_problem(problem, first).wrong is None
    assert _ctas(launch) == [0]  # takes over all others
    other, launch = run(Options(seed=1, tensor_load_wait="explicit"))
    assert torch.equal(other.out, first.out)
    assert torch.equal(other.lse, first.lse)
    assert judge_problem(problem, other).wrong is None
    assert len(_ctas(launch)) > 1


def test_answer_read_without_its_wait_is_reported() -> None:
    _, run = _kernel(PACKED)

    def change(text: str) -> str:
        changed, count = _WAIT.subn(r"setp.eq.b32 P1, 0, 0;\1", text)
        assert count == 2  # behind the loads, and beyond the last tile
        return changed

    with pytest.raises((RaceError, UninitialisedRead)):
        run(Options(seed=0, async_delay="late"), change)


def test_request_without_the_fence_behind_the_last_answer_is_reported() -> None:
    _, run = _kernel(PACKED)

    def change(text: str) -> str:
        changed, count = re.subn(r"fence\.proxy\.async\.shared::cta;(?=[^;]*;\s+elect)", "", text)
        assert count == 2  # of the first request, which has none before it, and of the others
        return changed

    with pytest.raises(RaceError, match=r"read needs fence\.proxy\.async") as found:
        run(Options(seed=0), change)
    assert "clusterlaunchcontrol.try_cancel" in str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        PACKED,
        "packed few causal idle rows",
        "packed nothing but idle rows",
        "packed blocks",
        "window",
        "blocks random",
    ],
)
def test_every_schedule_gives_the_same_bits_whoever_works_on_a_tile(name: str) -> None:
    problem, run = _kernel(name)
    first, launch = run(Options(async_delay="eager"))
    assert judge_problem(problem, first).wrong is None
    ctas = set()
    for seed in range(1, 10):
        delay = ("random", "late")[seed % 2]
        other, launch = run(Options(seed=seed, async_delay=delay, tensor_load_wait="explicit"))
        assert not launch.warnings
        assert torch.equal(other.out, first.out)
        assert torch.equal(other.lse, first.lse)
        ctas.add(tuple(_ctas(launch)))
    assert len(ctas) > 1
