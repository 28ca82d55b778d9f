// Palimpsa's gradients in float32 or float64, for every decay and the gradient of the variance: plain, not the fastest.
// (backward_tensor.cu: the same gradients of bf16 inputs on tensor cores.)
//
// One head, alpha_t = exp(g_t), R_t = 1 / (J_t + prior), mu_t = M_t R_t, query q_t = scale * (the q given):
//
//     M_t = alpha_t M_{t-1} + w_t k_t^T           J_t = alpha_t J_{t-1} + beta_t (k_t^2)^T
//
// walking t = n..1 from the gradients of the span's last state, with n_t = (dy_t q_t^T) R_t:
//
//     dM <- dM + n_t                              dJ <- dJ - x_t,  x_t = n_t mu_t + (dvar_t (q_t^2)^T) R_t^2
//     dq_t = mu_t^T dy_t + 2 q_t (R_t^T dvar_t)   dw_t = dM k_t    dbeta_t = dJ k_t^2
//     dk_t = dM^T w_t + 2 k_t (dJ^T beta_t)       dprior = -sum x_t
//     dg_t = alpha_t (<dM, M_{t-1}> + <dJ, J_{t-1}>)               then dM <- alpha_t dM, dJ <- alpha_t dJ
//
// Nothing is ever divided by a decay, so that every decay, alpha = 0 included, is exact. The states that the walk needs
// in reverse are therefore made by walking forward: from the state before a chunk of 64 tokens (given) to the current
// 16 of them, from there to the current 4, and for those 4 element by element, in registers.
//
// A block takes WARPS * ROWS values of one head of one span; lanes own the keys lane, lane + 32, .. (LANE_KEYS of
// them) and warps own ROWS values each. Sums over keys run over the lanes of a warp, sums over values over the warps
// and, left to the caller, over the blocks: all in a fixed order. Given when compiling: LANE_KEYS, ROWS (2 or 4),
// WARPS, VARIANCE (0 or 1), REAL (float or double).
#include "common.cuh"
#include "numbers.cuh"
#include "sums.cuh"

constexpr int THREADS = 32 * WARPS, CHUNK = 64, NEAR = 16, STEP = 4, KEYS = 32 * LANE_KEYS, VALUES = WARPS * ROWS;

// Shared memory, in numbers: q, k [token][key]; w, beta, dy, dvar [token][value]; alpha [token]; every warp's sums.
constexpr int QUERY = 0, KEY = QUERY + CHUNK * KEYS, WRITE = KEY + CHUNK * KEYS, EVIDENCE = WRITE + CHUNK * VALUES;
constexpr int D_OUTPUT = EVIDENCE + CHUNK * VALUES, D_VARIANCE = D_OUTPUT + CHUNK * VALUES;
constexpr int ALPHA = D_VARIANCE + (VARIANCE ? CHUNK * VALUES : 0), D_ALPHA = ALPHA + CHUNK;
constexpr int SUMS = D_ALPHA + WARPS * STEP, WORDS = SUMS + WARPS * STEP * 2 * KEYS;
extern "C" __device__ const int launch_shape[2] = {THREADS, WORDS * (int)sizeof(REAL)};

