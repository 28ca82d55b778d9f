// What every kernel here shares beside the instructions: work items.
#pragma once
#include "instructions.cuh"

constexpr float STEEP_BELOW = -0.7f;  // of g: heads with such tokens take longer in backward_tensor.cu

// One work item: a run of tokens of one sequence. `spans` is an int64 table, SPAN_FIELDS numbers a row.
// Dense batches and packed sequences look the same: tokens are counted along B and T together.
constexpr int SPAN_FIELDS = 6;
struct Span {
    i64 first;       // first token
    i64 length;      // tokens, may be 0
    i64 sequence;    // whose final state this span ends with, or -1 if another span follows
    i64 chunk_base;  // chunks of all earlier sequences
    i64 chunks;      // chunks of this sequence
    i64 chunk;       // the sequence's chunk that this span begins with
};
__device__ __forceinline__ Span read_span(const i64* spans, i64 index) {
    const i64* s = spans + index * SPAN_FIELDS;
    return {s[0], s[1], s[2], s[3], s[4], s[5]};
}
