// What the two recursions of the backward pass need of every chunk, from its entry state and L^-1: U, G, F and beside
// them e, Z and the decays (parallel_backward.py says what they are). One block per chunk and head.
#include "backward.cuh"

constexpr int SLICE = 32;  // keys of a state that are in shared memory at a time
using Square = Split<C, C>;
using Main = Split<C, WIDE>;
using Rows = Split<SLICE, KEYS>;
using Strip = Split<VALUES, SLICE>;
template <int A, int B> constexpr int MOST = A > B ? A : B;
constexpr int MAIN = MOST<Main::words, 2 * Rows::words>;
constexpr int ROOM = MOST<MOST<Square::words, Strip::words>, Exact<WIDE>::words>;
enum { OF_KEYS, OF_QUERIES, OF_COVARIANCE, OF_KEY_SCALES, OF_W, OF_B, OF_X, OF_Z, OF_U, OF_G, OF_F, OF_REST, OF_E,
       OF_VARIANCES, OF_MEAN, TILES = OF_MEAN + KEYS / SLICE };
constexpr int WORDS = Exact<KEYS>::words + Square::words + 2 * ROOM + MAIN + 6 * C + 8 * TILES;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE) backward_open(
    const u16* q, const u16* k, const u16* v, const float* log_decay, const float* process, const float* observation,
    const float* means, const float* covariances, const float* whitenings, const i64* table,
    u16* gain, u16* closed, u16* read, u16* innovation, u16* weights, float* vectors, float* scales, int heads,
    double scale_) {
    SHARED;
    u32 *left = shared + Exact<KEYS>::words + Square::words, *right = left + ROOM, *middle = right + ROOM;
    float *g = (float*)(middle + MAIN), *noise = g + C, *entry = noise + C, *gathered = entry + C, *tail = gathered + C;
    float* white = tail + C;
    Peaks peaks(white + C);
    Exact<KEYS> keys(shared), queries(right);
    Exact<VALUES> given(right);
    Square whitening(shared + Exact<KEYS>::words), square(left), scaled(right);
    float *ratio = (float*)left, *variances = ratio + C * RATIO;
    Place at(table, heads);
    float scale = (float)scale_, *number = at.of(scales, SCALES);
    const float *p = at.of(covariances, KEYS * KEYS), *m = at.of(means, KEYS * VALUES);  // m: [VALUES, KEYS]
    int thread = threadIdx.x;
    const Scale of_inverse = of_whitening();

    {
        Tokens<KEYS> key, query;
        Piece<C, C, C> piece;
        key.load(at.tokens_of(k, KEYS), heads, at.tokens);
        query.load(at.tokens_of(q, KEYS), heads, at.tokens);
        piece.load(at.of(whitenings, C * C));
        if (thread < C) {
            bool valid = thread < at.tokens;
            i64 token = (at.first + thread) * heads + at.head;
            decay_sums(valid ? log_decay[token] : 0.f, g, tail);
            noise[thread] = valid ? process[token] : 0.f;
            white[thread] = valid ? 1.f / sqrtf(observation[token]) : 1.f;
        }
        peaks.see(OF_KEYS, key.largest());
        peaks.see(OF_QUERIES, query.largest());
        peaks.see(OF_COVARIANCE, thread < KEYS ? size_of(p[thread * (KEYS + 1)]) : 0.f);  // no element is larger
        __syncthreads();
        key.store(keys, peaks.scale(OF_KEYS));
        query.store(queries, peaks.scale(OF_QUERIES));
        piece.store(whitening, of_inverse);
    }
    decay_ratios(ratio, g, tail);
    // entry: exp(g_1 + ... + g_t); gathered: N_t = noise_t + exp(2 g_t) N_{t-1}
    if (thread < 32) {  // two tokens a lane
        const int t = 2 * thread;
        const float x = g[t], a = expf(2.f * x);
        float all = x + g[t + 1], added = noise[t + 1] + expf(2.f * g[t + 1]) * noise[t];
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const float y = __shfl_up_sync(~0u, all, by), z = __shfl_up_sync(~0u, added, by);
            if (thread >= by) added += expf(2.f * all) * z, all += y;
        }
        const float before = __shfl_up_sync(~0u, all, 1), sent = __shfl_up_sync(~0u, added, 1);
        entry[t] = expf(thread ? before + x : x), entry[t + 1] = expf(all);
        gathered[t] = thread ? noise[t] + a * sent : noise[t], gathered[t + 1] = added;
    }
    __syncthreads();
    if (thread < C) tail[thread] = ratio[(C - 1) * RATIO + thread];
    peaks.see(OF_KEY_SCALES, thread < C ? entry[thread] * white[thread] : 0.f);
    __syncthreads();
    if (thread < C) {
        float* out = at.of(vectors, VECTORS * C) + thread;
        out[0] = entry[thread], out[C] = gathered[thread], out[2 * C] = tail[thread], out[3 * C] = white[thread];
        out[4 * C] = noise[thread];
    }
    const float last = entry[C - 1], key_down = peaks.scale(OF_KEYS).down;
    Split<C, KEYS> wide(middle);
    const int most = Part<C>::row() + 32;  // L^-1 is lower triangular
    {
        Part<KEYS> sent;  // W, then B = last W + tail y
        {
            Scale of_state = peaks.scale(OF_COVARIANCE);
            Piece<SLICE, KEYS, KEYS> piece[2];  // two on their way
            piece[0].load(p), piece[1].load(p + SLICE * KEYS);
#pragma unroll
            for (int d = 0; d < KEYS; d += SLICE) {
                Rows rows(middle + d / SLICE % 2 * Rows::words);
                piece[d / SLICE % 2].store(rows, of_state);
                if (d + 2 * SLICE < KEYS) piece[d / SLICE % 2].load(p + (d + 2 * SLICE) * KEYS);
                __syncthreads();
                add_product<false, false>(sent, keys.from_column(d), rows, 0, SLICE);
            }
            float down = key_down * of_state.down;
            float by[4];
            sent.of_rows(by, [&](int t) { return entry[t] * white[t] * down; });
            sent.each_of([&](int, int, float& x, float& y, int row, int) { x *= by[row], y *= by[row]; });
            peaks.see(OF_W, sent.largest());
            float most = peaks.largest(OF_COVARIANCE);
            sent.row_sums(variances, [&](int t, int d, float, float) {  // of a token with the least known key
                Two key = keys.get(t, d);
                float by = white[t] * key_down;
                return (entry[t] * entry[t] * most + gathered[t]) * by * by * (key.x * key.x + key.y * key.y);
            });
            if (thread == 0) number[COVARIANCE] = of_state.down;
        }
        __syncthreads();
        float variance = 0.f;
        if (thread < C) {
            variance = sum_of_four(variances);
            Two both = whitening.get(thread, thread & ~1);  // 1 / L_tt, whose square is 1 + the token's variance
            float x = of_inverse.down * (thread & 1 ? both.y : both.x), square = x * x;
            if (variance > NEGLIGIBLE && 1.f - square < SMALLEST_SHARE * variance * square)
                variance = 2.f * LARGEST_VARIANCE;
        }
        peaks.see(OF_VARIANCES, variance);
        Scale of_spread = peaks.scale(OF_W);
        float added[4];
        sent.of_rows(added, [&](int t) { return tail[t] * gathered[t] * white[t] * key_down; });
        sent.to(wide, of_spread);
        sent.each_of([&](int t, int d, float& x, float& y, int row, int) {
            Two key = keys.get(t, d);
            x = last * x + added[row] * key.x, y = last * y + added[row] * key.y;
        });
        peaks.see(OF_B, sent.largest());
        __syncthreads();
        Part<C> known, crossed;
        add_product<false, true>(known, queries, keys, 0, KEYS);
        add_product<false, true>(crossed, queries, wide, 0, KEYS);
        float query_down = scale * peaks.scale(OF_QUERIES).down;
        int n = 0;
        crossed.each([&](int t, int s, float& x, float& y) {
            const float(&same)[4] = known.x[n / (4 * Part<C>::pairs)][n / 2 % (2 * Part<C>::pairs)];
            float a = key_down * same[n % 2 * 2], b = key_down * same[n % 2 * 2 + 1], by = entry[t] * of_spread.down;
            a *= ratio[t * RATIO + s] * gathered[s] * white[s];
            b *= ratio[t * RATIO + s + 1] * gathered[s + 1] * white[s + 1];
            x = s <= t ? query_down * (by * x + a) : 0.f, y = s + 1 <= t ? query_down * (by * y + b) : 0.f;
            n++;
        });
        peaks.see(OF_X, crossed.largest());
        __syncthreads();
        Scale of_crossed = peaks.scale(OF_X), of_sent = peaks.scale(OF_B), of_scaled = peaks.scale(OF_KEY_SCALES);
        crossed.to(square, of_crossed);
        sent.to(wide, of_sent);
        int s = thread % (C / 2) * 2;  // L^-1 with the scales of Kg
        float a = of_scaled.up * of_inverse.down * entry[s] * white[s];
        float b = of_scaled.up * of_inverse.down * entry[s + 1] * white[s + 1];
#pragma unroll
        for (int t = 0; t < C; t += THREADS / (C / 2)) {
            Two x = whitening.get(t + thread / (C / 2), s);
            scaled.put(t + thread / (C / 2), s, a * x.x, b * x.y);
        }
        __syncthreads();
        Part<C> z;
        add_product<false, true>(z, square, whitening, 0, most);
        float down = of_crossed.down * of_inverse.down;
        z.each([&](int t, int s, float& x, float& y) { x = s <= t ? x : 0.f, y = s + 1 <= t ? y : 0.f; });
        peaks.see(OF_Z, down * z.largest());
        Part<KEYS> u;
        add_product<false, false>(u, whitening, wide, 0, most);
        const float u_down = of_sent.down * of_inverse.down, g_down = of_scaled.down * key_down;
        peaks.see(OF_U, u_down * u.largest());
        __syncthreads();
        u.to_memory(at.of(gain, 2 * C * KEYS), number + GAIN, peaks.scale(OF_U), u_down);
        z.to_memory(at.of(weights, 2 * C * C), number + WEIGHTS, peaks.scale(OF_Z), down);
        z.to(square, peaks.scale(OF_Z), -down);
        Part<KEYS> loop;  // G
        add_product<false, false>(loop, scaled, keys, 0, most);
        peaks.see(OF_G, g_down * loop.largest());
        __syncthreads();
        loop.to_memory(at.of(closed, 2 * C * KEYS), number + CLOSED, peaks.scale(OF_G), g_down);
        loop.to(wide, peaks.scale(OF_G), g_down);
        fetch_tokens(queries, at.tokens_of(q, KEYS), heads * KEYS, at.tokens);  // once more, as they are
        copies_issued();
        __syncthreads();
    }
    {
        Part<KEYS> f;  // Qg - Z G
        add_product<false, false>(f, square, wide, 0, most);
        float down = peaks.scale(OF_Z).down * peaks.scale(OF_G).down;
        copies_arrived();
        __syncthreads();
        f.each([&](int t, int d, float& x, float& y) {
            u32 both = *(const u32*)(queries.at + t * queries.stride + d);
            x = down * x + scale * entry[t] * low_bf16(both), y = down * y + scale * entry[t] * high_bf16(both);
        });
        peaks.see(OF_F, f.largest());
        __syncthreads();
        fetch_tokens(given, at.tokens_of(v, VALUES), heads * VALUES, at.tokens);
        copies_issued();
        f.to_memory(at.of(read, 2 * C * KEYS), number + READ, peaks.scale(OF_F));
    }
    Split<C, VALUES> residual(middle);
    {
        Part<VALUES> rest;
        Piece<VALUES, SLICE, KEYS> pieces[2];
        Strip strip(left);
        pieces[0].load(m), pieces[1].load(m + SLICE);
        float down = 1.f, largest = 0.f;  // every strip has its own scale
#pragma unroll
        for (int d = 0; d < KEYS; d += SLICE) {
            auto& piece = pieces[d / SLICE % 2];
            peaks.see(OF_MEAN + d / SLICE, piece.largest());
            __syncthreads();
            Scale of_strip = peaks.scale(OF_MEAN + d / SLICE);
            piece.store(strip, of_strip);
            if (d + 2 * SLICE < KEYS) piece.load(m + d + 2 * SLICE);
            if (d) rest.times(down * of_strip.up);
            down = of_strip.down, largest = larger(largest, down);
            copies_arrived();
            __syncthreads();
            add_product<false, true>(rest, keys.from_column(d), strip, 0, SLICE);
        }
        down *= key_down;
        rest.each([&](int t, int c, float& x, float& y) {
            u32 both = *(const u32*)(given.at + t * given.stride + c);
            float by = down * entry[t];
            x = white[t] * (low_bf16(both) - by * x), y = white[t] * (high_bf16(both) - by * y);
        });
        peaks.see(OF_REST, rest.largest());
        if (thread == 0) {
            number[MEAN] = largest;
            number[CAREFUL] = peaks.largest(OF_VARIANCES) > LARGEST_VARIANCE ? 1.f : 0.f;
            *((int*)number + LEFT_BY) = 0;
        }
        __syncthreads();
        rest.to(residual, peaks.scale(OF_REST));
        __syncthreads();
    }
    Part<VALUES> e;
    add_product<false, false>(e, whitening, residual, 0, most);
    float e_down = of_inverse.down * peaks.scale(OF_REST).down;
    peaks.see(OF_E, e_down * e.largest());
    __syncthreads();
    e.to_memory(at.of(innovation, 2 * C * WIDE), number + INNOVATION, peaks.scale(OF_E), e_down);
}
