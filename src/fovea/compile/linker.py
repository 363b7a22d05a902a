"""Linking of one launcher object into a shared library that `dlopen` takes.

Lives here: a static linker for what the compiler emits, so that neither the machine that compiles
nor the one that runs needs a system linker, and so that launchers for aarch64 can be made on x86-64
and the other way round. Reading ELF is in `elf`. Invariant: a relocation, section or symbol kind
that is not known here raises `ElfError`; nothing is guessed.

The library has four loadable parts on their own pages: tables and constants (read), code (read and
execute), and the global offset table with data (read and write). Symbols that the object leaves
undefined are looked up among the libraries already loaded, when the library is opened.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from fovea.compile import elf
from fovea.compile.elf import ElfError, ElfFile, Relocation, Section, Symbol

_PAGE = {elf.EM_X86_64: 0x1000, elf.EM_AARCH64: 0x10000}
# Dynamic relocations: absolute symbol, symbol into a GOT slot, load address + addend.
# Source: psABI x86-64, table 4.9; ELF for the Arm 64-bit architecture, section 5.7.
_DYNAMIC = {elf.EM_X86_64: (1, 6, 8), elf.EM_AARCH64: (257, 1025, 1027)}

_PF_X, _PF_W, _PF_R = 1, 2, 4
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_RELAENT = 4, 5, 6, 7, 8, 9
_DT_STRSZ, _DT_SYMENT, _DT_FLAGS, _DT_FLAGS_1 = 10, 11, 30, 0x6FFFFFFB
_HEADER_BYTES, _PROGRAM_BYTES = 64, 56
_PROGRAM_COUNT = 5


def link_shared(data: bytes, *, exports: tuple[str, ...]) -> bytes:
    """Return a shared library made of one position-independent object.

    Args:
        data: the relocatable object.
        exports: defined symbols that the library shows; the others stay inside.

    Raises:
        ElfError: the object needs something that is not known here, or lacks an export.
    """
    file = elf.read_elf(data)
    if file.type != elf.ET_REL or file.machine not in _PAGE:
        raise ElfError(
            f"cannot link ELF type {file.type} for machine {file.machine}: expected a relocatable "
            f"object (type {elf.ET_REL}) for machine {' or '.join(map(str, _PAGE))}"
        )
    return _Link(file, exports).image()


@dataclass(slots=True, kw_only=True)
class _Patch:
    section: Section
    relocation: Relocation
    symbol: Symbol


class _Link:
    """One link: gather what is needed, place it, patch it, write it."""

    def __init__(self, file: ElfFile, exports: tuple[str, ...]) -> None:
        self.file = file
        self.machine = file.machine
        self.page = _PAGE[file.machine]
        self.sections = [s for s in file.sections if _is_kept(s)]
        self.patches = [
            _Patch(section=s, relocation=r, symbol=file.symbols[r.symbol])
            for s in self.sections
            for r in file.relocations(s)
        ]
        self.exported = [_defined(file, name) for name in exports]
        self.got: dict[tuple[str, int, int], int] = {}
        self.stubs: dict[str, int] = {}
        self.undefined: list[str] = []
        for patch in self.patches:
            self._reserve(patch)
        self.place = dict[int, int]()
        self.dynamic_relocations: list[tuple[int, int, int]] = []

    # --- what is needed -------------------------------------------------------------------------

    def _reserve(self, patch: _Patch) -> None:
        symbol, kind = patch.symbol, patch.relocation.type
        if symbol.name == "_GLOBAL_OFFSET_TABLE_":
            return
        if symbol.section in (elf.SHN_ABS, elf.SHN_COMMON):
            raise ElfError(f"symbol {symbol.name!r} is absolute or common: not supported")
        known = _X86 if self.machine == elf.EM_X86_64 else _ARM
        if kind not in known:
            raise ElfError(
                f"relocation type {kind} of machine {self.machine} against {symbol.name!r} is not "
                f"supported (known: {sorted(known)})"
            )
        needs_stub = kind in _CALLS and not symbol.is_defined
        if kind in _GOT_KINDS or needs_stub:
            self.got.setdefault(_slot(symbol), len(self.got))
        if needs_stub:
            self.stubs.setdefault(symbol.name, len(self.stubs))
        if not symbol.is_defined and symbol.name not in self.undefined:
            if not symbol.is_global:
                raise ElfError(f"local symbol {symbol.name!r} is undefined")
            self.undefined.append(symbol.name)

    # --- where it goes --------------------------------------------------------------------------

    def image(self) -> bytes:
        """Return the bytes of the shared library."""
        strings = _Strings()
        names = [*self.undefined, *(s.name for s in self.exported)]
        self.symbol_number = {name: i + 1 for i, name in enumerate(names)}
        name_offsets = [strings.add(n) for n in names]
        layout = self._lay_out(len(names), len(strings.data))
        out = bytearray(layout.write_end)
        for section in self.sections:
            at = self.place[section.index]
            out[at : at + len(section.data)] = section.data
        for patch in self.patches:
            self._apply(patch, out)
        self._write_got(out)
        self._write_stubs(out)
        self._write_relocations(out, layout.rela)
        self._write_symbols(out, layout.symtab, name_offsets)
        self._write_hash(out, layout.hash, len(names))
        out[layout.strtab : layout.strtab + len(strings.data)] = strings.data
        self._write_dynamic(out, layout, len(strings.data))
        self._write_headers(out, layout)
        return bytes(out)

    def _lay_out(self, num_names: int, string_bytes: int) -> "_Layout":
        """Place everything in one address space in which file offset and address agree.

        The zeros at the end exist in memory alone.
        """
        constants = [s for s in self.sections if not s.flags & (elf.SHF_WRITE | elf.SHF_EXECINSTR)]
        code = [s for s in self.sections if s.flags & elf.SHF_EXECINSTR]
        data = [s for s in self.sections if s.flags & elf.SHF_WRITE and s.type != elf.SHT_NOBITS]
        zeros = [s for s in self.sections if s.flags & elf.SHF_WRITE and s.type == elf.SHT_NOBITS]
        symtab = _align(_HEADER_BYTES + _PROGRAM_COUNT * _PROGRAM_BYTES, 8)
        hash_at = symtab + 24 * (num_names + 1)
        rela = _align(hash_at + 4 * (2 + 1 + num_names + 1), 8)
        strtab = rela + 24 * self._count_dynamic()
        read_end = self._place(constants, strtab + string_bytes)
        code_at = _align(read_end, self.page)
        self.stubs_at = _align(self._place(code, code_at), 16)
        code_end = self.stubs_at + 16 * len(self.stubs)
        self.got_at = write_at = _align(code_end, self.page)
        dynamic = self.got_at + 8 * len(self.got)
        write_end = self._place(data, dynamic + 16 * _DYNAMIC_ENTRIES)
        memory_end = self._place(zeros, write_end)
        return _Layout(
            symtab=symtab, hash=hash_at, rela=rela, strtab=strtab, read_end=read_end, code=code_at,
            code_end=code_end, write=write_at, dynamic=dynamic, write_end=write_end,
            memory_end=memory_end,
        )  # fmt: skip

    def _place(self, sections: list[Section], at: int) -> int:
        for section in sections:
            at = _align(at, section.align)
            self.place[section.index] = at
            at += section.size
        return at

    def _count_dynamic(self) -> int:
        absolute = _DYNAMIC[self.machine][0]
        return len(self.got) + sum(p.relocation.type == absolute for p in self.patches)

    # --- patches --------------------------------------------------------------------------------

    def _address(self, symbol: Symbol) -> int:
        if symbol.section not in self.place:
            raise ElfError(f"symbol {symbol.name!r} lies in a section that is not loaded")
        return self.place[symbol.section] + symbol.value

    def _slot_address(self, symbol: Symbol) -> int:
        return self.got_at + 8 * self.got[_slot(symbol)]

    def _apply(self, patch: _Patch, out: bytearray) -> None:
        relocation, symbol = patch.relocation, patch.symbol
        kind, addend = relocation.type, relocation.addend
        where = self.place[patch.section.index] + relocation.offset
        absolute, _, relative = _DYNAMIC[self.machine]
        if kind == absolute:
            if symbol.is_defined:
                value = self._address(symbol) + addend
                self.dynamic_relocations.append((where, relative, value))
            else:
                info = self.symbol_number[symbol.name] << 32 | absolute
                self.dynamic_relocations.append((where, info, addend))
            return
        if symbol.name == "_GLOBAL_OFFSET_TABLE_":
            target = self.got_at
        elif kind in _GOT_KINDS:
            target = self._slot_address(symbol)
        elif symbol.is_defined:
            target = self._address(symbol)
        elif symbol.name in self.stubs and kind in _CALLS:
            target = self.stubs_at + 16 * self.stubs[symbol.name]
        else:
            raise ElfError(f"undefined symbol {symbol.name!r} is addressed directly")
        known = _X86 if self.machine == elf.EM_X86_64 else _ARM
        known[kind](out, where, target + addend, self.got_at)

    def _write_got(self, out: bytearray) -> None:
        _, into_slot, relative = _DYNAMIC[self.machine]
        for (name, section, value), i in self.got.items():
            where = self.got_at + 8 * i
            if section == elf.SHN_UNDEF:
                info = self.symbol_number[name] << 32 | into_slot
                self.dynamic_relocations.append((where, info, 0))
            else:
                address = self.place[section] + value
                struct.pack_into("<Q", out, where, address)
                self.dynamic_relocations.append((where, relative, address))

    def _write_stubs(self, out: bytearray) -> None:
        for name, i in self.stubs.items():
            at = self.stubs_at + 16 * i
            slot = self.got_at + 8 * self.got[name, elf.SHN_UNDEF, 0]
            if self.machine == elf.EM_X86_64:
                out[at : at + 6] = b"\xff\x25" + struct.pack("<i", slot - (at + 6))  # jmp *slot
                continue
            # adrp x16, slot; ldr x17, [x16, #low]; br x17: x16 and x17 are the ones that a call
            # may clobber (AAPCS64, section 6.1.1).
            struct.pack_into("<III", out, at, 0x90000010, 0xF9400211, 0xD61F0220)
            _adr_page(out, at, slot, 0)
            _low12(3)(out, at + 4, slot, 0)

    # --- tables ---------------------------------------------------------------------------------

    def _write_symbols(self, out: bytearray, at: int, name_offsets: list[int]) -> None:
        entries = [(elf.SHN_UNDEF, 0, 0)] * len(self.undefined)
        # Any index that is not SHN_UNDEF means "defined here": the file carries no section table.
        entries += [(1, self._address(s), s.size) for s in self.exported]
        for i, (name, (section, value, size)) in enumerate(zip(name_offsets, entries)):
            kind = 1 << 4 | (2 if section else 0)
            struct.pack_into("<IBBHQQ", out, at + 24 * (i + 1), name, kind, 0, section, value, size)

    def _write_relocations(self, out: bytearray, at: int) -> None:
        if len(self.dynamic_relocations) != self._count_dynamic():
            raise ElfError("internal: dynamic relocations were miscounted")
        for i, entry in enumerate(sorted(self.dynamic_relocations)):
            struct.pack_into("<QQQ", out, at + 24 * i, *entry)

    def _write_hash(self, out: bytearray, at: int, num_names: int) -> None:
        # One bucket, one chain: a library of a few dozen symbols is searched in no time.
        first = 1 if num_names else 0
        chain = [0, *range(2, num_names + 1), 0][: num_names + 1]
        struct.pack_into(f"<{4 + num_names}I", out, at, 1, num_names + 1, first, *chain)

    def _write_dynamic(self, out: bytearray, layout: "_Layout", string_bytes: int) -> None:
        table = {
            _DT_HASH: layout.hash, _DT_STRTAB: layout.strtab, _DT_SYMTAB: layout.symtab,
            _DT_STRSZ: string_bytes, _DT_SYMENT: 24, _DT_RELA: layout.rela,
            _DT_RELASZ: 24 * self._count_dynamic(), _DT_RELAENT: 24,
            # Fail when the library is opened, not at a call.
            _DT_FLAGS: 8, _DT_FLAGS_1: 1,
        }  # fmt: skip
        for tag, size_tag, name in ((25, 27, ".init_array"), (26, 28, ".fini_array")):
            section = next((s for s in self.sections if s.name == name), None)
            if section is not None:
                table[tag], table[size_tag] = self.place[section.index], section.size
        for i, (tag, value) in enumerate(table.items()):
            struct.pack_into("<QQ", out, layout.dynamic + 16 * i, tag, value)

    def _write_headers(self, out: bytearray, layout: "_Layout") -> None:
        code_size, dynamic_size = layout.code_end - layout.code, 16 * _DYNAMIC_ENTRIES
        in_file, in_memory = layout.write_end - layout.write, layout.memory_end - layout.write
        read, execute, write = _PF_R, _PF_R | _PF_X, _PF_R | _PF_W
        programs = (
            (_PT_LOAD, read, 0, layout.read_end, layout.read_end, self.page),
            (_PT_LOAD, execute, layout.code, code_size, code_size, self.page),
            (_PT_LOAD, write, layout.write, in_file, in_memory, self.page),
            (_PT_DYNAMIC, write, layout.dynamic, dynamic_size, dynamic_size, 8),
            (_PT_GNU_STACK, write, 0, 0, 0, 16),
        )
        assert len(programs) == _PROGRAM_COUNT
        struct.pack_into(
            "<16sHHIQQQIHHHHHH", out, 0, b"\x7fELF\x02\x01\x01", elf.ET_DYN, self.machine, 1, 0,
            _HEADER_BYTES, 0, 0, _HEADER_BYTES, _PROGRAM_BYTES, len(programs), 64, 0, 0,
        )  # fmt: skip
        for i, (kind, flags, at, file_size, memory_size, align) in enumerate(programs):
            struct.pack_into(
                "<IIQQQQQQ", out, _HEADER_BYTES + _PROGRAM_BYTES * i, kind, flags, at, at, at,
                file_size, memory_size, align,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Addresses of the library's parts, which are their file offsets too."""

    symtab: int
    hash: int
    rela: int
    strtab: int
    read_end: int
    code: int
    code_end: int
    write: int
    dynamic: int
    write_end: int
    memory_end: int


