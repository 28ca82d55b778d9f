// The gradients that do not wait for the covariances': of Z, of the innovations (sent on to the values), and H without
// the part that does:
//     dZ = tril(dY e^T)      de = D + Z^T dY,  D = U dM      H0 = X + X^T,  X = D e^T + dZ^T Z
//     dVt = L^-T de          dv = dVt / deviation
// One block per chunk and head. dVt takes the place of D in device memory.
#include "backward.cuh"

using Square = Split<C, C>;
using Wide = Split<C, VALUES>;
using Turned = Split<VALUES, C>;
template <int A, int B> constexpr int MOST = A > B ? A : B;
constexpr int MAIN = MOST<Wide::words, Turned::words>;
constexpr int SIDE = MOST<Exact<VALUES>::words, Square::words>;
constexpr int LEFT = MOST<Wide::words, Square::words>;
enum { OF_READS, OF_D, OF_DZ, OF_DE, OF_H, OF_DV, TILES };
constexpr int WORDS = LEFT + MAIN + SIDE + Square::words + 4 * C + 8 * TILES + C;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE) backward_reads(
    const u16* d_output, const u16* innovation, const u16* weights, const float* whitenings,
    const float* vectors, const i64* table, const i64* backwards, u16* d_innovation, u16* d_weights, u16* products,
    u16* dv, float* scales, int heads) {
    SHARED;
    u32 *left = shared, *middle = left + LEFT, *side = middle + MAIN, *corner = side + SIDE;
    float* sums = (float*)(corner + Square::words);
    Peaks peaks(sums + 4 * C);
    Wide e(left), d_innovations(middle);
    Turned turned(middle);
    Exact<VALUES> reads(side);
    Square d_z(side), z(corner), whitening(left);
    float* crossed = (float*)corner;
    Place at(table, heads, backwards);
    float *number = at.of(scales, SCALES), e_down = number[INNOVATION], z_down = number[WEIGHTS];
    int thread = threadIdx.x;
    float* white = peaks.at + 8 * TILES;
    if (thread < C) white[thread] = at.of(vectors, VECTORS * C)[3 * C + thread];
    const Scale of_inverse = of_whitening();

    fetch(e, at.of(innovation, 2 * C * WIDE));
    fetch(z, at.of(weights, 2 * C * C));
    copies_issued();
    {
        Tokens<VALUES> read;
        Piece<VALUES, C, C> piece;
        read.load(at.tokens_of(d_output, VALUES), heads, at.tokens);
        await_recursion(number, VALUES / MEAN_COLUMNS);
        piece.load((const float*)d_innovation + at.index * C * WIDE);
        peaks.see(OF_READS, read.largest());
        peaks.see(OF_D, piece.largest());
        __syncthreads();
        read.store(reads, peaks.scale(OF_READS));
        piece.store(turned, peaks.scale(OF_D));
    }
    copies_arrived();
    __syncthreads();
    int least = Part<C>::row();  // Z is lower triangular
    float read_down = peaks.scale(OF_READS).down, d_down = peaks.scale(OF_D).down;
    Part<C> dz;
    add_product<false, true>(dz, reads, e, 0, VALUES);
    float down = read_down * e_down;
    dz.each([&](int t, int s, float& x, float& y) { x = s <= t ? x : 0.f, y = s + 1 <= t ? y : 0.f; });
    peaks.see(OF_DZ, down * dz.largest());
    Part<VALUES> de;
    add_product<true, false>(de, z, reads, least, C);
    de.times(z_down * read_down);
#pragma unroll
    for (int i = 0; i < 2; i++)  // and D, as a product would have left it
#pragma unroll
        for (int j = 0; j < Part<VALUES>::pairs; j++) {
            u32 high[4], low[4];  // stored [value][token]: 16 tokens x 16 values
            int row = Part<VALUES>::row() + 16 * i, column = Part<VALUES>::column() + 16 * j;
            load_a<true, Turned::stride>(high, turned.at, row, column);
            load_a<true, Turned::stride>(low, turned.at + turned.plane, row, column);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                Two both = joined(high[r], low[r]);
                float(&to)[4] = de.x[i][2 * j + r / 2];
                to[r % 2 * 2] += d_down * both.x, to[r % 2 * 2 + 1] += d_down * both.y;
            }
        }
    peaks.see(OF_DE, de.largest());
    __syncthreads();
    Scale of_dz = peaks.scale(OF_DZ);
    dz.to(d_z, of_dz, down);
    dz.to_memory(at.of(d_weights, 2 * C * C), number + D_WEIGHTS, of_dz, down);
    __syncthreads();
    Part<C> x;
    add_product<true, true>(x, turned, e, 0, VALUES);
    x.times((d_down * e_down) * (of_dz.up / z_down));
    add_product<true, false>(x, d_z, z, least, C);
    x.times(of_dz.down * z_down);
    Piece<C, C, C> piece;
    piece.load(at.of(whitenings, C * C));
    __syncthreads();
    x.each([&](int t, int s, float& a, float& b) { crossed[t * RATIO + s] = a, crossed[t * RATIO + s + 1] = b; });
    Scale of_de = peaks.scale(OF_DE);
    de.to(d_innovations, of_de);
    piece.store(whitening, of_inverse);
    __syncthreads();
    x.each([&](int t, int s, float& a, float& b) { a += crossed[s * RATIO + t], b += crossed[(s + 1) * RATIO + t]; });
    peaks.see(OF_H, x.largest());
    Part<VALUES> d_residual;
    add_product<true, false>(d_residual, whitening, d_innovations, least, C);
    float v_down = of_inverse.down * of_de.down;
    peaks.see(OF_DV, v_down * d_residual.largest());
    __syncthreads();
    x.to_memory(at.of(products, 2 * C * C), number + PRODUCTS, peaks.scale(OF_H));
    d_residual.to_memory(at.of(d_innovation, 2 * C * WIDE), number + D_RESIDUAL, peaks.scale(OF_DV), v_down);
    u16* to = at.tokens_of(dv, VALUES);
    d_residual.each([&](int t, int c, float a, float b) {
        float by = white[t] * v_down;
        if (t < at.tokens) *(u32*)(to + (i64)t * heads * VALUES + c) = pack_bf16(by * a, by * b);
    });
    end_after_recursion();
}
