"""The driver against small launchers written in LLVM IR, with the symbols CuTe-DSL launchers
use."""

import ctypes
import struct
import threading

import numpy as np
import pytest

from fovea.emulator import Options, OutOfBounds
from fovea.emulator.driver import Launch, Launcher, load_launcher
from fovea.emulator.errors import LauncherError, LaunchError
from fovea.emulator.host_arguments import (
    CTensor,
    Pointer,
    Stream,
    device_array,
    read_c_signature,
)
from fovea.emulator.host_object import read_symbols

llvm = pytest.importorskip("llvmlite.binding")

# A TVM-FFI launcher of one tensor and one float: kernel "scale" gets (data pointer, n, factor),
# n / 4 CTAs of 64 threads in clusters of 2, 512 bytes of shared memory; launched `launches` times.
FFI_LAUNCHER = """
@slot = internal global i64 0
@kernel = internal global i64 0
@name = internal constant [6 x i8] c"scale\\00"
@kind = internal constant [11 x i8] c"ValueError\\00"
@part0 = internal constant [11 x i8] c"bad dtype \\00"
@part1 = internal constant [11 x i8] c"of tensor.\\00"
declare i32 @_cudaLibraryLoadData(ptr, ptr, ptr, ptr, i32, ptr, ptr, i32)
declare i32 @_cudaLibraryGetKernel(ptr, ptr, ptr)
declare i32 @_cudaLaunchKernelEx(ptr, ptr, ptr)
declare i32 @cuda_dialect_init_library_once(ptr, ptr, ptr, ptr)
declare void @TVMFFIErrorSetRaisedFromCStr(ptr, ptr)
declare void @TVMFFIErrorSetRaisedFromCStrParts(ptr, ptr, i32)
declare ptr @TVMFFIEnvGetStream(i32, i32)
declare void @CuteDSLRT_TVMFFISetRaisedCudaError(ptr, i32)
declare i32 @_cudaDeviceGetAttribute(ptr, i32, i32)
declare i64 @strlen(ptr)

define i32 @init(ptr %library) {{
  %r = call i32 @_cudaLibraryLoadData(ptr %library, ptr null, ptr null, ptr null, i32 0, ptr null,
                                      ptr null, i32 0)
  ret i32 %r
}}
define i32 @load(ptr %library, i32 %device) {{
  %handle = load ptr, ptr %library
  %r = call i32 @_cudaLibraryGetKernel(ptr @kernel, ptr %handle, ptr @name)
  ret i32 %r
}}
define i32 @__tvm_ffi_scale(ptr %self, ptr %args, i32 %count, ptr %result) {{
  %parts = alloca [2 x ptr]
  %config = alloca [52 x i8], align 8
  %attribute = alloca [18 x i32], align 8
  %parameters = alloca [3 x ptr]
  %n32 = alloca i32
  %queried = alloca i32
  %length = call i64 @strlen(ptr @name)
  %ok = call i32 @cuda_dialect_init_library_once(ptr @slot, ptr @init, ptr @load,
                                                 ptr @TVMFFIErrorSetRaisedFromCStr)
  %failed = icmp ne i32 %ok, 0
  br i1 %failed, label %error, label %decode
decode:
  %value = getelementptr i8, ptr %args, i64 8
  %tensor = load ptr, ptr %value
  %device_at = getelementptr i8, ptr %tensor, i64 8
  %device = load i32, ptr %device_at
  %dtype_at = getelementptr i8, ptr %tensor, i64 20
  %dtype = load i32, ptr %dtype_at
  %is_f32 = icmp eq i32 %dtype, 73730
  %is_cuda = icmp eq i32 %device, 2
  %fits = and i1 %is_f32, %is_cuda
  br i1 %fits, label %launch, label %refuse
refuse:
  store ptr @part0, ptr %parts
  %second = getelementptr ptr, ptr %parts, i64 1
  store ptr @part1, ptr %second
  call void @TVMFFIErrorSetRaisedFromCStrParts(ptr @kind, ptr %parts, i32 2)
  ret i32 -1
launch:
  %shape_at = getelementptr i8, ptr %tensor, i64 24
  %shape = load ptr, ptr %shape_at
  %n = load i64, ptr %shape
  %n_short = trunc i64 %n to i32
  store i32 %n_short, ptr %n32
  %grid = udiv i32 %n_short, 4
  %query = call i32 @_cudaDeviceGetAttribute(ptr %queried, i32 {attribute}, i32 0)
  call void @llvm.memset.p0.i64(ptr %config, i8 0, i64 52, i1 false)
  store i32 %grid, ptr %config
  %c1 = getelementptr i8, ptr %config, i64 4
  store i32 1, ptr %c1
  %c2 = getelementptr i8, ptr %config, i64 8
  store i32 1, ptr %c2
  %c3 = getelementptr i8, ptr %config, i64 12
  store i32 64, ptr %c3
  %c4 = getelementptr i8, ptr %config, i64 16
  store i32 1, ptr %c4
  %c5 = getelementptr i8, ptr %config, i64 20
  store i32 1, ptr %c5
  %c6 = getelementptr i8, ptr %config, i64 24
  store i64 512, ptr %c6
  %c7 = getelementptr i8, ptr %config, i64 40
  store ptr %attribute, ptr %c7
  %c8 = getelementptr i8, ptr %config, i64 48
  store i32 1, ptr %c8
  store i32 4, ptr %attribute
  %a1 = getelementptr i8, ptr %attribute, i64 8
  store i32 2, ptr %a1
  %a2 = getelementptr i8, ptr %attribute, i64 12
  store i32 1, ptr %a2
  %a3 = getelementptr i8, ptr %attribute, i64 16
  store i32 1, ptr %a3
  store ptr %tensor, ptr %parameters
  %p1 = getelementptr ptr, ptr %parameters, i64 1
  store ptr %n32, ptr %p1
  %p2 = getelementptr ptr, ptr %parameters, i64 2
  %factor = getelementptr i8, ptr %args, i64 24
  store ptr %factor, ptr %p2
  %handle = load ptr, ptr @kernel
  %first = call i32 @_cudaLaunchKernelEx(ptr %config, ptr %handle, ptr %parameters)
  %again = call i32 @_cudaLaunchKernelEx(ptr %config, ptr %handle, ptr %parameters)
  %status = or i32 %first, %again
  %bad = icmp ne i32 %status, 0
  br i1 %bad, label %error, label %done
error:
  call void @CuteDSLRT_TVMFFISetRaisedCudaError(ptr null, i32 719)
  ret i32 -1
done:
  ret i32 0
}}
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
"""
SIZES = {"scale": (8, 4, 8)}


