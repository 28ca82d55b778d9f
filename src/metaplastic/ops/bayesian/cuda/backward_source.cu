// What the recursion of the covariances' gradients adds in every chunk, as R of sym(G^T R), and the gradient of U that
// does not wait for it:
//     dU0 = e dM^T           R = dZ^T Qg + last dU0 - H0 G / 2
// One block per chunk and head. dU0 takes the place of e in device memory. Also the sum of dM M0.
#include "backward.cuh"

constexpr int SLICE = 32;  // values of dM that are in shared memory at a time
using Square = Split<C, C>;
using Rows = Split<SLICE, KEYS>;
using Main = Split<C, WIDE>;
constexpr int SIDE = Exact<KEYS>::words > Square::words ? Exact<KEYS>::words : Square::words;
constexpr int ROOM = Rows::words > Square::words ? Rows::words : Square::words;
enum { OF_QUERIES, OF_ENTRY, OF_DU, OF_R, OF_DM, TILES = OF_DM + VALUES / SLICE };
constexpr int WORDS = Main::words + SIDE + 2 * ROOM + 8 + 8 * TILES + C;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE) backward_source(
    const u16* q, const u16* closed, const u16* d_weights, const u16* products, const float* d_means,
    const float* means, const float* vectors, const i64* table, u16* innovation, u16* source, float* scales, int heads,
    double scale_) {
    SHARED;
    u32 *left = shared + Main::words, *right = left + ROOM, *side = right + ROOM;
    float* room = (float*)(side + SIDE);
    Peaks peaks(room + 8);
    Split<C, VALUES> e(shared);
    Split<C, KEYS> loop(shared);
    Exact<KEYS> queries(side);
    Square h(left), d_z(right);
    Place at(table, heads);
    float scale = (float)scale_, *number = at.of(scales, SCALES), *entry = peaks.at + 8 * TILES;
    if (threadIdx.x < C) entry[threadIdx.x] = at.of(vectors, VECTORS * C)[threadIdx.x];
    float e_down = number[INNOVATION], dz_down = number[D_WEIGHTS], h_down = number[PRODUCTS];
    float loop_down = number[CLOSED];

    fetch(e, at.of((const u16*)innovation, 2 * C * WIDE));
    fetch(d_z, at.of(d_weights, 2 * C * C));
    copies_issued();
    const float *dm = at.of(d_means, KEYS * VALUES), *m = at.of(means, KEYS * VALUES);  // [VALUES, KEYS]
    float with_mean = 0.f;
    Part<KEYS> part;
    {
        Tokens<KEYS> query;
        query.load(at.tokens_of(q, KEYS), heads, at.tokens);
        peaks.see(OF_QUERIES, query.largest());
        peaks.see(OF_ENTRY, threadIdx.x < C ? size_of(scale) * entry[threadIdx.x] : 0.f);
        __syncthreads();
        query.store(queries, peaks.scale(OF_QUERIES));
    }
    float down = 1.f;  // every slice has its own scale
    {
        Piece<SLICE, KEYS, KEYS> piece, known;
        Rows rows(left);
        piece.load(dm);
        copies_arrived();
        for (int c = 0; c < VALUES; c += SLICE) {
            known.load(m + c * KEYS);
            peaks.see(OF_DM + c / SLICE, piece.largest());
#pragma unroll
            for (int i = 0; i < piece.count; i++) {
                float4 x = piece.x[i], y = known.x[i];
                with_mean += (x.x * y.x + x.y * y.y) + (x.z * y.z + x.w * y.w);
            }
            __syncthreads();
            Scale of_rows = peaks.scale(OF_DM + c / SLICE);
            piece.store(rows, of_rows);
            if (c + SLICE < VALUES) piece.load(dm + (c + SLICE) * KEYS);
            if (c) part.times(down * of_rows.up);
            down = of_rows.down;
            __syncthreads();
            add_product<false, false>(part, e.from_column(c), rows, 0, SLICE);
        }
    }
    float u_down = e_down * down;
    peaks.see(OF_DU, u_down * part.largest());
    with_mean = sum_of_block(with_mean, room);
    if (threadIdx.x == 0) number[WITH_MEAN] = with_mean;
    part.to_memory(at.of(innovation, 2 * C * WIDE), number + INNOVATION, peaks.scale(OF_DU), u_down);
    fetch(loop, at.of(closed, 2 * C * KEYS));
    fetch(h, at.of(products, 2 * C * C));
    copies_issued();
    Scale of_entry = peaks.scale(OF_ENTRY);  // dZ stays scaled as it was
    for (int i = threadIdx.x; i < C * C / 2; i += THREADS) {
        int t = i / (C / 2), s = i % (C / 2) * 2;
        Two x = d_z.get(t, s);
        float by = scale * entry[t] * of_entry.up * 0x1p-13f;
        d_z.put(t, s, by * x.x, by * x.y);
    }
    float dz_scale = dz_down * of_entry.down * 0x1p13f * peaks.scale(OF_QUERIES).down;
    part.times(entry[C - 1] * u_down / dz_scale);
    copies_arrived();
    __syncthreads();
    add_product<true, false>(part, d_z, queries, Part<KEYS>::row(), C);
    float h_scale = -.5f * h_down * loop_down;
    part.times(dz_scale / h_scale);
    add_product<false, false>(part, h, loop, 0, C);
    peaks.see(OF_R, size_of(h_scale) * part.largest());
    __syncthreads();
    part.to_memory(at.of(source, 2 * C * KEYS), number + SOURCE, peaks.scale(OF_R), h_scale);
}
