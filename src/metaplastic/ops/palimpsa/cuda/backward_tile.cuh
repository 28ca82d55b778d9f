// The parts of backward_tensor.cu: what is fetched and prepared for tiles of tokens, how their sums are written.
#pragma once
#include "backward_layout.cuh"

// Adds to a block of M and J what the tokens base .. base + ENTRY - 1 write: run `run` of the decayed ones.
template <int TOKENS = ENTRY>
__device__ __forceinline__ void add_tokens(const u32* shared, int run, float (&M)[2][4], float (&J)[2][4],
                                           int key_block, int group, int base) {
    const int lane = threadIdx.x & 31, matrix = lane / 8, in = lane % 8;
    const u32* const factors = shared + DECAYED + run * 4 * FACTOR + key_block * 8 + matrix % 2 * 4;
    const u32* const rows = shared + WRITE + (base + in) * VALUE_ROW + group * 8;
    u32 a[4];
    if (TOKENS == 8) {
        u32 b[4];
        load_transposed(b, rows + matrix % 2 * 4 + matrix / 2 * CHUNK * VALUE_ROW);
#pragma unroll
        for (int word = 0; word < 4; word += 2) {  // two at once
            float(&sum)[2][4] = word ? J : M;
            load_transposed(a, factors + in * KEY_ROW + (word + matrix / 2) * FACTOR);
#pragma unroll
            for (int v = 0; v < 2; v++)
                multiply_8(sum[v], a[0], a[1], b[word + v]), multiply_8(sum[v], a[2], a[3], b[word + v]);
        }
    } else {
        u32 writes[4], evidence[4];
        const u32* const of_both = rows + matrix % 2 * 8 * VALUE_ROW + matrix / 2 * 4;
        load_transposed(writes, of_both), load_transposed(evidence, of_both + CHUNK * VALUE_ROW);
#pragma unroll
        for (int word = 0; word < 4; word++) {
            load_transposed(a, factors + (matrix / 2 * 8 + in) * KEY_ROW + word * FACTOR);
            if (word < 2) multiply(M[0], a, writes[0], writes[1]), multiply(M[1], a, writes[2], writes[3]);
            else multiply(J[0], a, evidence[0], evidence[1]), multiply(J[1], a, evidence[2], evidence[3]);
        }
    }
}

// Which of the chunk's tokens have such a g, bit by bit.
__device__ __forceinline__ u64 tokens_below(const float* decays, float bound) {
    const int lane = threadIdx.x & 31;
    const u64 early = __ballot_sync(~0u, decays[lane] < bound), late = __ballot_sync(~0u, decays[32 + lane] < bound);
    return early | late << 32;
}
__device__ __forceinline__ u64 bits_before(int end) { return end ? ~0ull >> (64 - end) : 0ull; }
// -1 if there is none.
__device__ __forceinline__ int last_before(u64 bits, int end) { return 63 - __clzll(bits & bits_before(end)); }

// Which tokens begin a tile, from the chunk's last one on: a token of strong decay, else the 8th.
__device__ __forceinline__ u64 tile_starts(u64 strong, int tokens) {
    u64 starts = 0;
    for (int end = tokens; end > 0;) end = max(max(last_before(strong, end), end - TILE), 0), starts |= 1ull << end;
    return starts;
}
// Tokens [first, first + tokens) of the chunk.
struct Tile {
    int first, tokens;
    bool direct, careful;  // is the decay from its first token to its last not near 1, is it strong?
    __device__ __forceinline__ int token(int s) const { return min(first + s, CHUNK - 1); }  // maybe none of the tile's
    __device__ __forceinline__ float inverse(const u32* shared, int s) const {  // 1 / c_s; beyond the last token, its
        return ((const float*)shared)[INVERSE + first + min(s, tokens - 1)];
    }
};
// Of a chunk of so many tokens: where tiles begin, c and 1 / c of every token.
__device__ __forceinline__ void write_tiles(u32* shared, int tokens) {
    float* const floats = (float*)shared;
    const int own = THREADS - 1 - threadIdx.x;  // the last warps have the least to do beside
    if (own >= CHUNK) return;
    const u64 starts = tile_starts(tokens_below(floats + DECAY, -STRONG), tokens);
    if (own == 0) *(u64*)(shared + BEGINS) = starts;
#pragma unroll 1
    for (int t = own; t < tokens; t += THREADS) {
        const int first = last_before(starts, t + 1);
        float sum = 0.f;
#pragma unroll
        for (int s = 1; s < TILE; s++) sum += s <= t - first ? floats[DECAY + first + s] : 0.f;
        floats[GAUGE + t] = expf(sum), floats[INVERSE + t] = expf(-sum);
    }
}
__device__ __forceinline__ Tile read_tile(const u32* shared, int end) {
    const int first = of_warp(last_before(*(const u64*)(shared + BEGINS), end));
    const float decay = ((const float*)shared)[GAUGE + end - 1];
    return {first, end - first, decay < DIRECT_BELOW, decay < CAREFUL_BELOW};
}