extern "C" __global__ void __launch_bounds__(THREADS)
backward(const REAL* __restrict__ q, const REAL* __restrict__ k, const REAL* __restrict__ w,
         const REAL* __restrict__ beta, const REAL* __restrict__ g, const REAL* __restrict__ prior,
         const REAL* __restrict__ d_output, const REAL* __restrict__ d_variance, const i64* __restrict__ spans,
         const REAL* __restrict__ chunks_m, const REAL* __restrict__ chunks_j,  // states before the chunks
         const REAL* __restrict__ d_last_m, const REAL* __restrict__ d_last_j,  // of every span's last state, or null
         REAL* __restrict__ dq, REAL* __restrict__ dk,  // [block of values, token, head, key], to be summed over blocks
         REAL* __restrict__ dw, REAL* __restrict__ dbeta,
         REAL* __restrict__ dg, REAL* __restrict__ dprior,  // [block, token, head] and [span, head, block]
         REAL* __restrict__ d_first_m, REAL* __restrict__ d_first_j,  // of every span's first state
         int tokens, int heads, int key_size, int value_size, double query_scale) {
    SHARED;
    REAL* const data = (REAL*)shared;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int blocks = (value_size + VALUES - 1) / VALUES, block = blockIdx.x % blocks, first_row = block * VALUES;
    const i64 item = blockIdx.x / blocks, head = item % heads;
    const Span span = read_span(spans, item / heads);
    const int length = (int)span.length;
    const REAL p = prior[head], scale = (REAL)query_scale;
    const i64 of_block = (i64)block * tokens;

    REAL M[ROWS][LANE_KEYS], J[ROWS][LANE_KEYS], near_m[ROWS][LANE_KEYS], near_j[ROWS][LANE_KEYS];
    REAL dM[ROWS][LANE_KEYS], dJ[ROWS][LANE_KEYS], d_prior = 0;
    auto element = [&](i64 state, int i, int c) {  // -1 beyond the state's sizes
        const int row = first_row + warp * ROWS + i, key = lane + 32 * c;
        return row < value_size && key < key_size ? (state * value_size + row) * key_size + key : (i64)-1;
    };
    auto load = [&](REAL (&m)[ROWS][LANE_KEYS], REAL (&j)[ROWS][LANE_KEYS], const REAL* from_m, const REAL* from_j,
                    i64 state) {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int c = 0; c < LANE_KEYS; c++) {
                const i64 at = from_m ? element(state, i, c) : -1;
                m[i][c] = at < 0 ? 0 : from_m[at], j[i][c] = at < 0 ? 0 : from_j[at];
            }
    };
    auto advance = [&](REAL (&m)[ROWS][LANE_KEYS], REAL (&j)[ROWS][LANE_KEYS], int from, int to) {
#pragma unroll 1
        for (int t = from; t < to; t++) {
            const REAL alpha = data[ALPHA + t];
#pragma unroll
            for (int c = 0; c < LANE_KEYS; c++) {
                const REAL key = data[KEY + t * KEYS + lane + 32 * c];
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    const int at = t * VALUES + warp * ROWS + i;
                    m[i][c] = alpha * m[i][c] + data[WRITE + at] * key;
                    j[i][c] = alpha * j[i][c] + data[EVIDENCE + at] * key * key;
                }
            }
        }
    };
    // Tokens t0 .. t0 + 3 of the chunk that begins with the span's token `start`; M, J: the state before them.
    auto step = [&](int start, int t0) {
        REAL sums[STEP * 2 * ROWS] = {}, d_alpha[STEP] = {};  // dw and dbeta of [token][row]
#pragma unroll
        for (int c = 0; c < LANE_KEYS; c++) {
            REAL key[STEP], query[STEP], to_query[STEP] = {}, to_key[STEP] = {}, to_square[STEP] = {};
#pragma unroll
            for (int s = 0; s < STEP; s++) {
                key[s] = data[KEY + (t0 + s) * KEYS + lane + 32 * c];
                query[s] = data[QUERY + (t0 + s) * KEYS + lane + 32 * c];
            }
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const int own = t0 * VALUES + warp * ROWS + i;
                REAL before_m[STEP + 1], before_j[STEP + 1];
                before_m[0] = M[i][c], before_j[0] = J[i][c];
#pragma unroll
                for (int s = 0; s < STEP; s++) {
                    const REAL alpha = data[ALPHA + t0 + s], square = key[s] * key[s];
                    before_m[s + 1] = alpha * before_m[s] + data[WRITE + own + s * VALUES] * key[s];
                    before_j[s + 1] = alpha * before_j[s] + data[EVIDENCE + own + s * VALUES] * square;
                }
#pragma unroll
                for (int s = STEP - 1; s >= 0; s--) {
                    const REAL alpha = data[ALPHA + t0 + s], d_y = data[D_OUTPUT + own + s * VALUES];
                    const REAL r = reciprocal(before_j[s + 1] + p), mu = before_m[s + 1] * r;
                    const REAL n = d_y * query[s] * r;
                    REAL x = n * mu;
                    to_query[s] += mu * d_y;
                    if (VARIANCE) {
                        const REAL d_r = data[D_VARIANCE + own + s * VALUES] * query[s] * r;
                        x = d_r * query[s] * r + x;
                        to_query[s] += 2 * d_r;
                    }
                    d_prior -= x;
                    const REAL m = dM[i][c] + n, j = dJ[i][c] - x;
                    sums[(s * 2) * ROWS + i] += m * key[s];
                    sums[(s * 2 + 1) * ROWS + i] += j * key[s] * key[s];
                    to_key[s] += m * data[WRITE + own + s * VALUES];
                    to_square[s] += j * data[EVIDENCE + own + s * VALUES];
                    d_alpha[s] += m * before_m[s] + j * before_j[s];
                    dM[i][c] = alpha * m, dJ[i][c] = alpha * j;
                }
            }
#pragma unroll
            for (int s = 0; s < STEP; s++) {
                REAL* place = data + SUMS + (warp * STEP + s) * 2 * KEYS + lane + 32 * c;
                place[0] = scale * to_query[s];
                place[KEYS] = 2 * key[s] * to_square[s] + to_key[s];
            }
        }
        const REAL sum = sum_each(sums);
        const int which = lane * (8 * ROWS) / 32, s = which / (2 * ROWS), i = which % ROWS;
        const int row = first_row + warp * ROWS + i;
        if (start + t0 + s < length && row < value_size && lane % (32 / (8 * ROWS)) == 0)
            (which / ROWS % 2 ? dbeta : dw)[((span.first + start + t0 + s) * heads + head) * value_size + row] = sum;
        const REAL of_alpha = sum_each(d_alpha);
        if (lane % 8 == 0) data[D_ALPHA + warp * STEP + lane / 8] = of_alpha;
        __syncthreads();
        for (int x = thread; x < STEP * 2 * KEYS; x += THREADS) {
            REAL total = 0;
            for (int other = 0; other < WARPS; other++) total += data[SUMS + other * STEP * 2 * KEYS + x];
            const int t = start + t0 + x / (2 * KEYS), key = x % KEYS;
            if (t < length && key < key_size)
                (x / KEYS % 2 ? dk : dq)[((of_block + span.first + t) * heads + head) * key_size + key] = total;
        }
        if (thread < STEP && start + t0 + thread < length) {
            const REAL alpha = data[ALPHA + t0 + thread];
            REAL total = 0;
            for (int other = 0; other < WARPS; other++) total += data[D_ALPHA + other * STEP + thread];
            dg[(of_block + span.first + start + t0 + thread) * heads + head] = alpha > 0 ? alpha * total : 0;
        }
        __syncthreads();
    };

    load(dM, dJ, d_last_m, d_last_j, item);
