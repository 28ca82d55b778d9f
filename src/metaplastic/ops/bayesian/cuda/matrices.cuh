// Float32 products on tensor cores, and block substitution with a chunk's Cholesky factor.
//
// Tensor cores see the upper 19 bits of a float32 number (TF32). A product of float32 numbers is the sum of three: of
// what they see of both, and of the rest of either with what they see of the other. The left operand is rounded first,
// the right one is cut by the hardware. bf16 numbers are seen whole: products with them take two.
// Inner indices stand in the order 2t, 2t + 1: a lane then holds of a result just what it needs to hold of a left
// operand, and results go on as left operands without leaving their registers.
#pragma once
#include "instructions.cuh"

#define UNROLL _Pragma("unroll")
constexpr int C = 64;     // tokens of a chunk
constexpr int ROW = 72;   // words between the rows of [.., C] matrices in shared memory: 8 rows in different banks

__device__ __forceinline__ float rounded(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }
__device__ __forceinline__ float seen(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
__device__ __forceinline__ float2 pair_at(const float* from) { return *(const float2*)from; }
__device__ __forceinline__ void put_pair(float* to, float x, float y) { *(float2*)to = make_float2(x, y); }

// A left operand: 16 rows, 8 inner indices.
struct Left {
    float high[4], low[4];
    __device__ __forceinline__ Left(float x0, float x1, float x2, float x3) : high{x0, x1, x2, x3} {
        UNROLL for (int i = 0; i < 4; i++) {
            const float x = high[i];
            high[i] = rounded(x), low[i] = x - seen(high[i]);
        }
    }
    // Of a result: rows g and g + 8, columns 2t and 2t + 1.
    __device__ __forceinline__ explicit Left(const float (&x)[4]) : Left(x[0], x[2], x[1], x[3]) {}
};
__device__ __forceinline__ void multiply_high(float (&d)[4], const Left& a, float b0, float b1) {
    multiply_tf32(d, a.high[0], a.high[1], a.high[2], a.high[3], b0, b1);
}
__device__ __forceinline__ void multiply_low(float (&d)[4], const Left& a, float b0, float b1) {
    multiply_tf32(d, a.low[0], a.low[1], a.low[2], a.low[3], b0, b1);
}
// With numbers that tensor cores see whole.
__device__ __forceinline__ void multiply_exact(float (&d)[4], const Left& a, float b0, float b1) {
    multiply_low(d, a, b0, b1), multiply_high(d, a, b0, b1);
}
__device__ __forceinline__ void multiply(float (&d)[4], const Left& a, float b0, float b1) {
    multiply_high(d, a, b0 - seen(b0), b1 - seen(b1)), multiply_exact(d, a, b0, b1);
}
// In float64, 8 x 8 with inner size 4: lane (g, t) holds a[g][t], b[t][g], d[g][2t], d[g][2t + 1].
#ifdef EMULATED
static inline void multiply_double(double (&d)[2], double a, double b) {
    u32 words[4];
    memcpy(words, &a, 8), memcpy(words + 2, &b, 8);
    auto all = emulation::exchange({words[0], words[1], words[2], words[3]});
    const int row = emulation::current->lane >> 2, column = emulation::current->lane & 3;
    for (int i = 0; i < 2; i++)
        for (int x = 0; x < 4; x++) {
            double left, right;
            memcpy(&left, all[4 * row + x], 8), memcpy(&right, all[4 * (2 * column + i) + x] + 2, 8);
            d[i] += left * right;
        }
}
#else
__device__ __forceinline__ void multiply_double(double (&d)[2], double a, double b) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(d[0]), "+d"(d[1]) : "d"(a), "d"(b));
}
#endif
template <int N> __device__ __forceinline__ void clear(float (&x)[N][4]) {
    UNROLL for (int n = 0; n < N; n++) UNROLL for (int i = 0; i < 4; i++) x[n][i] = 0.f;
}