// Decays over ENTRY tokens, lane = token - base, of which those after `last` do not count: from each to the end, and
// from before the first. A warp does several such runs at once. Sums, never differences: exact beside any decay.
struct Decays { float after, whole; };
__device__ __forceinline__ Decays decays_to(const float* decays, int base, int last) {
    const int lane = threadIdx.x & 31;
    float sum = base + lane <= last ? decays[base + lane] : 0.f;
#pragma unroll
    for (int s = 1; s < ENTRY; s <<= 1) {
        const float later = __shfl_down_sync(~0u, sum, s);
        if (lane % ENTRY + s < ENTRY) sum += later;
    }
    const float later = __shfl_down_sync(~0u, sum, 1);
    return {expf(lane % ENTRY == ENTRY - 1 ? 0.f : later), expf(__shfl_sync(~0u, sum, lane / ENTRY * ENTRY))};
}

// Decayed k and k^2 of tokens base .. base + count - 1, then zeros up to a whole run, by all threads. `decay`: of
// 32 tokens, then of the others.
template <int RUNS>
__device__ __forceinline__ void prepare_decayed(u32* shared, int base, int count, const float (&decay)[RUNS]) {
    const int items = (count + ENTRY - 1) / ENTRY * (ENTRY * KEYS / 8);
#pragma unroll 1
    for (int x0 = 0; x0 < items; x0 += THREADS) {
        const int x = x0 + threadIdx.x, t = x / (KEYS / 8), j = x % (KEYS / 8);
        float factor = __shfl_sync(~0u, decay[0], t % 32);
        if (RUNS > 1) {
            const float other = __shfl_sync(~0u, decay[RUNS - 1], t % 32);
            if (t >= 32) factor = other;
        }
        if (x >= items) continue;
        if (t >= count) factor = 0.f;
        const uint4 raw = *(const uint4*)(shared + KEY + (base + t) * KEY_ROW + 4 * j);
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
        u32* const to = shared + DECAYED + t / ENTRY * 4 * FACTOR + t % ENTRY * KEY_ROW + j / 2 * 8 + j % 2 * 2;
        u32 a[8], s[8];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float k0 = low_bf16(words[e]), k1 = high_bf16(words[e]);
            a[e] = split(k0 * factor), a[4 + e] = split(k1 * factor);
            s[e] = split(k0 * (k0 * factor)), s[4 + e] = split(k1 * (k1 * factor));
        }
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const u32 selector = part ? 0x7632 : 0x5410;
                const u32 *const p = a + 4 * odd, *const q = s + 4 * odd;
                u32* const place = to + part * FACTOR + 4 * odd;
                *(uint2*)place = {__byte_perm(p[0], p[1], selector), __byte_perm(p[2], p[3], selector)};
                *(uint2*)(place + 2 * FACTOR) = {__byte_perm(q[0], q[1], selector), __byte_perm(q[2], q[3], selector)};
            }
    }
}

// What the states before a chunk's tokens ENTRY, 2 ENTRY, .. are made of; returns the decays over ENTRY tokens each,
// from the token that is the lane's number and from the one 32 later.
__device__ __forceinline__ float2 prepare_entries(u32* shared) {
    const float* const decays = (const float*)shared + DECAY;
    const Decays early = decays_to(decays, 0, 31), late = decays_to(decays, 32, CHUNK - ENTRY - 1);
    const float after[2] = {early.after, late.after};
    prepare_decayed(shared, 0, CHUNK - ENTRY, after);
    return {early.whole, late.whole};
}
// The same for a tile that begins at token `first`: from the state before token `base`, whose decay is returned.
__device__ __forceinline__ float prepare_start(u32* shared, int base, int first) {
    const float* const decays = (const float*)shared + DECAY;
    if (first == base) return expf(decays[base]);
    const Decays to_first = decays_to(decays, base, first);
    const float after[1] = {to_first.after};
    prepare_decayed(shared, base, first - base, after);
    return __shfl_sync(~0u, to_first.whole, 0);
}

