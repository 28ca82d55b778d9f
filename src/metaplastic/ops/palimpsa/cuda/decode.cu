// Palimpsa, one token of every sequence: as fast as the state can be read and written.
//
//     M = alpha M_0 + w k^T        J = alpha J_0 + beta (k^2)^T        alpha = exp(g)
//     R = 1 / (J + prior)          y = scale (M R) q                   var = scale^2 R q^2
//
// Everything is laid out [N, H, ...], so the state is a list of N H V rows of K elements. A block takes eight rows of
// one head (V is a multiple of 8), eight lanes a row, lane l the keys 4 (l + 8 c) + 0..3: 16-byte (float64: 32-byte)
// pieces side by side. Nothing is shared, nobody waits, and everything is asked for before anything is computed: with
// one load behind another's result memory is idle half the time. Hints that a state is read but once cost 6%.
//
// Given when compiling: INPUT (bf16, half, float or double) of q, k, w, beta and output; REAL (float or double) of all
// else; KEY_PIECES (of 32 keys); VARIANCE (0 or 1).
#include "common.cuh"
#include "numbers.cuh"

constexpr int ROWS = 8, THREADS = 8 * ROWS;
constexpr int BLOCKS = sizeof(REAL) == 8 || KEY_PIECES > 4 ? 1 : KEY_PIECES == 4 ? 12 : 16;  // many small ones
extern "C" __device__ const int launch_shape[2] = {THREADS, 0};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
decode(const INPUT* __restrict__ q, const INPUT* __restrict__ k, const INPUT* __restrict__ w,
       const INPUT* __restrict__ beta, const REAL* __restrict__ g, const REAL* __restrict__ prior,
       const REAL* __restrict__ entry_m, const REAL* __restrict__ entry_j, INPUT* __restrict__ output,
       REAL* __restrict__ variance, REAL* __restrict__ to_m, REAL* __restrict__ to_j,
       int sequences, int heads, int key_size, int value_size, double scale) {
    const u32 item = blockIdx.x / ((u32)value_size / ROWS);  // sequence and head
    const i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / 8;
    const int first = 4 * (threadIdx.x & 7);
    const i64 at = row * key_size + first;
    const INPUT *const keys = k + (i64)item * key_size + first, *const queries = q + (i64)item * key_size + first;

    Four M[KEY_PIECES], J[KEY_PIECES], key[KEY_PIECES], query[KEY_PIECES];
    bool real[KEY_PIECES];
#pragma unroll
    for (int c = 0; c < KEY_PIECES; c++) real[c] = first + 32 * c < key_size;
    const REAL log_decay = g[item], p = prior[item % (u32)heads];
    const REAL write = number(w[row]), known = number(beta[row]);
#pragma unroll
    for (int c = 0; c < KEY_PIECES; c++) {
        M[c] = J[c] = {0, 0, 0, 0};
        if (entry_m && real[c]) M[c] = four(entry_m + at + 32 * c), J[c] = four(entry_j + at + 32 * c);
    }
#pragma unroll
    for (int c = 0; c < KEY_PIECES; c++) {
        key[c] = query[c] = {0, 0, 0, 0};
        if (real[c]) key[c] = four(keys + 32 * c), query[c] = four(queries + 32 * c);
    }
    const REAL decay = exp(log_decay);
    REAL y = 0, v = 0;
#pragma unroll
    for (int c = 0; c < KEY_PIECES; c++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const REAL x = key[c].x[e], read = query[c].x[e];
            M[c].x[e] = decay * M[c].x[e] + write * x;
            J[c].x[e] = decay * J[c].x[e] + known * (x * x);
            const REAL Rq = reciprocal(J[c].x[e] + p) * read;
            y += M[c].x[e] * Rq;
            if (VARIANCE) v += Rq * read;
        }
        if (real[c]) *(Four*)(to_m + at + 32 * c) = M[c], *(Four*)(to_j + at + 32 * c) = J[c];
    }
#pragma unroll
    for (int s = 1; s < 8; s <<= 1) {
        y += __shfl_xor_sync(~0u, y, s);
        if (VARIANCE) v += __shfl_xor_sync(~0u, v, s);
    }
    if (first == 0) {
        put(output + row, (REAL)scale * y);
        if (VARIANCE) variance[row] = (REAL)(scale * scale) * v;
    }
}
