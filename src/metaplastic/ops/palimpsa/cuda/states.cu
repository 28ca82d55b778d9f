// Palimpsa's states at chunk and span boundaries on tensor cores: bf16 k, w, beta; float32 states; every decay.
//
// Over a tile of tokens 1..n of one head, with f_t = exp(g_{t+1} + ... + g_n) (a sum, never a difference: exact beside
// any decay):
//
//     M_n = f_0 M_0 + sum_t w_t (f_t k_t)^T            J_n = f_0 J_0 + sum_t beta_t (f_t k_t^2)^T
//
// two matrix products. w and beta are bf16 already; the second factors stand as the sum of two bf16 words each, so a
// product of inner size 16 adds 8 tokens.
//
// One of two jobs, given as JOB: CHUNKS (writes the state before every chunk of CHUNK tokens) or LOCAL (writes the
// state after the span as if it began with an empty memory, and the span's decay).
//
// A block takes ROWS values of one head and one span; warps own 16 rows times PART keys.
// Given when compiling: KEY_TILES (of 8 keys, even, per warp), KEY_PARTS, ROW_GROUPS, JOB, BLOCKS (per multiprocessor);
// PIECES: if 1, chunks' states are written as backward_tensor.cu takes them, M and J together (K, V multiples of 16):
// [state][16 values][16 keys][M, J][8 values][lane] float4.
#include "common.cuh"

#define CHUNKS 1
#define LOCAL 2
#ifndef PIECES
#define PIECES 0
#endif
constexpr int WARPS = ROW_GROUPS * KEY_PARTS, THREADS = 32 * WARPS, ROWS = 16 * ROW_GROUPS, TOKENS = 32, CHUNK = 64;
constexpr int PART = 8 * KEY_TILES, KEYS = PART * KEY_PARTS;

