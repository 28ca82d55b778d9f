// The mean of one head and noise group from chunk to chunk, once their covariances are known (scan.cu runs it).
//
//     e = L^-1 (V - K M),   M <- last x M + U^T e,   and Q M for the read-outs
//
// Each of warps 0 .. 7 holds 16 columns of M, as rows of M^T in registers, and needs no other warp. Warp 8 awaits the
// covariance of the next chunk and loads what came of it, the other three load keys, queries and values. Products are
// of float32 numbers throughout: e is divided by L. One warp of a head also marks it if it has a chunk that float32 is
// too little for: here nobody waits for that.
#pragma once
#include "care.cuh"

constexpr int VALUES = 16 * MAIN, VALUE_ROW = VALUES / 2 + 4;  // of a block; words
struct MeanMemory {  // in words, one of two buffers
    static constexpr int KEY = 0, FACTOR = KEY + C * KEY_ROW, GAIN = FACTOR + C * ROW, VECTOR = GAIN + KEYS * ROW;
    static constexpr int VALUE = VECTOR + VECTORS, QUERY = VALUE + C * VALUE_ROW;
    static constexpr int BUFFER = FULL ? VALUE : QUERY + C * KEY_ROW;
    static constexpr int BARRIER = BUFFERS * BUFFER, WORDS = BARRIER + 8;
};

__device__ __forceinline__ void filter_mean(u32* shared, const Scan& scan, int item, int block) {
    using At = MeanMemory;
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), g = lane >> 2, t = lane & 3;
    const int streams = scan.heads * scan.groups, sequence = item / streams, stream = item % streams;
    const i64 begin = scan.first[sequence], end = scan.first[sequence + 1];
    const int from = block * VALUES, size = scan.values_of_group, v0 = from + 16 * warp + g;
    const int columns = size - from < VALUES ? size - from : VALUES;
    u64 *const full = (u64*)(shared + At::BARRIER), *const empty = full + 2;  // of both buffers
    auto slot = [&](i64 c) { return c * streams + stream; };
    auto odd = [&](i64 c) { return (int)(c - begin) % BUFFERS; };
    auto turn = [&](i64 c) { return (int)(c - begin) / BUFFERS & 1; };  // of the buffer's barriers
    auto buffer = [&](i64 c) { return shared + odd(c) * At::BUFFER; };
    if (threadIdx.x == 0)
        for (int x = 0; x < BUFFERS; x++)
            barrier_start(full + x, FULL ? 1 : 97), barrier_start(empty + x, 2 * columns);  // of lanes
    __syncthreads();

    if (warp >= MAIN) {
        fewer_registers<72>();
        if (FULL && warp > MAIN || lane && warp == MAIN) return;
#pragma unroll 1
        for (i64 c = begin; c < end; c++) {
            u32* const to = buffer(c);
            u64* const arrived = full + odd(c);
            if (warp == MAIN) await(scan.progress + item, (int)(c - begin) + 1);
            if (c - begin >= BUFFERS) barrier_wait(empty + odd(c), turn(c) ^ 1);
            if (warp > MAIN) {
                const Chunk chunk = chunk_at(scan.table, c);
                const int own = threadIdx.x - 32 * (MAIN + 1);
                copy_keys(to + At::KEY, scan.keys, scan.heads, stream / scan.groups, chunk, own, 96);
                copy_keys(to + At::QUERY, scan.queries, scan.heads, stream / scan.groups, chunk, own, 96);
                copy_tokens(to + At::VALUE, VALUE_ROW, (const u32*)scan.values + (stream * size + from) / 2,
                            streams * size / 2, columns / 2, chunk, own, 96);
                copies_arrived(), barrier_arrive(arrived);
                continue;
            }
            copies_may_follow(), copies_may_read();
            barrier_expect(arrived, 4 * (C * ROW + KEYS * ROW + VECTORS + FULL * C * KEY_ROW));
            copy_in(to + At::FACTOR, scan.factors + slot(c) * C * ROW, 4 * C * ROW, arrived);
            copy_in(to + At::GAIN, scan.gains + slot(c) * KEYS * ROW, 4 * KEYS * ROW, arrived);
            copy_in(to + At::VECTOR, vectors_at(scan, c, stream), 4 * VECTORS, arrived);
            if (FULL) copy_in(to + At::KEY, (const float*)scan.keys + slot(c) * C * KEY_ROW, 4 * C * KEY_ROW, arrived);
        }
        return;
    }

    more_registers<216>();
    if (16 * warp >= columns) return;
    float M[KEYS / 8][4];
    // States have their keys in rows.
    const i64 row = (i64)scan.groups * size;
    const i64 entry = (i64)(item / scan.groups) * KEYS * row + item % scan.groups * size + v0;
    UNROLL for (int n = 0; n < KEYS / 8; n++) UNROLL for (int x = 0; x < 4; x++)
        M[n][x] = scan.mean[entry + (8 * n + 2 * t + (x & 1)) * row + 8 * (x >> 1)];
    const bool looks = !CAREFUL && !WIDE && warp == 0 && block == 0;
    const float* const initial = scan.covariance + (i64)item * KEYS * KEYS;
    // What P's diagonal could be, had no token been seen.
    float most = looks ? most_of_keys(lane, [&](int d) { return initial[d * (KEYS + 1)]; }) : 0.f;
