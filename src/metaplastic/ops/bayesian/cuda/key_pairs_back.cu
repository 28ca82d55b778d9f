// The adjoint of key_pairs.cu: of the gradient m[s, t] of what it finds, where s <= t,
//     dx_t = sum_s m[s, t] R[t, s] y_s        dy_s = sum_t m[s, t] R[t, s] x_t
// A thread has one key, and what decays in registers.
#define THREADS KEYS
#include "instructions.cuh"

constexpr int C = 64, PITCH = 2 * C + 4;
constexpr int WORDS = C * PITCH + 2 * C * (C + 4);
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, 256 / KEYS) key_pairs_back(
    const float* d_found, const float* x, const float* y, const float* log_decay, float* dx, float* dy, int keys,
    int groups) {
    SHARED;
    float *const m = (float*)shared, *const turned = m + C * PITCH;  // [s][t], [t][s] with a row for either kind
    const i64 item = blockIdx.x;
    const int key = threadIdx.x;
    d_found += item * C * 2 * C;
    for (int i = key; i < C * 2 * C; i += THREADS) {
        const int s = i / (2 * C), t = i % (2 * C);
        m[s * PITCH + t] = turned[t * (C + 4) + s] = d_found[i];
    }
    __syncthreads();
    if (key >= keys) return;
    x += item * 2 * C * keys + key, y += item * C * keys + key, log_decay += item / groups * C * keys + key;
    dx += item * 2 * C * keys + key, dy += item * C * keys + key;
    {
        float r[C];  // R[t, s] y_s
#pragma unroll
        for (int s = 0; s < C; s++) r[s] = 0.f;
        for (int t = 0; t < C; t++) {
            const float a = expf(log_decay[t * keys]), own = y[t * keys];
            const float *of_key = turned + t * (C + 4), *of_query = of_key + C * (C + 4);
            float k_sum = 0.f, q_sum = 0.f;
#pragma unroll
            for (int s = 0; s < C; s += 4) {
                if (s > t) continue;  // the same for all threads
                const float4 u = *(const float4*)(of_key + s), w = *(const float4*)(of_query + s);
#pragma unroll
                for (int i = 0; i < 4; i++) r[s + i] *= a;
                if (s + 4 > t) {
#pragma unroll
                    for (int i = 0; i < 4; i++) r[s + i] = s + i == t ? own : r[s + i];
                }
                k_sum += u.x * r[s] + u.y * r[s + 1] + (u.z * r[s + 2] + u.w * r[s + 3]);
                q_sum += w.x * r[s] + w.y * r[s + 1] + (w.z * r[s + 2] + w.w * r[s + 3]);
            }
            dx[t * keys] = k_sum, dx[(C + t) * keys] = q_sum;
        }
    }
    for (int kind = 0; kind < 2; kind++) {
        float r[C], a = 0.f;  // R[t, s] x_t
        const float* of = x + kind * C * keys;
#pragma unroll
        for (int t = 0; t < C; t++) r[t] = 0.f;
        for (int s = C - 1; s >= 0; s--) {
            const float own = of[s * keys];
            const float* row = m + s * PITCH + kind * C;
            float sum = 0.f;
#pragma unroll
            for (int t = 0; t < C; t += 4) {
                if (t + 4 <= s) continue;
                const float4 u = *(const float4*)(row + t);
#pragma unroll
                for (int i = 0; i < 4; i++) r[t + i] *= a;
                if (t <= s) {
#pragma unroll
                    for (int i = 0; i < 4; i++) r[t + i] = t + i == s ? own : r[t + i];
                }
                sum += u.x * r[t] + u.y * r[t + 1] + (u.z * r[t + 2] + u.w * r[t + 3]);
            }
            a = expf(log_decay[s * keys]);
            dy[s * keys] = kind ? dy[s * keys] + sum : sum;
        }
    }
}
