"""Which registers of a kernel decide something.

Lives here: from the statements of a kernel, the registers whose values reach a guard, a branch, an
address or memory. Not here: what is done with that (`isa/barrier.py`: a wait whose result decides
nothing orders nothing). Invariant: a register is taken to decide something where in doubt.
"""

from fovea.emulator.machine.registers import registers_of
from fovea.emulator.ptx import syntax

# what hands a value on to its first operand and does nothing else
_PURE = frozenset(
    """mov selp setp set slct and or xor not cnot lop3 shl shr shf add sub mul mad neg abs min max
    cvt prmt bfe bfi popc clz vote shfl redux match""".split()
)
# what reads its first operand
_READS_FIRST = frozenset(["brx", "bar", "barrier", "tcgen05"])


def decisive_registers(body: list[syntax.Statement | syntax.LabelMark]) -> frozenset[str]:
    """Return the uids of the registers that decide something, directly or through others."""
    sources_of: dict[str, set[str]] = {}
    waiting: list[str] = []
    for item in body:
        if isinstance(item, syntax.LabelMark):
            continue
        guard = [] if item.guard is None else [item.guard.register.uid]
        first, *others = item.operands or (None,)
        inputs = {register.uid for operand in others for register in registers_of(operand)}  # pyright: ignore[reportArgumentType]
        written = [] if first is None else registers_of(first)
        mnemonic = item.opcode.partition(".")[0]
        if mnemonic in _PURE:
            # of a guarded one the old value stays where the guard is false: the guard decides it
            for register in written:
                sources_of.setdefault(register.uid, set()).update(inputs, guard)
            continue
        waiting += [*inputs, *guard]
        if isinstance(first, syntax.Memory) or not others or mnemonic in _READS_FIRST:
            waiting += [register.uid for register in written]
    found: set[str] = set()
    while waiting:
        uid = waiting.pop()
        if uid not in found:
            found.add(uid)
            waiting += sources_of.get(uid, ())
    return frozenset(found)
