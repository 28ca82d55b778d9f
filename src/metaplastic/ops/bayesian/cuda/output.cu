// Read-outs of one chunk, head and noise group, once the states before it are known; chunks side by side.
//
//     X[t, s] = entry_t q_t.W_s + R[t, s] N_s w_s q_t.k_s  (s <= t),   Z = X L^-T,   output = scale (entry x Q M + Z e)
//
// Each of four warps reads 16 tokens. FOR_BACKWARD: also L^-1, which is the same solve for the identity's rows.
// VARIANCE: also sum_s Z[t, s]^2, what the chunk's observations take off the read-out's variance.
#define FULL 0
#include "shapes.cuh"

constexpr int TILE = 128, AT_ONCE = 8, RATIO_ROW = 68;  // values of a tile, and, in eights, summed side by side
// What is needed later takes the place of what is no longer: Q M that of W, the ratios that of K, e that of them and L.
constexpr int SPREADS = C * SPREAD_ROW, READS = TILE * READ_ROW, KEY = SPREADS < READS ? READS : SPREADS;
constexpr int RATIOS = C * (KEY_ROW < RATIO_ROW ? RATIO_ROW : KEY_ROW), FACTOR = KEY + RATIOS, INNOVATION = KEY;
constexpr int VECTOR = KEY + (RATIOS + C * ROW < TILE * ROW ? TILE * ROW : RATIOS + C * ROW);
constexpr int BARRIER = VECTOR + VECTORS, WORDS = BARRIER + 4;
extern "C" __device__ const int launch_shape[2] = {128, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(128, WIDE ? 1 : 3) output(
    const u16* __restrict__ q, const u16* __restrict__ k, const i64* __restrict__ table,
    const float* __restrict__ vectors, const float* __restrict__ factors, const float* __restrict__ spreads,
    const float* __restrict__ reads, const float* __restrict__ innovations, u16* __restrict__ result,
    float* __restrict__ whitenings, float* __restrict__ squares, int heads, int groups, int size, double factor_of_q) {
    SHARED;
    const float scale = (float)factor_of_q;
    float *const spread = (float*)shared, *const L = (float*)shared + FACTOR, *const read = (float*)shared;
    float *const e = (float*)shared + INNOVATION, *const vector = (float*)shared + VECTOR;
    u32* const keys = shared + KEY;
    u64* const arrived = (u64*)(shared + BARRIER);
    float* const ratio = (float*)keys;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, g = lane >> 2, t = lane & 3;
    const i64 slot = blockIdx.x, chunk = slot / (heads * groups);
    const int stream = (int)(slot % (heads * groups)), head = stream / groups;
    const auto [first, tokens] = chunk_at(table, chunk);
    const int r0 = 16 * warp + g;
    // Of the first loads, then of e; of Q M.
    if (thread == 0) barrier_start(arrived, 1), barrier_start(arrived + 1, 1);
    copy_keys(keys, k, heads, head, {first, tokens}, thread, 128);
    copies_issued();
    __syncthreads();
    if (thread == 0) {
        copies_may_follow();
        barrier_expect(arrived, 4 * (C * SPREAD_ROW + C * ROW + VECTORS));
        copy_in(spread, spreads + slot * C * SPREAD_ROW, 4 * C * SPREAD_ROW, arrived);
        copy_in(L, factors + slot * C * ROW, 4 * C * ROW, arrived);
        copy_in(vector, vectors + slot * VECTORS, 4 * VECTORS, arrived);
    }
    u32 Q[KEYS / 8][2];
    UNROLL for (int half = 0; half < 2; half++) {
        const int token = r0 + 8 * half;
        const u32* const row = (const u32*)q + ((first + token) * heads + head) * (KEYS / 2) + t;
        UNROLL for (int kk = 0; kk < KEYS / 8; kk++) Q[kk][half] = token < tokens ? row[4 * kk] : 0u;
    }
    copies_arrived();
    barrier_wait(arrived, 0);
    __syncthreads();
    // bf16 queries are seen whole.
    auto multiply_q = [&](float (&d)[4], int kk, float b0, float b1) {
        multiply_tf32(d, low_bf16(Q[kk][0]), low_bf16(Q[kk][1]), high_bf16(Q[kk][0]), high_bf16(Q[kk][1]), b0, b1);
    };
    float x[8][4], pairs[8][4];
    clear(x), clear(pairs);
    UNROLL for (int kk = 0; kk < KEYS / 8; kk++)
        UNROLL for (int n = 0; n < 8; n++)
            if (n < 2 * warp + 2) {
                const float2 w = pair_at(spread + (8 * n + g) * SPREAD_ROW + 8 * kk + 2 * t);
                const float2 key = key_pair(keys, 8 * n + g, kk, t);
                multiply_q(x[n], kk, w.x - seen(w.x), w.y - seen(w.y)), multiply_q(x[n], kk, w.x, w.y);
                multiply_q(pairs[n], kk, key.x, key.y);
            }
    __syncthreads();
    auto load = [&](float* to, const float* source, int row, int from, u64* barrier) {  // a tile's rows
        const int rows = size - from < TILE ? size - from : TILE;
        copies_may_follow();
        barrier_expect(barrier, 4 * rows * row);
        copy_in(to, source + (slot * size + from) * row, 4 * rows * row, barrier);
    };
    if (thread == 0) load(read, reads, READ_ROW, 0, arrived + 1);
    {
        const int s = thread % C, half = thread / C;
        const float by = vector[NOISE + s] * vector[WHITE + s];
        float r = 0.f;
#pragma unroll 4
        for (int i = 0; i < C; i += 4) {
            const float4 steps = *(const float4*)(vector + STEPS + i);
            const float a[4] = {steps.x, steps.y, steps.z, steps.w};
            UNROLL for (int j = 0; j < 4; j++) {
                r = i + j == s ? by : r * a[j];
                if (i / (C / 2) == half) ratio[(i + j) * RATIO_ROW + s] = r;
            }
        }
    }
    __syncthreads();
    UNROLL for (int n = 0; n < 8; n++) UNROLL for (int i = 0; i < 4; i++) {
        const int r = r0 + 8 * (i >> 1), s = 8 * n + 2 * t + (i & 1);
        x[n][i] = s <= r ? vector[ENTRY + r] * x[n][i] + ratio[r * RATIO_ROW + s] * pairs[n][i] : 0.f;
    }
    solve(x, L, 0, warp, g, t);
    UNROLL for (int n = 0; n < 8; n++) UNROLL for (int i = 0; i < 4; i++)
        if (8 * n + 2 * t + (i & 1) > r0 + 8 * (i >> 1)) x[n][i] = 0.f;
    if (VARIANCE)
        UNROLL for (int half = 0; half < 2; half++) {
            float sum = 0.f;
            UNROLL for (int n = 0; n < 8; n++) UNROLL for (int j = 0; j < 2; j++)
                sum = fmaf(x[n][2 * half + j], x[n][2 * half + j], sum);
            sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
            if (t == 0) squares[slot * C + r0 + 8 * half] = sum;
        }
    if (FOR_BACKWARD) {
        float inverse[8][4];
        UNROLL for (int n = 0; n < 8; n++) UNROLL for (int i = 0; i < 4; i++)
            inverse[n][i] = 8 * n + 2 * t + (i & 1) == r0 + 8 * (i >> 1) ? 1.f : 0.f;
        solve(inverse, L, warp, 3, g, t);
        float* const to = whitenings + slot * C * C;
        UNROLL for (int n = 0; n < 8; n++) UNROLL for (int i = 0; i < 4; i++)
            to[(8 * n + 2 * t + (i & 1)) * C + r0 + 8 * (i >> 1)] = inverse[n][i];
    }
    const float entry_0 = vector[ENTRY + r0], entry_8 = vector[ENTRY + r0 + 8];
#pragma unroll 1
    for (int from = 0; from < size; from += TILE) {
        __syncthreads();
        if (thread == 0) {
            if (from) load(read, reads, READ_ROW, from, arrived + 1);
            load(e, innovations, ROW, from, arrived);
        }
        barrier_wait(arrived + 1, from / TILE & 1), barrier_wait(arrived, ~(from / TILE) & 1);
#pragma unroll 1
        for (int n0 = 0; n0 < TILE / 8 && from + 8 * n0 < size; n0 += AT_ONCE) {
            float y[AT_ONCE][4];
            UNROLL for (int n = 0; n < AT_ONCE; n++) UNROLL for (int i = 0; i < 4; i++)
                y[n][i] = (i < 2 ? entry_0 : entry_8) *
                          read[(8 * (n0 + n) + 2 * t + (i & 1)) * READ_ROW + r0 + 8 * (i >> 1)];
            UNROLL for (int kk = 0; kk < 8; kk++)
                if (kk < 2 * warp + 2) {
                    const Left z(x[kk]);
                    float2 b[AT_ONCE];
                    UNROLL for (int n = 0; n < AT_ONCE; n++) {
                        b[n] = pair_at(e + (8 * (n0 + n) + g) * ROW + 8 * kk + 2 * t);
                        multiply_high(y[n], z, b[n].x - seen(b[n].x), b[n].y - seen(b[n].y));
                    }
                    UNROLL for (int n = 0; n < AT_ONCE; n++) multiply_low(y[n], z, b[n].x, b[n].y);
                    UNROLL for (int n = 0; n < AT_ONCE; n++) multiply_high(y[n], z, b[n].x, b[n].y);
                }
            UNROLL for (int n = 0; n < AT_ONCE; n++) UNROLL for (int half = 0; half < 2; half++) {
                const int token = r0 + 8 * half, value = from + 8 * (n0 + n);
                if (token >= tokens || value >= size) continue;
                u16* const to = result + ((first + token) * heads * groups + stream) * size + value + 2 * t;
                *(u32*)to = pack_bf16(scale * y[n][2 * half], scale * y[n][2 * half + 1]);
            }
        }
    }
}
