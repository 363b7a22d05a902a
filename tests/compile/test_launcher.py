"""The launcher library run on this processor: a stand-in for the CUDA runtime records."""

import ctypes
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_variants import ToyAdd

from fovea.compile import elf
from fovea.compile.artifact import LAUNCHER_LIBRARY
from fovea.compile.compiler import compile_variant
from fovea.compile.linker import link_shared
from fovea.compile.target import HOST_TRIPLES, CompileTarget, native_host_triple

binding: Any = pytest.importorskip("llvmlite.binding")
if native_host_triple() != HOST_TRIPLES[0]:
    pytest.skip("the stand-in is opened on x86-64", allow_module_level=True)

# Answers what a launcher asks of the CUDA runtime; `_cudaLaunchKernelEx` keeps the launch's
# configuration and the values of its four parameters (three {address, length} pairs and a float).
_RUNTIME = r"""
@config = global [64 x i8] zeroinitializer
@values = global [4 x [16 x i8]] zeroinitializer
@loads = global i64 0
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define i32 @cuda_dialect_init_library_once(ptr %slot, ptr %init, ptr %load, ptr %error) {
  %known = load i64, ptr %slot
  %is_known = icmp ne i64 %known, 0
  br i1 %is_known, label %done, label %first
first:
  store i64 1, ptr %slot
  %a = call i32 %init(ptr %slot)
  %b = call i32 %load(ptr %slot, i32 0)
  %c = or i32 %a, %b
  ret i32 %c
done:
  ret i32 0
}
define void @cuda_dialect_unload_library_once(ptr %slot) { ret void }
define i32 @_cudaGetDevice(ptr %p) { store i32 0, ptr %p  ret i32 0 }
define i32 @_cudaSetDevice(i32 %d) { ret i32 0 }
define i32 @_cudaDeviceGetAttribute(ptr %p, i32 %a, i32 %d) { store i32 232448, ptr %p  ret i32 0 }
define i32 @_cuKernelGetAttribute(ptr %p, i32 %a, ptr %k, i32 %d) { store i32 0, ptr %p  ret i32 0 }
define i32 @_cudaFuncSetAttribute(ptr %f, i32 %a, i32 %v) { ret i32 0 }
define i32 @_cudaKernelSetAttributeForDevice(ptr %k, i32 %a, i32 %v, i32 %d) { ret i32 0 }
define i32 @_cudaLibraryGetKernel(ptr %k, ptr %l, ptr %n) { store i64 7, ptr %k  ret i32 0 }
define i32 @_cudaLibraryLoadData(ptr %l, ptr %c, ptr %x, ptr %y, i32 %n, ptr %z, ptr %w, i32 %m) {
  %old = load i64, ptr @loads
  %new = add i64 %old, 1
  store i64 %new, ptr @loads
  store i64 5, ptr %l
  ret i32 0
}
define void @CuteDSLRT_TVMFFISetRaisedCudaError(ptr %f, i32 %c) { ret void }
define ptr @TVMFFIEnvGetStream(i32 %t, i32 %d) { ret ptr inttoptr (i64 4242 to ptr) }
define void @TVMFFIErrorSetRaisedFromCStr(ptr %k, ptr %m) { ret void }
define void @TVMFFIErrorSetRaisedFromCStrParts(ptr %k, ptr %m, i32 %n) { ret void }
define i32 @_cudaLaunchKernelEx(ptr %config, ptr %function, ptr %arguments) {
  call void @llvm.memcpy.p0.p0.i64(ptr @config, ptr %config, i64 52, i1 0)
  %to0 = getelementptr [4 x [16 x i8]], ptr @values, i64 0, i64 0
  %to1 = getelementptr [4 x [16 x i8]], ptr @values, i64 0, i64 1
  %to2 = getelementptr [4 x [16 x i8]], ptr @values, i64 0, i64 2
  %to3 = getelementptr [4 x [16 x i8]], ptr @values, i64 0, i64 3
  %at1 = getelementptr ptr, ptr %arguments, i64 1
  %at2 = getelementptr ptr, ptr %arguments, i64 2
  %at3 = getelementptr ptr, ptr %arguments, i64 3
  %p0 = load ptr, ptr %arguments
  %p1 = load ptr, ptr %at1
  %p2 = load ptr, ptr %at2
  %p3 = load ptr, ptr %at3
  call void @llvm.memcpy.p0.p0.i64(ptr %to0, ptr %p0, i64 16, i1 0)
  call void @llvm.memcpy.p0.p0.i64(ptr %to1, ptr %p1, i64 16, i1 0)
  call void @llvm.memcpy.p0.p0.i64(ptr %to2, ptr %p2, i64 16, i1 0)
  call void @llvm.memcpy.p0.p0.i64(ptr %to3, ptr %p3, i64 4, i1 0)
  ret i32 0
}
"""