#pragma unroll 1
    for (int start = (length - 1) / CHUNK * CHUNK; length && start >= 0; start -= CHUNK) {
        const i64 first = span.first + start;
        const i64 state = span.chunk_base * heads + head * span.chunks + span.chunk + start / CHUNK;
        for (int x = thread; x < CHUNK * KEYS; x += THREADS) {  // beyond the span, tokens that change nothing
            const int t = x / KEYS, key = x % KEYS;
            const bool valid = start + t < length && key < key_size;
            const i64 at = ((first + t) * heads + head) * key_size + key;
            data[QUERY + x] = valid ? scale * q[at] : 0, data[KEY + x] = valid ? k[at] : 0;
        }
        for (int x = thread; x < CHUNK * VALUES; x += THREADS) {
            const int t = x / VALUES, row = first_row + x % VALUES;
            const bool valid = start + t < length && row < value_size;
            const i64 at = ((first + t) * heads + head) * value_size + row;
            data[WRITE + x] = valid ? w[at] : 0, data[EVIDENCE + x] = valid ? beta[at] : 0;
            data[D_OUTPUT + x] = valid ? d_output[at] : 0;
            if (VARIANCE) data[D_VARIANCE + x] = valid ? d_variance[at] : 0;
        }
        for (int t = thread; t < CHUNK; t += THREADS)
            data[ALPHA + t] = start + t < length ? exp(g[(first + t) * heads + head]) : 1;
        __syncthreads();
#pragma unroll 1
        for (int near = CHUNK - NEAR; near >= 0; near -= NEAR) {
            if (start + near >= length) continue;
            load(near_m, near_j, chunks_m, chunks_j, state);
            advance(near_m, near_j, 0, near);
#pragma unroll 1
            for (int t = near + NEAR - STEP; t >= near; t -= STEP) {
                if (start + t >= length) continue;
#pragma unroll
                for (int i = 0; i < ROWS; i++)
#pragma unroll
                    for (int c = 0; c < LANE_KEYS; c++) M[i][c] = near_m[i][c], J[i][c] = near_j[i][c];
                advance(M, J, near, t);
                step(start, t);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int c = 0; c < LANE_KEYS; c++) {
            const i64 at = element(item, i, c);
            if (at >= 0) d_first_m[at] = dM[i][c], d_first_j[at] = dJ[i][c];
        }
    REAL total[1] = {d_prior};
    d_prior = sum_each(total);
    __syncthreads();
    if (lane == 0) data[warp] = d_prior;
    __syncthreads();
    if (thread == 0) {
        for (int other = 1; other < WARPS; other++) d_prior += data[other];
        dprior[blockIdx.x] = d_prior;
    }
}
