"""Find a missing fence, and a missing wait, in a kernel that looks right and often is.

The kernel reverses blocks of 256 floats: 64 threads write a block to shared memory with ordinary
stores, then one thread hands it to the copy engine. Two lines make that correct:

    fence.proxy.async     the engine reads through another proxy and must see the threads' stores
    cp.async.bulk.wait_group.read   the block may be written again only once it has been read

Without them the result is right in many schedules. The emulator says what is missing all the same.
Run it from the repository's root: PYTHONPATH=src python examples/find_missing_fence.py
It needs numpy and no GPU.
"""

import numpy as np

from fovea import emulator

FENCE = "    fence.proxy.async.shared::cta;\n"
WAIT = "    @%first cp.async.bulk.wait_group.read 0;\n"
NUM_BLOCKS, BLOCK = 8, 256
SEEDS = range(20)

KERNEL = (
    """.version 8.0
.target sm_90a
.address_size 64

.visible .entry reverse(.param .u64 x, .param .u64 out, .param .u32 blocks)
{
    .shared .align 128 .b8 tile[1024];
    .reg .pred %first, %more;
    .reg .b32 %thread, %tile, %slot, %j, %blocks, %r<4>;
    .reg .b64 %x, %out, %from, %offset;

    ld.param.u64 %x, [x];
    ld.param.u64 %out, [out];
    ld.param.u32 %blocks, [blocks];
    mov.u32 %thread, %tid.x;
    setp.eq.u32 %first, %thread, 0;
    mov.u32 %tile, tile;
    sub.u32 %r0, 63, %thread;
    shl.b32 %slot, %thread, 4;
    add.u32 %slot, %tile, %slot;
    mul.wide.u32 %offset, %r0, 16;
    add.u64 %from, %x, %offset;
    mov.u32 %j, 0;
next:
    // four floats, backwards, to this thread's place
    ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%from];
    st.shared.v4.b32 [%slot], {%r3, %r2, %r1, %r0};
"""
    + FENCE
    + """    bar.sync 0;
    @%first cp.async.bulk.global.shared::cta.bulk_group [%out], [%tile], 1024;
    @%first cp.async.bulk.commit_group;
"""
    + WAIT
    + """    bar.sync 0;
    add.u64 %from, %from, 1024;
    add.u64 %out, %out, 1024;
    add.u32 %j, %j, 1;
    setp.lt.u32 %more, %j, %blocks;
    @%more bra next;
    @%first cp.async.bulk.wait_group 0;
    ret;
}
"""
)


def run(ptx: str, seed: int, *, is_checked: bool = True) -> bool:
    """Run the kernel under one schedule; return whether the result is right.

    Unchecked, it runs as hardware does: nobody looks for races.
    """
    x = np.arange(NUM_BLOCKS * BLOCK, dtype=np.float32)
    out = np.zeros_like(x)
    emulator.load_ptx(ptx).launch(
        "reverse",
        grid=1,
        block=64,
        args=[x, out, NUM_BLOCKS],
        options=emulator.Options(seed=seed, detect_races=is_checked),
    )
    return bool(np.array_equal(out.reshape(NUM_BLOCKS, BLOCK), x.reshape(-1, BLOCK)[:, ::-1]))


def main() -> None:
    """Run the kernel whole, then without each of the two lines."""
    right = sum(run(KERNEL, seed) for seed in SEEDS)
    print(f"whole kernel: right and silent in {right} of {len(SEEDS)} seeds")
    for name, line in (("fence.proxy.async", FENCE), ("cp.async.bulk.wait_group.read", WAIT)):
        broken = KERNEL.replace(line, "")
        lucky = sum(run(broken, seed, is_checked=False) for seed in SEEDS)
        print(f"\nwithout {name}: right in {lucky} of {len(SEEDS)} seeds if nobody looks")
        reports = []
        for seed in SEEDS:
            try:
                run(broken, seed)
            except emulator.RaceError as report:
                reports.append(report)
        print(f"reported in {len(reports)} of {len(SEEDS)} seeds; the first report:\n")
        first = reports[0]
        print(f"  {first}\n")
        print(f"  PTX line {first.line}: {broken.splitlines()[first.line - 1].strip()}")
        print(f"  rule: {first.rule}")


if __name__ == "__main__":
    main()