// What the tile's products need, from what lies in shared memory as it came; a token that is none multiplies zeros.
__device__ __forceinline__ void prepare_tile(u32* shared, const Tile& tile, float prior, float scale) {
    constexpr u32 OF_KEYS = TILE * ALL_BLOCKS * 8, OF_VALUES = TILE * ROW_GROUPS * 8;
    const int skip = TILE - tile.tokens;  // of the 8 tokens fetched
    const u16* const words = (const u16*)shared;
#pragma unroll 1
    for (u32 x = threadIdx.x; x < (OF_KEYS > OF_VALUES ? OF_KEYS : OF_VALUES); x += THREADS) {
        // Read for both first: what follows waits once.
        const u32 y = x < OF_KEYS ? x : OF_KEYS - 1, z = x < OF_VALUES ? x : OF_VALUES - 1;
        const int s = y / (ALL_BLOCKS * 8), j = y % (ALL_BLOCKS * 8), t = z / (ROW_GROUPS * 8);
        const float by = tile.inverse(shared, s), before = tile.inverse(shared, max(s - 1, 0));
        const u32 raw = shared[KEY + tile.token(s) * KEY_ROW + j];
        const u32 q = shared[NEXT_QUERY + min(skip + s, TILE - 1) * KEYS / 2 + j];
        const int i = z / 8 % ROW_GROUPS * 16 + z % 8;
        const u16* const from = words + 2 * (WRITE + tile.token(t) * VALUE_ROW) + i;
        const u16* const d = words + 2 * NEXT_D_OUTPUT + min(skip + t, TILE - 1) * ROWS + i;
        const u32 w0 = from[0], w1 = from[8], b0 = from[2 * CHUNK * VALUE_ROW], b1 = from[2 * CHUNK * VALUE_ROW + 8];
        const u32 d0 = d[0], d1 = d[8];
        if (x < OF_KEYS) {
            const bool valid = s < tile.tokens;
            const float k0 = low_bf16(raw), k1 = high_bf16(raw);
            const uint4 zeros = {0u, 0u, 0u, 0u};
            const u32 of_prior = split(prior * (by - before));
            const uint4 of_key = {split(k0 * by), split(k1 * by), split(k0 * (k0 * by)), split(k1 * (k1 * by))};
            const uint4 beside = {of_prior, of_prior, split(scale * low_bf16(q)), split(scale * high_bf16(q))};
            u32* const to = shared + UPDATE + x / 8 * RECORD + x % 8 * 8;
            *(uint4*)to = valid ? of_key : zeros, *(uint4*)(to + 4) = valid ? beside : zeros;
        }
        if (x < OF_VALUES) {
            const u32 valid = t < tile.tokens ? 0x10001u : 0u;
            *(uint4*)(shared + OTHER + 8 * x) = {w0 * 0x10001u, w1 * 0x10001u, b0 * 0x10001u, b1 * 0x10001u};
            *(uint4*)(shared + OTHER + 8 * x + 4) = {0x3f803f80u, 0x3f803f80u, d0 * valid, d1 * valid};
        }
    }
}

// q and dy of the 8 tokens before token `end` of the span, on their way.
__device__ __forceinline__ void fetch_tile(u32* shared, const u16* q, const u16* d_output, i64 span_first, int end,
                                           int heads, i64 head, int block) {
    // Keys from the first threads on, values from the last: where there are enough of them, none does both.
    const u32 own = thread_index();
    const i64 row0 = span_first * heads + head;
#pragma unroll 1
    for (u32 y = own; y < TILE * KEYS / 8; y += THREADS) {
        const int token = end - TILE + (int)(y / (KEYS / 8));
        const i64 row = row0 + (i64)max(token, 0) * heads;
        copy_16(shared + NEXT_QUERY + 4 * y, q + row * KEYS + y % (KEYS / 8) * 8, token >= 0);
    }
#pragma unroll 1
    for (u32 y = THREADS - 1 - own; y < TILE * ROWS / 8; y += THREADS) {
        const int token = end - TILE + (int)(y / (ROWS / 8));
        const i64 row = row0 + (i64)max(token, 0) * heads;
        const u16* const from = d_output + row * VALUES + block * ROWS + y % (ROWS / 8) * 8;
        copy_16(shared + NEXT_D_OUTPUT + 4 * y, from, token >= 0);
    }
    copies_issued();
}

