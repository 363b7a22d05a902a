// Kernels in CUDA C++ whose PTX nvcc writes: device libraries, cooperative groups, barriers, wmma.
// Compiled by test_nvcc.py; each is launched there under its own name.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda/barrier>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <mma.h>

#include <cstdio>

namespace cg = cooperative_groups;
using namespace nvcuda;

__constant__ float table[4] = {1.0f, -2.0f, 0.5f, 4.0f};

__device__ __noinline__ float polynomial(float x, int degree) {
    float result = 1.0f;
    for (int i = 0; i < degree; i++) result = result * x + table[i % 4];
    return result;
}

extern "C" {

__global__ void functions(const double *x, double *wide, float *narrow, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double v = x[i];
    wide[i] = sin(v) + exp(v) + log(fabs(v) + 1) + pow(fabs(v) + 0.5, 1.7) + fmod(v, 0.7) + v / 3.7 + cbrt(v);
    float f = (float)v;
    narrow[i] = sinf(f) + expf(f) + logf(fabsf(f) + 1) + tanhf(f) + rsqrtf(f * f + 1) + fmodf(f, 0.5f);
}

__global__ void calls(const float *x, float *out) {
    int t = threadIdx.x;
    out[t] = polynomial(x[t], t % 5);
    if (t % 3 == 0) out[t] += polynomial(x[t], 2);
    if (t < 2) printf("thread %d of %s: %.2f\n", t, "calls", out[t]);
}

__global__ void total(const float *x, float *out, int n) {
    __shared__ float parts[32];
    auto block = cg::this_thread_block();
    auto warp = cg::tiled_partition<32>(block);
    float sum = 0;
    for (int i = block.thread_rank(); i < n; i += block.size()) sum += x[i];
    sum = cg::reduce(warp, sum, cg::plus<float>());
    if (warp.thread_rank() == 0) parts[warp.meta_group_rank()] = sum;
    block.sync();
    if (warp.meta_group_rank()) return;
    sum = warp.thread_rank() < warp.meta_group_size() ? parts[warp.thread_rank()] : 0;
    sum = cg::reduce(warp, sum, cg::plus<float>());
    if (warp.thread_rank() == 0) atomicAdd(out, sum);
}

__global__ void staged(const float4 *x, float4 *out, int steps) {
    __shared__ alignas(128) float4 stage[2][64];
    __shared__ cuda::barrier<cuda::thread_scope_block> arrived;
    auto block = cg::this_thread_block();
    if (block.thread_rank() == 0) init(&arrived, block.size());
    block.sync();
    for (int i = 0; i < steps; i++) {
        cuda::memcpy_async(block, stage[i % 2], x + 64 * i, cuda::aligned_size_t<16>(64 * 16), arrived);
        arrived.arrive_and_wait();
        float4 v = stage[i % 2][63 - block.thread_rank()];
        out[64 * i + block.thread_rank()] = make_float4(v.w, v.z, v.y, v.x);
        block.sync();
    }
}

__global__ void counted(int *lock, int *count) {
    for (bool is_done = false; !is_done;) {
        if (atomicCAS(lock, 0, 1) == 0) {
            __threadfence();
            *(volatile int *)count = *(volatile int *)count + 1;
            __threadfence();
            atomicExch(lock, 0);
            is_done = true;
        }
    }
}

__global__ void bytes(const unsigned *a, const unsigned *b, unsigned *out) {
    int t = threadIdx.x;
    out[t] = __vabsdiffu4(a[t], b[t]) ^ __vsadu4(a[t], b[t]) ^ __dp4a(a[t], b[t], 3u);
}

__global__ void narrow(const float *x, unsigned char *codes) { codes[threadIdx.x] = __nv_fp8_e4m3(x[threadIdx.x]).__x; }

__global__ void product(const half *a, const half *b, float *c) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> x;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> y;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
    wmma::fill_fragment(sum, 0.0f);
    for (int k = 0; k < 2; k++) {
        wmma::load_matrix_sync(x, a + 16 * k, 32);
        wmma::load_matrix_sync(y, b + 16 * k, 32);
        wmma::mma_sync(sum, x, y, sum);
    }
    for (int i = 0; i < sum.num_elements; i++) sum.x[i] *= 2;
    wmma::store_matrix_sync(c, sum, 16, wmma::mem_row_major);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__global__ void __cluster_dims__(2, 1, 1) exchanged(int *out) {
    __shared__ int own[64];
    auto cluster = cg::this_cluster();
    own[threadIdx.x] = 10 * threadIdx.x + cluster.block_rank();
    cluster.sync();
    int *other = cluster.map_shared_rank(own, cluster.block_rank() ^ 1);
    out[64 * cluster.block_rank() + threadIdx.x] = other[63 - threadIdx.x];
    cluster.sync();
}
#endif
}
