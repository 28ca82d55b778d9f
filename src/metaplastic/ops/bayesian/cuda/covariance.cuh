// The covariance of one head and noise group from chunk to chunk, P on chip (scan.cu runs it).
//
//     W = K P,   A = E + W K^T = L L^T,   B = last x W + sent,   U = L^-1 B,   P <- last P last + N - U^T U
//
// Warps 0 .. 7 hold 16 rows of P each, in registers, as tensor cores leave them: W^T, B^T and U^T are made of them
// without leaving there, and only K, W, L and U^T pass through shared memory. Warp 8 factors A, one block of 16 columns
// after another, while the others take the last block out of B, out of the rest of A and out of P. With its three
// neighbours, which also load the next chunk, it makes the first block, before the others have the rest of A.
// WIDE: a warp has twice 16 rows, whose P it reads and updates in memory, and nothing is loaded ahead.
// With CAREFUL it is the turn of heads that have a chunk which float32 is too little for (care.cuh): the helpers make
// its U in float64, and from there on P is kept in two parts (covariance_careful.cuh).
#pragma once
#include "covariance_careful.cuh"

// Of a symmetric 16 x 16 block (its lower triangle) the inverse X of its Cholesky factor, by one warp: elimination with
// pivots of 4 x 4, which every lane factors by itself. Lane: a row and every second column.
__device__ __forceinline__ void factor(const float* A, float* X, int lane) {
    const int row = lane & 15, odd = lane >> 4;
    float a[8], own_pivot = 1.f;
    UNROLL for (int m = 0; m < 8; m++) {
        const int k = 2 * m + odd;
        a[m] = k <= row ? A[row * ROW + k] : A[k * ROW + row];
    }
#pragma unroll 1
    for (int j = 0; j < 16; j += 4) {
        auto from = [&](int m, int source) { return __shfl_sync(~0u, a[m], source); };
        const float d00 = from(0, j), d10 = from(0, j + 1), d11 = from(0, j + 17), d20 = from(0, j + 2);
        const float d30 = from(0, j + 3), d21 = from(0, j + 18), d31 = from(0, j + 19), d22 = from(1, j + 2);
        const float d32 = from(1, j + 3), d33 = from(1, j + 19);
        const float v0 = from(0, row), v1 = from(0, row + 16), v2 = from(1, row), v3 = from(1, row + 16);
        // Pivots p0 .. p3 and the unit lower triangle of this block; two reciprocals at a time need not wait.
        const float det = fmaf(d00, d11, -(d10 * d10)), i0 = reciprocal(d00), i1 = d00 * reciprocal(det);
        const float l10 = d10 * i0, l20 = d20 * i0, l30 = d30 * i0, p1 = det * i0;
        const float e21 = d21 - l20 * d10, e31 = d31 - l30 * d10;
        const float e22 = d22 - l20 * d20, e32 = d32 - l30 * d20, e33 = d33 - l30 * d30;
        const float l21 = e21 * i1, l31 = e31 * i1, p2 = e22 - l21 * e21;
        const float f32 = e32 - l31 * e21, f33 = e33 - l31 * e31, det2 = fmaf(p2, f33, -(f32 * f32));
        const float i2 = reciprocal(p2), i3 = p2 * reciprocal(det2), l32 = f32 * i2, p3 = det2 * i2;
        // What the lane's row is to lose of each pivot's row.
        const float t0 = row <= j ? 0.f : v0 * i0;
        const float w1 = v1 - t0 * d10, t1 = row <= j + 1 ? 0.f : w1 * i1;
        const float w2 = v2 - t0 * d20 - t1 * e21, t2 = row <= j + 2 ? 0.f : w2 * i2;
        const float w3 = v3 - t0 * d30 - t1 * e31 - t2 * f32, t3 = row <= j + 3 ? 0.f : w3 * i3;
        const float s3 = t3, s2 = t2 - s3 * l32, s1 = t1 - s2 * l21 - s3 * l31;
        const float s0 = t0 - s1 * l10 - s2 * l20 - s3 * l30;
        own_pivot = row == j ? d00 : row == j + 1 ? p1 : row == j + 2 ? p2 : row == j + 3 ? p3 : own_pivot;
        UNROLL for (int m = 2; m < 8; m++) {
            const int at = j + 16 * odd;
            const float r0 = from(m, at), r1 = from(m, at + 1), r2 = from(m, at + 2), r3 = from(m, at + 3);
            a[m - 2] = a[m] - ((s0 * r0 + s1 * r1) + (s2 * r2 + s3 * r3));
        }
        a[6] = row == j + odd ? 1.f : -(odd ? s1 : s0);
        a[7] = row == j + 2 + odd ? 1.f : -(odd ? s3 : s2);
    }
    const float scale = reciprocal_root(own_pivot);
    UNROLL for (int m = 0; m < 8; m++) {
        const int k = 2 * m + odd;
        X[row * ROW + k] = k <= row ? a[m] * scale : 0.f;
    }
}

