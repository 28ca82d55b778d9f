// The input types of the kernels that take any: how each is read and written, four elements at once or one.
#pragma once
#include "common.cuh"

struct bf16 { u16 bits; };
struct half { u16 bits; };
struct alignas(4 * sizeof(REAL)) Four { REAL x[4]; };

__device__ __forceinline__ REAL number(bf16 x) { return low_bf16(x.bits); }
__device__ __forceinline__ REAL number(half x) { return half_to_float(x.bits); }
__device__ __forceinline__ REAL number(float x) { return x; }
__device__ __forceinline__ REAL number(double x) { return x; }

template <class T> struct alignas(4 * sizeof(T)) FourOf { T x[4]; };
template <class T> __device__ __forceinline__ Four four(const T* from) {
    FourOf<T> all = *(const FourOf<T>*)from;
    return {number(all.x[0]), number(all.x[1]), number(all.x[2]), number(all.x[3])};
}

__device__ __forceinline__ void put(bf16* to, REAL x) { to->bits = pack_bf16((float)x, 0.f); }
__device__ __forceinline__ void put(half* to, REAL x) { to->bits = float_to_half((float)x); }
__device__ __forceinline__ void put(float* to, REAL x) { *to = (float)x; }
__device__ __forceinline__ void put(double* to, REAL x) { *to = x; }
__device__ __forceinline__ double reciprocal(double x) { return 1.0 / x; }
