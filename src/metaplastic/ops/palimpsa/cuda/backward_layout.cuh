// The parts of backward_tensor.cu: its shared memory, matrix helpers.
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
static inline void copy_block(float4* to, const float4* from) {
    for (int i = 0; i < 4; i++) copy_16((u32*)(to + 32 * i), from + 32 * i, true);
}
static inline u32 times(u32 a, u32 b) {
    return pack_bf16(low_bf16(a) * low_bf16(b), high_bf16(a) * high_bf16(b));
}
static inline void prefetch(const void*) {}
static inline int processor() { return blockIdx.x; }
static inline int thread_index() { return threadIdx.x; }
#else
// Read anew where it is needed: what follows from it need not be kept, or spilled, from tile to tile.
__device__ __forceinline__ int thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" :: "l"(from)); }
__device__ __forceinline__ int processor() {
    int x;
    asm("mov.u32 %0, %%smid;" : "=r"(x));
    return x;
}
// A lane's part of a key block of two states, on its way to shared memory: 4 pieces a warp apart.
__device__ __forceinline__ void copy_block(float4* to, const float4* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16; cp.async.cg.shared.global [%0 + 512], [%1 + 512], 16;"
                 "cp.async.cg.shared.global [%0 + 1024], [%1 + 1024], 16;"
                 "cp.async.cg.shared.global [%0 + 1536], [%1 + 1536], 16;" ::
        "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
// Products of two pairs of bf16, rounded to nearest.
__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
    return r;
}
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
constexpr int CHUNK = 64, ENTRIES = CHUNK / ENTRY, TILE = 8;  // tokens
constexpr float STRONG = 4.f;  // of -g
constexpr float DIRECT_BELOW = 0.135f, CAREFUL_BELOW = 0.04f;  // of c of a tile's last token: exp(-2), exp(-3.2)

// Shared memory, in words. Rows of bf16 are padded so that 8 of them, 16 bytes each, fall into different banks. The 16
// keys of a block stand in the order 0, 2, .., 14, 1, 3, .., 15, so that a lane's two keys are neighbours in memory.
constexpr int KEY_ROW = KEYS / 2 + 4, VALUE_ROW = ROWS / 2 + 4, FACTOR = ENTRY * KEY_ROW;
constexpr int RESIDENT = STREAM ? 1 : KEY_BLOCKS;               // blocks of keys whose dM and dJ stay here
constexpr int GRADIENT = 0;                                    // dM, -dJ: [warp][block][4][lane] float4
constexpr int NEXT_ENTRY = GRADIENT + WARPS * RESIDENT * 512;  // what the next block starts from
constexpr int NEXT_GRADIENT = NEXT_ENTRY + WARPS * 512;
constexpr int KEY = NEXT_GRADIENT + (STREAM ? WARPS * 512 : 0);  // the chunk's k, w, beta as they came
constexpr int WRITE = KEY + CHUNK * KEY_ROW, EVIDENCE = WRITE + CHUNK * VALUE_ROW;
// [token][block] factors of the updates: [row] k, k^2, the prior's and q, of two keys each; then zeros, twice: lanes
// that read zeros find them in other banks than those that do not.
constexpr int RECORD = 8 * 8 + 4, UPDATE = EVIDENCE + CHUNK * VALUE_ROW;
constexpr int OTHER = UPDATE + TILE * ALL_BLOCKS * RECORD;     // [token][row group][lane] uint2: w, beta, 1, dy
constexpr int NEXT_QUERY = OTHER + TILE * ROW_GROUPS * 64;     // q and dy of the next tile as they came
constexpr int NEXT_D_OUTPUT = NEXT_QUERY + TILE * KEYS / 2;
// Decayed k and k^2, each as the sum of two bf16: of up to ENTRY tokens, but where a chunk begins, before there are
// sums, of all but the last ENTRY.
constexpr int DECAYED = NEXT_D_OUTPUT + TILE * ROWS / 2, AFTER_DECAYED = DECAYED + (ENTRIES - 1) * 4 * FACTOR;
// [warp][block][lane][dq, dk] uint2, of bf16: rounded no more than the factors of the products they are sums of.
constexpr int KEY_SUMS = DECAYED + 4 * FACTOR;
// [part of the keys, but for the first][group][dw, dbeta][lane] float4
constexpr int ROW_SUMS = KEY_SUMS + WARPS * KEY_BLOCKS * 128;
constexpr int TOKEN_SUMS = ROW_SUMS + (KEY_PARTS - 1) * ROW_GROUPS * 256;  // [warp][12]
constexpr int AFTER_SUMS = TOKEN_SUMS + WARPS * 12;
constexpr int DECAY = AFTER_SUMS < AFTER_DECAYED ? AFTER_DECAYED : AFTER_SUMS;  // g of the chunk's tokens
constexpr int GAUGE = DECAY + CHUNK, INVERSE = GAUGE + CHUNK;  // their c and 1 / c (and anything behind)
constexpr int BEGINS = INVERSE + CHUNK + TILE;                 // which begin a tile
constexpr int RUNNING = BEGINS + 2;                            // dg of the first token of the tile done last
constexpr int HEAD = RUNNING + 1, ROOM = HEAD + 1, WORDS = ROOM + 1;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

