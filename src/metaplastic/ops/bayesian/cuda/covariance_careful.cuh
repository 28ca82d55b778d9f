// U of a chunk where a token is far less certain than its noise, in float64, by the four helping warps.
//
// There A = 1 + something large, and L^-1 takes large numbers from each other: in float32 every row of U would have
// errors of its own, along directions that no key corrects, and M keeps what is written there. W, 16 keys at a time, A,
// its factor and L^-1 are made once more from P (in memory), keys and decays as they are. From there on a key may be far
// more certain than others, P k what is left of large numbers: W is summed in float64 too, to a sequence's end.
#pragma once
#include "shapes.cuh"

enum { ALL = 1, HELPERS = 2, HOLDERS = 3, FACTORING = 4 };  // who meets; FACTORING: warps 0 to 8
constexpr int AT_A_TIME = 16, LINE = AT_A_TIME + 1, TRIANGLE = C * (C + 1) / 2;
constexpr int CAREFUL_ROOM = TRIANGLE + C * LINE;  // doubles
constexpr float LARGEST_PIVOT = 64.f;              // variance of a token over its noise

// Whether a chunk is such a one, from its factor: the inverses of its diagonal blocks have 1 / L_tt on their diagonals.
__device__ __forceinline__ bool hard(const float* factors, int lane) {
    const float x = factors[lane * (ROW + 1)], y = factors[(lane + 32) * (ROW + 1)];
    return __ballot_sync(~0u, LARGEST_PIVOT * x * x < 1.f || LARGEST_PIVOT * y * y < 1.f) != 0;
}

// By Newton's steps: a division of float64 is a call, which costs all code around it registers.
__device__ __forceinline__ double inverse_root(double x) {
    double r = reciprocal_root((float)x);
    UNROLL for (int i = 0; i < 3; i++) r *= 1.5 - 0.5 * x * r * r;
    return r;
}

// 16 rows of U^T U, from U^T, to memory.
__device__ __forceinline__ void careful_product(float* to, const float* gain, int row, int g, int t) {
#pragma unroll 1
    for (int n = 0; n < KEYS / 8; n++) {
        double sum[2][2] = {{0., 0.}, {0., 0.}};
#pragma unroll 4
        for (int s = t; s < C; s += 4) {
            const double right = gain[(8 * n + g) * ROW + s];
            multiply_double(sum[0], gain[row * ROW + s], right);
            multiply_double(sum[1], gain[(row + 8) * ROW + s], right);
        }
        UNROLL for (int i = 0; i < 2; i++)
            put_pair(to + (row + 8 * i) * KEYS + 8 * n + 2 * t, (float)sum[i][0], (float)sum[i][1]);
    }
}
// 16 columns of K P, from these rows of P in memory.
__device__ __forceinline__ void careful_spread(float* spread, const float* P, const u32* keys, int row, int g, int t) {
#pragma unroll 1
    for (int n0 = 0; n0 < 8; n0 += 4) {
        double sum[2][4][2];
        UNROLL for (int n = 0; n < 4; n++) UNROLL for (int x = 0; x < 4; x++) sum[x / 2][n][x % 2] = 0.;
#pragma unroll 2
        for (int kk = 0; kk < KEYS / 8; kk++) {
            const float2 x = pair_at(P + row * KEYS + 8 * kk + 2 * t), y = pair_at(P + (row + 8) * KEYS + 8 * kk + 2 * t);
            UNROLL for (int n = 0; n < 4; n++) {
                const float2 key = key_pair(keys, 8 * (n0 + n) + g, kk, t);
                multiply_double(sum[0][n], x.x, key.x), multiply_double(sum[0][n], x.y, key.y);
                multiply_double(sum[1][n], y.x, key.x), multiply_double(sum[1][n], y.y, key.y);
            }
        }
        UNROLL for (int n = 0; n < 4; n++) UNROLL for (int x = 0; x < 4; x++)
            spread[(8 * (n0 + n) + 2 * t + x % 2) * SPREAD_ROW + row + 8 * (x / 2)] = (float)sum[x / 2][n][x % 2];
    }
}

