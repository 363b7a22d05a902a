// Lanes that part and meet again: tiles of a warp, locks that each lane takes, branches with a
// __syncwarp() of their own. Compiled and launched by test_parted_lanes.py, 128 threads each.

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cub/cub.cuh>

namespace cg = cooperative_groups;

#define KERNEL extern "C" __global__ void

KERNEL tiles(int *out) {
    auto tile = cg::tiled_partition<8>(cg::this_thread_block());
    int sum = cg::reduce(tile, (int)threadIdx.x, cg::plus<int>());
    for (int i = 4; i; i /= 2) sum += tile.shfl_xor(sum, i);
    tile.sync();
    out[threadIdx.x] = sum;
}

KERNEL logical_warps(int *out) {
    using Reduce = cub::WarpReduce<int, 8>;
    __shared__ typename Reduce::TempStorage storage[16];
    int sum = Reduce(storage[threadIdx.x / 8]).Sum(threadIdx.x);
    out[threadIdx.x] = threadIdx.x % 8 ? 0 : sum;
}

KERNEL matched(int *out) {
    unsigned same = __match_any_sync(0xffffffff, threadIdx.x / 5);
    out[threadIdx.x] = __reduce_add_sync(same, threadIdx.x);
}

KERNEL labelled(int *out) {
    auto group = cg::labeled_partition(cg::coalesced_threads(), (int)(threadIdx.x % 3));
    out[threadIdx.x] = group.size() + 100 * group.shfl(threadIdx.x, 0);
}

KERNEL locked(int *out) {
    __shared__ int lock, count;
    if (!threadIdx.x) lock = count = 0;
    __syncthreads();
    for (int round = 0; round < 2; round++) {
        while (atomicCAS(&lock, 0, 1)) __nanosleep(10);
        __threadfence_block();
        ((volatile int &)count) += threadIdx.x;
        __threadfence_block();
        atomicExch(&lock, 0);
        if (round) __syncwarp();
    }
    __syncthreads();
    out[threadIdx.x] = count;
}

KERNEL branches(int *out) {
    __shared__ int s[128];
    if (threadIdx.x % 32 < 10) {
        s[threadIdx.x] = threadIdx.x;
        __syncwarp();
        out[threadIdx.x] = s[threadIdx.x ^ 31];
    } else {
        s[threadIdx.x] = threadIdx.x * 2;
        __syncwarp();
        out[threadIdx.x] = s[threadIdx.x ^ 31] + 1;
    }
}

__device__ __noinline__ int first_of(int value, unsigned members) {
    __syncwarp(members);
    return __shfl_sync(members, value, __ffs(members) - 1) + __popc(members);
}

KERNEL calls(int *out) {
    int lane = threadIdx.x % 32, value;
    if (lane < 7) value = first_of(lane + 100, 0x7f);
    else if (lane < 20) value = first_of(lane + 200, 0xfff80);
    else value = first_of(lane + 300, 0xfff00000);
    out[threadIdx.x] = value + first_of(lane, 0xffffffff);
}
