// One token of every sequence: the filter's step as it stands, one head and noise group a block.
//
//     Pb = a P a + l,   u = Pb k,   b = 1 / (r + k.u),   P' = Pb - b u u^T,   M' = a M + b u (v - (a M)^T k)^T
//     output = M'^T q = (a M)^T q + b (u.q) (v - (a M)^T k),   variance = q.Pb q - b (u.q)^2
//
// Nothing but the states' reading and writing should cost. Up to 128 keys each is read once and written once: P waits
// in shared memory, M in registers, of two or three blocks on a multiprocessor. M is asked for when P is there, so that
// P' is written while M still comes. P is symmetric, so P k is a sum over rows, as M^T k is: a warp has every 8th row,
// a lane 4 columns of every 128, and what warps have summed meets in shared memory. No cache hints: 64 sequences of 4
// heads would take 3% less with them, 256 take 5% more.
#include "instructions.cuh"

struct bf16 { u16 bits; };
struct half { u16 bits; };
__device__ __forceinline__ float number(bf16 x) { return low_bf16(x.bits); }
__device__ __forceinline__ float number(half x) { return half_to_float(x.bits); }
__device__ __forceinline__ float number(float x) { return x; }
__device__ __forceinline__ void put(bf16* to, float x) { to->bits = (u16)pack_bf16(x, 0.f); }
__device__ __forceinline__ void put(half* to, float x) { to->bits = float_to_half(x); }
__device__ __forceinline__ void put(float* to, float x) { *to = x; }

#define UNROLL _Pragma("unroll")
constexpr int WARPS = 8, ROWS = (KEYS + WARPS - 1) / WARPS, PIECES = (KEYS + 127) / 128, TILE = 128;
constexpr bool HELD = KEYS <= 128;
constexpr int BLOCKS = KEYS <= 64 ? 3 : HELD ? 2 : 1;  // on a multiprocessor
constexpr int STATE = HELD ? KEYS * KEYS : 0;
constexpr int SUMS = WARPS * (KEYS < 2 * TILE ? 2 * TILE : KEYS);
enum {  // vectors, what warps have summed, u for each warp
    KEY = 0, QUERY = KEYS, DECAY = 2 * KEYS, ADDED = 3 * KEYS, DECAYED_KEY = 4 * KEYS, DECAYED_QUERY = 5 * KEYS,
    SUMMED = 6 * KEYS, DIRECTION = SUMMED + SUMS, SPREAD = DIRECTION + WARPS * KEYS, BARRIER = SPREAD + WARPS
};
extern "C" __device__ const int launch_shape[2] = {32 * WARPS, 4 * (STATE + BARRIER) + 8};

// 16 bytes at once, where this stands. The compiler would move loads to where they are first needed, and it makes four
// stores of a float4 that is assigned.
#ifdef EMULATED
static float4 load(const float* from) { return *(const float4*)from; }
static void store(float* to, float4 x) { *(float4*)to = x; }
#else
__device__ __forceinline__ float4 load(const float* from) {
    float4 x;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from));
    return x;
}
__device__ __forceinline__ void store(float* to, float4 x) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" :: "l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w));
}
#endif
__device__ __forceinline__ float warp_sum(float x) {
    UNROLL for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}
