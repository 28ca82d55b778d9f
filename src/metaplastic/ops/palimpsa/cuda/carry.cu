// Entry states of consecutive spans of the same sequence, from what each span adds on its own (job LOCAL):
//
//     entry_1 = initial state (0 if none)        entry_{s+1} = decay_s entry_s + local_s
//
// In place: what comes in as local states leaves as entry states. `first_spans` [N + 1]: the spans of every sequence.
// A block takes 1024 elements of one head's M or J of one sequence. Given when compiling: REAL.
#include "common.cuh"

struct alignas(4 * sizeof(REAL)) Four { REAL x[4]; };
constexpr int THREADS = 256;
extern "C" __device__ const int launch_shape[2] = {THREADS, 0};

extern "C" __global__ void __launch_bounds__(THREADS)
carry(const i64* __restrict__ first_spans, const REAL* __restrict__ initial_m, const REAL* __restrict__ initial_j,
      const REAL* __restrict__ span_decay, REAL* __restrict__ m, REAL* __restrict__ j, int heads, int elements) {
    const int blocks = (elements / 4 + THREADS - 1) / THREADS, piece = blockIdx.x % blocks * THREADS + threadIdx.x;
    const i64 rest = blockIdx.x / blocks, which = rest % 2, item = rest / 2;  // item: sequence and head
    const i64 sequence = item / heads, head = item % heads;
    if (piece >= elements / 4) return;
    const REAL* initial = which ? initial_j : initial_m;
    REAL* states = which ? j : m;
    Four state = {0, 0, 0, 0};
    if (initial) state = *(const Four*)(initial + item * elements + 4 * piece);
    for (i64 s = first_spans[sequence]; s < first_spans[sequence + 1]; s++) {
        Four* place = (Four*)(states + (s * heads + head) * elements + 4 * piece);
        if (s + 1 == first_spans[sequence + 1]) {  // the last span's own contribution was not asked for
            *place = state;
            break;
        }
        Four local = *place;
        const REAL decay = span_decay[s * heads + head];
        *place = state;
#pragma unroll
        for (int e = 0; e < 4; e++) state.x[e] = decay * state.x[e] + local.x[e];
    }
}
