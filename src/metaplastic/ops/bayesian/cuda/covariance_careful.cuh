// U of a chunk where a token may be far less certain than its noise, or is far more certain than the least certain key
// is, in float64, by the four helping warps.
//
// In the first case A may be 1 + something large, and L^-1 takes large numbers from each other: in float32 every row of
// U would have errors of its own, along directions that no key corrects, and M keeps what is written there. In the
// second P k is what is left of large numbers. W (by the warps that hold P), A, its factor and L^-1 are made once more
// from P, keys and decays as they are. From there to the sequence's end P is the sum of two float32 numbers, and W is
// summed in float64.
#pragma once
#include "care.cuh"

enum { ALL = 1, HOLDERS = 2 };  // who meets; HOLDERS: warps 0 to 7

#ifdef EMULATED
static inline void wait_for(u64* barrier, int parity) { barrier_wait(barrier, parity); }
#else
// As barrier_wait, asleep for a while at a time: who waits here shares a scheduler with who is waited for.
__device__ __forceinline__ void wait_for(u64* barrier, int parity) {
    u32 complete;
    do
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(complete) : "r"((u32)__cvta_generic_to_shared(barrier)), "r"(parity) : "memory");
    while (!complete);
}
#endif
constexpr int AT_A_TIME = 16, LINE = AT_A_TIME + 1, TRIANGLE = C * (C + 1) / 2;
constexpr int CAREFUL_ROOM = TRIANGLE + C * LINE;  // doubles

// By Newton's steps: a division of float64 is a call, which costs all code around it registers.
__device__ __forceinline__ double inverse_root(double x) {
    double r = reciprocal_root((float)x);
    UNROLL for (int i = 0; i < 3; i++) r *= 1.5 - 0.5 * x * r * r;
    return r;
}

__device__ __forceinline__ void renew(float* P, float* rest, double taken, const float* vectors, int i, int j) {
    const int at = i * KEYS + j;
    const double both = (double)last_decay(vectors, i) * last_decay(vectors, j);
    const double p = both * ((double)P[at] + rest[at]) - taken + gathered_noise(vectors, i, j);
    P[at] = (float)p, rest[at] = (float)(p - (float)p);
}
// 16 rows of P in memory, and what float32 leaves of them, after the chunk; from U^T and what float32 leaves of that.
__device__ __forceinline__ void careful_update(float* P, float* rest, const float* gain, const float* gain_rest,
                                               const float* vectors, int row, int g, int t) {
#pragma unroll 1
    for (int n = 0; n < KEYS / 8; n++) {
        double sum[2][2] = {{0., 0.}, {0., 0.}};
        auto u = [&](int d, int s) { return (double)gain[d * ROW + s] + gain_rest[d * ROW + s]; };
#pragma unroll 4
        for (int s = t; s < C; s += 4) {
            const double right = u(8 * n + g, s);
            multiply_double(sum[0], u(row, s), right), multiply_double(sum[1], u(row + 8, s), right);
        }
        UNROLL for (int x = 0; x < 4; x++)
            renew(P, rest, sum[x / 2][x % 2], vectors, row + 8 * (x / 2), 8 * n + 2 * t + x % 2);
    }
}
// The same of a chunk that float32 is enough for: U^T U is there.
__device__ __forceinline__ void take_away(float* P, float* rest, const float* taken, const float* vectors, int row,
                                          int t) {
#pragma unroll 1
    for (int j = 2 * t; j < KEYS; j += 8) UNROLL for (int x = 0; x < 4; x++) {
        const int i = row + 8 * (x / 2), at = i * KEYS + j + x % 2;
        renew(P, rest, taken[at], vectors, i, j + x % 2);
    }
}
// The same rows of what float32 leaves of P: nothing as yet, or for the backward pass.
__device__ __forceinline__ void no_rest(float* rest, int row, int t) {
#pragma unroll 1
    for (int at = row * KEYS + 2 * t; at < (row + 1) * KEYS; at += 8)
        put_pair(rest + at, 0.f, 0.f), put_pair(rest + at + 8 * KEYS, 0.f, 0.f);
}
__device__ __forceinline__ void copy_rest(u16* to, const float* P, const float* rest, int row, int t) {
    auto code = [&](int at) { return (u32)rest_code(P[at], rest[at]) & 255; };
#pragma unroll 1
    for (int at = row * KEYS + 2 * t; at < (row + 1) * KEYS; at += 8)
        for (int i = at; i <= at + 8 * KEYS; i += 8 * KEYS) to[i / 2] = (u16)(code(i) | code(i + 1) << 8);
}
// 16 columns of K P, from these rows of P in memory: put(token, key, x).
template <class F>
__device__ __forceinline__ void careful_spread(const float* P, const float* rest, const u32* keys, int row, int g,
                                               int t, F put) {
#pragma unroll 1
    for (int n0 = 0; n0 < 8; n0 += 4) {
        double sum[2][4][2];
        UNROLL for (int n = 0; n < 4; n++) UNROLL for (int x = 0; x < 4; x++) sum[x / 2][n][x % 2] = 0.;
#pragma unroll 2
        for (int kk = 0; kk < KEYS / 8; kk++) {
            double p[2][2];
            UNROLL for (int i = 0; i < 2; i++) {
                const int at = (row + 8 * i) * KEYS + 8 * kk + 2 * t;
                const float2 x = pair_at(P + at), y = pair_at(rest + at);
                p[i][0] = (double)x.x + y.x, p[i][1] = (double)x.y + y.y;
            }
            UNROLL for (int n = 0; n < 4; n++) {
                const float2 key = key_pair(keys, 8 * (n0 + n) + g, kk, t);
                UNROLL for (int i = 0; i < 2; i++)
                    multiply_double(sum[i][n], p[i][0], key.x), multiply_double(sum[i][n], p[i][1], key.y);
            }
        }
        UNROLL for (int n = 0; n < 4; n++) UNROLL for (int x = 0; x < 4; x++)
            put(8 * (n0 + n) + 2 * t + x % 2, row + 8 * (x / 2), sum[x / 2][n][x % 2]);
    }
}

