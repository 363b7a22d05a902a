"""How long a PTX instruction of a warp keeps each pipe of its quarter of an SM busy.

Lives here: the table from a PTX opcode to cycles by pipe. Not here: how often an instruction runs
(the emulator counts that), the asynchronous units (`work.py`). Invariant: a warp has 32 threads, so
a pipe of n results a clock and SM is busy 32 / (n / 4) clocks.

Source of the rates: measured on an H200 with independent chains, results a clock and SM: fma
125-130, maximum 63, rounding of a pair 64, setp and selp 32 together, shift and add 107-118,
exponential 16. Packed f32x2 instructions of compute capability 10.0 take the fma pipe twice and one
issue slot.
"""

from dataclasses import dataclass

# What the assembler removes or keeps outside the vector pipes: moves, predicates' logic in pairs.
_FREE = frozenset({"mov", "cvta", "neg", "abs", "prefetch"})
# Descriptors and addresses that all lanes share: the uniform pipe, which nothing else here uses.
_UNIFORM = frozenset({"s64", "u64", "b64", "pred"})
_FMA = frozenset({"fma", "mul", "add", "sub", "mad"})
_FULL_RATE_INTEGER = frozenset({"add", "sub", "shl", "mad"})
_MUFU = frozenset({"ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeCycles:
    """Cycles of a warp's instruction on each pipe of a sub-partition."""

    issue: int = 0
    fma: int = 0
    alu: int = 0
    mufu: int = 0


_NONE = PipeCycles()
_ISSUE = PipeCycles(issue=1)
_HALF_RATE = PipeCycles(issue=1, alu=2)


def pipe_cycles(kind: str, mnemonic: str, opcode: str) -> PipeCycles:
    """Return what one execution of an instruction by a warp takes.

    Args:
        kind: the emulator's class: alu, mufu, memory, mma, sync, control.
        mnemonic: first part of the opcode.
        opcode: all of it.
    """
    if kind == "mufu" or mnemonic in _MUFU:
        return PipeCycles(issue=1, mufu=8)
    if kind == "control" or (kind == "sync" and "wait" in opcode):
        return _NONE  # a warp that waits does not issue; its retries depend on the schedule
    if kind != "alu":
        return _ISSUE
    return _arithmetic(mnemonic, opcode.rsplit(".", maxsplit=1)[-1], opcode)


def _arithmetic(mnemonic: str, of_type: str, opcode: str) -> PipeCycles:
    if mnemonic in _FREE or of_type in _UNIFORM:
        return _NONE
    if of_type == "f32x2":
        return PipeCycles(issue=1, fma=2)
    if opcode == "sub.f32":
        return _NONE  # without a rounding of its own: the assembler contracts it with its product
    if of_type == "f32" and mnemonic in _FMA:
        return PipeCycles(issue=1, fma=1)
    if mnemonic in _FULL_RATE_INTEGER:
        return PipeCycles(issue=1, fma=1)  # one of two pipes; counted on the fuller one
    return _HALF_RATE
