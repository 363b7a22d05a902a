"""A small warp-specialised sm_100a kernel: S = A B^T over a ring of stages, O = bf16(S) V^T.

Warps 0-3 take S from tensor memory, put P back there, take O and store it; warp 4 loads; warp 5
issues the products. Two tiles, three steps of K each, two stages: every barrier changes phase.
"""

import numpy as np
from tcgen05_kernels import descriptor, instruction_descriptor, operands, place

from fovea.emulator import Options, load_ptx
from fovea.emulator.arithmetic.formats import to_float32

TILES, STEPS, ROWS, COLUMNS = 2, 3, 128, 32
A_BYTES, B_BYTES, O_BYTES = ROWS * 32, COLUMNS * 32, ROWS * COLUMNS * 4
A_AT, B_AT, V_AT, O_AT, BAR_AT = 0, 8192, 10240, 12288, 12288 + O_BYTES
SHARED_BYTES = BAR_AT + 128
# mbarriers by their offset and count
FULL, EMPTY, S_FULL, S_EMPTY, P_FULL, O_FULL, O_EMPTY, V_FULL = 0, 16, 32, 40, 48, 56, 64, 72
COUNTS = {0: 1, 8: 1, 16: 1, 24: 1, S_FULL: 1, S_EMPTY: 128, P_FULL: 128, O_FULL: 1,
          O_EMPTY: 128, V_FULL: 1}  # fmt: skip
S_COLUMN, P_COLUMN, O_COLUMN = 0, 64, 96


def wait(label, barrier, parity):
    return f"""{label}: mbarrier.try_wait.parity.shared::cta.b64 %p, [{barrier}], {parity};
    @!%p bra {label};"""


def commit(barrier):
    return (
        f"@%one tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{barrier}];"
    )


def registers(first, count):
    return "{" + ", ".join(f"%d{first + j}" for j in range(count)) + "}"


AFTER = "tcgen05.fence::after_thread_sync;"
BEFORE = "tcgen05.fence::before_thread_sync;"
RING = """and.b32 %stage, %i, 1; shr.u32 %ph, %i, 1; and.b32 %ph, %ph, 1;
    shl.b32 %t0, %stage, 3; add.u32 %full, %bar, %t0; add.u32 %empty, %full, 16;"""
TILE = "and.b32 %tp, %tile, 1; xor.b32 %tq, %tp, 1;"

LOADER = f"""
    @%one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar+{V_FULL}], {B_BYTES};
    @%one cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
        [%sv], [%v], {B_BYTES}, [%bar+{V_FULL}];
    mov.u32 %i, 0;
next_load:
    {RING}
    xor.b32 %ph, %ph, 1;
    {wait("stage_free", "%empty", "%ph")}
    mad.lo.u32 %t1, %stage, {A_BYTES}, %sa;
    mad.lo.u32 %t2, %stage, {B_BYTES}, %sb;
    @%one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%full], {A_BYTES + B_BYTES};
    @%one cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
        [%t1], [%a], {A_BYTES}, [%full];
    @%one cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
        [%t2], [%b], {B_BYTES}, [%full];
    add.u64 %a, %a, {A_BYTES}; add.u64 %b, %b, {B_BYTES};
    add.u32 %i, %i, 1; setp.lt.u32 %q, %i, {TILES * STEPS}; @%q bra next_load;
"""

PRODUCTS = f"""
    {wait("v_loaded", f"%bar+{V_FULL}", "0")}
    mov.u32 %i, 0; mov.u32 %tile, 0;
next_tile:
    {TILE}
    {wait("s_free", f"%bar+{S_EMPTY}", "%tq")}
    {AFTER}
    mov.u32 %k, 0;
next_step:
    {RING}
    {wait("stage_full", "%full", "%ph")}
    mul.wide.u32 %rd0, %stage, {A_BYTES // 16}; add.u64 %da, %a_desc, %rd0;
    mul.wide.u32 %rd0, %stage, {B_BYTES // 16}; add.u64 %db, %b_desc, %rd0;
    setp.ne.u32 %q, %k, 0;
    @%one tcgen05.mma.cta_group::1.kind::f16 [%tmem], %da, %db, %idesc, %q;
    {commit("%empty")}
    add.u32 %i, %i, 1; add.u32 %k, %k, 1; setp.lt.u32 %q, %k, {STEPS}; @%q bra next_step;
    {commit(f"%bar+{S_FULL}")}
    {wait("p_there", f"%bar+{P_FULL}", "%tp")}
    {wait("o_free", f"%bar+{O_EMPTY}", "%tq")}
    {AFTER}
    @%one tcgen05.mma.cta_group::1.kind::f16 [%tmem_o], [%tmem_p], %v_desc, %idesc, %no;
    {commit(f"%bar+{O_FULL}")}
    add.u32 %tile, %tile, 1; setp.lt.u32 %q, %tile, {TILES}; @%q bra next_tile;
"""