// k, w and beta of a chunk, on their way; zeros beyond its tokens. `row0`: of its first token, counted with the heads.
__device__ __forceinline__ void fetch_chunk(u32* shared, const u16* k, const u16* w, const u16* beta, i64 row0,
                                            int heads, int block, int chunk_tokens) {
#pragma unroll 1
    for (int x = threadIdx.x; x < CHUNK * KEYS / 8; x += THREADS) {
        const int t = x / (KEYS / 8), j = x % (KEYS / 8) * 8;
        const bool valid = t < chunk_tokens;
        copy_16(shared + KEY + t * KEY_ROW + j / 2, k + (row0 + (valid ? t * heads : 0)) * KEYS + j, valid);
    }
    for (int x = threadIdx.x; x < CHUNK * ROWS / 8; x += THREADS) {
        const int t = x / (ROWS / 8), i = x % (ROWS / 8) * 8;
        const bool valid = t < chunk_tokens;
        const i64 from = (row0 + (valid ? t * heads : 0)) * VALUES + block * ROWS + i;
        u32* const to = shared + WRITE + t * VALUE_ROW + i / 2;
        copy_16(to, w + from, valid), copy_16(to + CHUNK * VALUE_ROW, beta + from, valid);
    }
    copies_issued();
}

// The same and the states before the chunk, to the cache that all multiprocessors share.
__device__ __forceinline__ void prefetch_chunk(const u16* k, const u16* w, const u16* beta, const float4* states,
                                               i64 row0, int heads, int block) {
    for (int x = threadIdx.x; x < ROWS * KEYS / 16; x += THREADS) prefetch(states + 8 * x);
    for (int t = threadIdx.x; t < CHUNK; t += THREADS) {
        for (int x = 0; x < KEYS; x += 64) prefetch(k + (row0 + t * heads) * KEYS + x);
        for (int x = 0; x < ROWS; x += 64) {
            const i64 at = (row0 + t * heads) * VALUES + block * ROWS + x;
            prefetch(w + at), prefetch(beta + at);
        }
    }
}

// dq and dk of a tile of `count` tokens, summed over the row groups; over several blocks the caller sums. `own_row`: of
// the first token, counted with the heads and the blocks.
__device__ __forceinline__ void write_key_sums(const u32* shared, float* dq, float* dk, i64 own_row, int heads,
                                               int count, float scale) {
#pragma unroll 1
    for (int x = thread_index(); x < ALL_BLOCKS * 64; x += THREADS) {
        const uint2* const from = (const uint2*)(shared + KEY_SUMS) + (x / 64 * 32 + x % 32) * 2 + x / 32 % 2;
        float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int group = 0; group < ROW_GROUPS; group++) {
            const uint2 more = from[group * ALL_BLOCKS * 64];
            sum.x += low_bf16(more.x), sum.y += high_bf16(more.x);
            sum.z += low_bf16(more.y), sum.w += high_bf16(more.y);
        }
        const int s = 2 * (x % 4), key = x / 64 * 16 + x % 32 / 4 * 2;
        const float factor = x / 32 % 2 ? 1.f : scale;
        const i64 at = (own_row + s * heads) * KEYS + key;
        float* const to = x / 32 % 2 ? dk : dq;
        for (int next = 0; next < 2 && s + next < count; next++) {
            const float a = factor * (next ? sum.y : sum.x), c = factor * (next ? sum.w : sum.z);
            if (VALUE_BLOCKS == 1) *(u32*)((u16*)to + at + next * heads * KEYS) = pack_bf16(a, c);
            else *(float2*)(to + at + next * heads * KEYS) = {a, c};
        }
    }
}
