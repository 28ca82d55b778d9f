// The recursion of the covariances' gradients, from the last chunk of a sequence to its first:
//     Y = P U^T     S = U Y     Z = last Y - (R^T + G^T S) / 2     P0 = last^2 P - Z G - (Z G)^T
// which is Psi^T P Psi + sym(G^T R). A block walks one head of a sequence with P in its registers, 16 rows a warp.
// Writes of every chunk Y^T (over R), S (over Z of the reads), the trace of P and the sum of P times the entry
// covariance.
#define THREADS (2 * KEYS)
#include "backward.cuh"

using Wide = Split<C, KEYS>;
using Tall = Split<KEYS, C>;
using Square = Split<C, C>;
constexpr int PITCH = KEYS + 4, WARPS = THREADS / 32;
enum { OF_Y, OF_S, TILES };
constexpr int WORDS = 3 * Wide::words + Tall::words + Square::words + KEYS * PITCH + 2 * WARPS + 8 * TILES;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_covariance(
    const u16* gain, const u16* closed, u16* source, const float* covariances, const float* vectors,
    const float* d_final, const i64* chunks, u16* between, float* scales, float* d_initial, int heads) {
    SHARED;
    Wide u(shared), loop(shared + Wide::words), r(shared + 2 * Wide::words);
    Tall tall(shared + 3 * Wide::words);
    Square square(shared + 3 * Wide::words + Tall::words);
    float* turned = (float*)(shared + 3 * Wide::words + Tall::words + Square::words);
    float* sums = turned + KEYS * PITCH;
    Peaks peaks(sums + 2 * WARPS);
    i64 sequence = blockIdx.x / heads, first = chunks[sequence], count = chunks[sequence + 1] - first;
    int head = blockIdx.x % heads, warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = 16 * warp + lane / 4;
    int pair = lane % 4 * 2;
    next_may_begin();
    if (has_careful(scales, first, first + count, heads, head)) return;  // backward_careful_covariance.cu did it

    float p[KEYS / 8][4];
    auto of = [&](int n, int i) { return (row + i / 2 * 8) * KEYS + 8 * n + pair; };
    const float* from = d_final + (sequence * heads + head) * KEYS * KEYS;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[n][i] = d_final ? from[of(n, i) + i % 2] : 0.f;
    auto get = [&](Wide to, const u16* memory, i64 index) {
        fetch(to, memory + index * 2 * C * KEYS);
        copies_issued();
    };
    if (count) {
        i64 index = (first + count - 1) * heads + head;
        get(u, gain, index), get(loop, closed, index), get(r, source, index);
    }
    for (i64 chunk = first + count - 1; chunk >= first; chunk--) {
        i64 index = chunk * heads + head;
        const float* prior = covariances + index * KEYS * KEYS;
        float last = vectors[index * VECTORS * C + C - 1], with_prior = 0.f, trace = 0.f, most = 0.f;
        float* number = scales + index * SCALES;
        float gain_down = number[GAIN], closed_down = number[CLOSED], source_down = number[SOURCE];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) most = larger(most, size_of(p[n][i]));
        Scale of_state(largest_of_warp(most));
        copies_arrived();
        __syncthreads();
        if (threadIdx.x == 0 && chunk < first + count - 1) leave(number + heads * SCALES);
        {  // lies in the room of (Z G)^T till that is made
            constexpr int step = THREADS / (KEYS / 4);
            int at = threadIdx.x / (KEYS / 4), column = threadIdx.x % (KEYS / 4) * 4;
            u32* to = (u32*)(turned + at * PITCH + column);
            prior += at * KEYS + column;
#pragma unroll
            for (int i = 0; i < KEYS; i += step) copy_16(to + i * PITCH, prior + i * KEYS, true);
        }
        copies_issued();
        {
            float y[C / 8][4];
#pragma unroll
            for (int n = 0; n < C / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) y[n][i] = 0.f;
#pragma unroll
            for (int k = 0; k < KEYS; k += 16) {
                u32 ah[4], al[4];
                split_operand(ah, al, p[k / 8], p[k / 8 + 1], of_state.up);
                add_row<true, Wide::stride, C>(y, ah, al, u.at, u.plane, k, 0);
            }
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (row + i / 2 * 8 == 8 * n + pair + i % 2) trace += p[n][i];
            float down = of_state.down * gain_down;
            most = 0.f;
#pragma unroll
            for (int n = 0; n < C / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) y[n][i] *= down, most = larger(most, size_of(y[n][i]));
            peaks.see(OF_Y, most);
            __syncthreads();
            float up = peaks.scale(OF_Y).up;
#pragma unroll
            for (int n = 0; n < C / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i += 2) tall.put(row + 4 * i, 8 * n + pair, up * y[n][i], up * y[n][i + 1]);
        }
        __syncthreads();
        const Scale of_y = peaks.scale(OF_Y);
        {  // S: 64 x 64, a warp 16 rows and 32 columns (64 keys: all of them)
            constexpr int WIDTH = 4 * C / WARPS;
            int m = warp % 4 * 16, n0 = warp / 4 * WIDTH;
            float s[WIDTH / 8][4];
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[n][i] = 0.f;
#pragma unroll 2
            for (int k = 0; k < KEYS; k += 16) {
                u32 ah[4], al[4];
                load_a<false, Wide::stride>(ah, u.at, m, k);
                load_a<false, Wide::stride>(al, u.at + u.plane, m, k);
                add_row<false, Tall::stride, WIDTH>(s, ah, al, tall.at, tall.plane, k, n0);
            }
            float down = gain_down * of_y.down;
            most = 0.f;
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[n][i] *= down, most = larger(most, size_of(s[n][i]));
            peaks.see(OF_S, most);
            __syncthreads();
            float up = peaks.scale(OF_S).up;
            u16* to = between + index * 2 * C * C;
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    int t = m + lane / 4 + 4 * i, column = n0 + 8 * n + pair;
                    u32 high, low;
                    split(up * s[n][i], up * s[n][i + 1], high, low);
                    *(u32*)(square.at + t * square.stride + column) = high;
                    *(u32*)(square.at + square.plane + t * square.stride + column) = low;
                    *(u32*)(to + t * C + column) = high;
                    *(u32*)(to + C * C + t * C + column) = low;
                }
        }
        __syncthreads();
        if (chunk > first) get(u, gain, index - heads);
        else copies_issued();  // so that as many copies follow that of the entry covariance
        float z[C / 8][4];
        const Scale of_s = peaks.scale(OF_S);
        if (threadIdx.x == 0) number[WEIGHTS] = of_s.down, number[SOURCE] = of_y.down;
        {
#pragma unroll
            for (int n = 0; n < C / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) z[n][i] = 0.f;
#pragma unroll 2
            for (int k = 0; k < C; k += 16) {
                u32 ah[4], al[4];
                load_a<true, Wide::stride>(ah, loop.at, 16 * warp, k);
                load_a<true, Wide::stride>(al, loop.at + loop.plane, 16 * warp, k);
                add_row<false, Square::stride, C>(z, ah, al, square.at, square.plane, k, 0);
            }
            u16* to = source + index * 2 * C * KEYS;
            float by_y = last * of_y.down, by_r = -.5f * source_down, by_s = -.5f * closed_down * of_s.down;
            most = 0.f;
#pragma unroll
            for (int n = 0; n < C; n += 16) {
                u32 rh[4], rl[4], yh[4], yl[4];  // stored [token][key], wanted [key][token]; Y the other way round
                load_a<true, Wide::stride>(rh, r.at, 16 * warp, n);
                load_a<true, Wide::stride>(rl, r.at + r.plane, 16 * warp, n);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    Two both = joined(rh[i], rl[i]);
                    Two own = tall.get(row + i % 2 * 8, n + i / 2 * 8 + pair);
                    float* to = &z[n / 8 + i / 2][i % 2 * 2];
                    to[0] = by_y * own.x + (by_r * both.x + by_s * to[0]);
                    to[1] = by_y * own.y + (by_r * both.y + by_s * to[1]);
                    most = larger(most, larger(size_of(to[0]), size_of(to[1])));
                }
                load_a<true, Tall::stride>(yh, tall.at, n, 16 * warp);
                load_a<true, Tall::stride>(yl, tall.at + tall.plane, n, 16 * warp);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    i64 at = (n + lane / 4 + i % 2 * 8) * KEYS + 16 * warp + i / 2 * 8 + pair;
                    *(u32*)(to + at) = yh[i];
                    *(u32*)(to + C * KEYS + at) = yl[i];
                }
            }
        }
        copies_arrived_but_last();
        __syncthreads();
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                float2 known = *(const float2*)(turned + (row + 4 * i) * PITCH + 8 * n + pair);
                with_prior += p[n][i] * known.x + p[n][i + 1] * known.y;
            }
