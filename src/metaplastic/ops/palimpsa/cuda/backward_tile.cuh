// The parts of backward_tensor.cu: its shared memory, what is prepared for a tile of tokens, matrix helpers.
#pragma once
#include "sums.cuh"

#ifdef EMULATED
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a < b ? b : a; }
static inline int __clzll(u64 x) { return x ? __builtin_clzll(x) : 64; }
static inline u32 transpose(u32 x) {
    auto all = emulation::exchange({x});
    int row = emulation::current->lane >> 2, column = emulation::current->lane & 3;
    auto at = [&](int r) { return all[r * 4 + row / 2][0] >> 16 * (row & 1) & 0xffffu; };
    return at(2 * column) | at(2 * column + 1) << 16;
}
static inline void load_transposed(u32 (&to)[4], const u32* row) {
    auto all = emulation::exchange({(u32)((u64)row), (u32)((u64)row >> 32)});
    int own = emulation::current->lane >> 2, column = emulation::current->lane & 3;
    for (int m = 0; m < 4; m++) {
        auto at = [&](int r) {
            return (u32)((const u16*)((u64)all[8 * m + r][0] | (u64)all[8 * m + r][1] << 32))[own];
        };
        to[m] = at(2 * column) | at(2 * column + 1) << 16;
    }
}
static inline void prefetch(const void*) {}
static inline int thread_index() { return threadIdx.x; }
template <class T> T __ldcg(const T* from) { return *from; }
#else
// Read anew where it is needed: what follows from it need not be kept, or spilled, from tile to tile.
__device__ __forceinline__ int thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" :: "l"(from)); }
// Transposes an 8 x 8 matrix: lane (row, column) holds its elements [row][2 column] and [row][2 column + 1].
__device__ __forceinline__ u32 transpose(u32 x) {
    u32 r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}
// Four 8 x 8 matrices from shared memory, transposed; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_transposed(u32 (&to)[4], const u32* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"((u32)__cvta_generic_to_shared(row)));
}
#endif

constexpr int WARPS = ROW_GROUPS * KEY_PARTS, THREADS = 32 * WARPS;
constexpr int ROWS = 16 * ROW_GROUPS, VALUES = ROWS * VALUE_BLOCKS;
constexpr int ALL_BLOCKS = KEY_BLOCKS * KEY_PARTS, KEYS = 16 * ALL_BLOCKS;
constexpr int CHUNK = 64, ENTRY = 16, ENTRIES = CHUNK / ENTRY, TILE = 8;  // tokens
constexpr float STRONG = 4.f, STEEP_BELOW = -0.7f;  // of g
constexpr float CAREFUL_BELOW = 0.135f;             // of c of a tile's last token: exp(-2)

// Shared memory, in words. Rows of bf16 are padded so that 8 of them, 16 bytes each, fall into different banks. The 16
// keys of a block stand in the order 0, 2, .., 14, 1, 3, .., 15, so that a lane's two keys are neighbours in memory.
constexpr int KEY_ROW = KEYS / 2 + 4, VALUE_ROW = ROWS / 2 + 4, FACTOR = ENTRY * KEY_ROW;
constexpr int GRADIENT = 0;                                    // dM, dJ: [warp][block][4][lane] float4
constexpr int NEXT_ENTRY = GRADIENT + WARPS * KEY_BLOCKS * 512;  // the state that the next block starts from
constexpr int KEY = NEXT_ENTRY + WARPS * 512;                  // the chunk's k, w, beta as they came
constexpr int WRITE = KEY + CHUNK * KEY_ROW, EVIDENCE = WRITE + CHUNK * VALUE_ROW;
// [token][block] factors of the updates: [row] k, k^2, the prior's and q, of two keys each; then zeros, twice: lanes
// that read zeros find them in other banks than those that do not.
constexpr int RECORD = 8 * 8 + 4, UPDATE = EVIDENCE + CHUNK * VALUE_ROW;
constexpr int OTHER = UPDATE + TILE * ALL_BLOCKS * RECORD;     // [token][row group][lane] uint2: w, beta, 1, dy
constexpr int NEXT_QUERY = OTHER + TILE * ROW_GROUPS * 64;     // q and dy of the next tile as they came
constexpr int NEXT_D_OUTPUT = NEXT_QUERY + TILE * KEYS / 2;
// Decayed k and k^2, each as the sum of two bf16: of up to 16 tokens, but where a chunk begins, before there are sums,
// of 48.
constexpr int DECAYED = NEXT_D_OUTPUT + TILE * ROWS / 2, AFTER_DECAYED = DECAYED + (ENTRIES - 1) * 4 * FACTOR;
constexpr int KEY_SUMS = DECAYED + 4 * FACTOR;                 // [warp][block][dq, dk][lane] float4
// [part of the keys, but for the first][group][dw, dbeta][lane] float4
constexpr int ROW_SUMS = KEY_SUMS + WARPS * KEY_BLOCKS * 256;
constexpr int TOKEN_SUMS = ROW_SUMS + (KEY_PARTS - 1) * ROW_GROUPS * 256;  // [warp][12]
constexpr int AFTER_SUMS = TOKEN_SUMS + WARPS * 12;
constexpr int DECAY = AFTER_SUMS < AFTER_DECAYED ? AFTER_DECAYED : AFTER_SUMS;  // g of the chunk's tokens
constexpr int GAUGE = DECAY + CHUNK, INVERSE = GAUGE + CHUNK;  // their c and 1 / c
constexpr int BEGINS = INVERSE + CHUNK;                        // which begin a tile
constexpr int RUNNING = BEGINS + 4, WORDS = RUNNING + 4;       // dg of the first token of the tile done last
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_16(d, a[0], a[1], a[2], a[3], b0, b1);
}

