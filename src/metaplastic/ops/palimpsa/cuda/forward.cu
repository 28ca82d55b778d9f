// Palimpsa's forward pass on tensor cores: bf16 q, k, w, beta; float32 state; exact for every decay.
//
// One head, alpha_t = exp(g_t) <= 1, I = J + prior (rows: values i, columns: keys j):
//
//     M_t = alpha_t M_{t-1} + w_t k_t^T
//     I_t = alpha_t I_{t-1} + (1 - alpha_t) prior + beta_t (k_t^2)^T
//     y_t[i] = sum_j q_t[j] M_t[i,j] / I_t[i,j]            var_t[i] = sum_j q_t[j]^2 / I_t[i,j]
//
// Gauge. With c_t the product of the alphas since the last restart, M' = M / c and I' = I / c obey, free of decay,
//
//     M'_t = M'_{t-1} + w_t (k_t / c_t)^T      I'_t = I'_{t-1} + beta_t (k_t^2 / c_t)^T + prior (1 - alpha_t) / c_t
//
// and M / I = M' / I'. Both updates are one small matrix product of inner size 8 each (two bf16 words stand for one
// float: w and beta are bf16 already), which share their second factor:
//
//     inner index      0, 1        2, 3          4, 5                       6, 7
//     first factor     w or 0      beta or 0     0 or 1                     0
//     second factor    k / c       k^2 / c       prior (1 - alpha) / c      unused
//
// Restarts. Whenever the running sum of g within a tile passes a multiple of RESTART the state is first multiplied by
// the decay since the last restart, and c starts again at 1: 1 / c never exceeds exp(RESTART), alpha = 0 is no special
// case, and a token of any decay may stand beside any other. Every tile ends with a restart.
//
// Read-out: two neighbouring keys share one reciprocal, u / I0 + v / I1 = (u I1 + v I0) / (I0 I1). The state is kept
// times `unit` = max(1, 1e-18 / prior), so that a product of two does not underflow; a precision above 1e15 / unit
// would overflow it.
//
// A block takes ROWS values of one head and one span of tokens; warps own 16 rows times PART keys. A lane holds rows
// 2g, 2g + 1 (g = lane / 4) and a quarter of the keys. Tokens come in tiles, loaded and turned into factors one tile
// ahead. No warp waits for another unless it is about half a tile ahead of it.
//
// Given when compiling: KEY_TILES (of 8 keys, even, per warp), KEY_PARTS (warps that share rows), ROW_GROUPS (of 16
// rows), TOKENS (16 or 32), VARIANCE (0 or 1), BLOCKS (per multiprocessor).
#include "common.cuh"

constexpr int WARPS = ROW_GROUPS * KEY_PARTS, THREADS = 32 * WARPS, ROWS = 16 * ROW_GROUPS;
constexpr int PART = 8 * KEY_TILES, KEYS = PART * KEY_PARTS;
constexpr int LOAD_AT = TOKENS / 4, PREPARE_AT = 3 * TOKENS / 4;  // when, within a tile, the next one is seen to
constexpr float RESTART = 8.f, NO_DECAY_LEFT = -200.f;  // exp(-200) is 0 in float32

// Shared memory, in words. Per token: the second factors as [part][column of a tile][tile], then the prior's word once
// per tile, then q as floats. That word is there twice where one place would share a bank with factors read beside it.
constexpr int STRIDE = (KEY_TILES + 3) / 4 * 4, FACTOR = KEY_PARTS * 8 * STRIDE;
constexpr int SQUARES = FACTOR + 4, PRIORS = 2 * FACTOR + (STRIDE % 16 == 8 ? 16 : 8);
constexpr int OTHER_PRIORS = STRIDE % 16 == 0 ? PRIORS : 2 * FACTOR + 32, WRITE = OTHER_PRIORS + STRIDE;
constexpr int VALUE = ROWS / 2 + (ROWS / 2 % 32 == 8 || ROWS / 2 % 32 == 24 ? 0 : 8);  // w or beta of a token
constexpr int TILE = TOKENS * (WRITE + KEYS) + 2 * TOKENS, VALUES = TOKENS * VALUE + 8;  // + 8: beta in other banks
constexpr int STAGE = TOKENS * KEYS / 2;
constexpr int PARTIAL = KEY_PARTS > 1 ? KEY_PARTS * TOKENS * ROWS * (1 + VARIANCE) : 0;
constexpr int SHARED_WORDS = 2 * TILE + 4 * VALUES + 2 * STAGE + 2 * PARTIAL + 8;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * SHARED_WORDS};

