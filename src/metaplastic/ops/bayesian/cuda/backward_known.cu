// Back through the Cholesky factor: the gradients of A (with the noise 1 on its diagonal), of B, of X and of W.
//     dU = dU0 - 2 Y       H = H0 - 2 S       dX = dZ L^-1      dA = -L^-T H L^-1 / 2      dB = L^-T dU
//     dW = last dB + dX^T Qg + dA Kg
// and the sum of dU U. One block per chunk and head. Each takes the place of what it came from in device memory (dW
// that of Y).
#include "backward.cuh"

using Square = Split<C, C>;
using Wide = Split<C, KEYS>;
constexpr int PAIR = 2 * Exact<KEYS>::words;
constexpr int ROOM = Wide::words > PAIR ? Wide::words : PAIR;
enum { OF_H, OF_DU, OF_INNER, OF_DX, OF_SCALED_DX, OF_DB, OF_DA, OF_SCALED_DA, OF_KEYS, OF_QUERIES, OF_DW, OF_SUM,
       TILES };
constexpr int WORDS = 3 * Square::words + ROOM + 8 * TILES + VECTORS * C;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE) backward_known(
    const u16* q, const u16* k, const float* whitenings, const float* vectors, const u16* between, const u16* gain,
    const i64* table, const i64* backwards, u16* d_weights, u16* products, u16* d_gain, u16* reached, float* scales,
    int heads, double scale_) {
    SHARED;
    u32* wide = shared + 3 * Square::words;
    Peaks peaks(wide + ROOM);
    Square whitening(shared), h(shared + Square::words), d_z(shared + 2 * Square::words);
    Wide du(wide);
    Exact<KEYS> queries(wide), keys(wide + Exact<KEYS>::words);
    Place at(table, heads, backwards);
    float *entry = peaks.at + 8 * TILES, *white = entry + 3 * C;
    float scale = (float)scale_, *number = at.of(scales, SCALES), dz_down = number[D_WEIGHTS];
    u16 *dx_memory = at.of(d_weights, 2 * C * C), *da_memory = at.of(products, 2 * C * C);
    const Scale of_inverse = of_whitening();
    float with_gain;
    if (number[CAREFUL] != 0.f) return end_after_recursion();  // backward_careful.cu does it
    fetch_vectors(entry, at.of(vectors, VECTORS * C));

    fetch(d_z, (const u16*)dx_memory);
    copies_issued();
    {
        Piece<C, C, C> piece;
        piece.load(at.of(whitenings, C * C));
        piece.store(whitening, of_inverse);
    }
    await_recursion(number, VALUES / MEAN_COLUMNS + 1);
    {
        Piece<C, C, C> square;
        Piece<C, KEYS, KEYS> piece;
        const u16* start = at.of((const u16*)d_gain, 2 * C * WIDE);
        square.subtract_twice(da_memory, number[PRODUCTS], at.of(between, 2 * C * C), number[WEIGHTS]);
        piece.subtract_twice(start, number[INNOVATION], at.of((const u16*)reached, 2 * C * KEYS), number[SOURCE]);
        peaks.see(OF_H, square.largest());
        peaks.see(OF_DU, piece.largest());
        with_gain = piece.times(at.of(gain, 2 * C * KEYS), number[GAIN]);
        __syncthreads();
        square.store(h, peaks.scale(OF_H));
        piece.store(du, peaks.scale(OF_DU));
    }
    copies_arrived();
    __syncthreads();
    int least = Part<C>::row();  // L^-1 is lower triangular
    Part<KEYS> part;
    {
        Part<C> inner, dx;
        add_product<false, false>(inner, h, whitening, 0, C);
        float inner_down = of_inverse.down * peaks.scale(OF_H).down;
        peaks.see(OF_INNER, inner_down * inner.largest());
        add_product<false, false>(dx, d_z, whitening, 0, least + 32);
        float down = of_inverse.down * dz_down, most = 0.f;
        dx.each([&](int t, int s, float& x, float& y) {
            x = s <= t ? down * x : 0.f, y = s + 1 <= t ? down * y : 0.f;
            most = larger(most, size_of(scale) * entry[t] * larger(size_of(x), size_of(y)));
        });
        peaks.see(OF_DX, dx.largest());
        peaks.see(OF_SCALED_DX, most);
        add_product<true, false>(part, whitening, du, least, C);
        peaks.see(OF_DB, of_inverse.down * peaks.scale(OF_DU).down * part.largest());
        __syncthreads();
        inner.to(h, peaks.scale(OF_INNER), inner_down);
        dx.to_memory(dx_memory, number + D_WEIGHTS, peaks.scale(OF_DX));
        float up = peaks.scale(OF_SCALED_DX).up * scale, by[4];
        dx.of_rows(by, [&](int t) { return up * entry[t]; });
        dx.each_of([&](int t, int s, float& x, float& y, int row, int) { d_z.put(t, s, by[row] * x, by[row] * y); });
    }
    const float sent_down = of_inverse.down * peaks.scale(OF_DU).down;
    part.to_memory(at.of(d_gain, 2 * C * WIDE), number + INNOVATION, peaks.scale(OF_DB), sent_down);
    {
        Tokens<KEYS> key, query;
        key.load(at.tokens_of(k, KEYS), heads, at.tokens);
        query.load(at.tokens_of(q, KEYS), heads, at.tokens);
        peaks.see(OF_KEYS, key.largest());
        peaks.see(OF_QUERIES, query.largest());
        __syncthreads();
        key.store(keys, peaks.scale(OF_KEYS));
        query.store(queries, peaks.scale(OF_QUERIES));
    }
    {
        Part<C> da;
        add_product<true, false>(da, whitening, h, least, C);
        da.times(-.5f * of_inverse.down * peaks.scale(OF_INNER).down);
        float most = 0.f;
        da.each([&](int, int s, float& x, float& y) {
            most = larger(most, larger(entry[s] * white[s] * size_of(x), entry[s + 1] * white[s + 1] * size_of(y)));
        });
        peaks.see(OF_DA, da.largest());
        peaks.see(OF_SCALED_DA, most);
        __syncthreads();
        da.to_memory(da_memory, number + PRODUCTS, peaks.scale(OF_DA));
        float up = peaks.scale(OF_SCALED_DA).up, by[4 * Part<C>::pairs];
        da.of_columns(by, [&](int s) { return up * entry[s] * white[s]; });
        da.each_of([&](int t, int s, float& x, float& y, int, int column) {
            h.put(t, s, by[column] * x, by[column + 1] * y);
        });
        __syncthreads();
    }
    float by_query = peaks.scale(OF_SCALED_DX).down * peaks.scale(OF_QUERIES).down;
    float by_key = peaks.scale(OF_SCALED_DA).down * peaks.scale(OF_KEYS).down;
    part.times(entry[C - 1] * sent_down / by_query);
    add_product<true, false>(part, d_z, queries, least, C);
    part.times(by_query / by_key);
    add_product<false, false>(part, h, keys, 0, C);
    peaks.see(OF_DW, by_key * part.largest());
    __syncthreads();
    part.to_memory(at.of(reached, 2 * C * KEYS), number + SOURCE, peaks.scale(OF_DW), by_key);
    with_gain = sum_of_block(with_gain, peaks.at + 8 * OF_SUM);
    if (threadIdx.x == 0) number[WITH_GAIN] = with_gain;
    end_after_recursion();
}
