// Which tokens float32 is too little for (covariance_careful.cuh says why, and what is done then).
#pragma once
#include "shapes.cuh"

// The largest variance of a token over its noise, and after a chunk that was done with care; and what share of that it
// would have, were its key the least certain one, a variance may be less than, if that is not negligible beside the
// noise. backward.cuh has its own.
constexpr float LARGEST_VARIANCE = 32.f, LARGEST_AFTERWARDS = 8.f, SMALLEST_SHARE = 0x1p-10f, NEGLIGIBLE = 0x1p-8f;

__device__ __forceinline__ float largest_of_warp(float x) {
    UNROLL for (int by = 16; by; by /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, by));
    return x;
}
template <class F> __device__ __forceinline__ float most_of_keys(int lane, F f) {
    float most = 0.f;
    for (int d = lane; d < KEYS; d += 32) most = fmaxf(most, f(d));
    return largest_of_warp(most);
}

// Of a token's row of Kg.
__device__ __forceinline__ float squared_length(const u32* keys, const float* vectors, int token) {
    float sum = 0.f;
#pragma unroll 4
    for (int i = 0; i < (FULL ? KEYS : KEYS / 2); i += 4) {
        if (FULL) {
            const float4 x = *(const float4*)((const float*)keys + token * KEY_ROW + i);
            sum += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
            continue;
        }
        const uint4 both = *(const uint4*)(keys + token * KEY_ROW + i);
        auto of = [](u32 x) { return low_bf16(x) * low_bf16(x) + high_bf16(x) * high_bf16(x); };
        sum += (of(both.x) + of(both.y)) + (of(both.z) + of(both.w));
    }
    return FULL ? sum : vectors[ENTERED + token] * vectors[ENTERED + token] * sum;
}

// The tokens of a chunk, a bit each, by a warp. Diagonal blocks of the factor are inverted: 1 / L_tt on the diagonal,
// and L_tt^2 is 1 + the token's variance. `most`: P's largest number, or more.
__device__ __forceinline__ u64 hard_tokens(const float* factors, const u32* keys, const float* vectors, float most,
                                           float at_most, int lane) {
    auto is = [&](int token) {
        const float x = factors[token * (ROW + 1)], square = x * x;
        const float variance = most * squared_length(keys, vectors, token);
        if (variance > at_most || at_most * square < 1.f) return true;
        return variance > NEGLIGIBLE && 1.f - square < SMALLEST_SHARE * variance * square;
    };
    const u64 first = __ballot_sync(~0u, is(lane)), second = __ballot_sync(~0u, is(lane + 32));
    return first | second << 32;
}