_DLTENSOR = struct.Struct("<QiiiBBHQQQ")
_CUDA, _TENSOR, _FLOAT = 2, 7, 3  # kDLCUDA, kTVMFFIDLTensorPtr, kTVMFFIFloat


def make_runtime(path: Path) -> None:
    """Write the stand-in as a shared library."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = binding.parse_assembly(_RUNTIME)
    target = binding.Target.from_triple(HOST_TRIPLES[0])
    machine = target.create_target_machine(opt=2, reloc="pic", codemodel="large")
    data = machine.emit_object(module)
    shown = [s.name for s in elf.read_elf(data).symbols if s.is_defined and s.is_global]
    path.write_bytes(link_shared(data, exports=tuple(shown)))


def _any(kind: int, payload: bytes) -> bytes:
    return struct.pack("<iI", kind, 0) + payload


def call_and_record(runtime_path: str, launcher_path: str) -> None:
    """Call the launcher as tvm_ffi does; print what arrived. Runs in a process of its own."""
    runtime = ctypes.CDLL(runtime_path, mode=ctypes.RTLD_GLOBAL)
    launcher = ctypes.CDLL(launcher_path)["__tvm_ffi_toy_add"]
    length = 1000
    memory = [(ctypes.c_float * length)() for _ in range(3)]
    shape, stride = (ctypes.c_int64 * 1)(length), (ctypes.c_int64 * 1)(1)
    tensors = []
    for block in memory:
        fields = (ctypes.addressof(block), _CUDA, 0, 1, 2, 32, 1)
        raw = _DLTENSOR.pack(*fields, ctypes.addressof(shape), ctypes.addressof(stride), 0)
        tensors.append(ctypes.create_string_buffer(raw, len(raw)))
    values = [_any(_TENSOR, struct.pack("<Q", ctypes.addressof(t))) for t in tensors]
    values.append(_any(_FLOAT, struct.pack("<d", -0.75)))
    packed = ctypes.create_string_buffer(b"".join(values), 16 * 4)
    result = ctypes.create_string_buffer(16)
    for _ in range(2):
        status = launcher(None, packed, 4, result)
        assert status == 0, status
    x, y, z, bx, by, bz, shared, stream = struct.unpack_from(
        "<6IQQ", bytes((ctypes.c_char * 64).in_dll(runtime, "config"))
    )
    received = bytes((ctypes.c_char * 64).in_dll(runtime, "values"))
    assert (x, y, z, bx, by, bz) == (8, 1, 1, 128, 1, 1)
    assert (shared, stream) == (0, 4242)
    for i, block in enumerate(memory):
        assert struct.unpack_from("<Qq", received, 16 * i) == (ctypes.addressof(block), length)
    assert struct.unpack_from("<f", received, 48) == (-0.75,)
    assert ctypes.c_int64.in_dll(runtime, "loads").value == 1
    sys.stdout.write("launched")


def test_launcher_library_delivers_its_launch(tmp_path: Path) -> None:
    artifact = compile_variant(ToyAdd(), CompileTarget(arch="sm_90a")).write(tmp_path)
    make_runtime(tmp_path / "runtime.so")
    code = (
        "import test_launcher\n"
        f"test_launcher.call_and_record({str(tmp_path / 'runtime.so')!r}, "
        f"{str(artifact.directory / LAUNCHER_LIBRARY)!r})"  # type: ignore[operator]
    )
    environment = {"PYTHONPATH": ":".join([str(Path(__file__).parent), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "launched"