_DYNAMIC_ENTRIES = 16  # 10 always, 4 for the arrays, the null entry that ends the table


class _Strings:
    """A string table that grows."""

    def __init__(self) -> None:
        self.data = bytearray(b"\0")

    def add(self, text: str) -> int:
        offset = len(self.data)
        self.data += text.encode() + b"\0"
        return offset


def _is_kept(section: Section) -> bool:
    if not section.flags & elf.SHF_ALLOC or section.size == 0:
        return False
    if section.flags & elf.SHF_TLS:
        raise ElfError(f"section {section.name!r} is thread-local: not supported")
    # Unwind tables serve C++ exceptions, which no launcher throws or lets pass.
    return not section.name.startswith(".eh_frame")


def _defined(file: ElfFile, name: str) -> Symbol:
    for symbol in file.symbols:
        if symbol.name == name and symbol.is_defined and symbol.is_global:
            return symbol
    defined = sorted(s.name for s in file.symbols if s.is_defined and s.is_global)
    raise ElfError(f"export {name!r} is not defined by the object (defined: {defined})")


def _slot(symbol: Symbol) -> tuple[str, int, int]:
    return symbol.name, symbol.section, symbol.value


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


# --- relocation arithmetic: (image, place, symbol + addend, GOT) -> patch ------------------------