__device__ __forceinline__ float4 four(const float* from) { return *(const float4*)from; }
__device__ __forceinline__ float dot(float4 x, float4 y) { return (x.x * y.x + x.y * y.y) + (x.z * y.z + x.w * y.w); }
__device__ __forceinline__ float4 times(float4 x, float4 y) { return {x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w}; }
__device__ __forceinline__ void add(float4& to, float a, float4 x) {
    to.x = fmaf(a, x.x, to.x), to.y = fmaf(a, x.y, to.y), to.z = fmaf(a, x.z, to.z), to.w = fmaf(a, x.w, to.w);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) decode(
    const INPUT* __restrict__ q, const INPUT* __restrict__ k, const INPUT* __restrict__ v, const float* __restrict__ g,
    const float* __restrict__ process_noise, const float* __restrict__ observation_noise,
    const float* __restrict__ mean, const float* __restrict__ covariance, INPUT* __restrict__ output,
    float* __restrict__ variance, float* __restrict__ final_mean, float* __restrict__ final_covariance,
    double factor_of_q) {
    SHARED;
    float *const held = (float*)shared, *const at = held + STATE;
    u64* const arrived = (u64*)(at + BARRIER);
    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    const i64 item = blockIdx.x, head = item / GROUPS;  // of all sequences
    constexpr int size = VALUES, row_of_mean = GROUPS * size;
    const int group = (int)(item % GROUPS);
    const float* const P = covariance + item * KEYS * KEYS;
    float* const to_P = final_covariance + item * KEYS * KEYS;
    const i64 first_mean = head * KEYS * row_of_mean + group * size;
    constexpr float4 zero = {0.f, 0.f, 0.f, 0.f};
    auto row_of = [&](int i) { return warp + WARPS * i; };
    auto is_row = [&](int i) { return KEYS % WARPS == 0 || row_of(i) < KEYS; };
    if (HELD && thread == 0) {
        barrier_start(arrived, 1), copies_may_follow();
        barrier_expect(arrived, 4 * STATE), copy_in(held, P, 4 * STATE, arrived);
    }
    for (int i = thread; i < KEYS; i += 32 * WARPS) {
        const float key = number(k[head * KEYS + i]), query = (float)factor_of_q * number(q[head * KEYS + i]);
        const float decay = expf(g[PER_KEY_DECAY ? head * KEYS + i : head]);
        at[KEY + i] = key, at[QUERY + i] = query, at[DECAY + i] = decay;
        at[ADDED + i] = process_noise[PER_KEY_NOISE ? head * KEYS + i : head];
        at[DECAYED_KEY + i] = decay * key, at[DECAYED_QUERY + i] = decay * query;
    }
    const float noise_of_token = observation_noise[item];
    float4 m[HELD ? ROWS : 1];
    float value[4];
    auto mean_at = [&](int i, int column) -> float4 {
        if (!is_row(i) || column >= size) return zero;
        const float* const from = mean + first_mean + (i64)row_of(i) * row_of_mean + column;
        return HELD ? load(from) : four(from);
    };
    auto ask_for_mean = [&](int column) {
        if (HELD) UNROLL for (int i = 0; i < ROWS; i++) m[i] = mean_at(i, column);
        UNROLL for (int j = 0; j < 4; j++) value[j] = column < size ? number(v[item * size + column + j]) : 0.f;
    };
    __syncthreads();
    auto piece_of = [&](int what, int piece) -> float4 {
        const int column = 128 * piece + 4 * lane;
        return column < KEYS ? four(at + what + column) : zero;
    };
    float4 with_k[PIECES], with_q[PIECES];
    UNROLL for (int piece = 0; piece < PIECES; piece++) with_k[piece] = with_q[piece] = zero;
    if (HELD) barrier_wait(arrived, 0);
    ask_for_mean(4 * lane);
#pragma unroll (HELD ? ROWS : 4)
    for (int i = 0; i < ROWS; i++) {
        const int row = row_of(i);
        if (!is_row(i)) continue;
        UNROLL for (int piece = 0; piece < PIECES; piece++) {
            const int column = 128 * piece + 4 * lane;
            if (column >= KEYS) continue;
            const float4 x = four((HELD ? held : P) + row * KEYS + column);
            add(with_k[piece], at[DECAYED_KEY + row], x);
            if (VARIANCE) add(with_q[piece], at[DECAYED_QUERY + row], x);
        }
    }
    UNROLL for (int piece = 0; piece < PIECES; piece++) {
        const int column = 128 * piece + 4 * lane;
        if (column < KEYS) *(float4*)(at + SUMMED + warp * KEYS + column) = with_k[piece];
    }
    if (VARIANCE) {  // q.Pb q: the warp's rows of P, and one warp what is added
        float spread = 0.f;
        UNROLL for (int piece = 0; piece < PIECES; piece++) {
            const float4 query = piece_of(QUERY, piece);
            spread += dot(with_q[piece], piece_of(DECAYED_QUERY, piece));
            if (warp == 0) spread += dot(times(query, query), piece_of(ADDED, piece));
        }
        spread = warp_sum(spread);
        if (lane == 0) at[SPREAD + warp] = spread;
    }
    __syncthreads();
    float* const direction = at + DIRECTION + warp * KEYS;  // u, the same for all warps
    float along_k = 0.f, along_q = 0.f;
    UNROLL for (int piece = 0; piece < PIECES; piece++) {
        const int column = 128 * piece + 4 * lane;
        if (column >= KEYS) continue;
        const float4 a = piece_of(DECAY, piece), key = piece_of(KEY, piece);
        float4 sum = zero, u = times(piece_of(ADDED, piece), key);
        UNROLL for (int w = 0; w < WARPS; w++) add(sum, 1.f, four(at + SUMMED + w * KEYS + column));
        u = {fmaf(a.x, sum.x, u.x), fmaf(a.y, sum.y, u.y), fmaf(a.z, sum.z, u.z), fmaf(a.w, sum.w, u.w)};
        *(float4*)(direction + column) = u;
        along_k += dot(u, key), along_q += dot(u, piece_of(QUERY, piece));
    }
    along_k = warp_sum(along_k), along_q = warp_sum(along_q);
    __syncwarp();
    const float precision = 1.f / (noise_of_token + along_k);
#pragma unroll (HELD ? ROWS : 4)
    for (int i = 0; i < ROWS; i++) {
        const int row = row_of(i);
        if (!is_row(i)) continue;
        const float decay = at[DECAY + row], along = direction[row], noise = at[ADDED + row];
        UNROLL for (int piece = 0; piece < PIECES; piece++) {
            const int column = 128 * piece + 4 * lane;
            if (column >= KEYS) continue;
            const float4 x = four((HELD ? held : P) + row * KEYS + column), a = piece_of(DECAY, piece);
            const float4 u = four(direction + column);
            auto next = [&](int j, float p, float a, float u) {  // the same at (row, column) and (column, row)
                return fmaf(-precision, along * u, (decay * a) * p) + (row == column + j ? noise : 0.f);
            };
            store(to_P + row * KEYS + column,
                  {next(0, x.x, a.x, u.x), next(1, x.y, a.y, u.y), next(2, x.z, a.z, u.z), next(3, x.w, a.w, u.w)});
        }
    }
    if (VARIANCE && thread == 0) {
        float sum = 0.f;
        for (int w = 0; w < WARPS; w++) sum += at[SPREAD + w];
        variance[item] = sum - precision * along_q * along_q;
    }
#pragma unroll 1
    for (int from = 0; from < size; from += TILE) {
        const int column = from + 4 * lane;
        if (from) ask_for_mean(column);
        float4 said = zero, read = zero;
        UNROLL for (int i = 0; i < ROWS; i++) {
            const int row = is_row(i) ? row_of(i) : KEYS - 1;  // beyond the last, m is 0
            const float4 x = HELD ? m[HELD ? i : 0] : mean_at(i, column);
            add(said, at[DECAYED_KEY + row], x), add(read, at[DECAYED_QUERY + row], x);
        }
        __syncthreads();  // the last sums are read
        float* const own = at + SUMMED + 2 * warp * TILE + 4 * lane;
        *(float4*)own = said, *(float4*)(own + TILE) = read;
        __syncthreads();
        said = read = zero;
        UNROLL for (int w = 0; w < WARPS; w++) {
            const float* const its = at + SUMMED + 2 * w * TILE + 4 * lane;
            add(said, 1.f, four(its)), add(read, 1.f, four(its + TILE));
        }
        if (column >= size) continue;
        const float4 e = {value[0] - said.x, value[1] - said.y, value[2] - said.z, value[3] - said.w};
        if (warp == 0) {
            INPUT* const to = output + item * size + column;
            add(read, precision * along_q, e);
            put(to, read.x), put(to + 1, read.y), put(to + 2, read.z), put(to + 3, read.w);
        }
        UNROLL for (int i = 0; i < ROWS; i++) {
            const int row = row_of(i);
            if (!is_row(i)) continue;
            const float4 x = HELD ? m[HELD ? i : 0] : mean_at(i, column);
            const float decay = at[DECAY + row], gain = precision * direction[row];
            store(final_mean + first_mean + (i64)row * row_of_mean + column,
                  {fmaf(decay, x.x, gain * e.x), fmaf(decay, x.y, gain * e.y), fmaf(decay, x.z, gain * e.z),
                   fmaf(decay, x.w, gain * e.w)});
        }
    }
}
