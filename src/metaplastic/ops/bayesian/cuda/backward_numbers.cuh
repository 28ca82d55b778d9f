// Numbers split in two, and the tiles of shared memory that hold them.
//
// Products run on the tensor cores with every number split into two fp16, x = high + low: high high + high low + low
// high, summed in float32. First a tile is multiplied by the power of two that brings its largest number to 2^13 or
// more: then 22 bits of every number count that is not below 2^-15 of the largest, nothing overflows, and products are
// about as exact as float32 ones. (Two bf16, 16 bits, lose too much where a small noise lets large numbers cancel.) What
// is bf16 to begin with (q, k and dY) is one fp16 exactly and is not scaled row by row: such scales go into the other
// factor.
// A tile is a plane of high parts and one of low parts, also in device memory, where one lies behind the other and the
// scale is in `scales`; rows in shared memory are 16 bytes longer than the data, against bank conflicts.
#pragma once
#include "instructions.cuh"

#ifndef THREADS
#define THREADS 256
#endif

#ifdef EMULATED
static inline u64 address_of(u32 (*all)[6], int lane) { return (u64)all[lane][1] << 32 | all[lane][0]; }
static inline void load_matrices(u32 (&r)[4], const u16* row) {
    u64 given = (u64)row;
    auto all = emulation::exchange({(u32)given, (u32)(given >> 32)});
    int lane = emulation::current->lane;
    for (int i = 0; i < 4; i++) memcpy(&r[i], (u16*)address_of(all, 8 * i + lane / 4) + 2 * (lane % 4), 4);
}
static inline void load_transposed(u32 (&r)[4], const u16* row) {
    u64 given = (u64)row;
    auto all = emulation::exchange({(u32)given, (u32)(given >> 32)});
    int lane = emulation::current->lane, from = 2 * (lane % 4);
    for (int i = 0; i < 4; i++) {
        u16 *x = (u16*)address_of(all, 8 * i + from), *y = (u16*)address_of(all, 8 * i + from + 1);
        r[i] = x[lane / 4] | (u32)y[lane / 4] << 16;
    }
}
static inline u32 pack_half(float low, float high) { return float_to_half(low) | (u32)float_to_half(high) << 16; }
static inline float low_half(u32 word) { return half_to_float((u16)word); }
static inline float high_half(u32 word) { return half_to_float((u16)(word >> 16)); }
static inline void multiply_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    auto all = emulation::exchange({a0, a1, a2, a3, b0, b1});
    int row = emulation::current->lane >> 2, column = emulation::current->lane & 3;
    for (int i = 0; i < 4; i++) {
        int r = row, c = 2 * column + (i & 1);
        double sum = d[i];
        for (int x = 0; x < 16; x++) {
            u32 a = all[r * 4 + x % 8 / 2][(i >> 1) + 2 * (x >> 3)], b = all[c * 4 + x % 8 / 2][4 + (x >> 3)];
            sum += (double)half_to_float((u16)(a >> 16 * (x & 1))) * half_to_float((u16)(b >> 16 * (x & 1)));
        }
        d[i] = (float)sum;
    }
}
static inline void put_words(void* to, u32 x, u32 y) { ((u32*)to)[0] = x, ((u32*)to)[1] = y; }
static inline float largest_of_warp(float x) {
    for (int by = 16; by; by /= 2) {
        float y = __shfl_xor_sync(~0u, x, by);
        x = x > y ? x : y;
    }
    return x;
}
#else
// Four 8 x 8 matrices of 16 bits: lanes 8 i .. 8 i + 7 give the rows of matrix i, lane (g, t) gets elements [g][2t..]
// of each; of its transpose in the second form.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((u32)__cvta_generic_to_shared(row)));
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((u32)__cvta_generic_to_shared(row)));
}
__device__ __forceinline__ u32 pack_half(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float low_half(u32 word) {
    float r;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(r) : "r"(word));
    return r;
}
__device__ __forceinline__ float high_half(u32 word) {
    float r;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(r) : "r"(word));
    return r;
}
// As multiply_16 of instructions.cuh, of fp16.
__device__ __forceinline__ void multiply_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Eight bytes of device memory at once: the compiler makes two stores of an assignment, each of half a sector.
__device__ __forceinline__ void put_words(void* to, u32 x, u32 y) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" :: "l"(to), "r"(x), "r"(y) : "memory");
}
// Of numbers that are not negative.
__device__ __forceinline__ float largest_of_warp(float x) {
    u32 r;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(__float_as_uint(x)));
    return __uint_as_float(r);
}
#endif

