// The recursion of the means' gradients, from the last chunk of a sequence to its first:
//     dM0 = last dM - G^T (U dM) + source
// A block walks 64 values, dM^T in its registers. Writes dM^T of every chunk over the sources, and that of the first
// state over that of the last.
#include "walk.cuh"

enum { OF_STATE, OF_U, OF_G, OF_GAINED, TILES };
constexpr bool AHEAD = KEYS <= 128;  // what a chunk needs is read while the one before is worked on, if registers last
constexpr int WORDS = 3 * Wide::words + Square::words + 8 * TILES;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, 1) walk_mean(
    const float* gain, const float* closed, const float* lasts, const i64* chunks, float* sources, float* state,
    int inner, int groups, int values) {
    SHARED;
    Wide own(shared), u(shared + Wide::words), loop(shared + 2 * Wide::words);
    Square square(shared + 3 * Wide::words);
    Peaks peaks(shared + 3 * Wide::words + Square::words);
    const int blocks = values / VALUES, column = blockIdx.x % blocks * VALUES;
    const Walker walker(chunks, blockIdx.x / blocks, inner, groups);
    float* whole = state + (walker.item * values + column) * KEYS;

    Part<KEYS> d;
    d.each([&](int c, int k, float& x, float& y) {
        float2 there = *(const float2*)(whole + c * KEYS + k);
        x = there.x, y = there.y;
    });
    Rows of_u, of_g;
    auto load_rows = [&](i64 chunk) {
        of_u.load(gain + walker.at(chunk) * C * KEYS), of_g.load(closed + walker.at(chunk) * C * KEYS);
    };
    if (AHEAD && walker.end > walker.first) load_rows(walker.end - 1);
    for (i64 chunk = walker.end - 1; chunk >= walker.first; chunk--) {
        const float* last = walker.last(lasts, chunk, groups);
        float* memory = sources + (walker.at(chunk) * values + column) * KEYS;
        if (!AHEAD) load_rows(chunk);
        Part<KEYS> source;
        if (AHEAD)
            source.each([&](int c, int k, float& x, float& y) {
                float2 there = *(const float2*)(memory + c * KEYS + k);
                x = there.x, y = there.y;
            });
        peaks.see(OF_STATE, d.largest());
        peaks.see(OF_U, of_u.largest());
        peaks.see(OF_G, of_g.largest());
        __syncthreads();
        d.to(own, peaks.scale(OF_STATE));
        of_u.store(u, peaks.scale(OF_U));
        of_g.store(loop, peaks.scale(OF_G));
        if (AHEAD && chunk > walker.first) load_rows(chunk - 1);
        __syncthreads();
        Part<C> gained;
        add_product<false, true>(gained, own, u, 0, KEYS);
        float down = peaks.scale(OF_STATE).down * peaks.scale(OF_U).down;
        peaks.see(OF_GAINED, down * gained.largest());
        __syncthreads();
        const Scale of_gained = peaks.scale(OF_GAINED);
        gained.to(square, of_gained, down);
        __syncthreads();
        Part<KEYS> back;
        add_product<false, false>(back, square, loop, 0, C);
        down = of_gained.down * peaks.scale(OF_G).down;
        int n = 0;
        d.each([&](int c, int k, float& x, float& y) {
            constexpr int pairs = 2 * Part<KEYS>::pairs;
            const int i = n / (2 * pairs), j = n / 2 % pairs;
            const float(&b)[4] = back.x[i][j], (&s)[4] = source.x[i][j];
            float2 &there = *(float2*)(memory + c * KEYS + k), by = *(const float2*)(last + k);
            float2 added = AHEAD ? make_float2(s[n % 2 * 2], s[n % 2 * 2 + 1]) : there;
            there = make_float2(x, y);
            x = by.x * x + (added.x - down * b[n % 2 * 2]), y = by.y * y + (added.y - down * b[n % 2 * 2 + 1]);
            n++;
        });
        __syncthreads();
    }
    d.each([&](int c, int k, float& x, float& y) { *(float2*)(whole + c * KEYS + k) = make_float2(x, y); });
}
