// Palimpsa, one token of every sequence: as fast as the state can be read and written.
//
//     M = alpha M_0 + w k^T        J = alpha J_0 + beta (k^2)^T        alpha = exp(g)
//     R = 1 / (J + prior)          y = (M R) (scale q)                 var = R (scale q)^2
//
// Everything is laid out [N, H, ...], so the state is a list of N H V rows of K elements. Eight lanes take a row, lane
// l the keys 4 (l + 8 c) + 0..3: 16-byte (float64: 32-byte) pieces side by side. Nothing is shared, nobody waits.
//
// Given when compiling: INPUT (bf16, half, float or double) of q, k, w, beta and output; REAL (float or double) of all
// else; KEY_PIECES (of 32 keys); VARIANCE (0 or 1).
#include "common.cuh"
#include "numbers.cuh"

constexpr int THREADS = 64, ROWS = THREADS / 8, BLOCKS = sizeof(REAL) == 4 && KEY_PIECES <= 4 ? 12 : 1;  // many small
extern "C" __device__ const int launch_shape[2] = {THREADS, 0};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
decode(const INPUT* __restrict__ q, const INPUT* __restrict__ k, const INPUT* __restrict__ w,
       const INPUT* __restrict__ beta, const REAL* __restrict__ g, const REAL* __restrict__ prior,
       const REAL* __restrict__ entry_m, const REAL* __restrict__ entry_j, INPUT* __restrict__ output,
       REAL* __restrict__ variance, REAL* __restrict__ to_m, REAL* __restrict__ to_j,
       int sequences, int heads, int key_size, int value_size, double scale) {
    const int lane = threadIdx.x & 7;
    const i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / 8;
    const bool real_row = row < (i64)sequences * heads * value_size;
    const i64 item = real_row ? row / value_size : 0, start = row * key_size;  // item: sequence and head

    Four M[KEY_PIECES], J[KEY_PIECES], key[KEY_PIECES], query[KEY_PIECES];
#pragma unroll
    for (int c = 0; c < KEY_PIECES; c++) {
        const int j = 4 * (lane + 8 * c);
        const bool real = real_row && j < key_size;
        M[c] = J[c] = key[c] = query[c] = {0, 0, 0, 0};
        if (real && entry_m) M[c] = stream_in(entry_m + start + j), J[c] = stream_in(entry_j + start + j);
        if (real) key[c] = four(k + item * key_size + j), query[c] = four(q + item * key_size + j);
    }
    const REAL decay = exp(g[item]), p = prior[item % heads];
    const REAL write = real_row ? number(w[row]) : 0, known = real_row ? number(beta[row]) : 0;
    REAL y = 0, v = 0;
#pragma unroll
    for (int c = 0; c < KEY_PIECES; c++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const REAL x = key[c].x[e], read = query[c].x[e] * (REAL)scale;
            M[c].x[e] = decay * M[c].x[e] + write * x;
            J[c].x[e] = decay * J[c].x[e] + known * (x * x);
            REAL R = reciprocal(J[c].x[e] + p);
            y += M[c].x[e] * R * read;
            if (VARIANCE) v += R * (read * read);
        }
        const int j = 4 * (lane + 8 * c);
        if (real_row && j < key_size) stream_out(to_m + start + j, M[c]), stream_out(to_j + start + j, J[c]);
    }
#pragma unroll
    for (int s = 1; s < 8; s <<= 1) {
        y += __shfl_xor_sync(~0u, y, s);
        if (VARIANCE) v += __shfl_xor_sync(~0u, v, s);
    }
    if (lane == 0 && real_row) {
        put(output + row, y);
        if (VARIANCE) variance[row] = v;
    }
}
