import ctypes
import itertools
import struct
from pathlib import Path
from typing import Any

import pytest

from fovea.compile import elf
from fovea.compile.elf import ElfError
from fovea.compile.linker import link_shared

binding: Any = pytest.importorskip("llvmlite.binding")

# One function per way in which a launcher reaches things: its own constants, data that starts as
# zero and data that does not, a pointer in data, functions by address, and the C library.
_IR = r"""
@text = internal constant [6 x i8] c"fovea\00"
@counter = internal global i64 0
@weights = internal global [4 x i64] [i64 3, i64 5, i64 7, i64 11], align 32
@pointer = internal global ptr getelementptr ([4 x i64], ptr @weights, i64 0, i64 2)
@llvm.global_dtors = appending global [1 x { i32, ptr, ptr }]
    [{ i32, ptr, ptr } { i32 65535, ptr @at_exit, ptr null }]
@told = external global i32

declare i64 @strlen(ptr)
declare i32 @abs(i32)

define void @at_exit() { ret void }
define i64 @length() { %r = call i64 @strlen(ptr @text)  ret i64 %r }
define i64 @count() {
  %old = load i64, ptr @counter
  %new = add i64 %old, 1
  store i64 %new, ptr @counter
  ret i64 %new
}
define i64 @weight(i64 %i) {
  %p = getelementptr [4 x i64], ptr @weights, i64 0, i64 %i
  %r = load i64, ptr %p
  ret i64 %r
}
define i64 @pointed() {
  %p = load ptr, ptr @pointer
  %r = load i64, ptr %p
  ret i64 %r
}
define internal i32 @through(ptr %f, i32 %x) noinline { %r = call i32 %f(i32 %x)  ret i32 %r }
define i32 @absolute(i32 %x) { %r = call i32 @through(ptr @abs, i32 %x)  ret i32 %r }
define i32 @tail(i32 %x) { %r = tail call i32 @abs(i32 %x)  ret i32 %r }
define ptr @where() { ret ptr @text }
"""
_EXPORTS = ("length", "count", "weight", "pointed", "absolute", "tail", "where")
_X86, _ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


def _object(triple: str, ir: str = _IR, model: str = "large") -> bytes:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = binding.parse_assembly(ir)
    # The compiler's own choice: large code model on x86-64, small on aarch64.
    code_model = model if triple == _X86 else "small"
    machine = binding.Target.from_triple(triple).create_target_machine(
        opt=2, reloc="pic", codemodel=code_model
    )
    module.triple = triple
    return machine.emit_object(module)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if elf.read_elf(_object(binding.get_process_triple())).machine != elf.EM_X86_64:
        pytest.skip("the library is opened on x86-64")
    path = tmp_path_factory.mktemp("linked") / "library.so"
    path.write_bytes(link_shared(_object(_X86), exports=_EXPORTS))
    library = ctypes.CDLL(str(path))
    for name in ("length", "count", "weight", "pointed"):
        library[name].restype = ctypes.c_int64
    library.weight.argtypes = [ctypes.c_int64]
    return library


def test_linked_code_reaches_constants_data_and_the_c_library(native: ctypes.CDLL) -> None:
    assert native.length() == 5
    assert [native.count() for _ in range(3)] == [1, 2, 3]
    assert [native.weight(i) for i in range(4)] == [3, 5, 7, 11]
    assert native.pointed() == 7
    assert native.absolute(-8) == 8
    assert native.tail(-9) == 9


def test_data_keeps_its_alignment(tmp_path: Path) -> None:
    ir = "@big = global [2 x i64] [i64 1, i64 2], align 64\ndefine ptr @of() { ret ptr @big }"
    path = tmp_path / "library.so"
    path.write_bytes(link_shared(_object(_X86, ir), exports=("of",)))
    library = ctypes.CDLL(str(path))
    library.of.restype = ctypes.c_void_p
    assert library.of() % 64 == 0


def test_symbol_not_exported_is_not_found(native: ctypes.CDLL) -> None:
    with pytest.raises(AttributeError, match="at_exit"):
        native.at_exit  # noqa: B018


def test_missing_symbol_is_reported_when_the_library_is_opened(tmp_path: Path) -> None:
    ir = "declare i32 @fovea_nowhere()\n"
    ir += "define i32 @f() { %r = call i32 @fovea_nowhere() ret i32 %r }"
    path = tmp_path / "library.so"
    path.write_bytes(link_shared(_object(_X86, ir), exports=("f",)))
    with pytest.raises(OSError, match="undefined symbol: fovea_nowhere"):
        ctypes.CDLL(str(path))


def _segments(image: bytes) -> list[tuple[int, ...]]:
    count = struct.unpack_from("<H", image, 56)[0]
    return [struct.unpack_from("<IIQQQQQQ", image, 64 + 56 * i) for i in range(count)]


