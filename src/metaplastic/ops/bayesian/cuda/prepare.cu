// What needs no state, of one chunk and head: decays, gathered noise, and A but for what comes from P.
//
//     known[t, s] = [t = s] + w_t w_s R[t, s] N_s k_t.k_s   (s <= t),   R[t, s] = a_{s+1} .. a_t,   a = exp(g)
//     N_t = a_t^2 N_{t-1} + l_t
//
// R is multiplied up, never a quotient of longer products: decays of 1 and exp(-1000) may stand side by side.
#define FULL 0
#include "shapes.cuh"

constexpr int RATIO_ROW = 68, STEP = C * KEY_ROW + C * RATIO_ROW, GATHERED = STEP + 4 * C, ROOT = GATHERED + C;
extern "C" __device__ const int launch_shape[2] = {128, 4 * (ROOT + C)};

extern "C" __global__ void __launch_bounds__(128) prepare(
    const u16* __restrict__ k, const float* __restrict__ log_decay, const float* __restrict__ process_noise,
    const float* __restrict__ observation_noise, const i64* __restrict__ table, float* __restrict__ known,
    float* __restrict__ vectors, int* __restrict__ progress, int counts, int heads, int groups) {
    SHARED;
    float* const ratio = (float*)shared + C * KEY_ROW;
    float4* const step = (float4*)(shared + STEP);  // of every token: a, a^2, l
    float *const gathered = (float*)shared + GATHERED, *const white = (float*)shared + ROOT;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, row = lane >> 2, t = lane & 3;
    const i64 chunk = blockIdx.x / heads;
    const int head = blockIdx.x % heads;
    const auto [first, tokens] = chunk_at(table, chunk);
    copy_keys(shared, k, heads, head, {first, tokens}, thread, 128);
    copies_issued();
    for (int i = blockIdx.x * 128 + thread; i < counts; i += (int)gridDim.x * 128) progress[i] = 0;  // for the scan
    if (thread < C) {
        const i64 at = (first + thread) * heads + head;
        const bool valid = thread < tokens;
        const float a = valid ? expf(log_decay[at]) : 1.f;
        step[thread] = {a, a * a, valid ? process_noise[at] : 0.f, 0.f};
    }
    __syncthreads();
    const int own = thread % C, half = thread / C;
    float entry = 1.f, noise = 0.f, r = 0.f;
#pragma unroll 8
    for (int i = 0; i < C; i++) {
        const float4 by = step[i];
        if (i <= own) entry *= by.x, noise = fmaf(by.y, noise, by.z);
        r = i == own ? 1.f : r * by.x;
        if (i / (C / 2) == half) ratio[i * RATIO_ROW + own] = r;
    }
    if (half == 0) gathered[own] = noise;
    copies_arrived();
    __syncthreads();
    float product[8][4];
    clear(product);
    UNROLL for (int kk = 0; kk < KEYS / 16; kk++) {
        const u32* const a = shared + (16 * warp + row) * KEY_ROW + 8 * kk + t;
        UNROLL for (int n = 0; n < 8; n++)
            if (n < 2 * warp + 2) {
                const u32* const b = shared + (8 * n + row) * KEY_ROW + 8 * kk + t;
                multiply_16(product[n], a[0], a[8 * KEY_ROW], a[4], a[8 * KEY_ROW + 4], b[0], b[4]);
            }
    }
    for (int group = 0; group < groups; group++) {
        const i64 slot = ((i64)chunk * heads + head) * groups + group;
        __syncthreads();
        if (thread < C) {
            const float root = thread < tokens
                ? 1.f / sqrtf(observation_noise[((first + thread) * heads + head) * groups + group]) : 1.f;
            float* const to = vectors + slot * VECTORS + thread;
            white[thread] = root;
            to[ENTERED] = entry * root, to[SENT] = ratio[(C - 1) * RATIO_ROW + thread] * noise * root;
            to[WHITE] = root, to[NOISE] = noise, to[STEPS] = step[thread].x, to[ENTRY] = entry;
        }
        __syncthreads();
        UNROLL for (int n = 0; n < 8; n++) UNROLL for (int half = 0; half < 2; half++) {
            const int r = 16 * warp + row + 8 * half, s = 8 * n + 2 * t;
            float x[2] = {0.f, 0.f};
            UNROLL for (int j = 0; j < 2; j++)
                if (s + j <= r) {
                    x[j] = ratio[r * RATIO_ROW + s + j] * gathered[s + j] * (white[r] * white[s + j]);
                    x[j] = x[j] * product[n][2 * half + j] + (s + j == r ? 1.f : 0.f);
                }
            put_pair(known + slot * C * ROW + r * ROW + s, x[0], x[1]);
        }
    }
}