// A lane's part of a key block of two states, 4 pieces a warp apart: [value tile][key, value] as in a product's result.
__device__ __forceinline__ void read_block(float (&x)[2][4], float (&y)[2][4], const float4* from, float factor,
                                           float plus_y = 0.f) {
#pragma unroll
    for (int v = 0; v < 2; v++) {
        const float4 a = from[v * 32], c = from[(2 + v) * 32];
        x[v][0] = factor * a.x, x[v][1] = factor * a.y, x[v][2] = factor * a.z, x[v][3] = factor * a.w;
        y[v][0] = fmaf(factor, c.x, plus_y), y[v][1] = fmaf(factor, c.y, plus_y);
        y[v][2] = fmaf(factor, c.z, plus_y), y[v][3] = fmaf(factor, c.w, plus_y);
    }
}
__device__ __forceinline__ void write_block(const float (&x)[2][4], const float (&y)[2][4], float4* to) {
#pragma unroll
    for (int v = 0; v < 2; v++) {
        to[v * 32] = {x[v][0], x[v][1], x[v][2], x[v][3]};
        to[(2 + v) * 32] = {y[v][0], y[v][1], y[v][2], y[v][3]};
    }
}

// Adds to a block of M and J what the tokens base .. base + ENTRY - 1 write: run `run` of the decayed ones.
__device__ __forceinline__ void add_tokens(const u32* shared, int run, float (&M)[2][4], float (&J)[2][4],
                                           int key_block, int group, int base) {
    const int lane = threadIdx.x & 31, matrix = lane / 8, in = lane % 8;
    const u32* const factors = shared + DECAYED + run * 4 * FACTOR;
    const u32* const keys = factors + (matrix / 2 * 8 + in) * KEY_ROW + key_block * 8 + matrix % 2 * 4;
    const u32* const rows = shared + WRITE + (base + matrix % 2 * 8 + in) * VALUE_ROW + group * 8 + matrix / 2 * 4;
    u32 writes[4], evidence[4], a[4];
    load_transposed(writes, rows), load_transposed(evidence, rows + CHUNK * VALUE_ROW);
#pragma unroll
    for (int word = 0; word < 4; word++) {
        load_transposed(a, keys + word * FACTOR);
        if (word < 2) multiply(M[0], a, writes[0], writes[1]), multiply(M[1], a, writes[2], writes[3]);
        else multiply(J[0], a, evidence[0], evidence[1]), multiply(J[1], a, evidence[2], evidence[3]);
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
    bool careful;  // is the decay from its first token to its last not near 1?
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
    const int first = last_before(*(const u64*)(shared + BEGINS), end);
    return {first, end - first, ((const float*)shared)[GAUGE + end - 1] < CAREFUL_BELOW};
}

// Decays over 16 tokens, lane = token - base, of which those after `last` do not count: from each to the end, and from
// before the first. A warp does two such runs at once. Sums, never differences: exact beside any decay.
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
    return {expf(lane % ENTRY == ENTRY - 1 ? 0.f : later), expf(__shfl_sync(~0u, sum, lane & ENTRY))};
}

// Decayed k and k^2 of tokens base .. base + count - 1, then zeros up to a multiple of 16, by all threads. `decay`: of
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

