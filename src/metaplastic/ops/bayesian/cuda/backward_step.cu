// The second half of a step of the recursion of backward_covariance.cu, for more than 128 keys:
//     S = U Y     Z = last Y - (R^T + G^T S) / 2     P0 = last^2 P - Z G - (Z G)^T
// One block per head of a sequence and 64 rows of P, each with S and Z of its own. The first one also writes what
// backward_covariance.cu does: Y^T (over R), S (over Z of the reads), and the sums.
#include "backward_steps.cuh"

using Wide = Split<C, KEYS>;
using Square = Split<C, C>;
enum { OF_Y, OF_S, OF_Z, TILES };
constexpr int WORDS = 3 * Wide::words + Square::words + 8 * TILES;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_step(
    const u16* gain, const u16* closed, u16* source, const float* vectors, float* scales, const float* reached,
    const float* sources, const float* sums, const i64* chunks, u16* between, float* state, int heads, int step) {
    SHARED;
    Wide u(shared), z_of(shared), loop(shared + Wide::words), reach(shared + 2 * Wide::words);
    Square square(shared + 3 * Wide::words);
    Peaks peaks(shared + 3 * Wide::words + Square::words);
    const Step at(chunks, scales, heads, step);
    if (!at.here) return;
    float *number = scales + at.index * SCALES, last = vectors[at.index * VECTORS * C + C - 1];
    float gain_down = number[GAIN], closed_down = number[CLOSED];
    const float *y = reached + at.item * C * KEYS, *r = sources + at.item * C * KEYS;

    fetch(u, gain + at.index * 2 * C * KEYS);
    fetch(loop, closed + at.index * 2 * C * KEYS);
    copies_issued();
    {
        Piece<C, KEYS, KEYS> piece;
        piece.load(y);
        peaks.see(OF_Y, piece.largest());
        __syncthreads();
        piece.store(reach, peaks.scale(OF_Y));
    }
    const Scale of_y = peaks.scale(OF_Y);
    copies_arrived();
    __syncthreads();
    {
        Part<C> s;
        add_product<false, true>(s, u, reach, 0, KEYS);
        s.times(gain_down * of_y.down);
        peaks.see(OF_S, s.largest());
        __syncthreads();
        s.to(square, peaks.scale(OF_S));
        if (at.part == 0) s.to_memory(between + at.index * 2 * C * C, number + WEIGHTS, peaks.scale(OF_S));
    }
    if (at.part == 0) {
        u16* to = source + at.index * 2 * C * KEYS;
        for (int i = threadIdx.x; i < 2 * C * KEYS / 8; i += THREADS) {
            int row = i / (KEYS / 8), column = i % (KEYS / 8) * 8;  // low rows follow the high ones in both
            *(uint4*)(to + row * KEYS + column) = *(const uint4*)(reach.at + row * reach.stride + column);
        }
        if (threadIdx.x == 0) number[SOURCE] = of_y.down, leave(number);
        if (threadIdx.x < 2) {
            float all = 0.f;
            for (int i = 0; i < PARTS; i++) all += sums[at.item * SUMS + threadIdx.x * PARTS + i];
            number[WITH_COVARIANCE + threadIdx.x] = all;
        }
    }
    __syncthreads();
    {
        Part<KEYS> z;
        add_product<false, false>(z, square, loop, 0, C);
        float by = peaks.scale(OF_S).down * closed_down;
        z.each([&](int t, int i, float& a, float& b) {
            float2 own = *(const float2*)(y + t * KEYS + i), other = *(const float2*)(r + t * KEYS + i);
            a = last * own.x - .5f * (other.x + by * a), b = last * own.y - .5f * (other.y + by * b);
        });
        peaks.see(OF_Z, z.largest());
        __syncthreads();
        z.to(z_of, peaks.scale(OF_Z));
    }
    __syncthreads();
    Part<KEYS> added;
    add_product<true, false>(added, z_of.from_column(at.row), loop, 0, C);
    add_product<true, false>(added, loop.from_column(at.row), z_of, 0, C);
    float down = peaks.scale(OF_Z).down * closed_down, kept = last * last;
    float* rows = state + at.item * KEYS * KEYS + at.row * KEYS;
    added.each([&](int i, int j, float& a, float& b) {
        float2* to = (float2*)(rows + i * KEYS + j);
        float2 own = *to;
        *to = make_float2(kept * own.x - down * a, kept * own.y - down * b);
    });
}
