"""The artifact that a GPU would open, run by the emulator on CPU tensors."""

import dataclasses
from typing import Any

import pytest
import torch
from toy_variants import ToyAdd, ToyReverse

from fovea.compile.artifact import Artifact
from fovea.compile.compiler import compile_variant
from fovea.compile.target import ARCHS, HOST_TRIPLES, CompileTarget, native_host_triple
from fovea.emulator import LauncherError
from fovea.errors import UnsupportedError
from fovea.runtime import emulated_module

pytest.importorskip("llvmlite")


@pytest.fixture(scope="module", params=ARCHS)
def artifact(request: pytest.FixtureRequest) -> Artifact:
    return compile_variant(ToyAdd(), CompileTarget(arch=request.param))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000])
def test_emulated_kernel_gives_the_right_numbers(artifact: Artifact, length: int) -> None:
    a, b = torch.randn(2, length)
    out = torch.full((length,), torch.nan)
    (result,) = emulated_module.load(artifact)(a, b, out, -0.75)
    assert result.kernel == "toy_add_0"
    expected = a.double() - 0.75 * b.double()
    torch.testing.assert_close(out.double(), expected, rtol=1.2e-7, atol=0.0)


def test_tensors_that_require_grad_are_taken(artifact: Artifact) -> None:
    a, b = torch.randn(2, 10)
    out = torch.empty(10)
    emulated_module.load(artifact)(a.requires_grad_(), b, out, 1.0)
    assert torch.equal(out, (a + b).detach())


def test_shared_memory_and_local_arrays_are_emulated() -> None:
    artifact = compile_variant(ToyReverse(), CompileTarget(arch="sm_90a"))
    a, out = torch.randn(256), torch.empty(256)
    emulated_module.load(artifact)(a, out, 1)
    # kept[i] = reversed + i, read back at shift % 64 = 1.
    expected = a.view(2, 128).flip(1).reshape(-1) + 1
    assert torch.equal(out, expected)


def test_wrong_arguments_are_refused_by_the_launcher_itself(artifact: Artifact) -> None:
    run: Any = emulated_module.load(artifact)
    good = torch.zeros(8)
    with pytest.raises(LauncherError, match="expected dtype=float32"):
        run(good.half(), good, good, 1.0)
    with pytest.raises(LauncherError, match="Expects 4 parameters"):
        run(good, good, good)


def test_artifact_is_opened_once(artifact: Artifact) -> None:
    same = dataclasses.replace(artifact)
    before = emulated_module._open.cache_info().misses
    emulated_module.load(artifact)
    emulated_module.load(same)
    assert emulated_module._open.cache_info().misses - before <= 1


def test_artifact_for_another_processor_is_refused(artifact: Artifact) -> None:
    other = next(t for t in HOST_TRIPLES if t != native_host_triple())
    record = dataclasses.replace(artifact.record, host_triple=other)
    with pytest.raises(UnsupportedError, match=f"launcher for {other}"):
        emulated_module.load(dataclasses.replace(artifact, record=record))
