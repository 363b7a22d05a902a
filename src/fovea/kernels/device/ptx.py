"""Single instructions that the DSL has no word for, or must not move.

Lives here: inline PTX, one function an instruction. Not here: anything longer than an instruction.
Invariant: each says why the DSL's own form does not do.
"""

import cutlass
import cutlass.cute as cute

_PACK = {cutlass.BFloat16: "cvt.rn.bf16x2.f32", cutlass.Float16: "cvt.rn.f16x2.f32"}


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
