// Kernels with PTX of their own: rings of copies, sums across a cluster, reductions by the copy
// engine, warps that give registers away. Compiled and launched by test_more_nvcc.py.

#include <cuda_fp16.h>
#include <cstdint>

__device__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ void init(uint64_t *bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}

__device__ void expect(uint64_t *bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
                 : "memory");
}

__device__ void arrive(uint64_t *bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

__device__ void wait(uint64_t *bar, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra END;\nbra AGAIN;\nEND:\n}" ::"r"(shared_address(bar)), "r"(parity)
        : "memory");
}

// fp8 products of one warp, operands through a ring of three stages filled by cp.async
extern "C" __global__ void ring(const uint8_t *a, const uint8_t *b, float *c, int k) {
    __shared__ __align__(16) uint8_t rows[3][16 * 32], columns[3][8 * 32];
    int lane = threadIdx.x, steps = k / 32;
    auto fetch = [&](int step) {
        if (step < steps) {
            int row = lane / 2, part = lane % 2 * 16;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             shared_address(&rows[step % 3][row * 32 + part])),
                         "l"(a + row * k + step * 32 + part));
            if (lane < 16)
                asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(
                                 shared_address(&columns[step % 3][row * 32 + part])),
                             "l"(b + row * k + step * 32 + part));
        }
        asm volatile("cp.async.commit_group;");
    };
    fetch(0);
    fetch(1);
    float d[4] = {0, 0, 0, 0};
    for (int step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncwarp();
        fetch(step + 2);
        const uint32_t *x = (const uint32_t *)rows[step % 3], *y = (const uint32_t *)columns[step % 3];
        int g = lane / 4, t = lane % 4;
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(x[g * 8 + t]), "r"(x[(g + 8) * 8 + t]), "r"(x[g * 8 + t + 4]), "r"(x[(g + 8) * 8 + t + 4]),
              "r"(y[g * 8 + t]), "r"(y[g * 8 + t + 4]));
    }
    for (int i = 0; i < 4; i++) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// every CTA of a cluster adds into the first one's memory, which counts the bytes that came
extern "C" __global__ void __cluster_dims__(4, 1, 1) cluster_sums(const int *x, int *out) {
    __shared__ __align__(16) int sums[64];
    __shared__ __align__(8) uint64_t bar;
    int t = threadIdx.x, rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    sums[t] = 0;
    if (t == 0 && rank == 0) {
        init(&bar, 1);
        expect(&bar, 4 * 64 * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
                 ::: "memory");
    uint32_t there, bar_there;
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(shared_address(&sums[t])));
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(bar_there) : "r"(shared_address(&bar)));
    asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.s32 [%0], %1, [%2];" ::"r"(
                     there), "r"(x[rank * 64 + t]), "r"(bar_there) : "memory");
    if (rank == 0) {
        wait(&bar, 0);
        out[t] = sums[t];
    }
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// tiles added to global memory by the copy engine
extern "C" __global__ void bulk_sums(const float *x, float *out) {
    __shared__ __align__(128) float tile[128];
    tile[threadIdx.x] = x[blockIdx.x * 128 + threadIdx.x] * 2;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 512;\n"
            "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::"l"(out), "r"(shared_address(tile))
            : "memory");
    }
}

#endif

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// a warpgroup that loads, with few registers, and two that multiply, with many
extern "C" __global__ void __launch_bounds__(384) specialised(const half *a, const half *b, float *c, int steps) {
    __shared__ __align__(128) half left[2][128 * 16], right[2][8 * 16];
    __shared__ __align__(8) uint64_t full[2], empty[2];
    int t = threadIdx.x;
    if (t == 0) {
        for (int i = 0; i < 2; i++) {
            init(&full[i], 1);
            init(&empty[i], 256);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (t >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (t == 256) {
            for (int step = 0; step < steps; step++) {
                int s = step % 2;
                if (step >= 2) wait(&empty[s], step / 2 - 1 & 1);
                expect(&full[s], 128 * 32 + 8 * 32);
                asm volatile(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 4096, [%2];" ::"r"(
                        shared_address(left[s])), "l"(a + step * 2048), "r"(shared_address(&full[s])) : "memory");
                asm volatile(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(
                        shared_address(right[s])), "l"(b + step * 128), "r"(shared_address(&full[s])) : "memory");
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float d[4] = {0, 0, 0, 0};
    for (int step = 0; step < steps; step++) {
        int s = step % 2;
        wait(&full[s], step / 2 & 1);
        // no swizzle: cores of 8 rows of 16 bytes; K is cut first, rows after it (stride 256)
        auto describe = [](const void *p) {
            return (uint64_t)(shared_address(p) >> 4 & 0x3fff) | (uint64_t)(128 >> 4) << 16 | (uint64_t)(256 >> 4) << 32;
        };
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, p, 1, 1, 0, 0;\n}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "l"(describe(left[s] + t / 128 * 1024)), "l"(describe(right[s])), "r"(step));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(d[i])::"memory");
        arrive(&empty[s]);
    }
    for (int i = 0; i < 4; i++) c[(t / 32 * 16 + t % 32 / 4 + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = d[i];
}

#endif
