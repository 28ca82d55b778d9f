// What the passes over chunks share: sizes, arguments, and how a chunk's keys and decays lie in memory.
//
// FULL 0: keys are bf16 as given, one decay per head: a row of K is a key times a number of the token.
// FULL 1: keys are float32, decayed and whitened beforehand, whatever the decay: three products instead of two.
// Chunks of all sequences are counted one after another; a slot is a chunk of one head and noise group:
// (chunk * heads + head) * groups + group. What passes from kernel to kernel lies in memory as it will in shared
// memory, rows of ROW or SPREAD_ROW words, so that the copy engine takes it at once.
#pragma once
#include "matrices.cuh"
#include "rest.cuh"

constexpr int MAIN = 8, THREADS = 32 * (MAIN + 4);   // warps that compute; four more help
constexpr bool WIDE = KEYS > 128;  // P is too large for a multiprocessor's registers: it stays in the L2 cache
constexpr int BUFFERS = WIDE ? 1 : 2;
constexpr int READ_ROW = 68;
constexpr int KEY_ROW = FULL ? KEYS + 8 : KEYS / 2 + 4, SPREAD_ROW = KEYS + 8;
// FULL 0: of every token [6][C]: the decay since the entry times w_t; the noise gathered, decayed to the chunk's end,
// times w_t; w_t, one over the standard deviation of its observation noise; the noise gathered; its own decay; the
// decay since the entry. FULL 1: of every key [3][KEYS]: the decay of the whole chunk, the noise gathered at its end,
// and what couples the keys of a pair.
constexpr int VECTORS = FULL ? 3 * KEYS : 6 * C;
enum { ENTERED = 0, SENT = C, WHITE = 2 * C, NOISE = 3 * C, STEPS = 4 * C, ENTRY = 5 * C };

struct Scan {
    const void* queries;        // FULL 0: bf16 [tokens, heads, KEYS]
    // FULL 0: bf16 [tokens, heads, ..]; FULL 1: float [slot, C, SPREAD_ROW], [slot, C, values]
    const void *keys, *values;
    const float *sent;          // FULL 1: [slot, C, KEYS]: tail x N x K, what B is beside last x W
    const float *known;         // [slot, C, ROW]: A but for what comes from P, lower triangle, zeros above
    const float *vectors;       // [slot, VECTORS]; FULL 1: [chunk, head, VECTORS]
    const i64 *table, *first;   // [chunk][first token, tokens]; a sequence's first chunk, and the end
    // Entry states: [sequence, head, group, KEYS, KEYS], [sequence, head, KEYS, group, values].
    const float *covariance, *mean;
    float *factors, *spreads, *gains;      // [slot, ..]: L [C, ROW] (matrices.cuh), W [C, SPREAD_ROW], U^T [KEYS, ROW]
    float *innovations, *reads;            // [slot, values, ..]: e^T [ROW]; FULL 0: (Q M)^T [READ_ROW], M at the entry
    float *covariances, *means;            // [slot, ..]: at the entry, if wanted: P [KEYS, KEYS], M^T [values, KEYS]
    float *final_covariance, *final_mean;      // as the entry states
    // Once a chunk was careful: rooms for what float32 leaves of P, [KEYS, KEYS], and of U^T, [KEYS, ROW], and for W in
    // float64, [C, KEYS], or else U^T U, [KEYS, KEYS]. With `covariances`, [slot, ..]: what float32 leaves of P at the
    // entry (rest.cuh), two numbers a word, [KEYS, KEYS], and whether that is there.
    float* rests;
    u16* entry_rests;
    int* entry_careful;
    int *progress;              // [sequence, head, group]: chunks whose covariance is done
    int *hard;                  // [sequence, head, group]: whether float32 is too little for a chunk
    int heads, groups, values_of_group;
};

