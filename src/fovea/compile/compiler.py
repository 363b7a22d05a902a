"""Compilation of one variant into an artifact with CuTe-DSL.

Lives here: the only calls into cutlass outside `kernels/`. What a kernel does is said there; where
artifacts are kept is `cache`'s matter. Invariant: the target is given, no device is asked, and the
launcher carries no instruction that only this machine's processor has.

A kernel author does three things:

    class MyVariant:                       # frozen and picklable (the pool sends it to workers)
        name = "fovea_fwd"                 # a C identifier without the word "cutlass"
        def key_text(self): return ...     # canonical text of everything that shapes the code
        def build(self):                   # imports cutlass here, not at the module's top
            kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
            m = cute.sym_int64()
            q = make_fake_compact_tensor(cutlass.BFloat16, (m, 64), assumed_align=16)
            return host_function, [q, cutlass.Float32(1.0),
                                   make_fake_stream(use_tvm_ffi_env_stream=True)]

    artifact = compile_variant(MyVariant(), CompileTarget(arch="sm_90a"))
    run = fovea.runtime.module.load(artifact, torch.device("cuda", 0))
    run(q, 2.0)                            # the environment stream is no argument of the call

The host function and kernel must lie in a file (the compiler reads their source). A kernel whose
PTX name holds the word "cutlass" is refused: ptxas changes its heuristics on that word.
"""

import contextlib
import gc
import importlib
import importlib.util
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import fovea.version
from fovea.compile import key
from fovea.compile.artifact import (
    CUBIN,
    LAUNCHER_LIBRARY,
    LAUNCHER_OBJECT,
    PTX,
    Artifact,
    ArtifactRecord,
    seal_artifact,
)
from fovea.compile.cubin import kernel_names, kernel_resources
from fovea.compile.key import Variant
from fovea.compile.linker import link_shared
from fovea.compile.target import CompileTarget
from fovea.errors import UnsupportedError, invalid, missing_package

SYMBOL_PREFIX = "__tvm_ffi_"  # what tvm_ffi expects before a function's name

