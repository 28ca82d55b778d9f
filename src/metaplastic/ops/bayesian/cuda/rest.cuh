// What float32 leaves of a number, in a byte: 2^-31 of the power of two below the number, times -127 to 127.
#pragma once
#include "instructions.cuh"

__device__ __forceinline__ float power_below(float x) { return __uint_as_float(__float_as_uint(x) & 0x7f800000u); }
__device__ __forceinline__ int rest_code(float number, float rest) {
    const float unit = power_below(number) * 0x1p-31f;
    const float code = unit > 0.f ? rest / unit : 0.f;
    return (int)(code > 127.f ? 127.f : code < -127.f ? -127.f : code + (code < 0.f ? -.5f : .5f));
}
__device__ __forceinline__ double with_rest(float number, signed char code) {
    return (double)number + (double)power_below(number) * 0x1p-31 * code;
}
