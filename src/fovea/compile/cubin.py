"""What a compiled kernel uses, read from its cubin.

Lives here: registers, stack, local and static shared memory of every kernel in a cubin, and the
names of the kernels in a PTX text. Invariant: the figures come from the binary that will run, not
from a plan; a file that lacks them raises.
"""

import re
import struct
from dataclasses import dataclass

from fovea.compile import elf
from fovea.compile.elf import ElfError

# Attributes of .nv.info. NVIDIA does not document them; cuobjdump --dump-resource-usage prints the
# same figures for the kernels in tests/compile, which is the evidence for these numbers.
_REGISTERS, _FRAME_BYTES, _STACK_BYTES = 0x2F, 0x11, 0x12
_MAX_THREADS, _REQUIRED_THREADS = 0x05, 0x10
_SIZED_VALUE = 0x04  # an attribute followed by a 16-bit size and that many bytes

_TOOLS = re.compile(rb"Cuda compilation tools, release (\d+)\.(\d+)")
_ENTRY = re.compile(r"^\s*(?:\.visible\s+)?\.entry\s+([\w$]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """What one thread, and one block, of a kernel takes.

    Attributes:
        registers: per thread at launch (a kernel may move them between warps later).
        stack_bytes: per thread; more than 0 means arrays in memory or spills.
        local_bytes: per thread, besides the stack.
        shared_bytes: static shared memory per block, alignment of the dynamic part included, as
            cuobjdump counts; the dynamic part itself is named at launch.
        threads: threads per block that the kernel takes at most, or 0 where it does not say.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    threads: int


def kernel_resources(cubin: bytes) -> dict[str, KernelResources]:
    """Return the resources of each kernel in a cubin, by name.

    Raises:
        ElfError: the bytes are no cubin, or it does not say what its kernels use.
    """
    file = elf.read_elf(cubin)
    if file.machine != elf.EM_CUDA:
        raise ElfError(f"ELF machine {file.machine} is not CUDA ({elf.EM_CUDA}): not a cubin")
    info = file.section(".nv.info")
    if info is None:
        raise ElfError("cubin has no .nv.info section: it does not say what its kernels use")
    by_symbol: dict[int, dict[int, int]] = {}
    for attribute, value in _attributes(info.data):
        if attribute in (_REGISTERS, _FRAME_BYTES, _STACK_BYTES) and len(value) == 8:
            symbol, amount = struct.unpack("<II", value)
            by_symbol.setdefault(symbol, {})[attribute] = amount
    found: dict[str, KernelResources] = {}
    for index, figures in by_symbol.items():
        name = file.symbols[index].name
        text = file.section(f".text.{name}")
        own = file.section(f".nv.info.{name}")
        # Functions that a kernel calls have figures too, but no attributes of their own.
        if text is None or own is None:
            continue
        if _REGISTERS not in figures or _FRAME_BYTES not in figures:
            raise ElfError(f"cubin does not say how many registers or stack bytes {name!r} takes")
        local, shared = file.section(f".nv.local.{name}"), file.section(f".nv.shared.{name}")
        found[name] = KernelResources(
            registers=figures[_REGISTERS],
            stack_bytes=max(figures[_FRAME_BYTES], figures.get(_STACK_BYTES, 0)),
            local_bytes=0 if local is None else local.size,
            shared_bytes=0 if shared is None else shared.size,
            threads=_threads(own.data),
        )
    if not found:
        raise ElfError("cubin holds no kernel")
    return found


def tools_version(cubin: bytes) -> tuple[int, int] | None:
    """Return the CUDA version of the tools that made a cubin, None where it does not say."""
    note = elf.read_elf(cubin).section(".note.nv.tkinfo")
    found = None if note is None else _TOOLS.search(note.data)
    return None if found is None else (int(found[1]), int(found[2]))


def kernel_names(ptx: str) -> list[str]:
    """Return the names of the kernels in a PTX text, in order."""
    return _ENTRY.findall(ptx)


def _threads(info: bytes) -> int:
    for attribute, value in _attributes(info):
        if attribute in (_REQUIRED_THREADS, _MAX_THREADS) and len(value) == 12:
            x, y, z = struct.unpack("<III", value)
            return x * y * z
    return 0


def _attributes(info: bytes) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED_VALUE:
            if at + size > len(info):
                raise ElfError("attribute of .nv.info is cut short")
            found.append((attribute, info[at : at + size]))
            at += size
    return found