#pragma unroll 1
    for (i64 c = begin; c < end; c++) {
        u32* const here = buffer(c);
        const float *const L = (const float*)(here + At::FACTOR), *const gain = (const float*)(here + At::GAIN);
        const float* const vectors = (const float*)(here + At::VECTOR);
        barrier_wait(full + odd(c), turn(c));
        if (scan.means) write_rows(M, scan.means + slot(c) * size * KEYS, v0, t);
        float e[8][4];
#pragma unroll 1
        for (int of_queries = FULL ? 0 : 1; of_queries >= 0; of_queries--) {
            const u32* const rows = here + (of_queries ? At::QUERY : At::KEY);
            clear(e);
            if (!FULL) UNROLL for (int kk = 0; kk < KEYS / 16; kk++)
                multiply_keys(e, M[2 * kk], M[2 * kk + 1], rows, kk, g, t);
            else UNROLL for (int kk = 0; kk < KEYS / 8; kk++) {
                const Left a(M[kk]);
                float2 key[8];
                UNROLL for (int n = 0; n < 8; n++) {
                    key[n] = key_pair(rows, 8 * n + g, kk, t);
                    multiply_low(e[n], a, key[n].x, key[n].y);
                }
                UNROLL for (int n = 0; n < 8; n++)
                    multiply_high(e[n], a, key[n].x - seen(key[n].x), key[n].y - seen(key[n].y));
                UNROLL for (int n = 0; n < 8; n++) multiply_high(e[n], a, key[n].x, key[n].y);
            }
            if (!of_queries) break;
            float* const to = scan.reads + (slot(c) * size + v0) * READ_ROW + 2 * t;
            UNROLL for (int n = 0; n < 8; n++) {
                put_pair(to + 8 * n, e[n][0], e[n][1]), put_pair(to + 8 * READ_ROW + 8 * n, e[n][2], e[n][3]);
            }
        }
        const float* const full = (const float*)scan.values + slot(c) * C * size;
        UNROLL for (int n = 0; n < 8; n++) UNROLL for (int j = 0; j < 2; j++) {
            const int s = 8 * n + 2 * t + j;
            float x, y, scale = 1.f;
            if (FULL) x = full[s * size + v0], y = full[s * size + v0 + 8];
            else {
                const u16* const row = (const u16*)(here + At::VALUE) + s * 2 * VALUE_ROW + 16 * warp + g;
                const float white = vectors[WHITE + s];
                x = white * low_bf16(row[0]), y = white * low_bf16(row[8]), scale = vectors[ENTERED + s];
            }
            e[n][j] = x - scale * e[n][j], e[n][2 + j] = y - scale * e[n][2 + j];
        }
        solve(e, L, 0, 3, g, t);
        float* const to = scan.innovations + slot(c) * size * ROW;
        UNROLL for (int n = 0; n < 8; n++) {
            put_pair(to + v0 * ROW + 8 * n + 2 * t, e[n][0], e[n][1]);
            put_pair(to + (v0 + 8) * ROW + 8 * n + 2 * t, e[n][2], e[n][3]);
        }
        constexpr int AT_ONCE = KEYS % 64 ? 2 : 8;  // many sums side by side: none waits for itself
        UNROLL for (int n0 = 0; n0 < KEYS / 8; n0 += AT_ONCE) {
            float added[AT_ONCE][4];
            clear(added);
            UNROLL for (int kk = 0; kk < 8; kk++) {
                const Left a(e[kk]);
                float2 u[AT_ONCE];
                UNROLL for (int n = 0; n < AT_ONCE; n++) {
                    u[n] = pair_at(gain + (8 * (n0 + n) + g) * ROW + 8 * kk + 2 * t);
                    multiply_high(added[n], a, u[n].x - seen(u[n].x), u[n].y - seen(u[n].y));
                }
                UNROLL for (int n = 0; n < AT_ONCE; n++) multiply_low(added[n], a, u[n].x, u[n].y);
                UNROLL for (int n = 0; n < AT_ONCE; n++) multiply_high(added[n], a, u[n].x, u[n].y);
            }
            UNROLL for (int n = 0; n < AT_ONCE; n++) UNROLL for (int x = 0; x < 4; x++) {
                const float decay = last_decay(vectors, 8 * (n0 + n) + 2 * t + (x & 1));
                M[n0 + n][x] = fmaf(decay, M[n0 + n][x], added[n][x]);
            }
        }
        if (looks) {
            if (hard_tokens(L, here + At::KEY, vectors, most, LARGEST_VARIANCE, lane)) scan.hard[item] = 1;
            auto last = [&](int d) { return last_decay(vectors, d); };
            auto noise = [&](int d) { return gathered_noise(vectors, d, d); };
            const float decay = FULL ? most_of_keys(lane, last) : last(0);
            most = decay * decay * most + (FULL ? most_of_keys(lane, noise) : noise(0));
        }
        barrier_arrive(empty + odd(c));
    }
    UNROLL for (int n = 0; n < KEYS / 8; n++) UNROLL for (int x = 0; x < 4; x++)
        scan.final_mean[entry + (8 * n + 2 * t + (x & 1)) * row + 8 * (x >> 1)] = M[n][x];
}