struct Job {
    int span, length;  // of the span; its tokens
    i64 first, state;  // the span's first token, and first state
    int begin, end;    // chunks [begin, end) of the span are its own: in every turn half of what is left
};
__device__ __forceinline__ Job job_at(const i64* spans, int number, int head, int turn, int turns, int heads) {
    const Span span = read_span(spans, number);
    const int length = (int)span.length, all = (length + CHUNK - 1) / CHUNK;
    const int begin = TURNED && turn + 1 < turns ? all >> (turn + 1) : 0;
    const i64 state = span.chunk_base * heads + (i64)head * span.chunks + span.chunk;
    return {number, length, span.first, state, begin, TURNED ? all >> turn : all};
}
// A room of the scratch that nobody has, of so many as blocks are at work: most often the multiprocessor's.
__device__ __forceinline__ int claim(int* rooms, int count) {
    for (int room = processor() % count;; room = room + 1 < count ? room + 1 : 0)
        if (atomicExch(rooms + room, 1) == 0) {
            __threadfence();  // what the block before wrote there comes before what this one will
            return room;
        }
}

// A number that all lanes share, so that the compiler knows: it and what follows from it are then kept once a warp.
__device__ __forceinline__ int of_warp(int x) { return __shfl_sync(~0u, x, 0); }

// M and J of a block in pieces, in float4; where this lane's of key block b are (read anew, as thread_index).
constexpr int STATE_PIECES = WARPS * KEY_BLOCKS * 128;
__device__ __forceinline__ u32 own_piece(int b) {
    const u32 x = thread_index();
    return (x / 32 * KEY_BLOCKS + b) * 128 + x % 32;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_16(d, a[0], a[1], a[2], a[3], b0, b1);
}

// A lane's part of a key block of two states, 4 pieces a warp apart: [value tile][key, value] as in a product's result,
// or, of M and J in memory (STATE), [value tile][value, key].
template <bool STATE = false, int STEP = 32>
__device__ __forceinline__ void read_block(float (&x)[2][4], float (&y)[2][4], const float4* from, float factor,
                                           float plus_y = 0.f) {
#pragma unroll
    for (int v = 0; v < 2; v++) {
        float4 a = from[v * STEP], c = from[(2 + v) * STEP];
        if (STATE) a = {a.x, a.z, a.y, a.w}, c = {c.x, c.z, c.y, c.w};
        x[v][0] = factor * a.x, x[v][1] = factor * a.y, x[v][2] = factor * a.z, x[v][3] = factor * a.w;
        y[v][0] = fmaf(factor, c.x, plus_y), y[v][1] = fmaf(factor, c.y, plus_y);
        y[v][2] = fmaf(factor, c.z, plus_y), y[v][3] = fmaf(factor, c.w, plus_y);
    }
}
// M and J as they are in memory, where another kernel may have written them.
__device__ __forceinline__ void load_pieces(float (&x)[2][4], float (&y)[2][4], const float4* from) {
    float4 all[4];
#pragma unroll
    for (int i = 0; i < 4; i++) all[i] = __ldcg(from + i * 32);
    read_block<true, 1>(x, y, all, 1.f);
}
template <bool STATE = false>
__device__ __forceinline__ void write_block(const float (&x)[2][4], const float (&y)[2][4], float4* to) {
#pragma unroll
    for (int v = 0; v < 2; v++) {
        to[v * 32] = {x[v][0], x[v][1 + STATE], x[v][2 - STATE], x[v][3]};
        to[(2 + v) * 32] = {y[v][0], y[v][1 + STATE], y[v][2 - STATE], y[v][3]};
    }
}
// The same of one state [V, K] in memory, from its element `at`; zeros if there is none.
__device__ __forceinline__ void load_block(float (&x)[2][4], const float* from, i64 at) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float2 keys = from ? __ldcg((const float2*)(from + at + (e / 2 * 8 + e % 2) * KEYS)) : float2{0.f, 0.f};
        x[e / 2][e % 2] = keys.x, x[e / 2][2 + e % 2] = keys.y;
    }
}