struct CovarianceMemory {  // in words
    static constexpr int KEY = 0, KNOWN = KEY + BUFFERS * C * KEY_ROW, VECTOR = KNOWN + BUFFERS * C * ROW;
    static constexpr int FACTOR = VECTOR + 2 * VECTORS, SPREAD = FACTOR + C * ROW;
    static constexpr int GAIN = WIDE ? SPREAD : SPREAD + C * SPREAD_ROW;  // W is no longer needed where U begins
    static constexpr int PART = GAIN + KEYS * ROW, BARRIER = PART + 4 * 256, CERTAIN = BARRIER + 28;
    static constexpr int LARGEST = CERTAIN + 4, EXACT = LARGEST + (CAREFUL ? 64 : 0);
    static constexpr int WORDS = EXACT + (WIDE || !CAREFUL ? 0 : 2 * CAREFUL_ROOM);
};

// Tiles of 16 x 8 of W K^T: rows of tile `i`, columns from tile `n0` on; STEPS times 8 inner indices from 8 `from` on.
template <int TILES, int STEPS>
__device__ __forceinline__ void known_tiles(float (&high)[TILES][4], const float* spread, const u32* keys, int i,
                                            int n0, int count, int from, int g, int t) {
    float low[TILES][4];
    clear(high), clear(low);
    UNROLL for (int x = 0; x < STEPS; x++) {
        const int kk = from + x;
        if (KEYS % 32 && kk >= KEYS / 8) break;
        const Left a = left_at(spread + (16 * i + g) * SPREAD_ROW + 8 * kk + 2 * t, SPREAD_ROW);
        UNROLL for (int n = 0; n < TILES; n++)
            if (n < count) {
                const float2 b = key_pair(keys, 8 * (n0 + n) + g, kk, t);
                if (FULL) multiply_high(low[n], a, b.x - seen(b.x), b.y - seen(b.y));
                multiply_high(high[n], a, b.x, b.y), multiply_low(low[n], a, b.x, b.y);
            }
    }
    UNROLL for (int n = 0; n < TILES; n++) UNROLL for (int x = 0; x < 4; x++) high[n][x] += low[n][x];
}

// Adds columns of U^T U, as many as `product` has, inner indices 8 kk and on; `gain` is U^T from the first of them on.
template <int TILES>
__device__ __forceinline__ void add_gains(float (&product)[TILES][4], const Left& left, const float* gain, int kk,
                                          int g, int t) {
    constexpr int AT_ONCE = TILES % 4 ? 2 : 4;
    UNROLL for (int n0 = 0; n0 < TILES; n0 += AT_ONCE) {
        float2 y[AT_ONCE];
        UNROLL for (int n = 0; n < AT_ONCE; n++) {
            y[n] = pair_at(gain + (8 * (n0 + n) + g) * ROW + 8 * kk + 2 * t);
            multiply_high(product[n0 + n], left, y[n].x - seen(y[n].x), y[n].y - seen(y[n].y));
        }
        UNROLL for (int n = 0; n < AT_ONCE; n++) multiply_low(product[n0 + n], left, y[n].x, y[n].y);
        UNROLL for (int n = 0; n < AT_ONCE; n++) multiply_high(product[n0 + n], left, y[n].x, y[n].y);
    }
}

// Adds W K^T's tile to A; FULL 0: times a number of the column's token.
__device__ __forceinline__ void add_tile(float* A, const float (&x)[4], const float* vectors, int i, int n, int g,
                                         int t) {
    UNROLL for (int e = 0; e < 4; e++) {
        const int row = 16 * i + g + 8 * (e >> 1), column = 8 * n + 2 * t + (e & 1);
        A[row * ROW + column] += x[e] * (FULL ? 1.f : vectors[ENTERED + column]);
    }
}