__device__ __forceinline__ void careful_gains(double* room, const Scan& scan, i64 slot, const double* spread,
                                              const u32* keys, const float* vectors, float* gain, float* gain_rest,
                                              float* factors, u64 hard, u64* helping, int own) {
    double *const L = room, *const slice = room + TRIANGLE;  // L by rows, then L^-1
    const int row = own / 2, from = own % 2 * 8;             // of a slice
    auto at = [](int t, int s) { return t * (t + 1) / 2 + s; };
    int phase = 0;
    auto together = [&] { barrier_arrive(helping), wait_for(helping, phase), phase ^= 1; };
    auto key = [&](int t, int d) {
        if (FULL) return (double)((const float*)keys)[t * KEY_ROW + d];
        return (double)vectors[ENTERED + t] * low_bf16(((const u16*)keys)[t * 2 * KEY_ROW + d]);
    };
    auto added = [&](int t, int d) {
        if (FULL) return (double)sent(scan, slot, keys, vectors, t, d);
        return (double)vectors[SENT + t] * low_bf16(((const u16*)keys)[t * 2 * KEY_ROW + d]);
    };
    auto slice_of_w = [&](int d0) {
        const double by = FULL ? 1. : vectors[ENTERED + row];
        UNROLL for (int j = from; j < from + 8; j++) slice[row * LINE + j] = by * spread[row * KEYS + d0 + j];
    };
    for (int i = own; i < C * C; i += 128)
        if (i % C <= i / C) L[at(i / C, i % C)] = scan.known[(slot * C + i / C) * ROW + i % C];
#pragma unroll 1
    for (int d0 = 0; d0 < KEYS; d0 += AT_A_TIME) {
        slice_of_w(d0);
        together();
#pragma unroll 1
        for (int i = own; i < C * C; i += 128) {
            const int t = i / C, s = i % C;
            if (s > t) continue;
            double sum = 0.;
            for (int j = 0; j < AT_A_TIME; j++) sum += slice[t * LINE + j] * key(s, d0 + j);
            L[at(t, s)] += sum;
        }
        together();
    }
#pragma unroll 1
    for (int j = 0; j < C; j++) {
        const double root = inverse_root(L[at(j, j)]), pivot = root * root;
#pragma unroll 1
        for (int i = own; i < C * C; i += 128) {
            const int t = i / C, s = i % C;
            if (s > j && s <= t) L[at(t, s)] -= L[at(t, j)] * L[at(s, j)] * pivot;
        }
        together();
    }
    if (own < C) slice[own] = inverse_root(L[at(own, own)]);
    together();
    // L = A's columns times these roots; its inverse takes its place row by row. From the first such token on both take
    // the place of the factor, for e and the read-outs: what came before does not know of that token.
    int first = 0;
    while (!(hard >> first & 1)) first++;
    for (int i = first * C + own; i < C * C; i += 128)
        if (i / C / 16 > i % C / 16) factors[i / C * ROW + i % C] = (float)(L[at(i / C, i % C)] * slice[i % C]);
#pragma unroll 1
    for (int t = 0; t < C; t++) {
        double x = own == t ? 1. : 0.;
        if (own < t)
            for (int s = own; s < t; s++) x -= L[at(t, s)] * slice[s] * L[at(s, own)];
        together();
        if (own <= t) L[at(t, own)] = x * slice[t];
        together();
    }
    for (int i = first * C + own; i < C * C; i += 128) {
        const int t = i / C, s = i % C;
        if (s <= t && t / 16 == s / 16) factors[t * ROW + s] = (float)L[at(t, s)];
    }
#pragma unroll 1
    for (int d0 = 0; d0 < KEYS; d0 += AT_A_TIME) {
        together();
        slice_of_w(d0);
        UNROLL for (int j = from; j < from + 8; j++)
            slice[row * LINE + j] = last_decay(vectors, d0 + j) * slice[row * LINE + j]
                                    + added(row, d0 + j);
        together();
        double sum[8];
        for (int j = 0; j < 8; j++) sum[j] = 0.;
#pragma unroll 1
        for (int s = 0; s <= row; s++)
            UNROLL for (int j = 0; j < 8; j++) sum[j] += L[at(row, s)] * slice[s * LINE + from + j];
        UNROLL for (int j = 0; j < 8; j++) {
            const int to = (d0 + from + j) * ROW + row;
            gain[to] = (float)sum[j], gain_rest[to] = (float)(sum[j] - (float)sum[j]);
        }
    }
    together();  // an even number of times: the next chunk begins as this one did
}
