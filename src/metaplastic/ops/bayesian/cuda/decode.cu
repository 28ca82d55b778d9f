// One token of every sequence: the filter's step as it stands, one head and noise group a block.
//
//     Pb = a P a + l,   u = Pb k,   b = 1 / (r + k.u),   P' = Pb - b u u^T,   M' = a M + b u (v - (a M)^T k)^T
//     output = M'^T q = (a M)^T q + b (u.q) (v - (a M)^T k),   variance = q.Pb q - b (u.q)^2
//
// Nothing but the states' reading and writing should cost: up to 128 keys, each is read once and written once; P waits
// in shared memory, M in registers, of two blocks on a multiprocessor. A warp has every 8th row, a lane 4 columns of
// every 128.
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
constexpr int STATE = HELD ? KEYS * KEYS : 0;
enum { KEY = 0, QUERY = KEYS, DECAY = 2 * KEYS, ADDED = 3 * KEYS, DIRECTION = 4 * KEYS, SUMS = 5 * KEYS };
extern "C" __device__ const int launch_shape[2] = {32 * WARPS, 4 * (STATE + SUMS + 16 + 2 * WARPS * TILE) + 16};

__device__ __forceinline__ float warp_sum(float x) {
    UNROLL for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}
__device__ __forceinline__ float4 four(const float* from) { return *(const float4*)from; }

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1 + HELD) decode(
    const INPUT* __restrict__ q, const INPUT* __restrict__ k, const INPUT* __restrict__ v, const float* __restrict__ g,
    const float* __restrict__ process_noise, const float* __restrict__ observation_noise,
    const float* __restrict__ mean, const float* __restrict__ covariance, INPUT* __restrict__ output,
    float* __restrict__ variance, float* __restrict__ final_mean, float* __restrict__ final_covariance,
    double factor_of_q) {
    SHARED;
    float *const held = (float*)shared, *const at = held + STATE;
    u64* const arrived = (u64*)(at + SUMS + 16 + 2 * WARPS * TILE);
    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    const i64 item = blockIdx.x, head = item / GROUPS;  // of all sequences
    constexpr int size = VALUES, row_of_mean = GROUPS * size;
    const int group = (int)(item % GROUPS);
    const float* const P = covariance + item * KEYS * KEYS;
    const i64 first_mean = head * KEYS * row_of_mean + group * size;
    if (HELD && thread == 0) {
        barrier_start(arrived, 1), copies_may_follow();
        barrier_expect(arrived, 4 * STATE), copy_in(held, P, 4 * STATE, arrived);
    }
    for (int i = thread; i < KEYS; i += 32 * WARPS) {
        at[KEY + i] = number(k[head * KEYS + i]), at[QUERY + i] = (float)factor_of_q * number(q[head * KEYS + i]);
        at[DECAY + i] = expf(g[PER_KEY_DECAY ? head * KEYS + i : head]);
        at[ADDED + i] = process_noise[PER_KEY_NOISE ? head * KEYS + i : head];
    }
    float4 m[HELD ? ROWS : 1];
    auto load_mean = [&](int i, int column) -> float4 {
        const int row = warp + WARPS * i;
        if (row >= KEYS || column >= size) return {0.f, 0.f, 0.f, 0.f};
        return four(mean + first_mean + (i64)row * row_of_mean + column);
    };
    auto load_row = [&](int i, int piece) -> float4 {
        const int row = warp + WARPS * i, column = 128 * piece + 4 * lane;
        if (row >= KEYS || column >= KEYS) return {0.f, 0.f, 0.f, 0.f};
        return four((HELD ? held : P) + (i64)row * KEYS + column);
    };
    if (HELD) UNROLL for (int i = 0; i < ROWS; i++) m[i] = load_mean(i, 4 * lane);
    __syncthreads();
    if (HELD) barrier_wait(arrived, 0);
    auto four_of = [&](int what, int piece) -> float4 {
        const int column = 128 * piece + 4 * lane;
        if (column >= KEYS) return {0.f, 0.f, 0.f, 0.f};
        return four(at + what + column);
    };
    auto dot = [](float4 x, float4 y) { return (x.x * y.x + x.y * y.y) + (x.z * y.z + x.w * y.w); };
    auto times = [](float4 x, float4 y) -> float4 { return {x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w}; };
    float spread = 0.f;  // the warp's part of q.Pb q
#pragma unroll 4
    for (int i = 0; i < ROWS; i++) {
        const int row = warp + WARPS * i;
        float with_k = 0.f, with_q = 0.f;
        UNROLL for (int piece = 0; piece < PIECES; piece++) {
            const float4 x = times(load_row(i, piece), four_of(DECAY, piece));
            with_k += dot(x, four_of(KEY, piece));
            if (VARIANCE) with_q += dot(x, four_of(QUERY, piece));
        }
        with_k = warp_sum(with_k);
        if (VARIANCE) with_q = warp_sum(with_q);
        if (row < KEYS) {
            const float decay = at[DECAY + row], noise = at[ADDED + row], query = at[QUERY + row];
            if (lane == 0) at[DIRECTION + row] = fmaf(decay, with_k, noise * at[KEY + row]);
            spread += query * fmaf(decay, with_q, noise * query);
        }
    }
    if (VARIANCE && lane == 0) at[SUMS + warp] = spread;
    __syncthreads();
    float along_k = 0.f, along_q = 0.f;
    UNROLL for (int piece = 0; piece < PIECES; piece++) {
        const float4 u = four_of(DIRECTION, piece);
        along_k += dot(u, four_of(KEY, piece)), along_q += dot(u, four_of(QUERY, piece));
    }
    along_k = warp_sum(along_k), along_q = warp_sum(along_q);
    const float precision = 1.f / (observation_noise[item] + along_k);
#pragma unroll 4
    for (int i = 0; i < ROWS; i++) {
        const int row = warp + WARPS * i;
        if (row >= KEYS) continue;
        const float decay = at[DECAY + row], along = at[DIRECTION + row];
        UNROLL for (int piece = 0; piece < PIECES; piece++) {
            const int column = 128 * piece + 4 * lane;
            if (column >= KEYS) continue;
            const float4 x = load_row(i, piece), a = four_of(DECAY, piece);
            const float4 u = four_of(DIRECTION, piece);
            auto noise = [&](int i) { return row == column + i ? at[ADDED + row] : 0.f; };
            auto next = [&](int i, float p, float a, float u) {  // the same at (row, column) and (column, row)
                return (decay * a) * p - precision * (along * u) + noise(i);
            };
            *(float4*)(final_covariance + item * KEYS * KEYS + (i64)row * KEYS + column) = {
                next(0, x.x, a.x, u.x), next(1, x.y, a.y, u.y), next(2, x.z, a.z, u.z), next(3, x.w, a.w, u.w)};
        }
    }
    if (VARIANCE && thread == 0) {
        float sum = 0.f;
        for (int i = 0; i < WARPS; i++) sum += at[SUMS + i];
        variance[item] = sum - precision * along_q * along_q;
    }
    float* const sums = at + SUMS + 16;
#pragma unroll 1
    for (int from = 0; from < size; from += TILE) {
        const int column = from + 4 * lane;
        if (HELD && from) UNROLL for (int i = 0; i < ROWS; i++) m[i] = load_mean(i, column);
        float4 said = {0.f, 0.f, 0.f, 0.f}, read = said;
        UNROLL for (int i = 0; i < ROWS; i++) {
            const int row = warp + WARPS * i < KEYS ? warp + WARPS * i : KEYS - 1;  // beyond the last, m is 0
            const float4 x = HELD ? m[HELD ? i : 0] : load_mean(i, column);
            const float decay = at[DECAY + row], key = decay * at[KEY + row], query = decay * at[QUERY + row];
            said.x += key * x.x, said.y += key * x.y, said.z += key * x.z, said.w += key * x.w;
            read.x += query * x.x, read.y += query * x.y, read.z += query * x.z, read.w += query * x.w;
        }
        __syncthreads();  // the last tile's sums are read
        float4* const own = (float4*)(sums + 2 * warp * TILE + 4 * lane);
        own[0] = said, own[TILE / 4] = read;
        __syncthreads();
        said = {0.f, 0.f, 0.f, 0.f}, read = said;
        UNROLL for (int w = 0; w < WARPS; w++) {
            const float4 x = four(sums + 2 * w * TILE + 4 * lane), y = four(sums + (2 * w + 1) * TILE + 4 * lane);
            said.x += x.x, said.y += x.y, said.z += x.z, said.w += x.w;
            read.x += y.x, read.y += y.y, read.z += y.z, read.w += y.w;
        }
        if (column >= size) continue;
        const INPUT* const value = v + item * size + column;
        const float residual[4] = {number(value[0]) - said.x, number(value[1]) - said.y, number(value[2]) - said.z,
                                   number(value[3]) - said.w};
        if (warp == 0) {
            const float of_residual = precision * along_q;
            INPUT* const to = output + item * size + column;
            put(to, fmaf(of_residual, residual[0], read.x)), put(to + 1, fmaf(of_residual, residual[1], read.y));
            put(to + 2, fmaf(of_residual, residual[2], read.z)), put(to + 3, fmaf(of_residual, residual[3], read.w));
        }
        UNROLL for (int i = 0; i < ROWS; i++) {
            const int row = warp + WARPS * i;
            if (row >= KEYS) continue;
            const float4 x = HELD ? m[HELD ? i : 0] : load_mean(i, column);
            const float decay = at[DECAY + row], gain = precision * at[DIRECTION + row];
            *(float4*)(final_mean + first_mean + (i64)row * row_of_mean + column) = {
                fmaf(decay, x.x, gain * residual[0]), fmaf(decay, x.y, gain * residual[1]),
                fmaf(decay, x.z, gain * residual[2]), fmaf(decay, x.w, gain * residual[3])};
        }
    }
}
