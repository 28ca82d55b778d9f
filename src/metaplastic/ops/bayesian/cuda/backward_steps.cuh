// What the two kernels share that walk the covariances' gradients where P does not fit into a multiprocessor's registers:
// it stays in device memory, and every step, the same chunk counted from the end of every sequence, is a launch of each.
#pragma once
#include "backward.cuh"

constexpr int PARTS = KEYS / C;  // blocks of 64 rows of P, each one's own
constexpr int SUMS = 2 * PARTS;  // per head of a sequence: with the entry covariance, and of the trace

struct Step {
    i64 item, index;  // head of a sequence; chunk * heads + head
    int part, row;    // of P
    bool here;        // otherwise there is nothing to do
    __device__ __forceinline__ Step(const i64* chunks, const float* scales, int heads, int step) {
        part = blockIdx.x % PARTS, row = part * C;
        item = blockIdx.x / PARTS;
        i64 sequence = item / heads, first = chunks[sequence], chunk = chunks[sequence + 1] - 1 - step;
        int head = (int)(item % heads);
        index = chunk * heads + head;
        // A sequence with a careful chunk is left to backward_careful_covariance.cu.
        here = chunk >= first && !has_careful(scales, first, chunks[sequence + 1], heads, head);
    }
};