def compile_ir(text: str) -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(reloc="pic")
    return target.emit_object(llvm.parse_assembly(text))


@pytest.fixture(scope="module")
def ffi_object():
    return compile_ir(FFI_LAUNCHER.format(attribute=16))


def launcher(data, run, **more):
    return Launcher(data, parameter_sizes=SIZES, run=run, **more)


def test_launcher_hands_over_each_launch_as_it_was_made(ffi_object):
    array = np.zeros(32, np.float32)
    first, second = launcher(ffi_object, lambda launch: launch)(array, 2.5)
    assert isinstance(first, Launch)
    assert (first.kernel, first.grid, first.block) == ("scale", (8, 1, 1), (64, 1, 1))
    assert (first.cluster, first.shared_bytes) == ((2, 1, 1), 512)
    pointer, count, factor = struct.unpack("<QId", b"".join(first.parameters))
    assert (pointer, count, factor) == (array.ctypes.data, 32, 2.5)
    assert [item.address for item in first.arrays] == [array.ctypes.data]
    assert second.parameters == first.parameters


def test_kernel_writes_reach_the_callers_array(ffi_object):
    array = np.arange(8, dtype=np.float32)

    def scale(launch):
        pointer, count, factor = struct.unpack("<QId", b"".join(launch.parameters))
        memory = (ctypes.c_float * count).from_address(pointer)
        memory[:] = [value * factor for value in memory]

    launcher(ffi_object, scale)(array, 3.0)
    assert np.array_equal(array, np.arange(8) * 9.0)


def test_exception_in_a_kernel_reaches_the_caller_and_stops_the_call(ffi_object):
    ran = []

    def fail(launch):
        ran.append(launch)
        raise ZeroDivisionError("kernel fault")

    call = launcher(ffi_object, fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="kernel fault"):
            call(np.zeros(8, np.float32), 1.0)
    assert len(ran) == 2, "the second launch of a failed call must not run"