# The oldest processor of the ABI: an artifact made on one machine runs on every other.
_HOST_CPU = {"x86_64": "x86-64", "aarch64": "generic"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WITHOUT_COMPILER = (
    " Or set FOVEA_BUNDLE to a folder made by `fovea compile`, or use backend='reference'."
)
_SCRATCH_BYTES = 64 * 1024**2

# The compiler keeps state of the compilation at hand in process-wide objects.
_one_at_a_time = threading.Lock()


class CompileError(RuntimeError):
    """A variant that the compiler does not take."""


def check_compiler(name: str) -> str:
    """Return the compiler's version.

    Raises:
        UnsupportedError: it is not installed here; the text says that the variant `name` needs it.
    """
    version = key.compiler_version()
    for package, is_there in (
        (key.COMPILER_DISTRIBUTION, version is not None),
        ("apache-tvm-ffi", importlib.util.find_spec("tvm_ffi") is not None),
    ):
        if not is_there:
            raise UnsupportedError(
                missing_package(f"compiling {name!r}", package, "cuda") + _WITHOUT_COMPILER
            )
    assert version is not None
    return version


def compile_variant(variant: Variant, target: CompileTarget) -> Artifact:
    """Return the artifact of a variant for a target, made now; nothing is written to a cache.

    Raises:
        UnsupportedError: the compiler is not installed here.
        ValueError: the variant's name cannot be a symbol.
        CompileError: the compiler refuses the variant.
    """
    _check_name(variant.name)
    version = check_compiler(variant.name)
    start = time.perf_counter()
    # cute.jit functions may be called in many threads; the compiler may not.
    with (
        _one_at_a_time,
        _collector_paused(),
        tempfile.TemporaryDirectory(dir=scratch_root()) as scratch,
    ):
        contents = _compile(variant, target, Path(scratch))
    ptx = contents[PTX].decode()
    for name in kernel_names(ptx):
        if "cutlass" in name:
            raise CompileError(
                f"kernel {name!r} of variant {variant.name!r} has the word 'cutlass' in its name, "
                "on which ptxas changes its heuristics; call kernel.set_name_prefix("
                f"{variant.name!r}, remove_cutlass_symbol=True, keep_mangled_name=False) in build()"
            )
    symbol = SYMBOL_PREFIX + variant.name
    contents[LAUNCHER_LIBRARY] = link_shared(contents[LAUNCHER_OBJECT], exports=(symbol,))
    record = ArtifactRecord(
        name=variant.name,
        symbol=symbol,
        key=key.cache_key(variant, target),
        arch=target.arch,
        host_triple=target.host_triple,
        variant=variant.key_text(),
        fovea_version=fovea.version.__version__,
        compiler_version=version,
        source_hash=key.source_hash(),
        kernels=kernel_resources(contents[CUBIN]),
        compile_seconds=round(time.perf_counter() - start, 3),
    )
    return seal_artifact(record, contents)


@contextlib.contextmanager
def _collector_paused() -> Generator[None]:
    """Keep the garbage collector from walking what tracing builds, all of which is in use.

    It takes a twentieth of a cold compilation otherwise.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def scratch_root() -> str | None:
    """Return a folder for the compiler's temporary files: one with room, else the system's choice.

    A full /tmp must not stop a compilation whose result fits in memory.
    """
    for candidate in (tempfile.gettempdir(), "/dev/shm"):
        try:
            if shutil.disk_usage(candidate).free >= _SCRATCH_BYTES:
                return candidate
        except OSError:
            continue
    return None


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or "cutlass" in name:
        raise ValueError(
            invalid(
                "variant.name",
                repr(name),
                "a C identifier without the word 'cutlass'",
                "name the variant so",
            )
        )


def _compile(variant: Variant, target: CompileTarget, scratch: Path) -> dict[str, bytes]:
    cute: Any = importlib.import_module("cutlass.cute")
    host_function, arguments = variant.build()
    options = (
        f"--enable-tvm-ffi --gpu-arch {target.arch} --keep-ptx --keep-cubin --dump-dir {scratch}"
    )
    try:
        compiled = cute.compile(host_function, *arguments, options=options)
    except Exception as error:
        raise CompileError(
            f"CuTe-DSL cannot compile {variant.name!r} for {target}: {error}"
        ) from error
    ptx, cubin = compiled.artifacts.PTX, compiled.artifacts.CUBIN
    if not ptx or not cubin:
        raise CompileError(
            f"CuTe-DSL {key.compiler_version()} returned no PTX or no cubin for {variant.name!r}; "
            "install nvidia-cutlass-dsl 4.8"
        )
    return {
        LAUNCHER_OBJECT: _export_launcher(compiled, variant.name, target, scratch),
        PTX: ptx.rstrip("\0").encode() if isinstance(ptx, str) else bytes(ptx),
        CUBIN: bytes(cubin),
    }


def _export_launcher(compiled: Any, name: str, target: CompileTarget, scratch: Path) -> bytes:
    """Return the launcher as a relocatable object for the target's processor.

    The compiled function's own `export_to_c` makes code for this very processor (AVX-512 where it
    has that) and refuses others under the TVM-FFI interface; the exporter below takes a triple.
    """
    try:
        export: Any = importlib.import_module("cutlass.base_dsl.export")
        builder: Any = importlib.import_module("cutlass.base_dsl.tvm_ffi_builder")
        entry = SYMBOL_PREFIX + compiled.function_name
        module = export.get_export_module(
            compiled.ir_module, f"__fovea_{name}", preserve_symbols={entry}
        )
        builder.rename_tvm_ffi_function(module, compiled.function_name, name)
        dump = compiled.export_provider.mlirExecutionEngine.dump_object_file_pic
    except (ImportError, AttributeError) as error:
        raise CompileError(
            f"CuTe-DSL {key.compiler_version()} lacks an interface that fovea uses to export "
            f"launchers ({error}); install nvidia-cutlass-dsl 4.8"
        ) from error
    path = scratch / LAUNCHER_OBJECT
    dump(
        module,
        str(path),
        SYMBOL_PREFIX + name,
        opt_level=3,
        host_triple=target.host_triple,
        host_cpu=_HOST_CPU[target.host_triple.partition("-")[0]],
        host_features="",
    )
    return path.read_bytes()
