"""Compile a small sm_90a matrix product with CuTe-DSL and export its launcher.

Run as a script in the folder to write to, with CUTE_DSL_ARCH=sm_90a set:
    python cute_gemm.py k|mn ffi|c
It writes gemm.o, gemm.ptx and, for the plain C interface, gemm.h. The kernel: tensor-map loads of A
and B -> mbarrier -> wgmma -> shared memory -> tensor-map store, 64 x 128 tiles, K in steps of 64.
"""

import sys
from pathlib import Path

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.utils import LayoutEnum

TILE_M, TILE_N, TILE_K = 64, 128, 64
DTYPE = cutlass.BFloat16


def partition(atom, shared, tensor):
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2),
        cute.group_modes(tensor, 0, 2),
    )  # fmt: skip


def atom(op, tensor, layout, box):
    return cpasync.make_tiled_tma_atom(op, tensor, cute.slice_(layout, (None, None, 0)), box)


@cute.kernel
def kernel(
    load_a: cute.CopyAtom, mA: cute.Tensor, load_b: cute.CopyAtom, mB: cute.Tensor,
    store_c: cute.CopyAtom, mC: cute.Tensor, tiled_mma: cute.TiledMma,
    layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout,
    layout_c: cute.ComposedLayout, steps: cutlass.Int32,
):  # fmt: skip
    tid, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.utils.SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, 1)
    sA = smem.allocate_tensor(DTYPE, layout_a.outer, 1024, layout_a.inner)
    sB = smem.allocate_tensor(DTYPE, layout_b.outer, 1024, layout_b.inner)
    sC = smem.allocate_tensor(DTYPE, layout_c.outer, 1024, layout_c.inner)
    if tid == 0:
        cute.arch.mbarrier_init(full, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    tAsA, tAgA = partition(load_a, sA, cute.local_tile(mA, (TILE_M, TILE_K), (tile, None)))
    tBsB, tBgB = partition(load_b, sB, cute.local_tile(mB, (TILE_N, TILE_K), (0, None)))
    tCsC, tCgC = partition(store_c, sC, cute.local_tile(mC, (TILE_M, TILE_N), (tile, 0)))
    thr = tiled_mma.get_slice(tid)
    tCrA = tiled_mma.make_fragment_A(thr.partition_A(sA))
    tCrB = tiled_mma.make_fragment_B(thr.partition_B(sB))
    acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE_M, TILE_N)), cutlass.Float32)
    acc.fill(0.0)
    for step in cutlass.range(steps):
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, (TILE_M + TILE_N) * TILE_K * 2)
            cute.copy(load_a, tAgA[None, step], tAsA[None, 0], tma_bar_ptr=full)
            cute.copy(load_b, tBgB[None, step], tBsB[None, 0], tma_bar_ptr=full)
        cute.arch.mbarrier_wait(full, step & 1)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for k in cutlass.range_constexpr(TILE_K // 16):
            a, b = tCrA[None, None, k, 0], tCrB[None, None, k, 0]
            cute.gemm(tiled_mma, acc, a, b, acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.arch.sync_threads()
    out = cute.make_rmem_tensor(acc.shape, DTYPE)
    out.store(acc.load().to(DTYPE))
    cute.autovec_copy(out, thr.partition_C(sC)[None, None, None, 0])
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    if warp == 0:
        cute.copy(store_c, tCsC[None, 0], tCgC)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=False)


@cute.jit
def gemm(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, is_k_major: cutlass.Constexpr):
    major_b = OperandMajorMode.K if is_k_major else OperandMajorMode.MN
    tiled_mma = sm90.make_trivial_tiled_mma(
        DTYPE, DTYPE, OperandMajorMode.K, major_b, cutlass.Float32, (1, 1, 1),
        tiler_mn=(TILE_M, TILE_N),
    )  # fmt: skip
    shape = (TILE_M, TILE_N, TILE_K)
    order_b = LayoutEnum.ROW_MAJOR if is_k_major else LayoutEnum.COL_MAJOR
    layout_a = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, DTYPE, 1)
    layout_b = sm90.make_smem_layout_b(order_b, shape, DTYPE, 1)
    layout_c = sm90.make_smem_layout_epi(DTYPE, LayoutEnum.ROW_MAJOR, (TILE_M, TILE_N), 1)
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

    load_a, tma_a = atom(load, a, layout_a, (TILE_M, TILE_K))
    load_b, tma_b = atom(load, b, layout_b, (TILE_N, TILE_K))
    store_c, tma_c = atom(store, c, layout_c, (TILE_M, TILE_N))
    kernel(
        load_a, tma_a, load_b, tma_b, store_c, tma_c, tiled_mma, layout_a, layout_b, layout_c,
        cute.ceil_div(cute.size(a, mode=[1]), TILE_K),
    ).launch(
        grid=[cute.ceil_div(cute.size(a, mode=[0]), TILE_M), 1, 1], block=[128, 1, 1]
    )  # fmt: skip


def fake(shape, order):
    return make_fake_compact_tensor(DTYPE, shape, stride_order=order, assumed_align=16)


def main(b_major, interface):
    m, k = cute.sym_int64(), cute.sym_int64()
    is_k_major = b_major == "k"
    arguments = [
        fake((m, k), (1, 0)),
        fake((TILE_N, k), (1, 0) if is_k_major else (0, 1)),
        fake((m, TILE_N), (1, 0)),
    ]
    options = "--keep-ptx" + (" --enable-tvm-ffi" if interface == "ffi" else "")
    compiled = cute.compile(gemm, *arguments, is_k_major, options=options)
    if interface == "ffi":
        compiled.export_to_c("gemm.o", function_name="gemm")
    else:
        compiled.export_to_c(file_path=".", file_name="gemm", function_prefix="gemm")
    next(Path().glob("*.ptx")).rename("gemm.ptx")


if __name__ == "__main__":
    main(*sys.argv[1:])