__device__ __forceinline__ void filter_covariance(u32* shared, const Scan& scan, int item, int room, int* left,
                                                  int leaving) {
    using At = CovarianceMemory;
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), g = lane >> 2, t = lane & 3;
    const int streams = scan.heads * scan.groups, sequence = item / streams, stream = item % streams;
    const i64 begin = scan.first[sequence], end = scan.first[sequence + 1];
    float* const factors = (float*)(shared + At::FACTOR);
    float* const spread = (float*)(shared + At::SPREAD);
    float* const gain = (float*)(shared + At::GAIN);
    // Of both buffers; then, once a chunk: all is loaded and results are out; W is there; parts of the first block of A;
    // all of the factor; U is there; once for each of its blocks but the last: a block of the factor; L below it.
    u64 *const full = (u64*)(shared + At::BARRIER), *const entered = full + 2, *const spread_there = full + 3;
    u64 *const parts = full + 4, *const factored_all = full + 5, *const gained = full + 6;
    u64 *const factored = full + 7, *const below = full + 8;  // below: of three
    u64 *const of_care = full + 11, *const helping = full + 13;  // P is in memory, the careful U is there; among helpers
    // Those that write L below a block, or wrote what else the factor's warp takes next.
    auto panel_warps = [](int J) { return J == 0 ? MAIN : 4; };
    volatile int* const certain = (int*)(shared + At::CERTAIN);  // whether a chunk was careful
    if (threadIdx.x == 0) {
        barrier_start(full, 1), barrier_start(full + 1, 1), barrier_start(entered, 96);
        barrier_start(spread_there, 32 * MAIN), barrier_start(parts, 128), barrier_start(factored_all, 32);
        barrier_start(gained, 32 * MAIN), barrier_start(factored, 32);
        for (int J = 0; J < 3; J++) barrier_start(below + J, 32 * panel_warps(J));
        barrier_start(of_care, 32 * MAIN), barrier_start(of_care + 1, 128);
        barrier_start(helping, 128);
        *certain = 0;
    }
    __syncthreads();
    int care = 0;  // parity of these two
    auto slot = [&](i64 c) { return c * streams + stream; };
    auto odd = [&](i64 c) { return (int)(c - begin) & 1; };
    auto keys_of = [&](i64 c) { return shared + At::KEY + odd(c) % BUFFERS * C * KEY_ROW; };
    auto known_of = [&](i64 c) { return (float*)(shared + At::KNOWN) + odd(c) % BUFFERS * C * ROW; };
    float* const largest = (float*)(shared + At::LARGEST);  // CAREFUL: on P's diagonal, some by every warp
    float* const rest = scan.rests + (i64)room * KEYS * (KEYS + ROW + 2 * C);
    float *const gain_rest = rest + KEYS * KEYS, *const taken = gain_rest + KEYS * ROW;
    double* const exact_spread = (double*)taken;  // a chunk needs one of them
    float* const final = scan.final_covariance + (i64)item * KEYS * KEYS;
    auto vectors_of = [&](i64 c) { return (float*)(shared + At::VECTOR) + odd(c) * VECTORS; };
    auto hard = [&](i64 c) -> u64 {  // its hard tokens, if it is the turn of such chunks
        if (!CAREFUL || WIDE) return 0;
        const float most = largest_of_warp(fmaxf(largest[lane], largest[lane + 32]));
        const float at_most = *certain ? LARGEST_AFTERWARDS : LARGEST_VARIANCE;
        return hard_tokens(factors, keys_of(c), vectors_of(c), most, at_most, lane);
    };

    if (warp >= MAIN) {
        fewer_registers<72>();
        const int helper = warp - MAIN;
        const int own = threadIdx.x - 32 * (MAIN + 1);
        auto load = [&](i64 c) {  // by warps 9 to 11
            u64* const arrived = full + odd(c);
            if (!FULL) {
                copy_keys(keys_of(c), scan.keys, scan.heads, stream / scan.groups, chunk_at(scan.table, c), own, 96);
                copies_issued();
            }
            if (own) return;
            copies_may_follow();
            barrier_expect(arrived, 4 * (C * ROW + VECTORS + FULL * C * KEY_ROW));
            copy_in(known_of(c), scan.known + slot(c) * C * ROW, 4 * C * ROW, arrived);
            copy_in(vectors_of(c), vectors_at(scan, c, stream), 4 * VECTORS, arrived);
            if (FULL) copy_in(keys_of(c), (const float*)scan.keys + slot(c) * C * KEY_ROW, 4 * C * KEY_ROW, arrived);
        };
        // In the end, if need be: U once more.
        auto with_care = [&](i64 c) {
            __syncwarp();
            const u64 tokens = hard(c);
            if (!tokens) return;
            wait_for(of_care, care);
            careful_gains((double*)(shared + At::EXACT), scan, slot(c), exact_spread, keys_of(c), vectors_of(c), gain,
                          gain_rest, factors, tokens, helping, threadIdx.x - 32 * MAIN);
            if (threadIdx.x == 32 * MAIN) *certain = 1;
            copies_may_follow();
            barrier_arrive(of_care + 1), care ^= 1;
        };
        // Its part of the first block of A.
        auto first_block = [&](i64 c) {
            constexpr int STEPS = (KEYS + 31) / 32;
            float part[2][4];
            clear(part);
            float* const to = (float*)(shared + At::PART) + lane * 4;
            if (helper * STEPS < KEYS / 8)
                known_tiles<2, STEPS>(part, spread, keys_of(c), 0, 0, 2, helper * STEPS, g, t);
            UNROLL for (int n = 0; n < 2; n++)
                *(float4*)(to + (2 * helper + n) * 128) = {part[n][0], part[n][1], part[n][2], part[n][3]};
            if (own == 0) copies_out_read<WIDE ? 0 : 1>();  // where the factor and U will be
            barrier_arrive(parts);
        };
        if (helper == 0) {
            for (int i = lane; i < C * ROW; i += 32) factors[i] = 0.f;
#pragma unroll 1
            for (i64 c = begin; c < end; c++) {
                float* const A = known_of(c);
                const int parity = (int)(c - begin) & 1;
                wait_for(spread_there, parity);
                first_block(c);
                wait_for(parts, parity);
                UNROLL for (int n = 0; n < 2; n++) {
                    float sum[4] = {0.f, 0.f, 0.f, 0.f};
                    UNROLL for (int h = 0; h < 4; h++) {
                        const float4 x = *(const float4*)((float*)(shared + At::PART) + (2 * h + n) * 128 + lane * 4);
                        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
                    }
                    add_tile(A, sum, vectors_of(c), 0, n, g, t);
                }
                __syncwarp();
#pragma unroll 1
                for (int J = 0; J < 4; J++) {
                    const int at = 16 * J * ROW + 16 * J;
                    if (J) {
                        const float* const L = factors + at - 16;
                        UNROLL for (int half = 0; half < 2; half++) {
                            float x[4];
                            tile(x, L, L + 8 * half * ROW, g, t);
                            subtract(A + at + 8 * half, x, g, t);
                        }
                        __syncwarp();
                    }
                    factor(A + at, factors + at, lane);
                    if (J == 3) copies_may_follow();
                    barrier_arrive(J == 3 ? factored_all : factored);
                    if (J == 3) with_care(c);
                    else wait_for(below + J, parity);
                }
            }
            meet(ALL, THREADS);
            return;
        }
        __syncwarp();
        if (begin < end) load(begin);
#pragma unroll 1
        for (i64 c = begin; c < end; c++) {
            const int parity = (int)(c - begin) & 1;
            copies_arrived();
            if (own == 0) barrier_wait(full + odd(c), (int)(c - begin) >> 1 & 1), copies_out_read<WIDE ? 0 : 2>();
            barrier_arrive(entered);
            if (own == 0) copies_out_written(), announce(scan.progress + item, (int)(c - begin));
            wait_for(spread_there, parity);
            if (own == 0) copy_out(scan.spreads + slot(c) * C * SPREAD_ROW, spread, 4 * C * SPREAD_ROW);
            first_block(c);
            if (!WIDE && c + 1 < end) load(c + 1);
            wait_for(factored_all, parity);
            with_care(c);
            wait_for(gained, parity);
            if (WIDE && c + 1 < end) load(c + 1);
            if (own == 0) {
                copy_out(scan.factors + slot(c) * C * ROW, factors, 4 * C * ROW);
                copy_out(scan.gains + slot(c) * KEYS * ROW, gain, 4 * KEYS * ROW);
            }
        }
        if (own == 0) copies_out_written();
        meet(ALL, THREADS);
        if (own == 0) announce(scan.progress + item, (int)(end - begin));
        return;
    }

    more_registers<216>();
    constexpr int SHARES = WIDE ? 2 : 1;
    auto row_of = [&](int share) { return 16 * (warp + MAIN * share) + g; };
    auto holds = [&](int share) { return KEYS == 16 * MAIN * SHARES || 16 * (warp + MAIN * share) < KEYS; };
    const int row_tile = warp < 4 ? 3 : warp < 6 ? 2 : 1, tiles = warp == 4 || warp == 5 ? 3 : 2;
    const int first_tile = warp < 4 ? 2 * warp : warp < 6 ? 3 * (warp - 4) : 2 * (warp - 6);
    const float* const entry = scan.covariance + (i64)item * KEYS * KEYS;
    float P[WIDE ? 2 : KEYS / 8][4];
    if (!WIDE && holds(0)) read_rows(P, entry, row_of(0), t);
    if (WIDE && begin == end)
        for (int i = threadIdx.x; i < KEYS * KEYS; i += 32 * MAIN) final[i] = entry[i];