@pytest.mark.parametrize(("triple", "page"), [(_X86, 0x1000), (_ARM, 0x10000)])
def test_no_part_is_both_written_and_executed(triple: str, page: int) -> None:
    loads = [s for s in _segments(link_shared(_object(triple), exports=_EXPORTS)) if s[0] == 1]
    assert [s[1] for s in loads] == [4, 5, 6]
    for before, after in itertools.pairwise(loads):
        assert before[3] + before[6] <= after[3]
        assert after[3] % page == 0


def _dynamic(image: bytes) -> dict[int, int]:
    at, size = next((s[2], s[5]) for s in _segments(image) if s[0] == 2)
    return dict(struct.iter_unpack("<QQ", image[at : at + size]))


def _exported(image: bytes) -> dict[str, int]:
    table = _dynamic(image)
    count = struct.unpack_from("<I", image, table[4] + 4)[0]
    found = {}
    for i in range(count):
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", image, table[6] + 24 * i)
        if section:
            start = table[5] + name
            found[image[start : image.index(b"\0", start)].decode()] = value
    return found


def _adrp_add(image: bytes, at: int) -> int:
    """Return the address that an adrp and the add after it make; both are decoded by the manual."""
    adrp, add = struct.unpack_from("<II", image, at)
    assert adrp & 0x9F000000 == 0x90000000
    assert add & 0xFFC00000 == 0x91000000
    pages = (adrp >> 5 & 0x7FFFF) << 2 | adrp >> 29 & 3
    pages -= (pages & 1 << 20) << 1
    return (at & ~0xFFF) + (pages << 12) + (add >> 10 & 0xFFF)


def test_aarch64_code_finds_its_constant() -> None:
    image = link_shared(_object(_ARM), exports=_EXPORTS)
    at = _adrp_add(image, _exported(image)["where"])
    assert image[at : at + 6] == b"fovea\0"


def test_aarch64_call_goes_through_a_stub_to_its_slot() -> None:
    image = link_shared(_object(_ARM), exports=_EXPORTS)
    at = _exported(image)["tail"]
    (branch,) = struct.unpack_from("<I", image, at)
    assert branch >> 26 == 0b000101
    offset = branch & 0x3FFFFFF
    stub = at + 4 * (offset - ((offset & 1 << 25) << 1))
    adrp, load, jump = struct.unpack_from("<III", image, stub)
    pages = (adrp >> 5 & 0x7FFFF) << 2 | adrp >> 29 & 3
    pages -= (pages & 1 << 20) << 1
    slot = (stub & ~0xFFF) + (pages << 12) + (load >> 10 & 0xFFF) * 8
    assert jump == 0xD61F0220  # br x17
    table = _dynamic(image)
    relocations = struct.iter_unpack("<QQQ", image[table[7] : table[7] + table[8]])
    ((symbol, kind),) = [(i >> 32, i & 0xFFFFFFFF) for o, i, _ in relocations if o == slot]
    assert kind == 1025  # R_AARCH64_GLOB_DAT
    name = table[5] + struct.unpack_from("<I", image, table[6] + 24 * symbol)[0]
    assert image[name : name + 4] == b"abs\0"


def test_export_that_is_not_defined_names_what_is() -> None:
    with pytest.raises(ElfError, match=r"export 'nothing' is not defined.*'count'"):
        link_shared(_object(_X86), exports=("nothing",))


def test_thread_local_data_is_refused() -> None:
    ir = "@t = thread_local global i32 1\ndefine i32 @f() { %r = load i32, ptr @t ret i32 %r }"
    with pytest.raises(ElfError, match="thread-local"):
        link_shared(_object(_X86, ir), exports=("f",))


def test_relocation_of_another_code_model_is_refused_not_guessed() -> None:
    # The small model reaches the C library's data through GOTPCREL forms that are not known here.
    ir = "@environ = external global ptr\ndefine ptr @f() { ret ptr @environ }"
    with pytest.raises(ElfError, match=r"relocation type \d+ .*'environ' is not supported"):
        link_shared(_object(_X86, ir, model="small"), exports=("f",))


def test_shared_library_is_not_linked_again() -> None:
    image = link_shared(_object(_X86), exports=_EXPORTS)
    with pytest.raises(ElfError, match="cannot link ELF type 3"):
        link_shared(image, exports=_EXPORTS)


@pytest.mark.parametrize("keep", [0, 3, 16, 63, 200, -1, -64])
def test_object_cut_short_is_refused(keep: int) -> None:
    with pytest.raises(ElfError):
        link_shared(_object(_X86)[:keep], exports=_EXPORTS)
