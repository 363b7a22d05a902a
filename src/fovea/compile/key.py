"""The identity of a compiled variant.

Lives here: what a cache key is made of. Invariant: two compilations with the same key give the same
code, so everything that reaches the compiler is in it: the sources that emit code, the compiler's
version and settings, the target, and the variant's own text (plan and mod graphs).
"""

import functools
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Protocol

import fovea.version
from fovea import env
from fovea.compile.artifact import FORMAT
from fovea.compile.target import CompileTarget

COMPILER_DISTRIBUTION = "nvidia-cutlass-dsl"

# Code is emitted by kernels/ from plan/ and from the mod graph; the rest of mods/ only shapes the
# graph, whose text is part of the variant.
_SOURCES = ("kernels/**/*.py", "plan/**/*.py", "mods/graph.py", "compile/compiler.py")


class Variant(Protocol):
    """What can be compiled: a plan with its mod graphs.

    `name` becomes part of symbol names; `key_text` is the canonical text of everything that shapes
    the code, computed without cutlass; `build` imports cutlass and returns the `cute.jit` host
    function and the fake arguments it is compiled for.
    """

    @property
    def name(self) -> str: ...

    def key_text(self) -> str: ...

    def build(self) -> tuple[object, list[object]]: ...


@functools.cache
def source_hash() -> str:
    """Return a hash of fovea's sources that emit code."""
    root = Path(fovea.version.__file__).parent
    digest = hashlib.sha256()
    for path in sorted({p for pattern in _SOURCES for p in root.glob(pattern)}):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


@functools.cache
def compiler_version() -> str | None:
    """Return the installed compiler's version, or None where there is none. Imports nothing."""
    try:
        return importlib.metadata.version(COMPILER_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def cache_key(variant: Variant, target: CompileTarget) -> str:
    """Return the hexadecimal identity of a variant compiled for a target, here and now."""
    parts = {
        "format": FORMAT,
        "fovea": fovea.version.__version__,
        "sources": source_hash(),
        "compiler": compiler_version(),
        "settings": env.compiler_settings(),
        **_variant_parts(variant, target),
    }
    return _digest(parts)


def bundle_key(variant: Variant, target: CompileTarget) -> str:
    """Return the hexadecimal identity of a variant in a bundle.

    It holds what a machine without a compiler knows; the compiler's version and the sources' hash
    are in the artifact's record, to be compared where there is a compiler.
    """
    return _digest({"fovea": fovea.version.__version__, **_variant_parts(variant, target)})


def _variant_parts(variant: Variant, target: CompileTarget) -> dict[str, object]:
    return {
        "arch": target.arch,
        "host": target.host_triple,
        "name": variant.name,
        "variant": variant.key_text(),
    }


def _digest(parts: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