def test_launcher_that_refuses_its_arguments_reports_its_own_text(ffi_object):
    with pytest.raises(LauncherError, match="ValueError: bad dtype of tensor"):
        launcher(ffi_object, lambda launch: None)(np.zeros(8, np.int32), 1.0)


def test_unknown_device_attribute_names_the_number():
    data = compile_ir(FFI_LAUNCHER.format(attribute=4711))
    with pytest.raises(LauncherError, match="device attribute 4711"):
        launcher(data, lambda launch: None)(np.zeros(8, np.float32), 1.0)


def test_kernel_missing_from_the_ptx_names_those_there(ffi_object):
    call = Launcher(ffi_object, parameter_sizes={"other": (8,)}, run=lambda launch: None)
    with pytest.raises(LauncherError, match=r"kernel 'scale'.*it defines: other"):
        call(np.zeros(8, np.float32), 1.0)


def test_two_launchers_of_one_object_do_not_share_state(ffi_object):
    one = launcher(ffi_object, lambda launch: "one")
    two = launcher(ffi_object, lambda launch: "two")
    array = np.zeros(8, np.float32)
    assert one(array, 1.0) == ("one", "one")
    assert two(array, 1.0) == ("two", "two")
    assert one(array, 1.0) == ("one", "one")


def test_launcher_called_from_threads_keeps_calls_apart(ffi_object):
    barrier = threading.Barrier(4, timeout=20)
    seen = {}

    def run(launch):
        barrier.wait()
        (count,) = struct.unpack("<I", launch.parameters[1])
        if count == 16:
            raise ValueError("sixteen")
        return count

    call = launcher(ffi_object, run)

    def work(count):
        try:
            seen[count] = call(np.zeros(count, np.float32), 1.0)
        except ValueError as error:
            seen[count] = str(error)
            barrier.wait()

    threads = [threading.Thread(target=work, args=(count,)) for count in (8, 12, 16, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {8: (8, 8), 12: (12, 12), 16: "sixteen", 20: (20, 20)}


def test_launcher_may_be_called_from_within_a_launch(ffi_object):
    array = np.zeros(8, np.float32)
    inner = launcher(ffi_object, lambda launch: "inner")
    outer = launcher(ffi_object, lambda launch: inner(array, 1.0))
    assert outer(array, 1.0) == (("inner", "inner"), ("inner", "inner"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a 64-bit little-endian ELF"),
        (b"MZ" + bytes(100), "not a 64-bit little-endian ELF"),
        (b"\x7fELF\x02\x01" + bytes(10), "damaged ELF"),
    ],
)
def test_bytes_that_are_no_object_are_refused(data, message):
    with pytest.raises(LauncherError, match=message):
        launcher(data, lambda launch: None)


def test_truncated_object_is_refused(ffi_object):
    for size in (100, len(ffi_object) // 2, len(ffi_object) - 40):
        with pytest.raises(LauncherError):
            launcher(ffi_object[:size], lambda launch: None)


def test_object_that_needs_an_unknown_symbol_names_it():
    data = compile_ir(
        "declare i32 @_cudaGraphLaunch(ptr)\n"
        "define i32 @__tvm_ffi_f(ptr %a, ptr %b, i32 %c, ptr %d) {\n"
        "  %r = call i32 @_cudaGraphLaunch(ptr %a)\n  ret i32 %r\n}\n"
    )
    assert read_symbols(data).undefined == {"_cudaGraphLaunch"}
    with pytest.raises(LauncherError, match="_cudaGraphLaunch"):
        launcher(data, lambda launch: None)


def test_object_without_a_launcher_is_refused():
    with pytest.raises(LauncherError, match="defines 0 launchers"):
        launcher(compile_ir("define i32 @f() { ret i32 0 }"), lambda launch: None)


# --- arguments ----------------------------------------------------------------------------------


def test_device_array_of_a_strided_view_spans_its_bytes():
    base = np.zeros((8, 16), np.float32)
    view = base[1:7:2, ::-1]
    array = device_array(view)
    assert (array.shape, array.strides) == ((3, 16), (32, -1))
    first, size = array.byte_range()
    assert first == base.ctypes.data + 64
    assert size == (2 * 32 + 16) * 4


def test_device_array_claims_another_type_of_the_same_width():
    storage = np.zeros((4, 8), np.uint16)
    assert device_array(storage, dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(LaunchError, match=r"dtype='float32'.*a type of 16 bits"):
        device_array(storage, dtype="float32")
    with pytest.raises(LaunchError, match=r"dtype='bf16'.*bfloat16"):
        device_array(storage, dtype="bf16")


def test_device_array_of_a_torch_tensor_shares_its_memory():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(6, 4, dtype=torch.bfloat16).t()
    array = device_array(tensor)
    assert (array.address, array.dtype) == (tensor.data_ptr(), "bfloat16")
    assert (array.shape, array.strides) == ((4, 6), (1, 4))


@pytest.mark.parametrize("value", ["text", object(), np.zeros(2, np.complex64)])
def test_device_array_of_something_else_is_refused(value):
    with pytest.raises(LaunchError, match=r"value=.*(an array, not|of this machine's)"):
        device_array(value)


# --- the plain C interface ----------------------------------------------------------------------

HEADER = """
typedef struct {
    void *data;
    int64_t dynamic_shapes[1];
    int64_t dynamic_strides[1];
} fk_Tensor_a_t;
static inline int32_t cute_dsl_fk_wrapper(fk_Kernel_Module_t *module, fk_Tensor_a_t *a, float s, \
cudaStream_t stream) {
"""
C_LAUNCHER = """
@kernel = internal global i64 0
@name = internal constant [6 x i8] c"scale\\00"
declare i32 @_cudaLibraryLoadData(ptr, ptr, ptr, ptr, i32, ptr, ptr, i32)
declare i32 @_cudaLibraryGetKernel(ptr, ptr, ptr)
declare i32 @_cudaLaunchKernelEx(ptr, ptr, ptr)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define void @_mlir_fk_cuda_init(ptr %args) {
  %l0 = load ptr, ptr %args
  %library = load ptr, ptr %l0
  %r = call i32 @_cudaLibraryLoadData(ptr %library, ptr null, ptr null, ptr null, i32 0, ptr null,
                                      ptr null, i32 0)
  ret void
}
define void @_mlir_fk_cuda_load_to_device(ptr %args) {
  %l0 = load ptr, ptr %args
  %library = load ptr, ptr %l0
  %handle = load ptr, ptr %library
  %r = call i32 @_cudaLibraryGetKernel(ptr @kernel, ptr %handle, ptr @name)
  ret void
}
define void @_mlir_fk__mlir_ciface_f(ptr %args, i32 %count) {
  %config = alloca [52 x i8], align 8
  %parameters = alloca [3 x ptr]
  call void @llvm.memset.p0.i64(ptr %config, i8 0, i64 52, i1 false)
  %tensor = load ptr, ptr %args
  store ptr %tensor, ptr %parameters
  %shape = getelementptr i8, ptr %tensor, i64 8
  %p1 = getelementptr ptr, ptr %parameters, i64 1
  store ptr %shape, ptr %p1
  %stride = getelementptr i8, ptr %tensor, i64 16
  %p2 = getelementptr ptr, ptr %parameters, i64 2
  store ptr %stride, ptr %p2
  %handle = load ptr, ptr @kernel
  %status = call i32 @_cudaLaunchKernelEx(ptr %config, ptr %handle, ptr %parameters)
  %at = getelementptr ptr, ptr %args, i64 3
  %result = load ptr, ptr %at
  store i32 %status, ptr %result
  ret void
}
"""


def test_plain_launcher_gets_the_structs_of_its_header():
    call = launcher(compile_ir(C_LAUNCHER), lambda launch: launch.parameters, header=HEADER)
    array = np.zeros((6, 8), np.float32)
    tensor = CTensor(array=device_array(array), dynamic_shapes=(6,))
    ((pointer, shape, stride),) = call(tensor, 1.0, Stream())
    assert struct.unpack("<QIQ", pointer + shape + stride) == (array.ctypes.data, 6, 8)


def test_plain_launcher_with_ambiguous_sizes_asks_which():
    call = launcher(compile_ir(C_LAUNCHER), lambda launch: None, header=HEADER)
    with pytest.raises(LauncherError, match="dynamic_shapes"):
        call(np.zeros((6, 8), np.float32), 1.0, Stream())
    with pytest.raises(LaunchError, match="takes 3 arguments"):
        call(np.zeros((6, 8), np.float32))


def test_plain_launcher_without_its_header_is_refused():
    with pytest.raises(LauncherError, match="header"):
        launcher(compile_ir(C_LAUNCHER), lambda launch: None)


def test_plain_launcher_whose_kernel_fails_raises_the_failure():
    def fail(launch):
        raise ZeroDivisionError

    call = launcher(compile_ir(C_LAUNCHER), fail, header=HEADER)
    tensor = CTensor(array=device_array(np.zeros((6, 8), np.float32)), dynamic_shapes=(6,))
    with pytest.raises(ZeroDivisionError):
        call(tensor, 1.0, Stream())


def test_header_with_an_unknown_parameter_type_names_it():
    with pytest.raises(LauncherError, match="'dim3'"):
        read_c_signature("int32_t cute_dsl_fk_wrapper(fk_Kernel_Module_t *module, dim3 grid)")


def test_pointer_argument_makes_its_array_reachable(ffi_object):
    array = device_array(np.zeros(8, np.float32))
    extra = device_array(np.zeros(4, np.int32))
    with pytest.raises(LauncherError):
        launcher(ffi_object, lambda launch: launch)(np.zeros(8, np.int8), Pointer(array=array))
    (first, _second) = launcher(ffi_object, lambda launch: launch)(array, 1.0, memory=[extra])
    assert [item.address for item in first.arrays] == [array.address, extra.address]


# --- with the machine behind it -------------------------------------------------------------------

SCALE_PTX = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry scale(.param .u64 data, .param .u32 count, .param .f64 factor)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .f32 %f<3>;
    .reg .f64 %d;
    .reg .b64 %rd<4>;
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    setp.ge.u32 %p, %r0, 4;
    @%p ret;
    mad.lo.u32 %r2, %r1, 4, %r0;
    ld.param.u64 %rd0, [data];
    ld.param.f64 %d, [factor];
    cvt.rn.f32.f64 %f0, %d;
    mul.wide.u32 %rd1, %r2, 4;
    add.u64 %rd2, %rd0, %rd1;
    ld.global.f32 %f1, [%rd2];
    mul.f32 %f2, %f1, %f0;
    st.global.f32 [%rd2], %f2;
    ret;
}
"""


def test_loaded_launcher_runs_its_kernels_on_the_callers_memory(ffi_object):
    array = np.arange(16, dtype=np.float32)
    first, second = load_launcher(ffi_object, SCALE_PTX)(array, 3.0, options=Options(seed=1))
    assert np.array_equal(array, np.arange(16) * 9.0)
    assert first.kernel == second.kernel == "scale"


def test_arrays_that_overlap_are_one_allocation(ffi_object):
    base = np.arange(32, dtype=np.float32)
    other = device_array(base[4:])
    load_launcher(ffi_object, SCALE_PTX)(base[:16], 2.0, memory=[other])
    assert np.array_equal(base[:16], np.arange(16) * 4.0)
    assert np.array_equal(base[16:], np.arange(16, 32))


def test_kernel_fault_reaches_the_caller_of_the_launcher(ffi_object):
    array = np.zeros(16, np.float32)
    beyond = SCALE_PTX.replace("add.u64 %rd2, %rd0, %rd1;", "add.u64 %rd2, %rd0, 65536;")
    with pytest.raises(OutOfBounds, match=r"ld\.global"):
        load_launcher(ffi_object, beyond)(array, 1.0)


def test_launcher_shows_its_kernels(ffi_object):
    call = load_launcher(ffi_object, SCALE_PTX)
    assert repr(call) == f"<Launcher {call.name} by tvm-ffi: kernels scale>"


def test_read_only_array_cannot_be_written_by_a_kernel(ffi_object):
    array = np.ones(16, np.float32)
    array.flags.writeable = False
    with pytest.raises(OutOfBounds, match="a read-only array: it is not writeable"):
        load_launcher(ffi_object, SCALE_PTX)(array, 2.0)
    assert (array == 1).all()


def test_launcher_is_told_the_options_number_of_sms():
    # This launcher returns the attribute as its status.
    end = "%sms = load i32, ptr %queried\n  ret i32 %sms\n}}\ndeclare void @llvm"
    text = FFI_LAUNCHER.replace("ret i32 0\n}}\ndeclare void @llvm", end)
    call = load_launcher(compile_ir(text.format(attribute=16)), SCALE_PTX)
    with pytest.raises(LauncherError, match="status 77"):
        call(np.zeros(8, np.float32), 1.0, options=Options(num_sms=77))
