// The second half of a step of the recursion of the covariances' gradients:
//     S = U Y     Z = last Y - G^T S / 2     P0 = last P last - Z G - (Z G)^T + source
// One block per head and noise group of a sequence and 64 rows of P, each with S and Z of its own. Writes P over the
// source.
#include "walk.cuh"

enum { OF_U, OF_G, OF_Y, OF_S, OF_Z, TILES };
constexpr int WORDS = 3 * Wide::words + Square::words + 8 * TILES;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, 1) walk_step(
    const float* gain, const float* closed, const float* lasts, const i64* chunks, const float* reached, float* sources,
    float* state, int inner, int groups, int step) {
    SHARED;
    Wide u(shared), z_of(shared), loop(shared + Wide::words), reach(shared + 2 * Wide::words);
    Square square(shared + 3 * Wide::words);
    Peaks peaks(shared + 3 * Wide::words + Square::words);
    const Walker walker(chunks, blockIdx.x / PARTS, inner, groups);
    const i64 chunk = walker.end - 1 - step, at = walker.at(chunk);
    const int row = blockIdx.x % PARTS * C;
    if (chunk < walker.first) return;
    const float *y = reached + walker.item * C * KEYS, *last = walker.last(lasts, chunk, groups);
    {
        Rows of_y, of_u;
        of_y.load(y), of_u.load(gain + at * C * KEYS);
        peaks.see(OF_Y, of_y.largest());
        peaks.see(OF_U, of_u.largest());
        __syncthreads();
        of_y.store(reach, peaks.scale(OF_Y));
        of_u.store(u, peaks.scale(OF_U));
        of_u.load(closed + at * C * KEYS);
        peaks.see(OF_G, of_u.largest());
        __syncthreads();
        of_u.store(loop, peaks.scale(OF_G));
    }
    const float closed_down = peaks.scale(OF_G).down;
    {
        Part<C> s;
        add_product<false, true>(s, u, reach, 0, KEYS);
        s.times(peaks.scale(OF_U).down * peaks.scale(OF_Y).down);
        peaks.see(OF_S, s.largest());
        __syncthreads();
        s.to(square, peaks.scale(OF_S));
    }
    __syncthreads();
    {
        Part<KEYS> z;
        add_product<false, false>(z, square, loop, 0, C);
        float by = -.5f * peaks.scale(OF_S).down * closed_down;
        z.each([&](int t, int i, float& a, float& b) {
            float2 own = *(const float2*)(y + t * KEYS + i), kept = *(const float2*)(last + i);
            a = kept.x * own.x + by * a, b = kept.y * own.y + by * b;
        });
        peaks.see(OF_Z, z.largest());
        __syncthreads();
        z.to(z_of, peaks.scale(OF_Z));
    }
    __syncthreads();
    Part<KEYS> added;
    add_product<true, false>(added, z_of.from_column(row), loop, 0, C);
    add_product<true, false>(added, loop.from_column(row), z_of, 0, C);
    float down = peaks.scale(OF_Z).down * closed_down;
    float *rows = state + (walker.item * KEYS + row) * KEYS, *memory = sources + (at * KEYS + row) * KEYS;
    added.each([&](int i, int j, float& a, float& b) {
        float2 *here = (float2*)(rows + i * KEYS + j), *there = (float2*)(memory + i * KEYS + j);
        float2 own = *here, source = *there, kept = *(const float2*)(last + j);
        kept.x *= last[row + i], kept.y *= last[row + i];
        *there = own;
        *here = make_float2(kept.x * own.x + (source.x - down * a), kept.y * own.y + (source.y - down * b));
    });
}