// In a warp's part of the keys, lane column c = lane % 4 holds keys 16 m + 4 c + 0..3, as columns 2 c, 2 c + 1 of tiles
// 2 m and 2 m + 1: so it reads q four at a time. Eight keys of one token, as they are stored, become second factors:
// factor * k and factor * k^2 at [column of a tile][tile].
__device__ __forceinline__ void split_keys(const uint4& raw, float factor, u32* words, u32* squares, int key) {
    const u32 ks[4] = {raw.x, raw.y, raw.z, raw.w};
    const int place = key / 4 % 4 * 2 * STRIDE + key / 16 * 2;
#pragma unroll
    for (int e = 0; e < 4; e++) {  // keys key + e % 2 + 4 (e / 2) and two later
        const u32 first = ks[e / 2 * 2], second = ks[e / 2 * 2 + 1];
        const float k0 = e % 2 ? high_bf16(first) : low_bf16(first), a0 = k0 * factor;
        const float k1 = e % 2 ? high_bf16(second) : low_bf16(second), a1 = k1 * factor;
        *(uint2*)(words + place + e * STRIDE) = {split(a0), split(a1)};
        *(uint2*)(squares + place + e * STRIDE) = {split(a0 * k0), split(a1 * k1)};
    }
}

// a[token][row]: sums over the four lanes of a group. Lane column c gets both rows of token c.
__device__ __forceinline__ float2 reduce(const float (&a)[4][2], int column) {
    const bool odd = column & 1, late = column & 2;
    float pair[2][2], sum[2];
#pragma unroll
    for (int x = 0; x < 2; x++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float keep = odd ? a[2 * x + 1][r] : a[2 * x][r], give = odd ? a[2 * x][r] : a[2 * x + 1][r];
            pair[x][r] = keep + __shfl_xor_sync(~0u, give, 1);
        }
#pragma unroll
    for (int r = 0; r < 2; r++)
        sum[r] = (late ? pair[1][r] : pair[0][r]) + __shfl_xor_sync(~0u, late ? pair[0][r] : pair[1][r], 2);
    return make_float2(sum[0], sum[1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
forward(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ w, const u16* __restrict__ beta,
        const float* __restrict__ g, const float* __restrict__ prior, const i64* __restrict__ spans,
        const float* __restrict__ entry_m, const float* __restrict__ entry_j, u16* __restrict__ output,
        float* __restrict__ variance, float* __restrict__ final_m, float* __restrict__ final_j,
        int heads, int key_size, int value_size, double query_scale) {
    SHARED;
    u32 *const values = shared + 2 * TILE, *const stage = values + 4 * VALUES;
    float* const partial = (float*)(stage + 2 * STAGE);
    u64 *const ready = (u64*)(partial + 2 * PARTIAL), *const done = ready + 2;  // of each buffer
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, row = lane >> 2, column = lane & 3;
    const int group = warp / KEY_PARTS, part = warp % KEY_PARTS;
    const int blocks = (value_size + ROWS - 1) / ROWS;
    const i64 item = blockIdx.x / blocks;  // span and head
    const int first_row = blockIdx.x % blocks * ROWS, own_row = first_row + group * 16 + 2 * row;
    const i64 head = item % heads;
    const float scale = (float)query_scale;
    const Span span = read_span(spans, item / heads);
    const int length = (int)span.length;
    const float p = prior[head], unit = fmaxf(1.f, 1e-18f / p);
    const u32 key_step = heads * key_size, value_step = heads * value_size;  // from token to token
    const i64 key_start = (span.first * heads + head) * key_size;
    const i64 value_start = (span.first * heads + head) * value_size + first_row;

    float M[KEY_TILES][4], I[KEY_TILES][4];  // [tile][row 2g: two keys, row 2g + 1: the same keys]
    // Where a state [V, K] has the lane's four keys in tiles n and n + 1, of its row r; -1 if it has no such element.
    auto state_offset = [&](i64 index, int n, int r) {
        int i = own_row + r, j = part * PART + 8 * n + 4 * column;
        return i < value_size && j < key_size ? ((index * heads + head) * value_size + i) * key_size + j : (i64)-1;
    };
#pragma unroll
    for (int n = 0; n < KEY_TILES; n += 2)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            i64 at = entry_m ? state_offset(item / heads, n, r) : -1;
            float4 m = {0.f, 0.f, 0.f, 0.f}, j = m;
            if (at >= 0) m = *(const float4*)(entry_m + at), j = *(const float4*)(entry_j + at);
            M[n][2 * r] = m.x * unit, M[n][2 * r + 1] = m.y * unit;
            M[n + 1][2 * r] = m.z * unit, M[n + 1][2 * r + 1] = m.w * unit;
            I[n][2 * r] = (j.x + p) * unit, I[n][2 * r + 1] = (j.y + p) * unit;
            I[n + 1][2 * r] = (j.z + p) * unit, I[n + 1][2 * r + 1] = (j.w + p) * unit;
        }

    float next_g = 0.f, tile_decay = 1.f;
    u32 restarts = 0;

    // Starts the copies of the tile at t0: k and q to the stage (each thread converts what it copied), w and beta to
    // their place. Tokens beyond the span are zeros without decay: they change nothing.
    auto load = [&](int t0, int buffer) {
#pragma unroll
        for (int c0 = 0; c0 < STAGE / 4; c0 += THREADS) {
            int c = c0 + thread, t = c / (KEYS / 8), j = c % (KEYS / 8) * 8;
            if (c < STAGE / 4) {
                bool valid = t0 + t < length && j < key_size;
                i64 at = valid ? key_start + (i64)t0 * key_step + t * key_step + j : 0;
                copy_16(stage + 4 * c, k + at, valid);
                copy_16(stage + STAGE + 4 * c, q + at, valid);
            }
        }
#pragma unroll
        for (int c0 = 0; c0 < TOKENS * ROWS / 8; c0 += THREADS) {
            int c = c0 + thread, t = c / (ROWS / 8), i = c % (ROWS / 8) * 8;
            if (c < TOKENS * ROWS / 8) {
                bool valid = t0 + t < length && first_row + i < value_size;
                i64 at = valid ? value_start + (i64)t0 * value_step + t * value_step + i : 0;
                u32* place = values + 2 * buffer * VALUES + t * VALUE + i / 2;
                copy_16(place, w + at, valid);
                copy_16(place + VALUES, beta + at, valid);
            }
        }
        copies_issued();
        next_g = lane < TOKENS && t0 + lane < length ? g[(span.first + t0 + lane) * heads + head] : 0.f;
    };

    // Turns the loaded tile into factors; every warp finds the gauge for itself, lane = token.
    auto prepare = [&](int buffer) {
        u32* const words = shared + buffer * TILE;
        float* const queries = (float*)(words + TOKENS * WRITE);
        float* const scales = queries + TOKENS * KEYS;  // per token: decay at its restart, then 1 / c
        float log_decay = next_g < NO_DECAY_LEFT ? NO_DECAY_LEFT : next_g, sum = log_decay;  // NaN stays NaN
#pragma unroll
        for (int s = 1; s < TOKENS; s <<= 1) {
            float earlier = __shfl_up_sync(~0u, sum, s);
            if (lane >= s) sum += earlier;
        }
        int passed = (int)(sum * (-1.f / RESTART)), before = __shfl_up_sync(~0u, passed, 1);
        bool restart = passed != (lane ? before : 0);
        restarts = __ballot_sync(~0u, restart);
        float run = sum;  // log c: the sum since the last restart, which itself counts as 0
        if (restarts) {
            run = restart ? 0.f : log_decay;
            int closed = restart;
#pragma unroll
            for (int s = 1; s < TOKENS; s <<= 1) {
                float earlier = __shfl_up_sync(~0u, run, s);
                int earlier_closed = __shfl_up_sync(~0u, closed, s);
                if (lane >= s && !closed) run += earlier, closed = earlier_closed;
            }
        }
        float run_before = __shfl_up_sync(~0u, run, 1);
        float inverse = expf(-run) * unit;
        tile_decay = expf(__shfl_sync(~0u, run, TOKENS - 1));
        if (warp == 0 && lane < TOKENS) {
            scales[lane] = expf((lane ? run_before : 0.f) + log_decay);
            scales[TOKENS + lane] = inverse;
            u32 word = split(p * -expm1f(log_decay) * inverse);
            u32* const own = words + lane * WRITE;
#pragma unroll
            for (int n = 0; n < STRIDE; n += 4)
                *(uint4*)(own + PRIORS + n) = *(uint4*)(own + OTHER_PRIORS + n) = {word, word, word, word};
        }
        copies_arrived();
#pragma unroll
        for (int c0 = 0; c0 < STAGE / 4; c0 += THREADS) {
            int c = c0 + thread, t = c / (KEYS / 8), j0 = c % (KEYS / 8) * 8;
            float factor = __shfl_sync(~0u, inverse, t & 31);
            if (c < STAGE / 4) {
                const uint4 raw_k = *(const uint4*)(stage + 4 * c), raw_q = *(const uint4*)(stage + STAGE + 4 * c);
                const u32 qs[4] = {raw_q.x, raw_q.y, raw_q.z, raw_q.w};
                u32* place = words + t * WRITE + j0 / PART * 8 * STRIDE;
                split_keys(raw_k, factor, place, place + SQUARES, j0 % PART);
#pragma unroll
                for (int e = 0; e < 4; e += 2)
                    *(float4*)(queries + t * KEYS + j0 + 2 * e) = {
                        low_bf16(qs[e]) * scale, high_bf16(qs[e]) * scale,
                        low_bf16(qs[e + 1]) * scale, high_bf16(qs[e + 1]) * scale};
            }
        }
        barrier_arrive(ready + buffer);
    };

    // Adds up what the warps of a row group found for the tile at t0, and stores it.
    auto combine = [&](int t0, int buffer) {
        for (int c = thread; c < TOKENS * ROWS / 2; c += THREADS) {
            int t = c / (ROWS / 2), i = c % (ROWS / 2) * 2;
#pragma unroll
            for (int what = 0; what <= VARIANCE; what++) {
                const int start = (buffer * (1 + VARIANCE) + what) * KEY_PARTS * TOKENS * ROWS;
                const float* from = partial + start + t * ROWS + i;
                float2 sum = *(const float2*)from;
#pragma unroll
                for (int z = 1; z < KEY_PARTS; z++) {
                    float2 more = *(const float2*)(from + z * TOKENS * ROWS);
                    sum.x += more.x, sum.y += more.y;
                }
                i64 at = value_start + (i64)(t0 + t) * value_step + i;
                if (t0 + t < length && first_row + i < value_size) {
                    if (what == 0) *(u32*)(output + at) = pack_bf16(sum.x, sum.y);
                    else *(float2*)(variance + at) = sum;
                }
            }
        }
    };

    // Which bytes of (w or beta of two rows, 1.0) a lane's first factors are: w at column 0; beta at 1, one at 2.
    const u32 none = 0x6666, pick_m0 = column == 0 ? 0x1010 : none, pick_m1 = column == 0 ? 0x3232 : none;
    const u32 pick_i0 = column == 1 ? 0x1010 : column == 2 ? 0x5454 : none;
    const u32 pick_i1 = column == 1 ? 0x3232 : column == 2 ? 0x5454 : none;
    const int own_factor = column == 0 ? (part * 8 + row) * STRIDE
                         : column == 1 ? SQUARES + (part * 8 + row) * STRIDE
                         : row / 2 % 2 ? OTHER_PRIORS : PRIORS;
    const int own_value = (column == 1 ? VALUES : 0) + group * 8 + row;
    const int own_query = TOKENS * WRITE + part * PART + 4 * column;

    if (thread == 0)
        for (int x = 0; x < 4; x++) barrier_start(ready + x, THREADS);
    __syncthreads();
    load(0, 0);
    prepare(0);
    int buffer = 0, parity = 0;  // of this tile; `parity` changes with every other one
#pragma unroll 1
    for (int t0 = 0; t0 < length; t0 += TOKENS) {
        const float decay = tile_decay;
        const u32 restarts_here = restarts;
        const u32 *factors = shared + buffer * TILE + own_factor, *writes = values + 2 * buffer * VALUES + own_value;
        const float *queries = (const float*)(shared + buffer * TILE + own_query);
        const float *scales = (const float*)(shared + buffer * TILE) + TOKENS * (WRITE + KEYS);

        auto rescale = [&](float by) {
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                for (int c = 0; c < 4; c++) M[n][c] *= by, I[n][c] *= by;
        };
        // Writes token t and reads it out: the lane's part of both rows' sums.
        auto step = [&](int t, float (&y)[2], float (&v)[2]) {
            u32 raw = writes[t * VALUE], m0 = __byte_perm(raw, 0x3f80, pick_m0), m1 = __byte_perm(raw, 0x3f80, pick_m1);
            u32 i0 = __byte_perm(raw, 0x3f80, pick_i0), i1 = __byte_perm(raw, 0x3f80, pick_i1);
            y[0] = y[1] = v[0] = v[1] = 0.f;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n += 2) {
                uint2 b = *(const uint2*)(factors + t * WRITE + n);
                multiply_8(I[n], i0, i1, b.x), multiply_8(M[n], m0, m1, b.x);
                multiply_8(I[n + 1], i0, i1, b.y), multiply_8(M[n + 1], m0, m1, b.y);
                float4 q4 = *(const float4*)(queries + t * KEYS + 8 * n);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float q0 = e ? q4.z : q4.x, q1 = e ? q4.w : q4.y;
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        float a0 = M[n + e][2 * r], a1 = M[n + e][2 * r + 1];
                        float d0 = I[n + e][2 * r], d1 = I[n + e][2 * r + 1], both = reciprocal(d0 * d1);
                        y[r] = fmaf(fmaf(q1 * a1, d0, q0 * a0 * d1), both, y[r]);
                        if (VARIANCE) v[r] = fmaf(fmaf(q1 * q1, d0, q0 * q0 * d1), both, v[r]);
                    }
                }
            }
        };

        barrier_wait(ready + buffer, parity);
#pragma unroll 1
        for (int t = 0; t < TOKENS; t += 4) {
            if (t == LOAD_AT) {
                if (t0) barrier_wait(done + (buffer ^ 1), parity ^ buffer ^ 1);  // nobody reads the other buffer now
                if (KEY_PARTS > 1 && t0) combine(t0 - TOKENS, buffer ^ 1);
                if (t0 + TOKENS < length) load(t0 + TOKENS, buffer ^ 1);
            }
            if (t == PREPARE_AT && t0 + TOKENS < length) prepare(buffer ^ 1);
            float y[4][2], v[4][2];
            if ((restarts_here >> t & 15) == 0) {
#pragma unroll
                for (int x = 0; x < 4; x++) step(t + x, y[x], v[x]);
            } else {
#pragma unroll 1
                for (int x = 0; x < 4; x++) {
                    if (restarts_here >> (t + x) & 1) rescale(scales[t + x]);
                    float one[2], one_v[2];
                    step(t + x, one, one_v);
#pragma unroll
                    for (int z = 0; z < 4; z++)
#pragma unroll
                        for (int r = 0; r < 2; r++)
                            if (x <= z) y[z][r] = one[r], v[z][r] = one_v[r];
                }
            }
            // The lane's own token and both its rows.
            const int own = t + column;
            float2 sum = reduce(y, column), sum_v = {0.f, 0.f};
            if (VARIANCE) {
                sum_v = reduce(v, column);
                sum_v.x *= scales[TOKENS + own], sum_v.y *= scales[TOKENS + own];
            }
            if (KEY_PARTS > 1) {
                float* to = partial + (buffer * (1 + VARIANCE) * KEY_PARTS + part) * TOKENS * ROWS + own * ROWS +
                            group * 16 + 2 * row;
                *(float2*)to = sum;
                if (VARIANCE) *(float2*)(to + KEY_PARTS * TOKENS * ROWS) = sum_v;
            } else if (t0 + own < length && own_row < value_size) {
                i64 at = value_start + (i64)(t0 + own) * value_step + group * 16 + 2 * row;
                *(u32*)(output + at) = pack_bf16(sum.x, sum.y);
                if (VARIANCE) *(float2*)(variance + at) = sum_v;
            }
        }
        rescale(decay);
        barrier_arrive(done + buffer);
        parity ^= buffer, buffer ^= 1;
    }
    if (KEY_PARTS > 1 && length) {
        barrier_wait(done + (buffer ^ 1), parity ^ buffer ^ 1);
        combine((length - 1) / TOKENS * TOKENS, buffer ^ 1);
    }
    if (span.sequence < 0 || !final_m) return;
    const float back = 1.f / unit;
#pragma unroll
    for (int n = 0; n < KEY_TILES; n += 2)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            i64 at = state_offset(span.sequence, n, r);
            if (at < 0) continue;
            float4 m = {M[n][2 * r], M[n][2 * r + 1], M[n + 1][2 * r], M[n + 1][2 * r + 1]};
            float4 j = {I[n][2 * r], I[n][2 * r + 1], I[n + 1][2 * r], I[n + 1][2 * r + 1]};
            *(float4*)(final_m + at) = {m.x * back, m.y * back, m.z * back, m.w * back};
            *(float4*)(final_j + at) = {fmaxf(j.x * back - p, 0.f), fmaxf(j.y * back - p, 0.f),
                                        fmaxf(j.z * back - p, 0.f), fmaxf(j.w * back - p, 0.f)};
        }
}