// What the states at a chunk's tokens 16, 32, 48 are made of; returns the decays over the 16 tokens before 16 (lane 0)
// and 32 (lane 16), and before 48.
__device__ __forceinline__ float2 prepare_entries(u32* shared) {
    const float* const decays = (const float*)shared + DECAY;
    const Decays early = decays_to(decays, 0, 2 * ENTRY - 1), late = decays_to(decays, 2 * ENTRY, 3 * ENTRY - 1);
    const float after[2] = {early.after, late.after};
    prepare_decayed(shared, 0, 3 * ENTRY, after);
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
    const int skip = TILE - tile.tokens;  // of the 8 tokens fetched
#pragma unroll 1
    for (int x = threadIdx.x; x < TILE * ALL_BLOCKS * 8; x += THREADS) {
        const int s = x / (ALL_BLOCKS * 8), j = x % (ALL_BLOCKS * 8);
        uint4 of_key = {0u, 0u, 0u, 0u}, beside = {0u, 0u, 0u, 0u};
        if (s < tile.tokens) {
            const float by = tile.inverse(shared, s);
            const u32 of_prior = split(prior * (by - tile.inverse(shared, max(s - 1, 0))));
            const u32 raw = shared[KEY + (tile.first + s) * KEY_ROW + j];
            const u32 q = shared[NEXT_QUERY + (skip + s) * KEYS / 2 + j];
            const float k0 = low_bf16(raw), k1 = high_bf16(raw);
            of_key = {split(k0 * by), split(k1 * by), split(k0 * (k0 * by)), split(k1 * (k1 * by))};
            beside = {of_prior, of_prior, split(scale * low_bf16(q)), split(scale * high_bf16(q))};
        }
        u32* const to = shared + UPDATE + x / 8 * RECORD + x % 8 * 8;
        *(uint4*)to = of_key, *(uint4*)(to + 4) = beside;
    }
    const u16* const words = (const u16*)shared;
#pragma unroll 1
    for (int x = threadIdx.x; x < TILE * ROW_GROUPS * 8; x += THREADS) {
        const int s = x / (ROW_GROUPS * 8), i = x / 8 % ROW_GROUPS * 16 + x % 8;
        const u16* const w = words + 2 * (WRITE + tile.token(s) * VALUE_ROW) + i;
        const u16* const beta = w + 2 * CHUNK * VALUE_ROW;
        const u16* const d = words + 2 * NEXT_D_OUTPUT + min(skip + s, TILE - 1) * ROWS + i;
        const u32 valid = s < tile.tokens ? 0x10001u : 0u;
        *(uint4*)(shared + OTHER + 8 * x) = {w[0] * 0x10001u, w[8] * 0x10001u, beta[0] * 0x10001u, beta[8] * 0x10001u};
        *(uint4*)(shared + OTHER + 8 * x + 4) = {0x3f803f80u, 0x3f803f80u, d[0] * valid, d[8] * valid};
    }
}

// q and dy of the 8 tokens before token `end` of the span, on their way.
__device__ __forceinline__ void fetch_tile(u32* shared, const u16* q, const u16* d_output, i64 span_first, int end,
                                           int heads, i64 head, int block) {
    for (int x = threadIdx.x; x < TILE * (KEYS + ROWS) / 8; x += THREADS) {
        const bool query = x < TILE * KEYS / 8;
        const int y = query ? x : x - TILE * KEYS / 8, per = (query ? KEYS : ROWS) / 8, t = end - TILE + y / per;
        const i64 at = (span_first + t) * heads + head;
        const u16* const from = query ? q + at * KEYS : d_output + at * VALUES + block * ROWS;
        u32* const to = shared + (query ? NEXT_QUERY : NEXT_D_OUTPUT) + 4 * y;
        copy_16(to, t < 0 ? q : from + y % per * 8, t >= 0);
    }
    copies_issued();
}

// k, w and beta of a chunk, on their way; zeros beyond its tokens. `row0`: of its first token, counted with the heads.
__device__ __forceinline__ void fetch_chunk(u32* shared, const u16* k, const u16* w, const u16* beta, i64 row0,
                                            int heads, int block, int chunk_tokens) {
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
__device__ __forceinline__ void prefetch_chunk(const u16* k, const u16* w, const u16* beta, const float* m,
                                               const float* j, i64 row0, int heads, int block) {
    for (int x = threadIdx.x; x < ROWS * KEYS / 32; x += THREADS) prefetch(m + 32 * x), prefetch(j + 32 * x);
    for (int t = threadIdx.x; t < CHUNK; t += THREADS) {
        for (int x = 0; x < KEYS; x += 64) prefetch(k + (row0 + t * heads) * KEYS + x);
        for (int x = 0; x < ROWS; x += 64) {
            const i64 at = (row0 + t * heads) * VALUES + block * ROWS + x;
            prefetch(w + at), prefetch(beta + at);
        }
    }
}
