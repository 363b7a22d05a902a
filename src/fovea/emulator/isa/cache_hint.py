"""Prefetches, priorities and cache policies: nothing happens, but their operands are checked.

Lives here: instructions that speak to caches alone. Not here: the hints of loads and stores
(`load_store.py`), prefetches of the copy engine (`bulk_copy.py`, `tensor_copy.py`). Invariant: no
memory is read or written.
Source: PTX ISA 9.7.9.15-19.
"""

from typing import Any

from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import Array, Decoded, Inline, Instruction
from fovea.emulator.ptx import syntax

_LINE = 128  # bytes that applypriority and discard speak of


@instruction("prefetch{.space}.level [a]", "prefetchu.L1 [a]",
             "prefetch.global.level_evict [a]", "prefetch{.tensormap_space}.tensormap [a]",
             source="PTX ISA 9.7.9.15", evidence="manual-only", kind="memory",
             space="global local", level="L1 L2", tensormap_space="const param",
             level_evict="L2::evict_last L2::evict_normal")  # fmt: skip
def prefetch(ins: Instruction) -> Decoded:
    """Read the address and do nothing: a prefetch of any address is allowed."""
    address = ins.address("a")

    def run(w: Any, mask: Array) -> None:
        address(w)

    return run


@instruction("applypriority{.global}.L2::evict_normal [a], size", source="PTX ISA 9.7.9.16",
             evidence="manual-only", kind="memory")  # fmt: skip
@instruction("discard{.global}.L2 [a], size", source="PTX ISA 9.7.9.18", evidence="manual-only",
             kind="memory")  # fmt: skip
def line_hint(ins: Instruction) -> Decoded:
    """Check the size; an H200 takes any address, aligned to a line or not."""
    if ins.immediate("size") != _LINE:
        raise ins.error(f"size {ins.immediate('size')} must be {_LINE}")
    address = ins.address("a")

    def run(w: Any, mask: Array) -> None:
        address(w)

    return run


@instruction("createpolicy.fractional.primary{.secondary}.b64 policy{, fraction}",
             source="PTX ISA 9.7.9.19", evidence="manual-only",
             primary="L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged",
             secondary="L2::evict_first L2::evict_unchanged")  # fmt: skip
@instruction("createpolicy.range{.global}.primary{.secondary}.b64 policy, [a], size, total",
             source="PTX ISA 9.7.9.19", evidence="manual-only",
             primary="L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged",
             secondary="L2::evict_first L2::evict_unchanged")  # fmt: skip
@instruction("createpolicy.cvt.L2.b64 policy, access-property", source="PTX ISA 9.7.9.19",
             evidence="manual-only")  # fmt: skip
def createpolicy(ins: Instruction) -> Inline:
    """policy = an opaque value that the emulator never looks into."""
    fraction = ins.operands.get("fraction")
    if isinstance(fraction, syntax.Immediate) and not 0 < float(fraction.value) <= 1:
        raise ins.error(f"fraction {fraction.value} must lie above 0 and up to 1")
    return ins.assign("policy", ins.program.constant(0x12F0000000000000, "b64"), "b64")