// The left operand at rows `g` and `g + 8` of a matrix in shared memory, inner indices from `from` on.
__device__ __forceinline__ Left left_at(const float* from, int row) {
    const float2 x = pair_at(from), y = pair_at(from + 8 * row);
    return {x.x, y.x, x.y, y.y};
}

// A 16 x 8 tile of A B^T, 16 inner indices; A and B with rows ROW words apart.
__device__ __forceinline__ void tile(float (&d)[4], const float* A, const float* B, int g, int t) {
    float part[3][4];
    clear(part);
    UNROLL for (int kk = 0; kk < 2; kk++) {
        const Left a = left_at(A + g * ROW + 8 * kk + 2 * t, ROW);
        const float2 b = pair_at(B + g * ROW + 8 * kk + 2 * t);
        multiply_high(part[0], a, b.x, b.y);
        multiply_high(part[1], a, b.x - seen(b.x), b.y - seen(b.y));
        multiply_low(part[2], a, b.x, b.y);
    }
    UNROLL for (int i = 0; i < 4; i++) d[i] = part[0][i] + (part[1][i] + part[2][i]);
}
__device__ __forceinline__ void subtract(float* from, const float (&x)[4], int g, int t) {
    float *const upper = from + g * ROW + 2 * t, *const lower = upper + 8 * ROW;
    const float2 p = pair_at(upper), q = pair_at(lower);
    put_pair(upper, p.x - x[0], p.y - x[1]), put_pair(lower, q.x - x[2], q.y - x[3]);
}

// A factor L in shared memory: below the diagonal its blocks of 16 x 16, on the diagonal the inverses of its blocks.
// Rows x solve to z with z L^T = x, block after block; `solved` gives block J, which begins x, `substitute` takes it
// out of the other `blocks` - 1 and moves them up: every block is the same code, which has to fit into the instruction
// cache.
__device__ __forceinline__ void solved(float (&z)[2][4], const float (&x)[8][4], const float* L, int J, int g, int t) {
    float rest[2][4];
    clear(z), clear(rest);
    const float* const X = L + 16 * J * ROW + 16 * J;
    UNROLL for (int kk = 0; kk < 2; kk++) {
        const Left a(x[kk]);
        UNROLL for (int n = kk; n < 2; n++) {
            const float2 b = pair_at(X + (8 * n + g) * ROW + 8 * kk + 2 * t);
            multiply_high(rest[n], a, b.x - seen(b.x), b.y - seen(b.y));
            multiply_high(z[n], a, b.x, b.y);
            multiply_low(rest[n], a, b.x, b.y);
        }
    }
    UNROLL for (int n = 0; n < 2; n++) UNROLL for (int i = 0; i < 4; i++) z[n][i] += rest[n][i];
}
__device__ __forceinline__ void substitute(float (&x)[8][4], const Left (&z)[2], const float* L, int J, int blocks,
                                           int g, int t) {
    const float* const below = L + 16 * J * ROW + 16 * J;
    UNROLL for (int n = 2; n < 8; n++) {
        if (n < 2 * blocks) UNROLL for (int kk = 0; kk < 2; kk++) {
            const float2 b = pair_at(below + (8 * n + g) * ROW + 8 * kk + 2 * t);
            multiply(x[n], z[kk], -b.x, -b.y);
        }
        UNROLL for (int i = 0; i < 4; i++) x[n - 2][i] = x[n][i];
    }
}
// All of it, in place, of rows that are zero before block `first` and end with block `last`.
__device__ __forceinline__ void solve(float (&x)[8][4], const float* L, int first, int last, int g, int t) {
#pragma unroll 1
    for (int J = 0; J < 4; J++) {
        float z[2][4];
        clear(z);
        if (J >= first && J <= last) solved(z, x, L, J, g, t);
        const Left left[2] = {Left(z[0]), Left(z[1])};
        substitute(x, left, L, J, J >= first ? last + 1 - J : 0, g, t);
        UNROLL for (int n = 0; n < 2; n++) UNROLL for (int i = 0; i < 4; i++) x[6 + n][i] = z[n][i];
    }
}