#pragma unroll 1
    for (i64 c = begin; c < end; c++) {
        const u32* const keys = keys_of(c);
        float* const A = known_of(c);
        const float* const vectors = vectors_of(c);
        const int parity = (int)(c - begin) & 1;
        wait_for(entered, parity);
        if (WIDE) meet(HOLDERS, 32 * MAIN);  // U, whose room is W's, was read by all
        float b[SHARES][8][4];  // W^T, then B^T, then U^T block by block
        UNROLL for (int share = 0; share < SHARES; share++) {
            clear(b[share]);
            if (!holds(share)) continue;
            const int d0 = row_of(share);
            float* const saved = scan.covariances + slot(c) * KEYS * KEYS;
            const float* const before = c == begin ? entry : final;
            if (!WIDE && scan.covariances) write_rows(P, saved, d0, t);
            if (!WIDE && scan.entry_careful) {
                if (threadIdx.x == 0) scan.entry_careful[slot(c)] = CAREFUL && *certain;
                if (CAREFUL && *certain)
                    copy_rest(scan.entry_rests + slot(c) * (KEYS * KEYS / 2), final, rest, d0, t);
            }
            auto multiply_in_tf32 = [&](int kk, const Left& a) {
                float2 key[8];
                UNROLL for (int n = 0; n < 8; n++) {
                    key[n] = key_pair(keys, 8 * n + g, kk, t);
                    multiply_high(b[share][n], a, key[n].x, key[n].y);
                }
                UNROLL for (int n = 0; n < 8; n++) {
                    multiply_low(b[share][n], a, key[n].x, key[n].y);
                    if (FULL) multiply_high(b[share][n], a, key[n].x - seen(key[n].x), key[n].y - seen(key[n].y));
                }
            };
            if (WIDE) {
#pragma unroll 2
                for (int kk = 0; kk < KEYS / 8; kk++) {
                    const int at = d0 * KEYS + 8 * kk + 2 * t;
                    const float2 x = pair_at(before + at), y = pair_at(before + at + 8 * KEYS);
                    if (scan.covariances) put_pair(saved + at, x.x, x.y), put_pair(saved + at + 8 * KEYS, y.x, y.y);
                    multiply_in_tf32(kk, Left(x.x, y.x, x.y, y.y));
                }
            } else if (CAREFUL && *certain) {
                write_rows(P, final, d0, t);
                careful_spread(final, rest, keys, d0, g, t,
                               [&](int s, int d, double x) { spread[s * SPREAD_ROW + d] = (float)x; });
                read_rows(P, final, d0, t);
                UNROLL for (int n = 0; n < 8; n++) UNROLL for (int x = 0; x < 4; x++)
                    b[share][n][x] = spread[(8 * n + 2 * t + x % 2) * SPREAD_ROW + d0 + 8 * (x / 2)];
            } else if (FULL)
                UNROLL for (int kk = 0; kk < KEYS / 8; kk++) multiply_in_tf32(kk, Left(P[WIDE ? 0 : kk]));
            else
                UNROLL for (int kk = 0; kk < KEYS / 16; kk++)
                    multiply_keys(b[share], P[WIDE ? 0 : 2 * kk], P[WIDE ? 0 : 2 * kk + 1], keys, kk, g, t);
            const float last_0 = last_decay(vectors, d0), last_8 = last_decay(vectors, d0 + 8);
            UNROLL for (int n = 0; n < 8; n++) UNROLL for (int j = 0; j < 2; j++) {
                const int s = 8 * n + 2 * t + j;
                const float scale = FULL ? 1.f : vectors[s];
                const float x = b[share][n][j] * scale, y = b[share][n][2 + j] * scale;
                spread[s * SPREAD_ROW + d0] = x, spread[s * SPREAD_ROW + d0 + 8] = y;
                b[share][n][j] = fmaf(last_0, x, sent(scan, slot(c), keys, vectors, s, d0));
                b[share][n][2 + j] = fmaf(last_8, y, sent(scan, slot(c), keys, vectors, s, d0 + 8));
            }
        }
        if (CAREFUL && !WIDE && t == g / 2) {
            float most = 0.f;
            UNROLL for (int n = 0; n < KEYS / 8; n++) {
                const float* const p = P[WIDE ? 0 : n] + n % 2 * 2;
                if (n / 2 == warp) most = fmaxf(most, g & 1 ? p[1] : p[0]);
            }
            largest[8 * warp + g] = most;
        }
        copies_may_follow();
        barrier_arrive(spread_there), meet(HOLDERS, 32 * MAIN);
        {
            float x[3][4];
            known_tiles<3, KEYS / 8>(x, spread, keys, row_tile, first_tile, tiles, 0, g, t);
            UNROLL for (int n = 0; n < 3; n++)
                if (n < tiles) add_tile(A, x[n], vectors, row_tile, first_tile + n, g, t);
        }
        float product[WIDE ? 2 : KEYS / 8][4];  // U^T U: apart from P, whose rounding inside a tensor core would last
        clear(product);
        bool carefully = false;
#pragma unroll 1
        for (int J = 0; J < 4; J++) {
            const float* const X = factors + 16 * J * ROW + 16 * J;
            if (J < 3) meet(HOLDERS, 32 * MAIN);
            wait_for(J == 3 ? factored_all : factored, J == 3 ? parity : (parity + J) & 1);
            if (J < 3 && warp < 2 * (3 - J)) {  // L below the diagonal block
                const int i = J + 1 + warp / 2, half = warp % 2 * 8;
                float x[4];
                tile(x, A + 16 * i * ROW + 16 * J, X + half * ROW, g, t);
                float* const to = factors + (16 * i + g) * ROW + 16 * J + half + 2 * t;
                put_pair(to, x[0], x[1]), put_pair(to + 8 * ROW, x[2], x[3]);
            }
            if (J == 3 && hard(c)) {
                carefully = true;
                if (!WIDE && holds(0)) {
                    write_rows(P, final, row_of(0), t);
                    if (!*certain) no_rest(rest, row_of(0), t);
                    careful_spread(final, rest, keys, row_of(0), g, t,
                                   [&](int s, int d, double x) { exact_spread[s * KEYS + d] = x; });
                }
                barrier_arrive(of_care), wait_for(of_care + 1, care), care ^= 1;
            }
            float u[SHARES][2][4];
            UNROLL for (int share = 0; share < SHARES; share++) {
                if (!holds(share) || carefully) continue;
                solved(u[share], b[share], factors, J, g, t);
                UNROLL for (int n = 0; n < 2; n++) {
                    float* const to = gain + row_of(share) * ROW + 16 * J + 8 * n + 2 * t;
                    put_pair(to, u[share][n][0], u[share][n][1]);
                    put_pair(to + 8 * ROW, u[share][n][2], u[share][n][3]);
                }
            }
            if (J == 3) copies_may_follow(), barrier_arrive(gained);
            else if (warp < panel_warps(J)) barrier_arrive(below + J);
            meet(HOLDERS, 32 * MAIN);
            // Blocks (i, k) of A that the factor's warp does not take care of, in halves.
            const int blocks = J == 0 ? 10 : J == 1 ? 4 : 0;
#pragma unroll 1
            for (int q = warp; q < blocks; q += MAIN) {
                const int block = q / 2, half = q % 2 * 8;
                const int i = J == 0 && block < 2 ? 2 : 3, k = J == 1 ? 2 + block : block < 2 ? 1 + block : block - 1;
                float x[4];
                tile(x, factors + 16 * i * ROW + 16 * J, factors + (16 * k + half) * ROW + 16 * J, g, t);
                subtract(A + 16 * i * ROW + 16 * k + half, x, g, t);
            }
            if (carefully) {
                if (!WIDE && holds(0)) {
                    careful_update(final, rest, gain, gain_rest, vectors, row_of(0), g, t);
                    read_rows(P, final, row_of(0), t);
                }
                continue;
            }
            UNROLL for (int share = 0; share < SHARES; share++) {
                if (!holds(share)) continue;
                const Left left[2] = {Left(u[share][0]), Left(u[share][1])};
                substitute(b[share], left, factors, J, 4 - J, g, t);
                if (!WIDE) UNROLL for (int kk = 0; kk < 2; kk++) add_gains(product, left[kk], gain, 2 * J + kk, g, t);
            }
        }
        UNROLL for (int share = 0; share < SHARES; share++) {
            if (!holds(share) || carefully) continue;
            const int d0 = row_of(share);
            auto updated = [&](float before, float taken, int n, int x) {
                const int row = d0 + 8 * (x >> 1), column = 8 * n + 2 * t + (x & 1);
                const float both = last_decay(vectors, row) * last_decay(vectors, column);
                return both * before - taken + gathered_noise(vectors, row, column);
            };
            if (CAREFUL && !WIDE && *certain) {
                write_rows(P, final, d0, t), write_rows(product, taken, d0, t);
                take_away(final, rest, taken, vectors, d0, t);
                read_rows(P, final, d0, t);
                continue;
            }
            if (!WIDE) UNROLL for (int n = 0; n < KEYS / 8; n++) UNROLL for (int x = 0; x < 4; x++)
                P[WIDE ? 0 : n][x] = updated(P[WIDE ? 0 : n][x], product[WIDE ? 0 : n][x], n, x);
            if (!WIDE) continue;
            const float* const before = c == begin ? entry : final;
#pragma unroll 1
            for (int n0 = 0; n0 < KEYS / 8; n0 += 2) {
                float taken[2][4];
                clear(taken);
#pragma unroll 2
                for (int kk = 0; kk < 8; kk++)
                    add_gains(taken, left_at(gain + d0 * ROW + 8 * kk + 2 * t, ROW), gain + 8 * n0 * ROW, kk, g, t);
                UNROLL for (int n = 0; n < 2; n++) UNROLL for (int half = 0; half < 2; half++) {
                    const int at = (d0 + 8 * half) * KEYS + 8 * (n0 + n) + 2 * t;
                    const float2 p = pair_at(before + at);
                    put_pair(final + at, updated(p.x, taken[n][2 * half], n0 + n, 2 * half),
                             updated(p.y, taken[n][2 * half + 1], n0 + n, 2 * half + 1));
                }
            }
        }
    }
    meet(ALL, THREADS);
    if (CAREFUL && left && threadIdx.x == 0) announce(left, leaving);
    if (WIDE) return;
    // Symmetric to the last bit: the mean of P and P^T.
    float* const whole = (float*)shared;
    if (holds(0)) UNROLL for (int n = 0; n < (WIDE ? 0 : KEYS / 8); n++) {
        float* const to = whole + row_of(0) * SPREAD_ROW + 8 * n + 2 * t;
        put_pair(to, P[WIDE ? 0 : n][0], P[WIDE ? 0 : n][1]);
        put_pair(to + 8 * SPREAD_ROW, P[WIDE ? 0 : n][2], P[WIDE ? 0 : n][3]);
    }
    meet(HOLDERS, 32 * MAIN);
    for (int i = threadIdx.x; i < KEYS * KEYS; i += 32 * MAIN) {
        const int row = i / KEYS, column = i % KEYS;
        final[i] = 0.5f * (whole[row * SPREAD_ROW + column] + whole[column * SPREAD_ROW + row]);
    }
}