_PACK = "\n".join(f"    cvt.rn.bf16x2.f32 %d{40 + j}, %f{2 * j + 1}, %f{2 * j};" for j in range(8))
_TO_FLOAT = "\n".join(f"    mov.b32 %f{j}, %d{j};" for j in range(16))
_ROW = "\n".join(
    f"    st.shared.v4.b32 [%row+{16 * j}], {registers(4 * j, 4)};" for j in range(COLUMNS // 4)
)
EPILOGUE = f"""
    mov.u32 %tile, 0;
    shl.b32 %t1, %warp, 21;
    add.u32 %tmem, %tmem, %t1; add.u32 %tmem_p, %tmem_p, %t1; add.u32 %tmem_o, %tmem_o, %t1;
    mad.lo.u32 %row, %thread, {COLUMNS * 4}, %so;
next_output:
    {TILE}
    {wait("s_there", f"%bar+{S_FULL}", "%tp")}
    {AFTER}
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {registers(0, 16)}, [%tmem];
    tcgen05.wait::ld.sync.aligned;
    {BEFORE}
    mbarrier.arrive.shared::cta.b64 _, [%bar+{S_EMPTY}];
{_TO_FLOAT}
{_PACK}
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%tmem_p], {registers(40, 8)};
    tcgen05.wait::st.sync.aligned;
    {BEFORE}
    mbarrier.arrive.shared::cta.b64 _, [%bar+{P_FULL}];
    {wait("o_there", f"%bar+{O_FULL}", "%tp")}
    {AFTER}
    tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(0, 32)}, [%tmem_o];
    tcgen05.wait::ld.sync.aligned;
    {BEFORE}
    mbarrier.arrive.shared::cta.b64 _, [%bar+{O_EMPTY}];
{_ROW}
    fence.proxy.async.shared::cta;
    bar.sync 1, 128;
    @!%first bra stored;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%so], {O_BYTES};
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
stored:
    bar.sync 2, 128;
    add.u64 %out, %out, {O_BYTES};
    add.u32 %tile, %tile, 1; setp.lt.u32 %q, %tile, {TILES}; @%q bra next_output;
"""

_INITS = "\n".join(
    f"    @%first mbarrier.init.shared::cta.b64 [%bar+{at}], {count};"
    for at, count in COUNTS.items()
)
TEXT = f"""
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .u64 out, .param .u64 a, .param .u64 b, .param .u64 v)
{{
    .reg .pred %first, %one, %p, %q, %no;
    .reg .b32 %sa, %sb, %sv, %so, %bar, %thread, %warp, %t<4>, %d<48>, %row, %idesc;
    .reg .b32 %i, %k, %tile, %tp, %tq, %stage, %ph, %full, %empty, %tmem, %tmem_p, %tmem_o;
    .reg .b64 %out, %a, %b, %v, %rd<4>, %da, %db, %a_desc, %b_desc, %v_desc;
    .reg .f32 %f<16>;
    mov.u32 %sa, smem;
    add.u32 %sb, %sa, {B_AT}; add.u32 %sv, %sa, {V_AT}; add.u32 %so, %sa, {O_AT};
    add.u32 %bar, %sa, {BAR_AT};
    mov.u32 %thread, %tid.x; shr.u32 %warp, %thread, 5;
    setp.eq.u32 %first, %thread, 0; setp.ne.u32 %no, %thread, %thread;
    and.b32 %t0, %thread, 31; setp.eq.u32 %one, %t0, 0;
{_INITS}
    @%first fence.mbarrier_init.release.cluster;
    setp.ne.u32 %q, %warp, 0; @%q bra allocated;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%bar+80], 128;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
allocated:
    bar.sync 0;
    ld.shared.b32 %tmem, [%bar+80];
    add.u32 %tmem_p, %tmem, {P_COLUMN}; add.u32 %tmem_o, %tmem, {O_COLUMN};
    mov.u32 %idesc, {instruction_descriptor(ROWS, COLUMNS)};
    shr.u32 %t1, %sa, 4; cvt.u64.u32 %rd1, %t1; or.b64 %a_desc, %rd1, {descriptor(32, ROWS)};
    shr.u32 %t1, %sb, 4; cvt.u64.u32 %rd1, %t1; or.b64 %b_desc, %rd1, {descriptor(32, COLUMNS)};
    shr.u32 %t1, %sv, 4; cvt.u64.u32 %rd1, %t1; or.b64 %v_desc, %rd1, {descriptor(32, COLUMNS)};
    ld.param.u64 %out, [out]; ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; ld.param.u64 %v, [v];
    setp.eq.u32 %q, %warp, 4; @%q bra loader;
    setp.eq.u32 %q, %warp, 5; @%q bra products;
{EPILOGUE}
    bra end;
loader:
{LOADER}
    bra end;
products:
{PRODUCTS}
end:
    bar.sync 0;
    setp.ne.u32 %q, %warp, 0; @%q bra freed;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 128;
freed:
    ret;
}}
"""


class Problem:
    """Operands of the kernel and what it must give."""

    def __init__(self):
        parts = [operands(ROWS, COLUMNS, "bf16", 32, seed) for seed in range(TILES * STEPS)]
        _, v, _, _ = operands(ROWS, COLUMNS, "bf16", 32, 99)
        self.a = np.concatenate([place(part[0], 32) for part in parts])
        self.b = np.concatenate([place(part[1], 32) for part in parts])
        self.v = place(v, 32)
        wide_v = to_float32(v, "bf16").astype(np.float64)
        self.expected, self.scale = [], []
        for tile in range(TILES):
            steps = parts[tile * STEPS : tile * STEPS + STEPS]
            p = sum(part[2] for part in steps)[:, :16]
            self.expected.append(p @ wide_v.T)
            self.scale.append(np.abs(p) @ np.abs(wide_v).T)

    def run(self, module, seed, **options):
        """Return the output of one launch."""
        out = np.zeros((TILES, ROWS, COLUMNS), np.float32)
        module.launch(
            "k", 1, 192, 1, [out, self.a, self.b, self.v], SHARED_BYTES,
            Options(seed=seed, max_steps=20_000, **options),
        )  # fmt: skip
        return out

    def check(self, out):
        """Compare with float64; P is rounded to bf16, which costs 2^-9 of each term."""
        for got, expected, scale in zip(out, self.expected, self.scale):
            assert np.all(np.abs(got - expected) <= scale * 2.0**-8)


def loaded(text=TEXT):
    return load_ptx(text)