// Shared memory, in words: second factors as [pair of tokens t, t + 4][k, k^2][part][two tiles][column][tile][token]: a
// lane reads those of two tiles and two tokens at once.
constexpr int FACTOR = KEYS * 2, PAIR = 2 * FACTOR + 8;
constexpr int VALUE = ROWS / 2 + (ROWS / 2 % 32 == 8 || ROWS / 2 % 32 == 24 ? 0 : 8);
constexpr int TILE = TOKENS / 2 * PAIR, VALUES = TOKENS * VALUE, STAGE = TOKENS * KEYS / 2;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * (2 * TILE + 6 * VALUES + 2 * STAGE)};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
states(const u16* __restrict__ k, const u16* __restrict__ w, const u16* __restrict__ beta, const float* __restrict__ g,
       const i64* __restrict__ spans, const float* __restrict__ entry_m, const float* __restrict__ entry_j,
       float* __restrict__ to_m, float* __restrict__ to_j, float* __restrict__ span_decay,
       int* ranks,  // PIECES: [heads] in order, [1] how unlike they are, then zeros: [1] blocks done, [heads] steep g
       int heads, int key_size, int value_size) {
    SHARED;
    u32 *const values = shared + 2 * TILE, *const stage = values + 6 * VALUES;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, row = lane >> 2, column = lane & 3;
    const int group = warp / KEY_PARTS, part = warp % KEY_PARTS;
    const int blocks = (value_size + ROWS - 1) / ROWS;
    const i64 item = blockIdx.x / blocks, head = item % heads;
    const int first_row = blockIdx.x % blocks * ROWS, own_row = first_row + group * 16 + 2 * row;
    const Span span = read_span(spans, item / heads);
    if (JOB == LOCAL && span.sequence >= 0) return;  // nothing follows: nobody asks
    const int length = (int)span.length;
    const u32 key_step = heads * key_size, value_step = heads * value_size;
    const i64 key_start = (span.first * heads + head) * key_size;
    const i64 value_start = (span.first * heads + head) * value_size + first_row;

    float M[KEY_TILES][4], J[KEY_TILES][4];  // [tile][row 2g: keys 2c, 2c + 1; row 2g + 1: the same]
    const int own_key = part * PART + 2 * column;
    // Where a lane's part of a state begins: its first row; and in pieces, where lane (r, c) has values 2 c, 2 c + 1,
    // each with keys 2 r, 2 r + 1.
    const i64 state_size = (i64)value_size * key_size, own_state = (i64)own_row * key_size + own_key;
    const int own_place = row / 4 * 32 + column * 4 + row % 4;
    const i64 own_piece = (own_row / 16 * (key_size / 16) + part * PART / 16) * 128 + own_place;
    const int own_tiles = own_row < value_size ? (key_size - part * PART) / 8 : 0;
    auto store = [&](i64 state, int n) {  // tile n of it
        if (n >= own_tiles) return;
        if (PIECES) {
            float4* const at = (float4*)to_m + state * (state_size / 2) + own_piece + n / 2 * 128 + n % 2 * 16;
            at[0] = {M[n][0], M[n][1], M[n][2], M[n][3]}, at[64] = {J[n][0], J[n][1], J[n][2], J[n][3]};
            return;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (own_row + r >= value_size) continue;
            const i64 at = state * state_size + own_state + r * key_size + 8 * n;
            *(float2*)(to_m + at) = {M[n][2 * r], M[n][2 * r + 1]};
            *(float2*)(to_j + at) = {J[n][2 * r], J[n][2 * r + 1]};
        }
    };
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            bool valid = entry_m && JOB == CHUNKS && own_row + r < value_size && own_key + 8 * n < key_size;
            i64 at = item * state_size + own_state + r * key_size + 8 * n;
            float2 m = {0.f, 0.f}, j = m;
            if (valid) m = *(const float2*)(entry_m + at), j = *(const float2*)(entry_j + at);
            M[n][2 * r] = m.x, M[n][2 * r + 1] = m.y, J[n][2 * r] = j.x, J[n][2 * r + 1] = j.y;
        }

    float next_g = 0.f, later_g = 0.f, tile_decay = 1.f, whole_decay = 1.f;
    int steep_here = 0;
    // Which 8 keys of which token a thread brings in and converts: 16 keys of 16 tokens a warp, of which every second 8
    // begin with the odd keys, so that all lanes write to different banks.
    const bool odd_first = lane & 8;
    auto token_of = [&](int c) { return c / 32 % 2 * 16 + lane % 16; };
    auto key_of = [&](int c) { return c / 64 * 16 + lane / 16 * 8; };
    // Starts the copies of the tile at t0, two tiles ahead, as in forward.cu: k to a stage, w and beta to one of three
    // places. Tokens beyond the span are zeros without decay: they change nothing.
    auto load = [&](int t0, int buffer, int place) {
#pragma unroll
        for (int c0 = 0; c0 < STAGE / 4; c0 += THREADS) {
            int c = c0 + thread, t = token_of(c), j = key_of(c);
            bool valid = t0 + t < length && j < key_size;
            i64 at = valid ? key_start + (i64)t0 * key_step + t * key_step + j : 0;
            if (c < STAGE / 4) copy_16(stage + buffer * STAGE + 4 * c, k + at, valid);
        }
#pragma unroll
        for (int c0 = 0; c0 < TOKENS * ROWS / 8; c0 += THREADS) {
            int c = c0 + thread, t = c / (ROWS / 8), i = c % (ROWS / 8) * 8;
            bool valid = t0 + t < length && first_row + i < value_size;
            i64 at = valid ? value_start + (i64)t0 * value_step + t * value_step + i : 0;
            u32* to = values + 2 * place * VALUES + t * VALUE + i / 2;
            if (c < TOKENS * ROWS / 8) copy_16(to, w + at, valid), copy_16(to + VALUES, beta + at, valid);
        }
        copies_issued();
        next_g = later_g;
        later_g = t0 + lane < length ? g[(span.first + t0 + lane) * heads + head] : 0.f;
    };
    auto prepare = [&](int buffer) {
        u32* const words = shared + buffer * TILE;
        float sum = next_g;  // lane = token: g of this token and of all later ones
#pragma unroll
        for (int s = 1; s < TOKENS; s <<= 1) {
            float later = __shfl_down_sync(~0u, sum, s);
            if (lane + s < TOKENS) sum += later;
        }
        float later = __shfl_down_sync(~0u, sum, 1), decay = expf(lane == TOKENS - 1 ? 0.f : later);
        tile_decay = expf(__shfl_sync(~0u, sum, 0));
        if (PIECES) steep_here += __popc(__ballot_sync(~0u, next_g < STEEP_BELOW));
        copies_arrived_but_last();
#pragma unroll
        for (int c0 = 0; c0 < STAGE / 4; c0 += THREADS) {
            int c = c0 + thread, t = token_of(c), j0 = key_of(c);
            float factor = __shfl_sync(~0u, decay, t & 31);
            if (c < STAGE / 4) {
                const uint4 raw = *(const uint4*)(stage + buffer * STAGE + 4 * c);
                const u32 ks[4] = {raw.x, raw.y, raw.z, raw.w};
                u32* place = words + (t / 8 * 4 + t % 4) * PAIR + j0 / 16 * 32 + j0 / 8 % 2 * 2 + t / 4 % 2;
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    const bool odd = e % 2 != odd_first;
                    float key = odd ? high_bf16(ks[e / 2]) : low_bf16(ks[e / 2]), decayed = key * factor;
                    u32* to = place + 4 * (e - e % 2) + 4 * odd;
                    to[0] = split(decayed), to[FACTOR] = split(decayed * key);
                }
            }
        }
    };

    load(0, 0, 0);
    load(TOKENS, 1, 1);
    prepare(0);
    __syncthreads();
    int buffer = 0, place = 0;
