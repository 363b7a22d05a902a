"""Host object files: their symbols, and loading them so that calls end in Python.

What lives here: a reader for the symbol table of an ELF relocatable object and the linking of such
an object under llvmlite's LLJIT. Not here: what the symbols answer (driver.py) and how arguments
are laid out (host_arguments.py).

Invariant: an undefined symbol is bound to an address given by the caller or to the C library, or
linking fails with an error that names it. Nothing is registered process-wide; a `HostObject` owns
all it needs.
"""

import ctypes
import importlib
import itertools
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fovea.emulator.errors import LauncherError
from fovea.errors import missing_package

_ELF_MACHINES = {62: "x86-64", 183: "aarch64"}
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE_SECTION = 2
_BIND_LOCAL = 0
_library_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSymbols:
    """The global symbols of a relocatable object: what it defines and what it still needs."""

    defined: frozenset[str]
    undefined: frozenset[str]


_CUDA_NAME = re.compile(r"_*cu(da)?[A-Z]")


def read_symbols(data: bytes) -> ObjectSymbols:
    """Return the symbols of an ELF64 little-endian relocatable object.

    Raises:
        LauncherError: when `data` is no such object or is truncated.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise LauncherError(
            f"object_bytes is not a 64-bit little-endian ELF object (starts with {data[:6]!r}); "
            "pass the bytes of the .o file that export_to_c wrote"
        )
    try:
        return _read_symbols(data)
    except (struct.error, IndexError, ValueError) as error:
        raise LauncherError(
            f"object_bytes is a damaged ELF object of {len(data)} bytes: {error}; export it again"
        ) from error


def _read_symbols(data: bytes) -> ObjectSymbols:
    kind, machine = struct.unpack_from("<HH", data, 16)
    if kind != 1:
        raise LauncherError(f"the ELF file has type {kind}; a relocatable object (1) is needed")
    if machine not in _ELF_MACHINES:
        raise LauncherError(f"the object is for ELF machine {machine}; known: {_ELF_MACHINES}")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections: list[tuple[int, ...]] = [
        _SECTION_HEADER.unpack_from(data, table + index * size) for index in range(count)
    ]
    defined: set[str] = set()
    undefined: set[str] = set()
    for section in sections:
        if section[1] != _SYMBOL_TABLE_SECTION:
            continue
        names = sections[section[6]]
        for at in range(section[4], section[4] + section[5], _SYMBOL.size):
            name_at, info, _other, section_index, _value, _size = _SYMBOL.unpack_from(data, at)
            start = names[4] + name_at
            name = data[start : data.index(b"\0", start)].decode()
            if name and info >> 4 != _BIND_LOCAL:
                (defined if section_index else undefined).add(name)
    return ObjectSymbols(
        defined=frozenset(defined), undefined=frozenset(undefined - {"_GLOBAL_OFFSET_TABLE_"})
    )


class HostObject:
    """A linked host object whose exported functions can be called through ctypes."""

    def __init__(self, data: bytes, imports: Mapping[str, int], exports: frozenset[str]) -> None:
        """Link `data`, binding undefined names by `imports`, and look up `exports`.

        Raises:
            LauncherError: when a needed symbol is unknown or LLVM refuses the object.
        """
        binding = _llvm()
        undefined = read_symbols(data).undefined
        process = ctypes.CDLL(None)
        # A CUDA library that the process has loaded must not answer: it would look for a GPU.
        unknown = sorted(
            name
            for name in undefined - imports.keys()
            if _CUDA_NAME.match(name) or not hasattr(process, name)
        )
        if unknown:
            raise LauncherError(
                f"the launcher needs symbols that the emulator does not answer: "
                f"{', '.join(unknown)} (answered: {', '.join(sorted(imports))}); "
                "compile it without the feature that needs them"
            )
        library = binding.JITLibraryBuilder().add_object_img(data).add_current_process()
        for name in undefined & imports.keys():
            library.import_symbol(name, imports[name])
        for name in exports:
            library.export_symbol(name)
        try:
            self._jit = binding.create_lljit_compiler()
            self._tracker = library.link(self._jit, f"launcher{next(_library_numbers)}")
        except RuntimeError as error:
            raise LauncherError(f"LLVM cannot load the launcher's object: {error}") from error
        self._addresses = {name: int(self._tracker[name]) for name in exports}

    def address(self, name: str) -> int:
        """Return the address of one of the exported functions."""
        return self._addresses[name]


def _llvm() -> Any:
    """Return llvmlite.binding with this machine's code generator ready."""
    try:
        binding: Any = importlib.import_module("llvmlite.binding")
    except ImportError as error:
        raise LauncherError(
            missing_package("running a host launcher", "llvmlite", "emulator")
            + " The PTX alone runs without it: load_ptx(text).launch(...)."
        ) from error
    # Both calls are idempotent: they register targets once for the process.
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding
