import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_variants import ToyAdd, ToyBroken, ToyNamedByTheCompiler, ToyReverse

from fovea.compile import compiler, elf, key
from fovea.compile.artifact import Artifact, read_artifact
from fovea.compile.compiler import CompileError, compile_variant
from fovea.compile.cubin import kernel_names, kernel_resources
from fovea.compile.target import ARCHS, HOST_TRIPLES, CompileTarget
from fovea.errors import UnsupportedError

SM90 = CompileTarget(arch="sm_90a")


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return compile_variant(ToyAdd(), SM90)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("host_triple", HOST_TRIPLES)
def test_one_process_compiles_for_every_target(arch: str, host_triple: str) -> None:
    target = CompileTarget(arch=arch, host_triple=host_triple)
    artifact = compile_variant(ToyAdd(), target)
    assert f".target {arch}\n" in artifact.ptx
    assert artifact.record.target == target
    machine = elf.EM_X86_64 if host_triple.startswith("x86_64") else elf.EM_AARCH64
    assert elf.read_elf(artifact.launcher_object).machine == machine
    assert artifact.launcher_library[18:20] == machine.to_bytes(2, "little")
    # The launcher carries the very cubin of the artifact.
    assert artifact.cubin in artifact.launcher_library
    assert artifact.cubin in artifact.launcher_object


def test_artifact_says_what_it_is_and_what_it_uses(artifact: Artifact) -> None:
    record = artifact.record
    assert (record.name, record.symbol) == ("toy_add", "__tvm_ffi_toy_add")
    assert record.variant == ToyAdd().key_text()
    assert record.key == key.cache_key(ToyAdd(), SM90)
    assert record.compiler_version == key.compiler_version()
    assert kernel_names(artifact.ptx) == ["toy_add_0"] == list(record.kernels)
    used = record.kernels["toy_add_0"]
    assert 8 <= used.registers <= 32
    assert (used.stack_bytes, used.local_bytes, used.shared_bytes) == (0, 0, 0)
    assert used.threads == 128


def test_shared_and_local_memory_are_read_from_the_cubin() -> None:
    used = compile_variant(ToyReverse(), SM90).record.kernels["toy_reverse_0"]
    assert used.shared_bytes == 1024  # as cuobjdump says of this kernel
    assert used.stack_bytes >= 64 * 4  # an array indexed at run time, which registers cannot hold


def test_artifact_is_the_same_each_time(artifact: Artifact) -> None:
    again = compile_variant(ToyAdd(), SM90)
    assert again.contents == artifact.contents
    assert again.record.checksums == artifact.record.checksums


def test_other_plan_gives_other_code(artifact: Artifact) -> None:
    other = compile_variant(ToyAdd(threads=64), SM90)
    assert other.record.kernels["toy_add_0"].threads == 64
    assert other.record.key != artifact.record.key
    assert other.cubin != artifact.cubin


def test_artifact_survives_the_disk(artifact: Artifact, tmp_path: Path) -> None:
    artifact.write(tmp_path)
    assert read_artifact(tmp_path).contents == artifact.contents


def test_launcher_runs_on_the_oldest_processor(artifact: Artifact, tmp_path: Path) -> None:
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump shows the instructions")
    if elf.read_elf(artifact.launcher_object).machine != elf.EM_X86_64:
        pytest.skip("AVX is x86-64's")
    path = tmp_path / "launcher.o"
    path.write_bytes(artifact.launcher_object)
    code = subprocess.run([objdump, "-d", path], capture_output=True, text=True, check=True).stdout
    assert code.count("call ") > 5
    assert not [register for register in ("%ymm", "%zmm") if register in code]


def test_kernel_named_by_the_compiler_is_refused() -> None:
    with pytest.raises(CompileError, match=r"word 'cutlass'.*set_name_prefix"):
        compile_variant(ToyNamedByTheCompiler(), SM90)


def test_variant_that_does_not_compile_says_which_and_why() -> None:
    with pytest.raises(CompileError, match=r"cannot compile 'toy_broken' for sm_90a"):
        compile_variant(ToyBroken(), SM90)


@pytest.mark.parametrize("name", ["", "a-b", "1st", "my_cutlass_kernel", "a b"])
def test_variant_with_a_name_that_is_no_symbol_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"variant\.name="):
        compile_variant(dataclasses.replace(ToyAdd(), name=name), SM90)


def test_compiling_without_the_compiler_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key, "compiler_version", lambda: None)
    with pytest.raises(UnsupportedError, match=r"fovea-attention\[cuda\]"):
        compile_variant(ToyAdd(), SM90)


def test_importing_compile_imports_no_compiler() -> None:
    code = (
        "import fovea.compile.aot, fovea.compile.compiler, fovea.runtime.module, sys;"
        "bad = {'cutlass', 'tvm_ffi', 'triton', 'rich', 'llvmlite'} & set(sys.modules);"
        "assert not bad, bad"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_full_tmp_sends_the_compiler_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage

    def full(path: Any) -> Any:
        return usage(path)._replace(free=0) if path == "/full" else usage("/")

    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: "/full")
    monkeypatch.setattr(compiler.shutil, "disk_usage", full)
    assert compiler.scratch_root() == "/dev/shm"


def test_cuobjdump_agrees_on_the_resources(tmp_path: Path) -> None:
    cuobjdump = _cuobjdump()
    if cuobjdump is None:
        pytest.skip("cuobjdump is not installed")
    for variant in (ToyAdd(), ToyReverse()):
        artifact = compile_variant(variant, SM90)
        path = tmp_path / "kernel.cubin"
        path.write_bytes(artifact.cubin)
        said = subprocess.run(
            [cuobjdump, "--dump-resource-usage", path], capture_output=True, text=True, check=True
        ).stdout
        used = kernel_resources(artifact.cubin)[f"{variant.name}_0"]
        assert f"REG:{used.registers} STACK:{used.stack_bytes} SHARED:{used.shared_bytes}" in said


def _cuobjdump() -> str | None:
    try:
        import triton.backends.nvidia as nvidia  # pyright: ignore
    except ImportError:
        return shutil.which("cuobjdump")
    path = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    return str(path) if path.is_file() else shutil.which("cuobjdump")