#pragma unroll
        for (int by = 16; by; by /= 2) {
            with_prior += __shfl_xor_sync(~0u, with_prior, by);
            trace += __shfl_xor_sync(~0u, trace, by);
        }
        if (lane == 0) sums[warp] = with_prior, sums[WARPS + warp] = trace;
        if (chunk > first) get(r, source, index - heads);
        constexpr int HALF = KEYS / 2;
        const Scale of_z(largest_of_warp(most));
        float square_of_last = last * last, down = of_z.down * closed_down;
        u32 high[C / 16][4], low[C / 16][4];
#pragma unroll
        for (int k = 0; k < C / 16; k++) split_operand(high[k], low[k], z[2 * k], z[2 * k + 1], of_z.up);
#pragma unroll
        for (int begin = 0; begin < KEYS; begin += HALF) {
            float x[HALF / 8][4];
#pragma unroll
            for (int n = 0; n < HALF / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) x[n][i] = 0.f;
#pragma unroll
            for (int k = 0; k < C; k += 16) {
                add_row<false, Wide::stride, HALF>(x, high[k / 16], low[k / 16], loop.at, loop.plane, k, begin);
            }
#pragma unroll
            for (int n = 0; n < HALF / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    int column = begin + 8 * n + pair;
                    float a = down * x[n][i], b = down * x[n][i + 1], (&own)[4] = p[begin / 8 + n];
                    *(float2*)(turned + (row + 4 * i) * PITCH + column) = make_float2(a, b);
                    own[i] = square_of_last * own[i] - a, own[i + 1] = square_of_last * own[i + 1] - b;
                }
        }
        __syncthreads();
        if (threadIdx.x < 2) {
            float all = 0.f;
            for (int i = 0; i < WARPS; i++) all += sums[threadIdx.x * WARPS + i];
            number[WITH_COVARIANCE + threadIdx.x] = all;
        }
        if (chunk > first) get(loop, closed, index - heads);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) p[n][i] -= turned[(8 * n + pair + i % 2) * PITCH + row + i / 2 * 8];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i += 2)
            *(float2*)(turned + (row + 4 * i) * PITCH + 8 * n + pair) = make_float2(p[n][i], p[n][i + 1]);
    __syncthreads();
    if (threadIdx.x == 0 && count) leave(scales + (first * heads + head) * SCALES);
    float* to = d_initial + (sequence * heads + head) * KEYS * KEYS;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const float* other = turned + (8 * n + pair) * PITCH + row + 4 * i;
            *(float2*)(to + of(n, i)) = make_float2((p[n][i] + other[0]) / 2, (p[n][i + 1] + other[PITCH]) / 2);
        }
}
