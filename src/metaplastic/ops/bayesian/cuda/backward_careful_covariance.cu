// The recursion of the covariances' gradients (backward_covariance.cu) of sequences that have a careful chunk, in float64.
// There P after a chunk may be a thousandth of what it was before and its gradient as much larger, of which
//     Y = P U^T     S = U Y     Z = last Y - (R^T + G^T S) / 2     P0 = last^2 P - Z G - (Z G)^T
// takes nearly all away again. G's rows must lie where the keys do: G is L^-1 times keys and decays as they are. Where a
// chunk is careful L^-1 is in float64, and U and R nearly so. A few blocks walk all such heads; rooms are in device
// memory.
#include "backward_careful.cuh"

constexpr i64 ROOM = KEYS * KEYS + 3 * C * KEYS + C * C;
enum { DECAY, ENTRY, ROOT, ROWS };  // of every token, double
constexpr int WORDS = 2 * (ROWS * C + 2 * 8 + STAGE) + 8;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_careful_covariance(
    const u16* k, const float* log_decay, const float* observation, const float* covariances, const signed char* rests,
    const int* entry_careful, const float* whitenings, const float* whitening_rests, const u16* gain,
    const u16* gain_rests, u16* source, const u16* source_rests, const float* d_final, const i64* table,
    const i64* chunks, u16* between, float* scales, float* d_initial, double* rooms, int sequences, int heads) {
    SHARED;
    double *const decay = (double*)shared, *const entry = decay + ENTRY * C, *const root = decay + ROOT * C;
    double *const sums = decay + ROWS * C, *const stage = sums + 2 * 8;
    Peaks peaks(stage + STAGE);
    const int thread = threadIdx.x;
    double *const d = rooms + blockIdx.x * ROOM, *const G = d + KEYS * KEYS;
    double *const y = G + C * KEYS, *const z = y + C * KEYS, *const s_of = z + C * KEYS;

    for (i64 item = blockIdx.x; item < (i64)sequences * heads; item += gridDim.x) {
        const i64 sequence = item / heads, first = chunks[sequence], end = chunks[sequence + 1];
        const int head = (int)(item % heads);
        if (!has_careful(scales, first, end, heads, head)) continue;
        for (int i = thread; i < KEYS * KEYS; i += THREADS) d[i] = d_final ? d_final[item * KEYS * KEYS + i] : 0.;
        for (i64 chunk = end - 1; chunk >= first; chunk--) {
            const i64 index = chunk * heads + head, start = table[2 * chunk];
            const int tokens = (int)table[2 * chunk + 1];
            float* const number = scales + index * SCALES;
            const bool careful = number[CAREFUL] != 0.f;
            const float u_down = number[GAIN], r_down = number[SOURCE];
            const u16* const u = gain + index * 2 * C * KEYS;
            u16* const r = source + index * 2 * C * KEYS;
            const Entry p(covariances, rests, entry_careful, index);
            if (thread < C) {
                const i64 token = (start + thread) * heads + head;
                decay[thread] = thread < tokens ? (double)log_decay[token] : 0.;
                root[thread] = thread < tokens ? 1. / sqrt((double)observation[token]) : 1.;
            }
            __syncthreads();
            if (thread < C) {
                double sum = 0.;
                for (int t = 0; t <= thread; t++) sum += decay[t];
                entry[thread] = exp(sum);
            }
            double with_prior = 0., trace = 0.;
            for (int i = thread; i < KEYS * KEYS; i += THREADS) {
                with_prior += d[i] * p(i / KEYS, i % KEYS);
                if (i / KEYS == i % KEYS) trace += d[i];
            }
#pragma unroll
            for (int by = 16; by; by /= 2) {
                with_prior += __shfl_xor_sync(~0u, with_prior, by), trace += __shfl_xor_sync(~0u, trace, by);
            }
            if (thread % 32 == 0) sums[thread / 32] = with_prior, sums[8 + thread / 32] = trace;
            __syncthreads();
            const double last = entry[C - 1];
            if (thread == 0) {
                with_prior = trace = 0.;
                for (int i = 0; i < THREADS / 32; i++) with_prior += sums[i], trace += sums[8 + i];
                number[WITH_COVARIANCE] = (float)with_prior, number[TRACE] = (float)trace;
                number[WITH_COVARIANCE_REST] = (float)(with_prior - number[WITH_COVARIANCE]);
            }
            const float *const u_rest = (const float*)(gain_rests + index * 2 * C * KEYS);
            const float *const r_rest = (const float*)(source_rests + index * 2 * C * WIDE);
            auto both = [&](const u16* x, float down, const float* rest, int t, int i) {
                return element(x, KEYS, down, t, i) + (careful ? rest[t * KEYS + i] : 0.f);
            };
            auto u_at = [&](int t, int i) { return both(u, u_down, u_rest, t, i); };
            product<KEYS, PLAIN>(stage, C,
                [&](int t, int s) {
                    const i64 at = index * C * C + t * C + s;
                    const double inverse = (double)whitenings[at] + (careful ? whitening_rests[at] : 0.f);
                    return s > t ? 0. : entry[s] * root[s] * inverse;
                },
                [&](int s, int i) {
                    return s < tokens ? (double)low_bf16(k[((start + s) * heads + head) * KEYS + i]) : 0.;
                },
                [&](int t, int i, double x) { G[t * KEYS + i] = x; });
            product<KEYS, PLAIN>(stage, KEYS, u_at, [&](int i, int j) { return d[i * KEYS + j]; },
                [&](int t, int j, double x) { y[t * KEYS + j] = x; });
            __syncthreads();
            product<C, B_TURNED>(stage, KEYS, u_at, [&](int i, int s) { return y[s * KEYS + i]; },
                [&](int t, int s, double x) { s_of[t * C + s] = x; });
            __syncthreads();
            product<KEYS, PLAIN>(stage, C, [&](int t, int s) { return s_of[t * C + s]; },
                [&](int s, int i) { return G[s * KEYS + i]; },
                [&](int t, int i, double x) {
                    z[t * KEYS + i] = last * y[t * KEYS + i] - .5 * (both(r, r_down, r_rest, t, i) + x);
                });
            __syncthreads();
            give<KEYS>(r, number + SOURCE, y, peaks);
            give<C>(between + index * 2 * C * C, number + WEIGHTS, s_of, peaks);
            auto row = [&](const double* x, const double* then, int t) {
                return t < C ? x + t * KEYS : then + (t - C) * KEYS;
            };
            for (int from = 0; from < KEYS; from += C)
                product<KEYS, A_TURNED>(stage, 2 * C, [&](int i, int t) { return row(z, G, t)[from + i]; },
                    [&](int t, int j) { return row(G, z, t)[j]; },
                    [&](int i, int j, double x) {
                        double& to = d[(from + i) * KEYS + j];
                        to = last * last * to - x;
                    });
            __syncthreads();
            if (thread == 0) leave(number);
        }
        __syncthreads();
        for (int i = thread; i < KEYS * KEYS; i += THREADS)
            d_initial[item * KEYS * KEYS + i] = (float)((d[i] + d[i % KEYS * KEYS + i / KEYS]) / 2);
        __syncthreads();
    }
}
