// What the kernels of careful chunks share: products in float64, and the entry covariance with what float32 left of it.
#pragma once
#include "backward.cuh"
#include "rest.cuh"

constexpr int LINE = C + 1, STEP = 16, STAGE = C * (STEP + 1) + STEP * (WIDE + 2);

// f(row, column, sum) of every element of a b, 64 x N; a(row, k), b(k, column). Both pass through shared memory, STEP
// inner indices at a time, read along rows or, TURNED, along columns.
enum { PLAIN = 0, A_TURNED = 1, B_TURNED = 2 };
template <int N, int TURNED, class A, class B, class F>
__device__ __forceinline__ void product(double* stage, int inner, A a, B b, F f) {
    constexpr int WIDTH = N + 2;
    double *const left = stage, *const right = stage + C * (STEP + 1);
    const int row = threadIdx.x / 32 * 8, lane = threadIdx.x % 32;
    double sum[8][N / 32];
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < N / 32; j++) sum[i][j] = 0.;
#pragma unroll 1
    for (int from = 0; from < inner; from += STEP) {
        __syncthreads();
#pragma unroll
        for (int i = threadIdx.x; i < C * STEP; i += THREADS) {
            const int k = TURNED & A_TURNED ? i / C : i % STEP, m = TURNED & A_TURNED ? i % C : i / STEP;
            left[m * (STEP + 1) + k] = a(m, from + k);
        }
#pragma unroll
        for (int i = threadIdx.x; i < N * STEP; i += THREADS) {
            const int k = TURNED & B_TURNED ? i % STEP : i / N, n = TURNED & B_TURNED ? i / STEP : i % N;
            right[k * WIDTH + n] = b(from + k, n);
        }
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < STEP; k++) {
            double y[N / 32];
#pragma unroll
            for (int j = 0; j < N / 32; j++) y[j] = right[k * WIDTH + lane + 32 * j];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const double x = left[(row + i) * (STEP + 1) + k];
#pragma unroll
                for (int j = 0; j < N / 32; j++) sum[i][j] += x * y[j];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < N / 32; j++) f(row + i, lane + 32 * j, sum[i][j]);
}

// Its elements as a split matrix of device memory (backward.cuh), with their common scale.
template <int N> __device__ __forceinline__ void give(u16* memory, float* number, const double* x, Peaks peaks) {
    float most = 0.f;
    for (int i = threadIdx.x; i < C * N; i += THREADS) most = larger(most, size_of((float)x[i]));
    __syncthreads();
    peaks.see(0, most);
    __syncthreads();
    const Scale scale = peaks.scale(0);
    for (int i = 2 * threadIdx.x; i < C * N; i += 2 * THREADS) {
        u32 high, low;
        split((float)(x[i] * scale.up), (float)(x[i + 1] * scale.up), high, low);
        *(u32*)(memory + i) = high, *(u32*)(memory + C * N + i) = low;
    }
    if (threadIdx.x == 0) *number = scale.down;
}

// Sums over the columns of f(row, column): to[64].
template <class F> __device__ __forceinline__ void row_sums(double* to, int columns, F f) {
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < C; row += THREADS / 32) {
        double sum = 0.;
        for (int j = lane; j < columns; j += 32) sum += f(row, j);
#pragma unroll
        for (int by = 16; by; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
        if (lane == 0) to[row] = sum;
    }
}

// The entry covariance of a chunk and head; `rests` is there only for a chunk that was careful in the forward pass.
struct Entry {
    const float* p;
    const signed char* rest;
    __device__ __forceinline__ Entry(const float* covariances, const signed char* rests, const int* careful, i64 index)
        : p(covariances + index * KEYS * KEYS), rest(careful && careful[index] ? rests + index * KEYS * KEYS : 0) {}
    __device__ __forceinline__ double operator()(int i, int j) const {
        return with_rest(p[i * KEYS + j], rest ? rest[i * KEYS + j] : 0);
    }
};

// An element of a split matrix of device memory.
__device__ __forceinline__ double element(const u16* x, int columns, float down, int i, int j) {
    const int at = i * columns + (j & ~1);
    const Two both = joined(*(const u32*)(x + at), *(const u32*)(x + C * columns + at));
    return (double)down * (j & 1 ? both.y : both.x);
}
