// The products of tokens in which every key decays on its own, of one chunk, head and noise group:
//     found[s, t] = sum_d x_td R_d[t, s] y_sd,   R_d[t, s] = exp(g_{s+1, d}) .. exp(g_td) for s <= t, else 0
// for x of two kinds, side by side (keys and queries). Four tokens t at a time: R meets in the middle before them, so that
// what lies earlier is one product with x times the decays since then; a thread has one key, of all tokens s.
#define THREADS KEYS
#include "instructions.cuh"

constexpr int C = 64, PITCH = KEYS + 1, STEP = 4, PAIRS = STEP * (STEP + 1) / 2, SPLIT = KEYS / 32;
constexpr int ROWS = (C * PITCH + 3) / 4 * 4, NOW = 2 * STEP * KEYS, INNER = 2 * PAIRS * PITCH;
constexpr int WORDS = ROWS + NOW + INNER + 2 * STEP * SPLIT * C + 2 * PAIRS;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS) key_pairs(
    const float* x, const float* y, const float* log_decay, float* found, int keys, int groups) {
    SHARED;
    float *const rows = (float*)shared, *const now = rows + ROWS, *const inner = now + NOW, *const sums = inner + INNER;
    float* const inner_sums = sums + 2 * STEP * SPLIT * C;
    const i64 item = blockIdx.x;
    const int key = threadIdx.x, lane = key % 32, part = key / 32;
    const bool inside = key < keys;
    x += item * 2 * C * keys + key, y += item * C * keys + key, log_decay += item / groups * C * keys + key;
    found += item * C * 2 * C;
    float k_next[STEP], q_next[STEP], y_next[STEP], g_next[STEP];
    auto load = [&](int t) {
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            const int at = (t + i) * keys;
            k_next[i] = inside ? x[at] : 0.f, q_next[i] = inside ? x[at + C * keys] : 0.f;
            y_next[i] = inside ? y[at] : 0.f, g_next[i] = inside ? log_decay[at] : 0.f;
        }
    };
    load(0);
    for (int t = 0; t < C; t += STEP) {
        float a[STEP], last[STEP], kept = 1.f;
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            a[i] = expf(g_next[i]), kept *= a[i];
            now[i * KEYS + key] = k_next[i] * kept, now[(STEP + i) * KEYS + key] = q_next[i] * kept;
        }
        int n = 0;
#pragma unroll
        for (int j = 0; j < STEP; j++) {  // pairs among the four
            float r = y_next[j];
#pragma unroll
            for (int i = j; i < STEP; i++, n++) {
                if (i > j) r *= a[i];
                inner[n * PITCH + key] = k_next[i] * r, inner[(PAIRS + n) * PITCH + key] = q_next[i] * r;
            }
            last[j] = r;
        }
        if (t + STEP < C) load(t + STEP);
        __syncthreads();
#pragma unroll
        for (int half = 0; half < C; half += C / 2) {
            const int s = half + lane;
            if (half >= t) break;  // nothing earlier
            const float *row = rows + s * PITCH + 32 * part, *own = now + 32 * part;
            float sum[2 * STEP];
#pragma unroll
            for (int i = 0; i < 2 * STEP; i++) sum[i] = 0.f;
            if (s < t) {
#pragma unroll 2
                for (int d = 0; d < 32; d += 4) {
                    const float r[4] = {row[d], row[d + 1], row[d + 2], row[d + 3]};
#pragma unroll
                    for (int i = 0; i < 2 * STEP; i++) {
                        const float4 u = *(const float4*)(own + i * KEYS + d);
                        sum[i] += u.x * r[0] + u.y * r[1] + (u.z * r[2] + u.w * r[3]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2 * STEP; i++) sums[(i * SPLIT + part) * C + s] = sum[i];
        }
        for (int n = part; n < 2 * PAIRS; n += SPLIT) {
            float sum = 0.f;
#pragma unroll
            for (int d = 0; d < KEYS; d += 32) sum += inner[n * PITCH + d + lane];
#pragma unroll
            for (int by = 16; by; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
            if (lane == 0) inner_sums[n] = sum;
        }
        __syncthreads();
        for (int at = key; at < 2 * C; at += THREADS) {
            const int s = at % C, kind = at / C;
            float to[STEP];
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                const int j = s - t;  // of the four, if it is one of them
                to[i] = 0.f;
                if (j < 0)
                    for (int p = 0; p < SPLIT; p++) to[i] += sums[((kind * STEP + i) * SPLIT + p) * C + s];
                else if (j <= i)
                    to[i] = inner_sums[kind * PAIRS + j * STEP - j * (j - 1) / 2 + i - j];
            }
            *(float4*)(found + s * 2 * C + kind * C + t) = {to[0], to[1], to[2], to[3]};
        }
        for (int s = 0; s < t; s++) rows[s * PITCH + key] *= kept;
#pragma unroll
        for (int j = 0; j < STEP; j++) rows[(t + j) * PITCH + key] = last[j];
    }
}
