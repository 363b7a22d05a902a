"""Tensor memory from ordinary threads: loads, stores and their waits, a row a thread.

Lives here: `tcgen05.ld` and `.st` of shape 32x32b, by which lane i of a warp holds 32-bit columns
of row i, and the orderings around them. Not here: products (`umma.py`), which columns mean what
(`plan/sm100.py`). Invariant: what a load brings is used only after `finish_load`, by a dependence
that no compiler can overlook, not by the order of instructions alone.
"""

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import llvm

_LANE_SHIFT = 16  # of a tensor memory address: lane above, column below


def warp_rows(address: cutlass.Int32, warp_in_group: cutlass.Int32) -> cutlass.Int32:
    """Return an address moved to the 32 lanes that a warp of a warpgroup may touch."""
    return address + (warp_in_group << (_LANE_SHIFT + 5))


def start_load(address: cutlass.Int32, columns: int) -> list[cutlass.Float32]:
    """Start to load columns of each lane's row; the values may not be used yet. Run by a warp."""
    names = ", ".join(f"{{$w{i}}}" for i in range(columns))
    values = cute.arch.inline_ptx(
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 " + "{" + names + "}, [{$r0}];",
        write_only_types=[cutlass.Float32] * columns,
        read_only_args=[address],
    )
    return list(values)


def finish_load(values: list[cutlass.Float32]) -> list[cutlass.Float32]:
    """Wait for all loads of this warp; return the values of one, now there.

    The values pass through the wait, so that no use of them can move ahead of it.
    """
    count = len(values)
    kind = cutlass.Float32.mlir_type
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)])
    result = llvm.inline_asm(
        llvm.StructType.get_literal([kind] * count),
        [value.ir_value() for value in values],
        "tcgen05.wait::ld.sync.aligned;",
        constraints,
        has_side_effects=True,
    )
    return [cutlass.Float32(llvm.extractvalue(kind, result, [i])) for i in range(count)]


def load(address: cutlass.Int32, columns: int) -> list[cutlass.Float32]:
    """Load columns of each lane's row and wait for them. Run by a warp."""
    return finish_load(start_load(address, columns))


def store(address: cutlass.Int32, values: list[cutlass.Int32] | list[cutlass.Float32]) -> None:
    """Start to store columns of each lane's row. Run by a warp."""
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(values)))
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x{len(values)}.b32 [{{$r0}}], " + "{" + names + "};",
        read_only_args=[address, *values],
    )


def finish_stores() -> None:
    """Wait until all stores of this warp are done."""
    cute.arch.fence_view_async_tmem_store()


def before_arrival() -> None:
    """Order this thread's tensor memory accesses before what its next arrival tells others."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def after_wait() -> None:
    """Order this thread's later tensor memory accesses after what it has just waited for."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