#pragma unroll 1
    for (int t0 = 0; t0 < length; t0 += TOKENS) {
        const float decay = tile_decay;
        load(t0 + 2 * TOKENS, buffer, (place + 2) % 3);
        whole_decay *= decay;
        const u32* factors = shared + buffer * TILE + column * PAIR + part * PART * 2 + row * 4;
        const u32* writes = values + 2 * place * VALUES + column * VALUE + group * 8 + row;
        const i64 state = span.chunk_base * heads + head * span.chunks + span.chunk + t0 / CHUNK;
#pragma unroll 1
        for (int t = 0; t < TOKENS; t += 16, factors += 8 * PAIR, writes += 16 * VALUE) {
            // Both rows of each word of w and beta, every one twice: once for either word of the second factor.
            u32 ws[2][4], bs[2][4];
#pragma unroll
            for (int x = 0; x < 4; x++) {
                const u32 both_w = writes[4 * x * VALUE], both_b = writes[4 * x * VALUE + VALUES];
                u32 *const to_w = ws[x / 2] + x % 2 * 2, *const to_b = bs[x / 2] + x % 2 * 2;
                to_w[0] = __byte_perm(both_w, 0, 0x1010), to_w[1] = __byte_perm(both_w, 0, 0x3232);
                to_b[0] = __byte_perm(both_b, 0, 0x1010), to_b[1] = __byte_perm(both_b, 0, 0x3232);
            }
            const float by = t ? 1.f : decay;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n += 2) {  // stored two by two, so that memory need not take all at once
                if (JOB == CHUNKS && t == 0 && t0 % CHUNK == 0) store(state, n), store(state, n + 1);
#pragma unroll
                for (int c = 0; c < 4; c++) M[n][c] *= by, J[n][c] *= by, M[n + 1][c] *= by, J[n + 1][c] *= by;
#pragma unroll
                for (int x = 0; x < 2; x++) {
                    const u32 *a = ws[x], *b = bs[x];
                    const uint4 f = *(const uint4*)(factors + 4 * x * PAIR + 16 * n);
                    const uint4 f2 = *(const uint4*)(factors + 4 * x * PAIR + FACTOR + 16 * n);
                    multiply_16(M[n], a[0], a[1], a[2], a[3], f.x, f.y);
                    multiply_16(M[n + 1], a[0], a[1], a[2], a[3], f.z, f.w);
                    multiply_16(J[n], b[0], b[1], b[2], b[3], f2.x, f2.y);
                    multiply_16(J[n + 1], b[0], b[1], b[2], b[3], f2.z, f2.w);
                }
            }
        }
        prepare(buffer ^ 1);
        __syncthreads();
        buffer ^= 1, place = (place + 1) % 3;
    }
    copies_arrived();
    if (JOB == LOCAL) {
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) store(item, n);
        if (first_row == 0 && thread == 0) span_decay[item] = whole_decay;
    }
    if (PIECES) {  // the last block knows how heads compare
        int *const unlike = ranks + heads, *const blocks_done = unlike + 1, *const steep = blocks_done + 1;
        __syncthreads();
        if (thread == 0) {
            if (first_row == 0) atomicAdd(steep + head, steep_here);
            __threadfence();
            shared[0] = atomicAdd(blocks_done, 1) == gridDim.x - 1;
            __threadfence();
        }
        __syncthreads();
        if (!shared[0]) return;
        for (int own = thread; own < heads; own += THREADS) {
            const int here = __ldcg(steep + own);
            int place = 0;
            for (int other = 0; other < heads; other++) {
                const int there = __ldcg(steep + other);
                place += there > here || (there == here && other < own);
            }
            ranks[place] = own;
            if (place == 0) atomicAdd(unlike, here);
            if (place == heads - 1) atomicAdd(unlike, -here);
        }
    }
}