_Apply = Callable[[bytearray, int, int, int], None]


def _pc64(out: bytearray, at: int, value: int, _got: int) -> None:
    struct.pack_into("<q", out, at, value - at)


def _pc32(out: bytearray, at: int, value: int, _got: int) -> None:
    struct.pack_into("<i", out, at, value - at)


def _got64(out: bytearray, at: int, value: int, got: int) -> None:
    struct.pack_into("<q", out, at, value - got)


def _never(_out: bytearray, at: int, _value: int, _got: int) -> None:
    raise ElfError(f"internal: absolute relocation at {at:#x} applied statically")


def _adr_page(out: bytearray, at: int, value: int, _got: int) -> None:
    pages = (value >> 12) - (at >> 12)
    if not -(1 << 20) <= pages < 1 << 20:
        raise ElfError("address does not fit adrp's 4 GiB reach")
    _insert(out, at, (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5)


def _low12(shift: int) -> _Apply:
    def apply(out: bytearray, at: int, value: int, _got: int) -> None:
        if value & ((1 << shift) - 1):
            raise ElfError(f"address {value:#x} is not aligned to {1 << shift} bytes")
        _insert(out, at, ((value & 0xFFF) >> shift) << 10)

    return apply


def _branch26(out: bytearray, at: int, value: int, _got: int) -> None:
    words = (value - at) >> 2
    if not -(1 << 25) <= words < 1 << 25:
        raise ElfError("branch does not fit its 128 MiB reach")
    _insert(out, at, words & 0x3FFFFFF)


def _insert(out: bytearray, at: int, bits: int) -> None:
    (word,) = struct.unpack_from("<I", out, at)
    struct.pack_into("<I", out, at, word | bits)


# Source: psABI x86-64, table 4.9. The compiler uses the large code model: 64-bit forms.
_X86: dict[int, _Apply] = {1: _never, 2: _pc32, 4: _pc32, 24: _pc64, 25: _got64, 27: _got64,
                           29: _pc64}  # fmt: skip
# Source: ELF for the Arm 64-bit architecture (AArch64), section 5.7.
_ARM: dict[int, _Apply] = {257: _never, 260: _pc64, 261: _pc32, 275: _adr_page, 277: _low12(0),
                           278: _low12(0), 282: _branch26, 283: _branch26, 284: _low12(1),
                           285: _low12(2), 286: _low12(3), 299: _low12(4), 311: _adr_page,
                           312: _low12(3)}  # fmt: skip
# Kinds whose symbol is reached through a slot of the global offset table; kinds that call. The two
# machines' numbers do not collide.
_GOT_KINDS = frozenset({27, 311, 312})
_CALLS = frozenset({4, 282, 283})
