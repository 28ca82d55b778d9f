// The chunks that backward_open.cu marks, in float64: those that might find a token far less certain than its noise, or
// have one far more certain than the least certain key is. There A may be 1 + something large, from which L^-1 takes
// large numbers, or W what is left of large ones, and 22 bits of the rest are too few.
//
// Phase 0, after backward_open.cu: what the recursions need, U, G, F and e and Z, in the place of what is there.
// Phase 1, after backward_source.cu: R once more. Of it, and of what later chunks send, the gradient of a prior that
// they have all but erased is a millionth: for backward_careful_covariance.cu what 22 bits leave of U and R, and float32
// of L^-1, takes the place of G, of dU0 and of dZ, needed till now.
// Phase 2, instead of backward_known.cu and backward_inputs.cu: the gradients of q, k, the decay and both noises. L^-1
// is applied first to what it makes small, and nothing is subtracted that was added before:
//     dW = L^-T (dZ^T Qg + last dU - H G / 2)
//     dKg = dW P0 - L^-T H (L^-1 W) / 2 - dVt M0^T          dQg = dZ (L^-1 W) + dY M0^T
//     dg_u = what crosses u: sums over s < u <= t of pairs, of reads after u, of writes before it that reach the end
// All else as in backward_inputs.cu. A few blocks look through all chunks; rooms are in device memory.
#include "backward_careful.cuh"