__device__ __forceinline__ float size_of(float x) { return fabsf(x); }
__device__ __forceinline__ float larger(float x, float y) { return fmaxf(x, y); }  // of a number and NaN, the number

// A power of two and its inverse; for numbers of at most this size, that it brings to 2^14 at most.
struct Scale {
    float up, down;
    __device__ __forceinline__ explicit Scale(float largest) {
        u32 exponent = largest == 0.f ? 127 : __float_as_uint(largest) >> 23;  // zeros do with any
        exponent = exponent < 90 ? 90 : exponent;  // what is 2^-37 and less of 1 is not brought up all the way
        up = __uint_as_float((267 - exponent) << 23), down = __uint_as_float((exponent - 13) << 23);
    }
    static __device__ __forceinline__ Scale known(float down) {
        Scale scale(1.f);
        scale.up = 1.f / down, scale.down = down;
        return scale;
    }
};
__device__ __forceinline__ Scale of_whitening() { return Scale(1.f); }  // |L^-1| <= 1: A is 1 + something positive

struct Two { float x, y; };
__device__ __forceinline__ void split(float x, float y, u32& high, u32& low) {
    high = pack_half(x, y);
    low = pack_half(x - low_half(high), y - high_half(high));
}
__device__ __forceinline__ Two joined(u32 high, u32 low) {
    return {low_half(high) + low_half(low), high_half(high) + high_half(low)};
}
// What a product gives (16 x 8 twice), scaled, is what the next one takes (16 x 16).
__device__ __forceinline__ void split_operand(
    u32 (&high)[4], u32 (&low)[4], const float (&x)[4], const float (&y)[4], float up) {
    split(up * x[0], up * x[1], high[0], low[0]);
    split(up * x[2], up * x[3], high[1], low[1]);
    split(up * y[0], up * y[1], high[2], low[2]);
    split(up * y[2], up * y[3], high[3], low[3]);
}

__device__ __forceinline__ float largest_of(float4 x) {
    return larger(larger(size_of(x.x), size_of(x.y)), larger(size_of(x.z), size_of(x.w)));
}

// The largest number that each warp has seen, a row of 8 for every tile: written before a barrier, read after it.
struct Peaks {
    float* at;
    __device__ __forceinline__ explicit Peaks(void* memory) : at((float*)memory) {}
    __device__ __forceinline__ void see(int tile, float largest) const {
        largest = largest_of_warp(largest);
        if (threadIdx.x % 32 == 0) at[8 * tile + threadIdx.x / 32] = largest;
    }
    __device__ __forceinline__ float largest(int tile) const {
        float4 x = *(const float4*)(at + 8 * tile);
        float most = largest_of(x);
        if (THREADS > 128) most = larger(most, largest_of(*(const float4*)(at + 8 * tile + 4)));
        return most;
    }
    __device__ __forceinline__ Scale scale(int tile) const { return Scale(largest(tile)); }
};

// A matrix in shared memory; without a low plane its elements are exact.
template <int ROWS, int COLUMNS, bool LOW> struct Tile {
    static constexpr int rows = ROWS, columns = COLUMNS, stride = COLUMNS + 8, plane = ROWS * stride;
    static constexpr bool has_low = LOW;
    static constexpr int words = plane / 2 * (LOW ? 2 : 1);
    u16* at;
    __device__ __forceinline__ explicit Tile(void* memory) : at((u16*)memory) {}
    __device__ __forceinline__ Tile from_column(int column) const { return Tile(at + column); }
    __device__ __forceinline__ void put(int row, int column, float x, float y) const {
        u32 high, low;
        split(x, y, high, low);
        *(u32*)(at + row * stride + column) = high;
        *(u32*)(at + plane + row * stride + column) = low;
    }
    __device__ __forceinline__ Two get(int row, int column) const {
        u32 high = *(const u32*)(at + row * stride + column);
        return joined(high, LOW ? *(const u32*)(at + plane + row * stride + column) : 0);
    }
};
template <int ROWS, int COLUMNS> using Split = Tile<ROWS, COLUMNS, true>;
