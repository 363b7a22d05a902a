"""Reading of 64-bit little-endian ELF files: sections, symbols, relocations.

Lives here: the reader that `linker` (launchers) and `cubin` (kernels) share. Invariant: a file that
is cut short or is no such ELF raises `ElfError`, never a bare struct error.
"""

import struct
from dataclasses import dataclass

# Source of all numbers here: System V ABI, chapters 4 and 5.
SHT_SYMTAB, SHT_RELA, SHT_NOBITS = 2, 4, 8
SHF_WRITE, SHF_ALLOC, SHF_EXECINSTR, SHF_TLS = 1, 2, 4, 0x400
SHN_UNDEF, SHN_ABS, SHN_COMMON = 0, 0xFFF1, 0xFFF2
ET_REL, ET_DYN = 1, 3
EM_X86_64, EM_AARCH64, EM_CUDA = 62, 183, 190

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELA = struct.Struct("<QQq")


class ElfError(ValueError):
    """A file that is no ELF, is cut short, or uses what is not supported here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One section header with its bytes (empty for NOBITS)."""

    index: int
    name: str
    type: int
    flags: int
    size: int
    link: int
    info: int
    align: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """One entry of the symbol table."""

    name: str
    binding: int
    type: int
    section: int
    value: int
    size: int

    @property
    def is_defined(self) -> bool:
        return self.section != SHN_UNDEF

    @property
    def is_global(self) -> bool:
        return self.binding != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """One patch of a section: at `offset`, with the value of symbol number `symbol`."""

    offset: int
    type: int
    symbol: int
    addend: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ElfFile:
    """A parsed ELF file."""

    type: int
    machine: int
    sections: tuple[Section, ...]
    symbols: tuple[Symbol, ...]

    def section(self, name: str) -> Section | None:
        """Return the first section of that name, or None."""
        return next((s for s in self.sections if s.name == name), None)

    def relocations(self, section: Section) -> list[Relocation]:
        """Return the relocations with addends that apply to a section."""
        found: list[Relocation] = []
        for table in self.sections:
            if table.type == SHT_RELA and table.info == section.index:
                found.extend(
                    Relocation(offset=o, type=i & 0xFFFFFFFF, symbol=i >> 32, addend=a)
                    for o, i, a in _RELA.iter_unpack(table.data)
                )
        return found


def read_elf(data: bytes) -> ElfFile:
    """Return the sections and symbols of an ELF file.

    Raises:
        ElfError: the bytes are not a whole 64-bit little-endian ELF file.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise ElfError(f"not a 64-bit little-endian ELF file: it begins with {data[:6]!r}")
    try:
        return _read(data)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ElfError(f"ELF file of {len(data)} bytes is cut short or damaged: {error}") from error


def _read(data: bytes) -> ElfFile:
    header: tuple[int, ...] = _HEADER.unpack_from(data)
    elf_type, machine, table, count, names_index = (
        header[1],
        header[2],
        header[6],
        header[12],
        header[13],
    )
    raw = [_SECTION.unpack_from(data, table + _SECTION.size * i) for i in range(count)]
    contents: list[bytes] = []
    for _, kind, _, _, offset, size, *_ in raw:
        body = b"" if kind == SHT_NOBITS else data[offset : offset + size]
        if kind not in (0, SHT_NOBITS) and len(body) != size:
            raise ElfError(f"ELF file of {len(data)} bytes ends inside a section")
        contents.append(body)
    # What `linker` writes has no section table.
    names: bytes = contents[names_index] if contents else b""
    sections = tuple(
        Section(
            index=i,
            name=_text(names, s[0]),
            type=s[1],
            flags=s[2],
            size=s[5],
            link=s[6],
            info=s[7],
            align=max(s[8], 1),
            data=contents[i],
        )
        for i, s in enumerate(raw)
    )
    symbols: list[Symbol] = []
    for section in sections:
        if section.type == SHT_SYMTAB:
            strings = contents[section.link]
            symbols.extend(
                Symbol(
                    name=_text(strings, name),
                    binding=info >> 4,
                    type=info & 15,
                    section=index,
                    value=value,
                    size=size,
                )
                for name, info, _, index, value, size in _SYMBOL.iter_unpack(section.data)
            )
    return ElfFile(type=elf_type, machine=machine, sections=sections, symbols=tuple(symbols))


def _text(table: bytes, offset: int) -> str:
    end = table.index(b"\0", offset) if b"\0" in table[offset:] else len(table)
    return table[offset:end].decode()
