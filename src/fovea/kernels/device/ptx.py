"""Single instructions that the DSL has no word for, or must not move.

Lives here: inline PTX, one function an instruction. Not here: anything longer than an instruction.
Invariant: each says why the DSL's own form does not do.
"""

import cutlass
import cutlass.cute as cute

_MINUS_INF = "0fFF800000"
_PACK = {cutlass.BFloat16: "cvt.rn.bf16x2.f32", cutlass.Float16: "cvt.rn.f16x2.f32"}


def hide_unless(visible: cutlass.Boolean, score: cutlass.Float32) -> cutlass.Float32:
    """Return the score where visible, else -inf.

    The optimiser may not look inside. It turns a select on a conjunction of tests into one select a
    test: three instructions a register instead of one.
    """
    return cute.arch.inline_ptx(
        f"selp.f32 {{$w0}}, {{$r0}}, {_MINUS_INF}, {{$r1}};",
        write_only_types=[cutlass.Float32],
        read_only_args=[score, visible],
    )


def bit(word: cutlass.Int32, number: int) -> cutlass.Int32:
    """Return a word with no bit but one left, to be compared with 0.

    The optimiser may not look inside. It shifts that bit down first: an instruction more.
    """
    return cute.arch.inline_ptx(
        f"and.b32 {{$w0}}, {{$r0}}, {1 << number:#x};",
        write_only_types=[cutlass.Int32],
        read_only_args=[word],
    )


def bits_of(value: cutlass.Float32) -> cutlass.Int32:
    """Return the bits of a float, for which the DSL has no word."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[cutlass.Int32], read_only_args=[value]
    )


def float_of(bits: cutlass.Int32) -> cutlass.Float32:
    """Return the float of these bits, for which the DSL has no word either."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[cutlass.Float32], read_only_args=[bits]
    )


def funnel_left(high: cutlass.Int32, low: cutlass.Int32, count: cutlass.Int32) -> cutlass.Int32:
    """Return 32 bits of `high` and `low` behind it, from bit `count` modulo 32 on.

    The DSL has no word for it.
    """
    return cute.arch.inline_ptx(
        "shf.l.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[cutlass.Int32],
        read_only_args=[low, high, count],
    )


def high_product(a: cutlass.Int32, b: cutlass.Int32) -> cutlass.Int32:
    """Return the high word of the 64-bit product of two signed integers.

    The DSL has no word for it.
    """
    return cute.arch.inline_ptx(
        "mul.hi.s32 {$w0}, {$r0}, {$r1};",
        write_only_types=[cutlass.Int32],
        read_only_args=[a, b],
    )


def opaque(value: cutlass.Int32) -> cutlass.Int32:
    """Return the same value, as one that the optimiser knows nothing of.

    It hoists what two arms of a branch both compute, and then keeps all of it alive at once.
    """
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[cutlass.Int32], read_only_args=[value]
    )


def pack_pair(
    low: cutlass.Float32, high: cutlass.Float32, dtype: type[cutlass.Numeric]
) -> cutlass.Int32:
    """Return two floats rounded to a 16-bit type in one register, `low` in the lower half.

    The optimiser may not move this. It sinks a plain conversion to the product that uses it, one
    loop iteration later, and so keeps P in fp32 alive beside the next S: twice the registers.
    """
    return cute.arch.inline_ptx(
        f"{_PACK[dtype]} {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[cutlass.Int32],
        read_only_args=[high, low],
    )
