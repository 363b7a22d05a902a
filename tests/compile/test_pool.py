import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy_variants import ToyAdd, ToyBroken, ToyDeadly

from fovea.compile.cache import Cache
from fovea.compile.compiler import CompileError
from fovea.compile.pool import compile_many
from fovea.compile.target import CompileTarget

SM90, SM100 = CompileTarget(arch="sm_90a"), CompileTarget(arch="sm_100a")


@pytest.fixture
def cache(isolated_cache: Path) -> Cache:
    return Cache(isolated_cache, 2**30)


def test_jobs_are_compiled_in_parallel_and_kept(
    cache: Cache, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [(ToyAdd(), SM90), (ToyAdd(threads=64), SM100), (ToyAdd(), SM90)]
    artifacts = compile_many(jobs, workers=2, cache=cache)
    assert [a.record.arch for a in artifacts] == ["sm_90a", "sm_100a", "sm_90a"]
    assert [a.record.kernels["toy_add_0"].threads for a in artifacts] == [128, 64, 128]
    assert artifacts[0] is artifacts[2]
    assert {e.key for e in cache.entries()} == {a.record.key for a in artifacts}
    said = capsys.readouterr().err
    assert "fovea: compiled 2/2 " in said
    # All there: no process is started, nothing is said.
    again = compile_many(jobs, workers=2, cache=cache)
    assert again == artifacts
    assert capsys.readouterr().err == ""


def test_all_failures_are_named_and_the_rest_is_kept(cache: Cache) -> None:
    jobs = [(ToyBroken(), SM90), (ToyAdd(), SM90), (ToyBroken(), SM100)]
    with pytest.raises(CompileError, match="2 of 3 variants do not compile") as caught:
        compile_many(jobs, workers=1, cache=cache)
    assert "toy_broken for sm_90a on" in str(caught.value)
    assert "toy_broken for sm_100a on" in str(caught.value)
    assert len(cache.entries()) == 1


def test_worker_that_dies_is_reported(cache: Cache) -> None:
    with pytest.raises(
        CompileError, match=r"toy_deadly for sm_90a.*a worker died.*__main__.*workers=1"
    ):
        compile_many([(ToyDeadly(), SM90)], workers=1, cache=cache)


def test_variant_that_cannot_be_sent_to_a_worker_is_refused(cache: Cache) -> None:
    @dataclasses.dataclass(frozen=True)
    class Local(ToyAdd):
        pass

    with pytest.raises(TypeError, match=r"a picklable object.*top level"):
        compile_many([(Local(), SM90)], cache=cache)


def test_no_workers_is_refused(cache: Cache) -> None:
    with pytest.raises(ValueError, match="workers=0"):
        compile_many([(ToyAdd(), SM90)], workers=0, cache=cache)


def test_no_jobs_give_no_artifacts(cache: Cache) -> None:
    assert compile_many([], cache=cache) == []


_RACE = """
import sys
from toy_variants import ToyAdd
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget
print(get_artifact(ToyAdd(), CompileTarget(arch="sm_90a")).record.compile_seconds)
"""


def test_processes_that_want_the_same_kernel_compile_it_once(isolated_cache: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _RACE],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120) for process in running]
    assert [p.returncode for p in running] == [0, 0], said
    # The record tells how long its own compilation took: the same number, the same compilation.
    assert said[0][0] == said[1][0]
    assert len(Cache(isolated_cache, 2**30).entries()) == 1
