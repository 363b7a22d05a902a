"""Artifacts on a machine whose driver is pretended: what it needs, and what the error says."""

import re
from typing import Any

import pytest
import torch
from toy_variants import ToyAdd

from fovea.compile.artifact import Artifact
from fovea.compile.compiler import compile_variant
from fovea.compile.cubin import tools_version
from fovea.compile.target import CompileTarget
from fovea.errors import UnsupportedError
from fovea.runtime import driver_version, module

pytest.importorskip("tvm_ffi")

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return compile_variant(ToyAdd(), CompileTarget(arch="sm_100a"))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what pretends a Blackwell GPU and a driver that gives a number as CUDA does."""
    monkeypatch.setattr(module, "_opened", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Pretended GPU")

    def pretend(number: int) -> None:
        monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: number, raising=False)

    return pretend


def test_cubin_says_which_tools_made_it(artifact: Artifact) -> None:
    tools = tools_version(artifact.cubin)
    assert tools is not None
    text = f"release {tools[0]}.{tools[1]},".encode()
    assert text in artifact.cubin


def test_driver_too_old_is_refused_with_both_versions(artifact: Artifact, driver: Any) -> None:
    needed = driver_version.needed_cuda(artifact)
    assert needed >= (12, 8)
    driver(12040)
    with pytest.raises(UnsupportedError) as caught:
        module.load(artifact, CUDA)
    message = str(caught.value)
    assert f"needs a driver for CUDA {needed[0]}.{needed[1]} or later" in message
    assert "this machine's driver is for CUDA 12.4" in message
    assert re.search(r"update the driver, or use backend='reference'", message)


def test_driver_of_the_tools_major_version_is_taken(artifact: Artifact, driver: Any) -> None:
    major, minor = driver_version.needed_cuda(artifact)
    driver(1000 * major + 10 * minor)
    assert callable(module.load(artifact, CUDA))


def test_architecture_alone_decides_where_the_tools_are_unknown(
    artifact: Artifact, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_version, "tools_version", lambda _: None)
    driver(12080)
    assert callable(module.load(artifact, CUDA))
    driver(12060)
    with pytest.raises(UnsupportedError, match=r"CUDA 12\.8 or later \(release 570\).*CUDA 12\.6"):
        module.load(artifact, CUDA)
