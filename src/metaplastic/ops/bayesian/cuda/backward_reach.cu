// The first half of a step of the recursion of backward_covariance.cu, for more than 128 keys: Y = P U^T. One block per
// head of a sequence and 64 rows of P. Writes Y^T and R in float32, and its parts of the trace of P and of the sum of P
// times the entry covariance.
#include "backward_steps.cuh"

using Wide = Split<C, KEYS>;
enum { OF_STATE, TILES };
constexpr int WORDS = 2 * Wide::words + 8 * TILES + 8;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_reach(
    const u16* gain, const u16* source, const float* covariances, const float* scales, const float* state,
    const i64* chunks, float* reached, float* sources, float* sums, int heads, int step) {
    SHARED;
    Wide u(shared), own(shared + Wide::words);
    Peaks peaks(shared + 2 * Wide::words);
    float* room = peaks.at + 8 * TILES;
    const Step at(chunks, scales, heads, step);
    if (!at.here) return;
    const float* number = scales + at.index * SCALES;
    const float* rows = state + at.item * KEYS * KEYS + at.row * KEYS;
    const u16* r = source + at.index * 2 * C * KEYS;
    float gain_down = number[GAIN], r_down = number[SOURCE], with_prior = 0.f;

    fetch(u, gain + at.index * 2 * C * KEYS);
    copies_issued();
    {
        Piece<C, KEYS, KEYS> piece, known;
        piece.load(rows);
        known.load(covariances + at.index * KEYS * KEYS + at.row * KEYS);
        peaks.see(OF_STATE, piece.largest());
#pragma unroll
        for (int i = 0; i < piece.count; i++) {
            float4 x = piece.x[i], y = known.x[i];
            with_prior += (x.x * y.x + x.y * y.y) + (x.z * y.z + x.w * y.w);
        }
        __syncthreads();
        piece.store(own, peaks.scale(OF_STATE));
    }
    copies_arrived();
    __syncthreads();
    Part<C> y;
    add_product<false, true>(y, u, own, 0, KEYS);
    float down = peaks.scale(OF_STATE).down * gain_down;
    float* to = reached + at.item * C * KEYS + at.row;
    float* also = sources + at.item * C * KEYS + at.row;
    y.each([&](int t, int i, float& a, float& b) {
        Two of_source = from_memory<KEYS>(r + at.row, r_down, t, i);
        *(float2*)(to + t * KEYS + i) = make_float2(down * a, down * b);
        *(float2*)(also + t * KEYS + i) = make_float2(of_source.x, of_source.y);
    });
    with_prior = sum_of_block(with_prior, room);
    float trace = sum_of_block(threadIdx.x < C ? rows[threadIdx.x * (KEYS + 1) + at.row] : 0.f, room);
    if (threadIdx.x == 0) sums[at.item * SUMS + at.part] = with_prior, sums[at.item * SUMS + PARTS + at.part] = trace;
}