__device__ __forceinline__ void careful_gains(double* room, const Scan& scan, i64 slot, const float* P, const u32* keys,
                                              const float* vectors, float* gain, int own) {
    double *const L = room, *const slice = room + TRIANGLE;  // L by rows, then L^-1
    const int row = own / 2, from = own % 2 * 8;             // of a slice
    auto at = [](int t, int s) { return t * (t + 1) / 2 + s; };
    auto key = [&](int t, int d) {
        if (FULL) return (double)((const float*)keys)[t * KEY_ROW + d];
        return (double)vectors[ENTERED + t] * low_bf16(((const u16*)keys)[t * 2 * KEY_ROW + d]);
    };
    auto slice_of_w = [&](int d0) {
        double sum[8];
        for (int i = 0; i < 8; i++) sum[i] = 0.;
#pragma unroll 2
        for (int i = 0; i < KEYS; i++) {
            const double x = key(row, i);
            UNROLL for (int j = 0; j < 8; j++) sum[j] += x * P[i * KEYS + d0 + from + j];
        }
        UNROLL for (int j = 0; j < 8; j++) slice[row * LINE + from + j] = sum[j];
    };
    for (int i = own; i < C * C; i += 128)
        if (i % C <= i / C) L[at(i / C, i % C)] = scan.known[(slot * C + i / C) * ROW + i % C];
#pragma unroll 1
    for (int d0 = 0; d0 < KEYS; d0 += AT_A_TIME) {
        slice_of_w(d0);
        meet(HELPERS, 128);
#pragma unroll 1
        for (int i = own; i < C * C; i += 128) {
            const int t = i / C, s = i % C;
            if (s > t) continue;
            double sum = 0.;
            for (int j = 0; j < AT_A_TIME; j++) sum += slice[t * LINE + j] * key(s, d0 + j);
            L[at(t, s)] += sum;
        }
        meet(HELPERS, 128);
    }
#pragma unroll 1
    for (int j = 0; j < C; j++) {
        const double root = inverse_root(L[at(j, j)]), pivot = root * root;
#pragma unroll 1
        for (int i = own; i < C * C; i += 128) {
            const int t = i / C, s = i % C;
            if (s > j && s <= t) L[at(t, s)] -= L[at(t, j)] * L[at(s, j)] * pivot;
        }
        meet(HELPERS, 128);
    }
    if (own < C) slice[own] = inverse_root(L[at(own, own)]);
    meet(HELPERS, 128);
    // L = A's columns times these roots; its inverse takes its place row by row.
#pragma unroll 1
    for (int t = 0; t < C; t++) {
        double x = own == t ? 1. : 0.;
        if (own < t)
            for (int s = own; s < t; s++) x -= L[at(t, s)] * slice[s] * L[at(s, own)];
        meet(HELPERS, 128);
        if (own <= t) L[at(t, own)] = x * slice[t];
        meet(HELPERS, 128);
    }
#pragma unroll 1
    for (int d0 = 0; d0 < KEYS; d0 += AT_A_TIME) {
        meet(HELPERS, 128);
        slice_of_w(d0);
        UNROLL for (int j = from; j < from + 8; j++)
            slice[row * LINE + j] = last_decay(vectors, d0 + j) * slice[row * LINE + j]
                                    + sent(scan, slot, keys, vectors, row, d0 + j);
        meet(HELPERS, 128);
        double sum[8];
        for (int j = 0; j < 8; j++) sum[j] = 0.;
#pragma unroll 1
        for (int s = 0; s <= row; s++)
            UNROLL for (int j = 0; j < 8; j++) sum[j] += L[at(row, s)] * slice[s * LINE + from + j];
        UNROLL for (int j = 0; j < 8; j++) gain[(d0 + from + j) * ROW + row] = (float)sum[j];
    }
}
