// The first half of a step of the recursion of the covariances' gradients: Y = P U^T. One block per head and noise group
// of a sequence and 64 rows of P. Writes Y^T.
#include "walk.cuh"

enum { OF_STATE, OF_U, TILES };
constexpr int WORDS = 2 * Wide::words + 8 * TILES;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, 1) walk_reach(
    const float* gain, const i64* chunks, const float* state, float* reached, int inner, int groups, int step) {
    SHARED;
    Wide u(shared), own(shared + Wide::words);
    Peaks peaks(shared + 2 * Wide::words);
    const Walker walker(chunks, blockIdx.x / PARTS, inner, groups);
    const i64 chunk = walker.end - 1 - step;
    const int row = blockIdx.x % PARTS * C;
    if (chunk < walker.first) return;
    Rows of_u, of_state;
    of_u.load(gain + walker.at(chunk) * C * KEYS), of_state.load(state + (walker.item * KEYS + row) * KEYS);
    peaks.see(OF_U, of_u.largest());
    peaks.see(OF_STATE, of_state.largest());
    __syncthreads();
    of_u.store(u, peaks.scale(OF_U));
    of_state.store(own, peaks.scale(OF_STATE));
    __syncthreads();
    Part<C> y;
    add_product<false, true>(y, u, own, 0, KEYS);
    float down = peaks.scale(OF_STATE).down * peaks.scale(OF_U).down, *to = reached + walker.item * C * KEYS + row;
    y.each([&](int t, int i, float& a, float& b) { *(float2*)(to + t * KEYS + i) = make_float2(down * a, down * b); });
}