// A chunk's tokens.
struct Chunk { i64 first; int tokens; };
__device__ __forceinline__ Chunk chunk_at(const i64* table, i64 chunk) {
    return {table[2 * chunk], (int)table[2 * chunk + 1]};
}
// bf16 rows of a chunk's tokens by `count` threads: `from_row` words from token to token; zeros where there is none.
__device__ __forceinline__ void copy_tokens(u32* to, int row, const void* from, int from_row, int words, Chunk chunk,
                                            int own, int count) {
    const u32* const source = (const u32*)from + chunk.first * from_row;
    const int pieces = words / 4;
#pragma unroll 4
    for (int i = own; i < C * pieces; i += count) {
        const int r = i / pieces, x = i % pieces * 4;
        const bool valid = r < chunk.tokens;
        copy_16(to + r * row + x, source + (valid ? r * from_row + x : 0), valid);
    }
}
// FULL 0: the chunk's keys.
__device__ __forceinline__ void copy_keys(u32* to, const void* keys, int heads, int head, Chunk chunk, int own,
                                          int count) {
    copy_tokens(to, KEY_ROW, (const u32*)keys + head * (KEYS / 2), heads * (KEYS / 2), KEYS / 2, chunk, own, count);
}
__device__ __forceinline__ const float* vectors_at(const Scan& scan, i64 chunk, int stream) {
    const i64 at = FULL ? chunk * scan.heads + stream / scan.groups : chunk * scan.heads * scan.groups + stream;
    return scan.vectors + at * VECTORS;
}

// Keys 8 kk + 2t and the next of a token.
__device__ __forceinline__ float2 key_pair(const u32* keys, int token, int kk, int t) {
    if (FULL) return pair_at((const float*)keys + token * KEY_ROW + 8 * kk + 2 * t);
    const u32 both = keys[token * KEY_ROW + 4 * kk + t];
    return make_float2(low_bf16(both), high_bf16(both));
}
__device__ __forceinline__ float last_decay(const float* vectors, int key) {
    return vectors[FULL ? key : ENTRY + C - 1];
}
__device__ __forceinline__ float gathered_noise(const float* vectors, int row, int column) {
    if (!FULL) return row == column ? vectors[NOISE + C - 1] : 0.f;
    return row == column ? vectors[KEYS + row] : row == (column ^ 1) ? vectors[2 * KEYS + row] : 0.f;
}
// What a token adds to B beside last x W.
__device__ __forceinline__ float sent(const Scan& scan, i64 slot, const u32* keys, const float* vectors, int token,
                                      int key) {
    if (FULL) return scan.sent[(slot * C + token) * KEYS + key];
    return vectors[SENT + token] * low_bf16(((const u16*)keys)[token * 2 * KEY_ROW + key]);
}

// bf16 parts of two float32 numbers, three of each: together they are all of it.
struct Thirds {
    u32 part[3];
    __device__ __forceinline__ Thirds(float x, float y) {
        UNROLL for (int i = 0; i < 3; i++) {
            const u32 a = __float_as_uint(x), b = __float_as_uint(y);
            part[i] = a >> 16 | (b & 0xffff0000u);
            x -= high_bf16(a), y -= high_bf16(b);
        }
    }
};
// Adds x K^T, of two tiles of x in a result's registers (keys 16 kk and on) and bf16 keys: three products that lose no
// digit of x or K, where TF32 takes four of half the size for 21 of 24 digits of x.
__device__ __forceinline__ void multiply_keys(float (&d)[8][4], const float (&x)[4], const float (&y)[4],
                                              const u32* keys, int kk, int g, int t) {
    const Thirds a[4] = {{x[0], x[1]}, {x[2], x[3]}, {y[0], y[1]}, {y[2], y[3]}};
    u32 key[8][2];
    UNROLL for (int n = 0; n < 8; n++) UNROLL for (int half = 0; half < 2; half++)
        key[n][half] = keys[(8 * n + g) * KEY_ROW + 8 * kk + 4 * half + t];
    UNROLL for (int i = 2; i >= 0; i--) UNROLL for (int n = 0; n < 8; n++)
        multiply_16(d[n], a[0].part[i], a[1].part[i], a[2].part[i], a[3].part[i], key[n][0], key[n][1]);
}

// 16 rows of a [.., KEYS] matrix as a result's registers.
template <int TILES>
__device__ __forceinline__ void read_rows(float (&x)[TILES][4], const float* from, int row, int t) {
    UNROLL for (int n = 0; n < TILES; n++) {
        const int at = row * KEYS + 8 * n + 2 * t;
        const float2 a = pair_at(from + at), b = pair_at(from + at + 8 * KEYS);
        x[n][0] = a.x, x[n][1] = a.y, x[n][2] = b.x, x[n][3] = b.y;
    }
}
template <int TILES> __device__ __forceinline__ void write_rows(const float (&x)[TILES][4], float* to, int row, int t) {
    UNROLL for (int n = 0; n < TILES; n++) {
        put_pair(to + row * KEYS + 8 * n + 2 * t, x[n][0], x[n][1]);
        put_pair(to + (row + 8) * KEYS + 8 * n + 2 * t, x[n][2], x[n][3]);
    }
}
