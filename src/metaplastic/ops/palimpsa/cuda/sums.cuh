// Sums over the lanes of a warp, in a fixed order.
#pragma once
#include "common.cuh"

// Sums N values over the warp's lanes; lane l gets the sum of value l * N / 32.
template <int OFFSET = 16, int N, class T>
__device__ __forceinline__ T sum_each(const T (&value)[N]) {
    if constexpr (OFFSET == 0) {
        return value[0];
    } else if constexpr (N == 1) {
        const T sum[1] = {value[0] + __shfl_xor_sync(~0u, value[0], OFFSET)};
        return sum_each<OFFSET / 2>(sum);
    } else {
        const bool upper = threadIdx.x & OFFSET;
        T sum[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const T give = upper ? value[i] : value[i + N / 2];
            sum[i] = (upper ? value[i + N / 2] : value[i]) + __shfl_xor_sync(~0u, give, OFFSET);
        }
        return sum_each<OFFSET / 2>(sum);
    }
}
