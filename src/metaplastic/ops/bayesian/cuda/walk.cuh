// The two recursions of parallel_backward.py as kernels, for inputs that have no backward kernels of their own: U, G and
// all else in float32, split when it arrives in shared memory; decays over a chunk for every key.
#pragma once
#define VALUES 64  // of a block
#include "backward.cuh"

constexpr int PARTS = KEYS / C;  // blocks of 64 rows of P, each one's own
using Wide = Split<C, KEYS>;
using Square = Split<C, C>;
using Rows = Piece<C, KEYS, KEYS>;

// A head and noise group of a sequence, and its chunks; `inner`: heads times groups.
struct Walker {
    i64 item, first, end;
    int inner, within, head;
    __device__ __forceinline__ Walker(const i64* chunks, i64 item, int inner, int groups) : item(item), inner(inner) {
        i64 sequence = item / inner;
        first = chunks[sequence], end = chunks[sequence + 1];
        within = (int)(item % inner), head = within / groups;
    }
    __device__ __forceinline__ i64 at(i64 chunk) const { return chunk * inner + within; }
    __device__ __forceinline__ const float* last(const float* lasts, i64 chunk, int groups) const {
        return lasts + (chunk * (inner / groups) + head) * KEYS;
    }
};
