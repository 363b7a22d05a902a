import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_variants import ToyAdd

from fovea.compile.artifact import LAUNCHER_LIBRARY, Artifact
from fovea.compile.compiler import compile_variant
from fovea.compile.target import HOST_TRIPLES, CompileTarget, native_host_triple
from fovea.errors import UnsupportedError
from fovea.runtime import module

pytest.importorskip("tvm_ffi")

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return compile_variant(ToyAdd(), CompileTarget(arch="sm_90a"))


@pytest.fixture
def device_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Pretended GPU")

    return pretend


@pytest.fixture(autouse=True)
def forget_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_opened", {})


def _refusal(run: Any) -> str:
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="expected device_type=cuda") as caught:
        run(x, x, x, 1.0)
    return str(caught.value)


def test_launcher_in_memory_is_opened_and_checks_its_arguments(
    artifact: Artifact, device_of: Any
) -> None:
    device_of((9, 0))
    run = module.load(artifact, CUDA)
    assert "a: Tensor([n0], float32), b: Tensor([n0], float32)" in _refusal(run)
    with pytest.raises(TypeError, match="Expects 4 parameters"):
        run(*[torch.zeros(4)] * 3)


def test_launcher_in_a_folder_is_opened_from_there(artifact: Artifact, tmp_path: Path) -> None:
    _refusal(module.open_launcher(artifact.write(tmp_path)))
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path / LAUNCHER_LIBRARY) in maps


def test_folder_that_is_gone_does_not_matter(artifact: Artifact, tmp_path: Path) -> None:
    written = artifact.write(tmp_path / "entry")
    shutil.rmtree(tmp_path / "entry")
    _refusal(module.open_launcher(written))


def test_launchers_in_memory_do_not_mix(artifact: Artifact) -> None:
    other = compile_variant(ToyAdd(name="toy_other", threads=64), CompileTarget(arch="sm_90a"))
    first, second = module.open_launcher(artifact), module.open_launcher(other)
    assert first is not second
    assert module.open_launcher(artifact) is first


def test_artifact_for_another_gpu_is_refused(artifact: Artifact, device_of: Any) -> None:
    device_of((10, 0))
    with pytest.raises(UnsupportedError, match=r"is for sm_90a, Pretended GPU takes sm_100a"):
        module.load(artifact, CUDA)
    device_of((8, 0))
    with pytest.raises(UnsupportedError, match=r"takes no artifact of fovea.*reference"):
        module.load(artifact, CUDA)


def test_artifact_for_another_processor_is_refused(artifact: Artifact, device_of: Any) -> None:
    device_of((9, 0))
    other = next(t for t in HOST_TRIPLES if t != native_host_triple())
    foreign = dataclasses.replace(
        artifact, record=dataclasses.replace(artifact.record, host_triple=other)
    )
    with pytest.raises(UnsupportedError, match=f"launcher for {other}"):
        module.load(foreign, CUDA)


def test_cpu_device_is_refused(artifact: Artifact) -> None:
    with pytest.raises(UnsupportedError, match=r"runs on cuda devices, got cpu"):
        module.load(artifact, torch.device("cpu"))


_OPEN = """
import pickle, sys
from pathlib import Path
from fovea.runtime.module import open_launcher
open_launcher(pickle.loads(Path(sys.argv[1]).read_bytes()))
"""


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("/nowhere/lib.so", "runtime library /nowhere/lib.so cannot be loaded"),
        (None, "libcute_dsl_runtime.so is not installed here.*FOVEA_RUNTIME_LIBRARY"),
        ("libm.so.6", "undefined symbol.*runtime library in use is libm.so.6"),
    ],
)
def test_wrong_runtime_library_says_what_to_do(
    artifact: Artifact, tmp_path: Path, library: str | None, message: str
) -> None:
    import pickle
    import re

    (tmp_path / "artifact").write_bytes(pickle.dumps(artifact))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment["FOVEA_RUNTIME_LIBRARY"] = library or ""
    code = _OPEN
    if library is None:
        code = "import fovea.runtime.module as m\nm._installed_runtime_library = lambda: None\n"
        code += _OPEN
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "artifact")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fovea.errors.UnsupportedError")
    assert re.search(message, last)


def test_missing_tvm_ffi_says_what_to_install(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    with pytest.raises(
        UnsupportedError, match=r"'apache-tvm-ffi', which is not installed; pip install"
    ):
        module.open_launcher(artifact)
