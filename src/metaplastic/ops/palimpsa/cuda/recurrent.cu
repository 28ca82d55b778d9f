// Palimpsa token by token: every input type, every decay, no trick.
//
//     M_t = alpha_t M_{t-1} + w_t k_t^T        J_t = alpha_t J_{t-1} + beta_t (k_t^2)^T        alpha_t = exp(g_t)
//     R_t = 1 / (J_t + prior)        y_t = (M_t R_t) (scale q_t)        var_t = R_t (scale q_t)^2
//
// Eight lanes hold one row of the state in registers: lane l keys 4 (l + 8 c) + 0..3, so that a row is read and written
// in whole 16-byte (float64: 32-byte) pieces side by side.
// A block of 256 threads takes 32 rows of one head and one span of tokens.
//
// One of three jobs, given as JOB: READ (outputs and final states), CHUNKS (the state before every chunk of CHUNK
// tokens) or LOCAL (the state after the span as if it began with an empty memory, and the span's decay).
//
// Given when compiling: INPUT (bf16, half, float or double) of q, k, w, beta and output; REAL (float or double) of all
// else; KEY_PIECES (of 32 keys); JOB; VARIANCE (0 or 1).
#include "common.cuh"
#include "numbers.cuh"

#define READ 0
#define CHUNKS 1
#define LOCAL 2
constexpr int THREADS = 256, ROWS = THREADS / 8, KEYS = 32 * KEY_PIECES, TOKENS = 8, CHUNK = 64;
constexpr int SHARED_BYTES = TOKENS * (2 * KEYS + 2 * ROWS + 1) * sizeof(REAL);
extern "C" __device__ const int launch_shape[2] = {THREADS, SHARED_BYTES};

extern "C" __global__ void __launch_bounds__(THREADS)
recurrent(const INPUT* __restrict__ q, const INPUT* __restrict__ k, const INPUT* __restrict__ w,
          const INPUT* __restrict__ beta, const REAL* __restrict__ g, const REAL* __restrict__ prior,
          const i64* __restrict__ spans, const REAL* __restrict__ entry_m, const REAL* __restrict__ entry_j,
          INPUT* __restrict__ output, REAL* __restrict__ variance, REAL* __restrict__ to_m, REAL* __restrict__ to_j,
          REAL* __restrict__ span_decay, int heads, int key_size, int value_size, double scale) {
    SHARED;
    REAL *const queries = (REAL*)shared, *const keys = queries + TOKENS * KEYS;
    REAL *const writes = keys + TOKENS * KEYS, *const evidence = writes + TOKENS * ROWS;
    REAL* const decays = evidence + TOKENS * ROWS;
    const int thread = threadIdx.x, lane = thread & 7, row = thread >> 3;
    const int blocks = (value_size + ROWS - 1) / ROWS, first_row = blockIdx.x % blocks * ROWS;
    const i64 item = blockIdx.x / blocks, head = item % heads;
    const Span span = read_span(spans, item / heads);
    if (JOB == LOCAL && span.sequence >= 0) return;  // nothing follows: nobody asks
    const bool real_row = first_row + row < value_size;
    const REAL p = prior[head];

    Four M[KEY_PIECES], J[KEY_PIECES];
    auto offset = [&](i64 state, int c) {  // -1 where a state [V, K] has no such element
        int j = 4 * (lane + 8 * c);
        return real_row && j < key_size ? (state * value_size + first_row + row) * key_size + j : (i64)-1;
    };
    auto store = [&](i64 state) {
#pragma unroll
        for (int c = 0; c < KEY_PIECES; c++) {
            i64 at = offset(state, c);
            if (at >= 0) *(Four*)(to_m + at) = M[c], *(Four*)(to_j + at) = J[c];
        }
    };
#pragma unroll
    for (int c = 0; c < KEY_PIECES; c++) {
        i64 at = entry_m && JOB != LOCAL ? offset(item, c) : -1;
        M[c] = J[c] = {0, 0, 0, 0};
        if (at >= 0) M[c] = *(const Four*)(entry_m + at), J[c] = *(const Four*)(entry_j + at);
    }

    REAL whole_decay = 1;
    for (i64 t0 = 0; t0 < span.length; t0 += TOKENS) {
        const int tokens = (int)(span.length - t0 < TOKENS ? span.length - t0 : TOKENS);
        if (JOB == CHUNKS && t0 % CHUNK == 0)
            store(span.chunk_base * heads + head * span.chunks + span.chunk + t0 / CHUNK);
        __syncthreads();  // the tile before has been read
        for (int x = thread; x < tokens * KEYS; x += THREADS) {
            int t = x / KEYS, j = x % KEYS;
            i64 at = ((span.first + t0 + t) * heads + head) * key_size + j;
            queries[x] = JOB == READ && j < key_size ? number(q[at]) * (REAL)scale : 0;
            keys[x] = j < key_size ? number(k[at]) : 0;
        }
        for (int x = thread; x < tokens * ROWS; x += THREADS) {
            int t = x / ROWS, i = first_row + x % ROWS;
            i64 at = ((span.first + t0 + t) * heads + head) * value_size + i;
            writes[x] = i < value_size ? number(w[at]) : 0;
            evidence[x] = i < value_size ? number(beta[at]) : 0;
        }
        if (thread < tokens) decays[thread] = exp(g[(span.first + t0 + thread) * heads + head]);
        __syncthreads();
        for (int t = 0; t < tokens; t++) {
            const REAL decay = decays[t], write = writes[t * ROWS + row], known = evidence[t * ROWS + row];
            REAL y = 0, v = 0;
            if (JOB == LOCAL) whole_decay *= decay;
#pragma unroll
            for (int c = 0; c < KEY_PIECES; c++) {
                Four key = *(const Four*)(keys + t * KEYS + 4 * (lane + 8 * c)), query = {};
                if (JOB == READ) query = *(const Four*)(queries + t * KEYS + 4 * (lane + 8 * c));
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    M[c].x[e] = decay * M[c].x[e] + write * key.x[e];
                    J[c].x[e] = decay * J[c].x[e] + known * (key.x[e] * key.x[e]);
                    if (JOB != READ) continue;
                    REAL R = reciprocal(J[c].x[e] + p);
                    y += M[c].x[e] * R * query.x[e];
                    if (VARIANCE) v += R * (query.x[e] * query.x[e]);
                }
            }
            if (JOB != READ) continue;
#pragma unroll
            for (int s = 1; s < 8; s <<= 1) {
                y += __shfl_xor_sync(~0u, y, s);
                if (VARIANCE) v += __shfl_xor_sync(~0u, v, s);
            }
            i64 at = ((span.first + t0 + t) * heads + head) * value_size + first_row + row;
            if (lane == 0 && real_row) {
                put(output + at, y);
                if (VARIANCE) variance[at] = v;
            }
        }
    }
    if (JOB == READ && span.sequence >= 0) store(span.sequence * heads + head);
    if (JOB == LOCAL) {
        store(item);
        if (first_row == 0 && thread == 0) span_decay[item] = whole_decay;
    }
}