// Matrices of a block in device memory, 64 rows of double; in phase 1, when memory is short, some take another's place.
constexpr i64 OF_KEYS = C * KEYS, OF_VALUES = C * VALUES, OF_TOKENS = C * C;
constexpr i64 ROOM = 8 * OF_KEYS + 3 * OF_VALUES + 5 * OF_TOKENS;
constexpr i64 SMALL_ROOM = 3 * OF_KEYS + 2 * OF_VALUES + 3 * OF_TOKENS;
enum { DECAY, ENTRY, TAIL, GATHERED, ADDED, ROOT, SCALED, ROWS };  // of every token, double
constexpr int WORDS = 2 * (3 * C * LINE + ROWS * C + 2 * C + STAGE) + 8;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_careful(
    const u16* q, const u16* k, const u16* v, const u16* d_output, const float* log_decay, const float* process,
    const float* observation, const float* means, const float* covariances, const signed char* rests,
    const int* entry_careful, const float* whitenings, const i64* table, const float* d_means, const u16* square,
    const u16* reached, u16* gain, u16* closed, u16* read, u16* innovation, u16* weights, float* whitening_rests,
    u16* dq, u16* dk, float* dg, float* d_process, float* d_observation, float* scales, double* rooms, int chunks,
    int heads, int phase, double scale) {
    SHARED;
    double *const ratio = (double*)shared, *const L = ratio + C * LINE, *const inverse = L + C * LINE;
    double *const decay = inverse + C * LINE, *const entry = decay + ENTRY * C, *const tail = decay + TAIL * C;
    double *const gathered = decay + GATHERED * C, *const added = decay + ADDED * C, *const root = decay + ROOT * C;
    double *const scaled = decay + SCALED * C, *const sums = decay + ROWS * C, *const others = sums + C;
    double* const stage = others + C;
    Peaks peaks(stage + STAGE);
    const int thread = threadIdx.x;
    const bool between = phase == 1;
    double* const room = rooms + blockIdx.x * (between ? SMALL_ROOM : ROOM);
    double *const W = room, *const LW = W + OF_KEYS, *const U = LW + OF_KEYS, *const G = between ? W : U + OF_KEYS;
    double *const e = between ? U + OF_KEYS : G + 5 * OF_KEYS, *const Z = e + (between ? 2 : 3) * OF_VALUES;

    const i64 count = (i64)chunks * heads;
    if (!any_careful(scales, blockIdx.x, count, gridDim.x)) return;
    for (i64 index = blockIdx.x; index < count; index += gridDim.x) {
        float* const number = scales + index * SCALES;
        if (number[CAREFUL] == 0.f) continue;
        __syncthreads();
        const i64 chunk = index / heads, first = table[2 * chunk];
        const int head = (int)(index % heads), tokens = (int)table[2 * chunk + 1];
        auto token = [&](int t) { return (first + t) * heads + head; };
        auto of_token = [&](const u16* x, int t, int i, int size) {
            return t < tokens ? (double)low_bf16(x[token(t) * size + i]) : 0.;
        };
        const Entry p(covariances, rests, entry_careful, index);
        const float* const m = means + index * KEYS * VALUES;  // M^T
        if (thread < C) {
            const bool valid = thread < tokens;
            decay[thread] = valid ? (double)log_decay[token(thread)] : 0.;
            added[thread] = valid ? (double)process[token(thread)] : 0.;
            root[thread] = valid ? 1. / sqrt((double)observation[token(thread)]) : 1.;
        }
        __syncthreads();
        if (thread < C) {
            double sum = 0., before = 0.;
            for (int t = 0; t < C; t++) {
                if (t > thread) sum += decay[t];
                if (t <= thread) before += decay[t];
                ratio[t * LINE + thread] = t >= thread ? exp(sum) : 0.;
            }
            entry[thread] = exp(before), scaled[thread] = entry[thread] * root[thread];
        }
        __syncthreads();
        if (thread < C) {
            double sum = 0.;
            for (int s = 0; s <= thread; s++) {
                const double r = ratio[thread * LINE + s];
                sum += r * r * added[s];
            }
            gathered[thread] = sum, tail[thread] = ratio[(C - 1) * LINE + thread];
        }
        __syncthreads();
        const double last = entry[C - 1];
        auto key = [&](int t, int d) { return of_token(k, t, d, KEYS); };
        auto query = [&](int t, int d) { return scale * of_token(q, t, d, KEYS); };
        auto own_key = [&](int t, int d) { return root[t] * key(t, d); };
        auto entered = [&](int t, int d) { return scaled[t] * key(t, d); };
        auto in = [](const double* x, int columns) { return [=](int i, int j) { return x[i * columns + j]; }; };
        auto turned = [](const double* x, int columns) { return [=](int i, int j) { return x[j * columns + i]; }; };
        auto to = [](double* x, int columns) { return [=](int i, int j, double sum) { x[i * columns + j] = sum; }; };
        auto inverted = [&](int t, int s) { return inverse[t * LINE + s]; };
        auto inverted_turned = [&](int t, int s) { return inverse[s * LINE + t]; };

        product<KEYS, PLAIN>(stage, KEYS, entered, p, to(W, KEYS));
        product<C, B_TURNED>(stage, KEYS, own_key, [&](int d, int s) { return own_key(s, d); },
            [&](int t, int s, double x) {
            L[t * LINE + s] = s <= t ? ratio[t * LINE + s] * gathered[s] * x + (s == t ? 1. : 0.) : 0.;
        });
        __syncthreads();
        product<C, B_TURNED>(stage, KEYS, in(W, KEYS), [&](int d, int s) { return entered(s, d); },
            [&](int t, int s, double x) {
            if (s <= t) L[t * LINE + s] += x;
        });
        for (int j = 0; j < C; j++) {  // Cholesky's factor
            __syncthreads();
            const double pivot = 1. / L[j * LINE + j];
            for (int at = thread; at < C * C; at += THREADS) {
                const int t = at / C, s = at % C;
                if (s > j && t >= s) L[t * LINE + s] -= L[t * LINE + j] * L[s * LINE + j] * pivot;
            }
        }
        __syncthreads();
        if (thread < C) sums[thread] = 1. / sqrt(L[thread * LINE + thread]);
        __syncthreads();
        for (int at = thread; at < C * C; at += THREADS) L[at / C * LINE + at % C] *= sums[at % C];
        __syncthreads();
        if (thread < C)
            for (int t = 0; t < C; t++) {
                double x = t == thread ? 1. : 0.;
                for (int s = thread; s < t; s++) x -= L[t * LINE + s] * inverse[s * LINE + thread];
                inverse[t * LINE + thread] = t < thread ? 0. : x * sums[t];
            }
        __syncthreads();
        product<KEYS, PLAIN>(stage, C, inverted, in(W, KEYS), to(LW, KEYS));
        product<C, B_TURNED>(stage, KEYS, query, [&](int d, int s) { return W[s * KEYS + d]; },
            [&](int t, int s, double x) {
            L[t * LINE + s] = s <= t ? entry[t] * x : 0.;  // from here on X, then Z's part
        });
        __syncthreads();
        product<KEYS, PLAIN>(stage, C, inverted, entered, to(G, KEYS));
        product<C, B_TURNED>(stage, KEYS, query, [&](int d, int s) { return own_key(s, d); },
            [&](int t, int s, double x) {
            L[t * LINE + s] += ratio[t * LINE + s] * gathered[s] * x;
        });
        product<KEYS, PLAIN>(stage, C, inverted, [&](int s, int d) { return tail[s] * gathered[s] * own_key(s, d); },
                      [&](int t, int d, double x) { U[t * KEYS + d] = last * LW[t * KEYS + d] + x; });
        double* const residual = e + OF_VALUES;
        product<VALUES, B_TURNED>(stage, KEYS, entered, [&](int d, int c) { return (double)m[c * KEYS + d]; },
            [&](int t, int c, double x) {
            residual[t * VALUES + c] = root[t] * of_token(v, t, c, VALUES) - x;
        });
        __syncthreads();
        product<C, B_TURNED>(stage, C, [&](int t, int s) { return L[t * LINE + s]; }, inverted_turned,
            [&](int t, int s, double x) {
            Z[t * C + s] = s <= t ? x : 0.;
        });
        product<VALUES, PLAIN>(stage, C, inverted, in(residual, VALUES), to(e, VALUES));
        __syncthreads();
        if (phase == 0) {
            double* const F = W;
            product<KEYS, PLAIN>(stage, C, in(Z, C), in(G, KEYS), [&](int t, int d, double x) {
                F[t * KEYS + d] = entry[t] * query(t, d) - x;
            });
            __syncthreads();
            give<KEYS>(gain + index * 2 * C * KEYS, number + GAIN, U, peaks);
            give<KEYS>(closed + index * 2 * C * KEYS, number + CLOSED, G, peaks);
            give<KEYS>(read + index * 2 * C * KEYS, number + READ, F, peaks);
            give<C>(weights + index * 2 * C * C, number + WEIGHTS, Z, peaks);
            give<VALUES>(innovation + index * 2 * C * WIDE, number + INNOVATION, e, peaks);
            continue;
        }
        double *const D = e + OF_VALUES, *const de = D + OF_VALUES;
        double *const d_sent = W, *const d_gain = between ? LW : G + OF_KEYS, *const d_spread = d_gain + OF_KEYS;
        double *const d_key = d_spread + OF_KEYS, *const d_query = d_key + OF_KEYS;
        double *const dZ = Z + OF_TOKENS, *const H = dZ + OF_TOKENS, *const dX = H + OF_TOKENS,
            *const dA = dX + OF_TOKENS;
        const float* const dm = d_means + index * KEYS * VALUES;  // dM^T, after the chunk
        auto reads = [&](int t, int c) { return of_token(d_output, t, c, VALUES); };
        const u16 *const y = reached + index * 2 * C * KEYS, *const s_of = square + index * 2 * C * C;
        const float y_down = number[SOURCE], s_down = number[WEIGHTS];
        product<VALUES, B_TURNED>(stage, KEYS, in(U, KEYS),
            [&](int d, int c) { return (double)dm[c * KEYS + d]; }, to(D, VALUES));
        product<C, B_TURNED>(stage, VALUES, reads, [&](int c, int s) { return e[s * VALUES + c]; },
            [&](int t, int s, double x) {
            dZ[t * C + s] = s <= t ? x : 0.;
        });
        product<KEYS, PLAIN>(stage, VALUES, in(e, VALUES), [&](int c, int d) { return (double)dm[c * KEYS + d]; },
                      [&](int t, int d, double x) {
            d_gain[t * KEYS + d] = x - (between ? 0. : 2. * element(y, KEYS, y_down, t, d));
        });
        __syncthreads();
        product<C, B_TURNED>(stage, VALUES, in(D, VALUES), [&](int c, int s) { return e[s * VALUES + c]; }, to(H, C));
        if (!between)
            product<VALUES, A_TURNED>(stage, C, turned(Z, C), reads, [&](int t, int c, double x) {
                de[t * VALUES + c] = D[t * VALUES + c] + x;
            });
        __syncthreads();
        product<C, A_TURNED>(stage, C, turned(dZ, C), in(Z, C), [&](int t, int s, double x) { H[t * C + s] += x; });
        __syncthreads();
        for (int at = thread; at < C * C; at += THREADS) {
            const int t = at / C, s = at % C;
            if (s > t) continue;
            const double x = H[t * C + s] + H[s * C + t] - (between ? 0. : 2. * element(s_of, C, s_down, t, s));
            H[t * C + s] = x, H[s * C + t] = x;
        }
        __syncthreads();
        double* const R = between ? d_gain : d_key;  // of dW = L^-T R
        product<KEYS, A_TURNED>(stage, C, turned(dZ, C), [&](int t, int d) { return entry[t] * query(t, d); },
                      [&](int t, int d, double x) { R[t * KEYS + d] = x + last * d_gain[t * KEYS + d]; });
        __syncthreads();
        product<KEYS, PLAIN>(stage, C, in(H, C), in(G, KEYS),
            [&](int t, int d, double x) { R[t * KEYS + d] -= .5 * x; });
        if (between) {
            u16* const source = read + index * 2 * C * KEYS;
            __syncthreads();
            give<KEYS>(source, number + SOURCE, R, peaks);
            __syncthreads();
            auto left = [&](float* to, const u16* from, float down, const double* exact) {
                for (int at = thread; at < C * KEYS; at += THREADS)
                    to[at] = (float)(exact[at] - element(from, KEYS, down, at / KEYS, at % KEYS));
            };
            left((float*)(closed + index * 2 * C * KEYS), gain + index * 2 * C * KEYS, number[GAIN], U);
            left((float*)(innovation + index * 2 * C * WIDE), source, number[SOURCE], R);
            for (int at = thread; at < C * C; at += THREADS) {
                const i64 to = index * C * C + at;
                whitening_rests[to] = (float)(inverse[at / C * LINE + at % C] - whitenings[to]);
            }
            continue;
        }
        product<C, PLAIN>(stage, C, in(H, C), inverted, [&](int t, int s, double x) { L[t * LINE + s] = x; });
        product<C, PLAIN>(stage, C, in(dZ, C), inverted, to(dX, C));
        product<C, A_TURNED>(stage, C, inverted_turned, [&](int t, int s) { return L[t * LINE + s]; },
                   [&](int t, int s, double x) { dA[t * C + s] = -.5 * x; });
        product<KEYS, PLAIN>(stage, C, in(H, C), in(LW, KEYS), to(U, KEYS));  // H L^-1 W
        double* const d_residual = D;
        product<VALUES, A_TURNED>(stage, C, inverted_turned, in(de, VALUES), to(d_residual, VALUES));
        __syncthreads();
        product<KEYS, A_TURNED>(stage, C, inverted_turned, in(R, KEYS), to(d_spread, KEYS));
        product<KEYS, A_TURNED>(stage, C, inverted_turned, in(d_gain, KEYS), to(d_sent, KEYS));
        __syncthreads();
        // dKg and dQg
        product<KEYS, A_TURNED>(stage, C, inverted_turned, in(U, KEYS),
            [&](int t, int d, double x) { d_key[t * KEYS + d] = -.5 * x; });
        product<KEYS, PLAIN>(stage, C, in(dZ, C), in(LW, KEYS), to(d_query, KEYS));
        product<KEYS, PLAIN>(stage, KEYS, in(d_spread, KEYS), p,
                      [&](int t, int d, double x) { d_key[t * KEYS + d] += x; });
        product<KEYS, PLAIN>(stage, VALUES, in(d_residual, VALUES),
            [&](int c, int d) { return (double)m[c * KEYS + d]; },
                      [&](int t, int d, double x) { d_key[t * KEYS + d] -= x; });
        product<KEYS, PLAIN>(stage, VALUES, reads, [&](int c, int d) { return (double)m[c * KEYS + d]; },
                      [&](int t, int d, double x) { d_query[t * KEYS + d] += x; });
        // Of the decay, what a token's own key and query, decayed, give: of all tokens from u on.
        __syncthreads();
        row_sums(sums, KEYS, [&](int t, int d) {
            return entry[t] * (own_key(t, d) * d_key[t * KEYS + d] + query(t, d) * d_query[t * KEYS + d]);
        });
        row_sums(others, KEYS, [&](int t, int d) { return d_gain[t * KEYS + d] * LW[t * KEYS + d]; });
        __syncthreads();
        double end = 0., mine = 0.;
        for (int t = 0; t < C; t++) end += others[t];
        for (int i = thread; i < KEYS * VALUES; i += THREADS) mine += (double)dm[i] * m[i];
        __syncthreads();
#pragma unroll
        for (int by = 16; by; by /= 2) mine += __shfl_xor_sync(~0u, mine, by);
        if (thread % 32 == 0) others[thread / 32] = mine;
        __syncthreads();
        for (int i = 0; i < THREADS / 32; i++) end += others[i];
        end = last * (end + 2. * last * ((double)number[WITH_COVARIANCE] + number[WITH_COVARIANCE_REST]));
        // Pairs: with what crosses u in L, by rows; E R and dX R take the place of dA and dX.
        product<C, B_TURNED>(stage, KEYS, own_key, [&](int d, int s) { return own_key(s, d); },
            [&](int t, int s, double x) {
            double& a = dA[t * C + s];
            if (s == t && t < tokens) d_observation[token(t)] = (float)(root[t] * root[t] * a);
            a *= (s == t ? 1. : s < t ? 2. : 0.) * ratio[t * LINE + s];
            L[t * LINE + s] = a * gathered[s] * x;
        });
        product<C, B_TURNED>(stage, KEYS, query, [&](int d, int s) { return own_key(s, d); },
            [&](int t, int s, double x) {
            double& a = dX[t * C + s];
            a = s <= t ? a * ratio[t * LINE + s] : 0.;
            L[t * LINE + s] += a * gathered[s] * x;
        });
        __syncthreads();
        if (thread < C) {
            double sum = 0.;
            for (int s = 0; s < C; s++) {
                const double x = L[thread * LINE + s];
                L[thread * LINE + s] = sum, sum += x;  // of s before u
            }
        }
        row_sums(others, KEYS, [&](int s, int d) {
            return tail[s] * gathered[s] * own_key(s, d) * d_sent[s * KEYS + d];
        });
        __syncthreads();
        if (thread < C) {
            double sum = end;
            for (int t = thread; t < C; t++) sum += sums[t] + L[t * LINE + thread];
            for (int s = 0; s < thread; s++) sum += others[s];
            scaled[thread] = sum, decay[thread] = exp(decay[thread]);  // neither is needed as it was
        }
        // J, then dQ and dK.
        double *const J = G, *const also = U;
        product<KEYS, A_TURNED>(stage, C, turned(dA, C), own_key, [&](int s, int d, double x) {
            J[s * KEYS + d] = x + tail[s] * d_sent[s * KEYS + d];
        });
        product<KEYS, PLAIN>(stage, C, in(dA, C), [&](int s, int d) { return gathered[s] * own_key(s, d); },
            to(also, KEYS));
        product<KEYS, PLAIN>(stage, C, in(dX, C), [&](int s, int d) { return gathered[s] * own_key(s, d); },
                      [&](int t, int d, double x) {
            x += entry[t] * d_query[t * KEYS + d];
            if (t < tokens) dq[token(t) * KEYS + d] = (u16)pack_bf16((float)(scale * x), 0.f);
        });
        __syncthreads();
        product<KEYS, A_TURNED>(stage, C, turned(dX, C), query, [&](int s, int d, double x) { J[s * KEYS + d] += x; });
        __syncthreads();
        for (int i = thread; i < C * KEYS; i += THREADS) {
            const int t = i / KEYS, d = i % KEYS;
            const double x = entry[t] * d_key[i] + also[i] + gathered[t] * J[i];
            if (t < tokens) dk[token(t) * KEYS + d] = (u16)pack_bf16((float)(root[t] * x), 0.f);
        }
        row_sums(sums, KEYS, [&](int t, int d) { return own_key(t, d) * J[t * KEYS + d]; });
        __syncthreads();
        if (thread == 0) {
            double d = number[TRACE];
            for (int t = C - 1; t >= 0; t--) {
                d += sums[t];
                sums[t] = d;
                d *= decay[t] * decay[t];
            }
        }
        __syncthreads();
        if (thread < tokens && thread < C) {
            d_process[token(thread)] = (float)sums[thread];
            dg[token(thread)] = (float)(scaled[thread] + 2. * (gathered[thread] - added[thread]) * sums[thread]);
        }
    }
}
