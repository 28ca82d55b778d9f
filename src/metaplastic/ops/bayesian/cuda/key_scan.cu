// What a chunk's decays per key gather, token after token; a thread per key (key_decay.py says what each is):
//     GATHERED 0: entry_t = a_1 .. a_t and tail_t = a_{t+1} .. a_C, of the log decays
//     GATHERED 1: N_t = a_t^2 N_{t-1} + x_t            GATHERED 2, its adjoint: d_t = a_{t+1}^2 d_{t+1} + x_t
// [items, C, keys]; x may have one column.
#define THREADS 128
#include "instructions.cuh"

constexpr int C = 64;
extern "C" __device__ const int launch_shape[2] = {THREADS, 0};

extern "C" __global__ void __launch_bounds__(THREADS) key_scan(
    const float* log_decay, const float* x, float* first, float* second, int items, int keys, int columns) {
    const i64 thread = (i64)blockIdx.x * THREADS + threadIdx.x, item = thread / keys;
    const int key = (int)(thread % keys);
    if (item >= items) return;
    const float* g = log_decay + item * C * keys + key;
    float *to = first + item * C * keys + key, *also = second ? second + item * C * keys + key : 0;
    if (x) x += item * C * columns + (columns > 1 ? key : 0);
    if (GATHERED == 0) {
        float a[C], entry = 1.f, tail = 1.f;
#pragma unroll
        for (int t = 0; t < C; t++) {
            a[t] = expf(g[t * keys]);
            entry *= a[t];
            to[t * keys] = entry;
        }
#pragma unroll
        for (int t = C - 1; t >= 0; t--) {
            also[t * keys] = tail;
            tail *= a[t];
        }
    } else {
        float sum = 0.f, kept = 0.f;
#pragma unroll 16
        for (int i = 0; i < C; i++) {
            const int t = GATHERED == 1 ? i : C - 1 - i;
            const float a = expf(g[t * keys]);
            if (GATHERED == 1) kept = a * a;
            sum = kept * sum + x[t * columns];
            if (GATHERED == 2) kept = a * a;
            to[t * keys] = sum;
        }
    }
}
