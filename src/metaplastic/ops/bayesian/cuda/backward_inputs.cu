// The gradients of q, k, the log decay and both noises, from those that backward_known.cu leaves:
//     W = Kg P0      dKg = dA W + dW P0 - dVt M0^T      dQg = dX W + dY M0^T
//     dQ = entry dQg + (dX R N) K        J = (E R)^T K + (dX R)^T Q + tail dB,  E = 2 stril(dA) + diag(dA)
//     dK = entry dKg + (E R N) K + N J   dN = K J + trace of P at the end
//     dg = reversed cumulative sum of (K dK + Q dQ - 2 N K J, at the end what the final states add)
//          + 2 (N - noise) dnoise,       dnoise_t = dN_t + a_{t+1}^2 dnoise_{t+1}
// in whitened keys; that of a token's observation noise is dA_tt over the noise. One block per chunk and head.
#include "backward.cuh"

constexpr int SLICE = 32;
using Square = Split<C, C>;
using Wide = Split<C, KEYS>;
using Rows = Split<SLICE, KEYS>;  // of P0 and M0^T
template <int A, int B> constexpr int MOST = A > B ? A : B;
constexpr int RIGHT = MOST<Exact<KEYS>::words, Rows::words>;
constexpr int LEFT = MOST<MOST<Wide::words, 2 * Square::words>, Exact<VALUES>::words + Rows::words>;
constexpr int MIDDLE = MOST<MOST<Wide::words, Split<C, VALUES>::words>, MOST<2 * Square::words, 2 * Rows::words>>;
constexpr int SUMS = 4 * C;
enum { OF_KEYS, OF_W, OF_READS, OF_QUERIES, OF_ACROSS, OF_AMONG, OF_LATER_KEYS, OF_LATER_QUERIES, TILES };
constexpr int WORDS = Exact<KEYS>::words + LEFT + MIDDLE + RIGHT + SUMS + 3 * C + 8 * TILES + VECTORS * C;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE) backward_inputs(
    const u16* q, const u16* k, const u16* d_output, const float* log_decay, const float* means,
    const float* covariances, const float* vectors, const u16* d_known, const u16* d_crossed, const u16* d_sent,
    const u16* d_spread, const u16* d_residual, const float* scales, const i64* table,
    u16* dq, u16* dk, float* dg, float* d_process, float* d_observation, int heads, double scale_) {
    SHARED;
    u32 *left = shared + Exact<KEYS>::words, *middle = left + LEFT, *right = middle + MIDDLE;
    float *sums = (float*)(right + RIGHT), *g = sums + SUMS, *to_decay = g + C, *to_noise = to_decay + C;
    Peaks peaks(to_noise + C);
    Exact<KEYS> keys(shared), queries(right);
    Place at(table, heads);
    float scale = (float)scale_;
    int thread = threadIdx.x;
    float *entry = peaks.at + 8 * TILES, *gathered = entry + C, *tail = gathered + C, *white = tail + C;
    const float *noise = white + C, *number = at.of(scales, SCALES);
    const u16 *da = at.of(d_known, 2 * C * C), *dx = at.of(d_crossed, 2 * C * C), *db = at.of(d_sent, 2 * C * WIDE);
    float known_down = number[PRODUCTS], crossed_down = number[D_WEIGHTS], sent_down = number[INNOVATION];
    int most = Part<KEYS>::row() + 32;

    if (number[CAREFUL] != 0.f) return;  // backward_careful.cu does it
    fetch_vectors(entry, at.of(vectors, VECTORS * C));
    Wide dw(left);
    fetch(dw, at.of(d_spread, 2 * C * KEYS));
    copies_issued();
    if (thread < C)  // what takes the other room is not there yet
        decay_sums(thread < at.tokens ? log_decay[(at.first + thread) * heads + at.head] : 0.f, g, to_decay);
    {
        Tokens<KEYS> key;
        key.load(at.tokens_of(k, KEYS), heads, at.tokens);
        peaks.see(OF_KEYS, key.largest());
        __syncthreads();
        key.store(keys, peaks.scale(OF_KEYS));
    }
    const float key_down = peaks.scale(OF_KEYS).down;
    Part<KEYS> to_key;
    {
        Part<KEYS> w;
        Piece<SLICE, KEYS, KEYS> piece;
        const float* p = at.of(covariances, KEYS * KEYS);
        const Scale of_state = Scale::known(number[COVARIANCE]);
        piece.load(p);
        copies_arrived();
        for (int d = 0; d < KEYS; d += SLICE) {
            Rows rows(middle + d / SLICE % 2 * Rows::words);
            piece.store(rows, of_state);
            if (d + SLICE < KEYS) piece.load(p + (i64)(d + SLICE) * KEYS);
            __syncthreads();
            add_product<false, false>(w, keys.from_column(d), rows, 0, SLICE);
            add_product<false, false>(to_key, dw.from_column(d), rows, 0, SLICE);
        }
        float down = key_down * of_state.down;
        w.each([&](int t, int, float& x, float& y) {
            float by = down * entry[t] * white[t];
            x *= by, y *= by;
        });
        peaks.see(OF_W, w.largest());
        __syncthreads();
        w.to(Wide(middle), peaks.scale(OF_W));
    }
    Part<KEYS> to_query;
    const Scale of_mean = Scale::known(number[MEAN]);
    float key_factor, query_factor;  // of to_key and to_query
    {
        Square known(left), crossed(left + Square::words);
        Wide spread(middle);
        fetch(known, da);
        fetch(crossed, dx);
        copies_issued();
        copies_arrived();
        __syncthreads();
        float w_down = peaks.scale(OF_W).down;
        to_key.times(number[SOURCE] * Scale::known(number[COVARIANCE]).down / (known_down * w_down));
        add_product<false, false>(to_key, known, spread, 0, C);
        add_product<false, false>(to_query, crossed, spread, 0, most);
    }
    {
        Exact<VALUES> reads(left);
        Split<C, VALUES> residual(middle);
        Tokens<VALUES> read;
        read.load(at.tokens_of(d_output, VALUES), heads, at.tokens);
        peaks.see(OF_READS, read.largest());
        __syncthreads();
        fetch(residual, at.of(d_residual, 2 * C * WIDE));
        copies_issued();
        read.store(reads, peaks.scale(OF_READS));
        Piece<SLICE, KEYS, KEYS> piece;
        const float* m = at.of(means, KEYS * VALUES);
        piece.load(m);
        float by_key = number[D_RESIDUAL] * of_mean.down, by_query = peaks.scale(OF_READS).down * of_mean.down;
        key_factor = by_key, query_factor = by_query;
        float w_down = peaks.scale(OF_W).down;
        to_key.times(-known_down * w_down / by_key);
        to_query.times(crossed_down * w_down / by_query);
        copies_arrived();
        for (int c = 0; c < VALUES; c += SLICE) {
            Rows rows(c / SLICE % 2 ? left + Exact<VALUES>::words : right);
            piece.store(rows, of_mean);
            if (c + SLICE < VALUES) piece.load(m + (c + SLICE) * KEYS);
            __syncthreads();
            add_product<false, false>(to_key, residual.from_column(c), rows, 0, SLICE);
            add_product<false, false>(to_query, reads.from_column(c), rows, 0, SLICE);
        }
    }
    Square across(left), among(left + Square::words), later_keys(middle), later_queries(middle + Square::words);
    {
        Tokens<KEYS> query;
        query.load(at.tokens_of(q, KEYS), heads, at.tokens);
        peaks.see(OF_QUERIES, query.largest());
        __syncthreads();
        fetch(later_keys, da);  // what comes of it takes its place
        fetch(later_queries, dx);
        copies_issued();
        query.store(queries, peaks.scale(OF_QUERIES));
        float* ratio = (float*)left;
        decay_ratios(ratio, g, to_decay);
        copies_arrived();
        __syncthreads();
        Part<C> a, c;  // E R and dX R
        float of_across = 0.f, of_among = 0.f, of_later = 0.f;
        int n = 0;
        a.each([&](int t, int s, float& x, float& y) {
            Two known = later_keys.get(t, s), crossed = later_queries.get(t, s);
            float r = ratio[t * RATIO + s], u = ratio[t * RATIO + s + 1];
            float by = gathered[s] * white[s], also = gathered[s + 1] * white[s + 1];
            x = (s == t ? 1.f : 2.f) * (known_down * known.x) * r;  // 0 above
            y = (s + 1 == t ? 1.f : 2.f) * (known_down * known.y) * u;
            float(&to)[4] = c.x[n / (4 * Part<C>::pairs)][n / 2 % (2 * Part<C>::pairs)];
            float p = to[n % 2 * 2] = crossed_down * crossed.x * r;
            float q = to[n % 2 * 2 + 1] = crossed_down * crossed.y * u;
            n++;
            of_across = larger(of_across, larger(size_of(p) * by, size_of(q) * also));
            of_among = larger(of_among, larger(size_of(x) * by, size_of(y) * also));
            of_later = larger(of_later, white[t] * larger(size_of(x), size_of(y)));
        });
        peaks.see(OF_ACROSS, of_across);
        peaks.see(OF_AMONG, of_among);
        peaks.see(OF_LATER_KEYS, of_later);
        peaks.see(OF_LATER_QUERIES, size_of(scale) * c.largest());
        __syncthreads();
        float ups[4] = {peaks.scale(OF_ACROSS).up, peaks.scale(OF_AMONG).up, peaks.scale(OF_LATER_KEYS).up,
                        peaks.scale(OF_LATER_QUERIES).up * scale};
        n = 0;
        float by_column[4 * Part<C>::pairs], by_row[4];
        a.of_columns(by_column, [&](int s) { return gathered[s] * white[s]; });
        a.of_rows(by_row, [&](int t) { return ups[2] * white[t]; });
        a.each_of([&](int t, int s, float& x, float& y, int row, int column) {
            float by = by_column[column], also = by_column[column + 1];
            float(&from)[4] = c.x[n / (4 * Part<C>::pairs)][n / 2 % (2 * Part<C>::pairs)];
            float p = from[n % 2 * 2], q = from[n % 2 * 2 + 1];
            n++;
            across.put(t, s, ups[0] * (p * by), ups[0] * (q * also));
            among.put(t, s, ups[1] * (x * by), ups[1] * (y * also));
            later_keys.put(t, s, by_row[row] * x, by_row[row] * y);
            later_queries.put(t, s, ups[3] * p, ups[3] * q);
        });
        __syncthreads();
    }
    const float query_down = peaks.scale(OF_QUERIES).down;
    {
        float down = peaks.scale(OF_ACROSS).down * key_down, up = query_factor / down;
        to_query.each([&](int t, int, float& x, float& y) { x *= up * entry[t], y *= up * entry[t]; });
        add_product<false, false>(to_query, across, keys, 0, most);
        query_factor = scale * down;
    }
    u16* query_out = at.tokens_of(dq, KEYS);
    to_query.row_sums(sums, [&](int t, int d, float x, float y) {
        x *= query_factor, y *= query_factor;
        if (t < at.tokens) *(u32*)(query_out + (i64)t * heads * KEYS + d) = pack_bf16(x, y);
        Two query = queries.get(t, d);
        return query_down * (x * query.x + y * query.y);
    });
    {
        float down = peaks.scale(OF_AMONG).down * key_down, up = -key_factor / down;
        to_key.each([&](int t, int, float& x, float& y) { x *= up * entry[t], y *= up * entry[t]; });
        add_product<false, false>(to_key, among, keys, 0, most);
        key_factor = down;
    }
    __syncthreads();
    Wide sent(left);
    fetch(sent, db);
    copies_issued();
    Part<KEYS> later;
    float later_factor;
    {
        float by_key = peaks.scale(OF_LATER_KEYS).down * key_down;
        float by_query = peaks.scale(OF_LATER_QUERIES).down * query_down;
        add_product<true, false>(later, later_keys, keys, Part<KEYS>::row(), C);
        later.times(by_key / by_query);
        add_product<true, false>(later, later_queries, queries, Part<KEYS>::row(), C);
        later_factor = by_query;
    }
    copies_arrived();
    __syncthreads();
    later.each([&](int t, int d, float& x, float& y) {
        Two both = sent.get(t, d);
        float by = tail[t] * sent_down;
        x = later_factor * x + by * both.x, y = later_factor * y + by * both.y;
    });
    if (thread < C) to_decay[thread] = sum_of_four(sums);
    __syncthreads();
    later.row_sums(sums, [&](int t, int d, float x, float y) {
        Two key = keys.get(t, d);
        return white[t] * key_down * (x * key.x + y * key.y);
    });
    __syncthreads();
    if (thread < C) {
        float with_key = sum_of_four(sums);
        to_decay[thread] -= 2.f * gathered[thread] * with_key;
        to_noise[thread] = with_key;
    }
    __syncthreads();
    {
        int n = 0;
        u16* out = at.tokens_of(dk, KEYS);
        to_key.row_sums(sums, [&](int t, int d, float x, float y) {
            constexpr int pairs = 2 * Part<KEYS>::pairs;
            const float(&j)[4] = later.x[n / (2 * pairs)][n / 2 % pairs];
            x = key_factor * x + gathered[t] * j[n % 2 * 2], y = key_factor * y + gathered[t] * j[n % 2 * 2 + 1], n++;
            if (t < at.tokens) *(u32*)(out + (i64)t * heads * KEYS + d) = pack_bf16(white[t] * x, white[t] * y);
            Two key = keys.get(t, d);
            return key_down * (x * key.x + y * key.y);
        });
    }
    __syncthreads();
    if (thread < C) {
        float with_key = sum_of_four(sums), w = white[thread];
        to_decay[thread] += w * with_key;
        Two both = from_memory<C>(da, known_down, thread, thread & ~1);
        if (thread < at.tokens)
            d_observation[(at.first + thread) * heads + at.head] = w * w * (thread & 1 ? both.y : both.x);
    }
    __syncthreads();
    if (thread >= 32) return;
    // From the last token on, sum_t = to_decay_t + sum_{t+1} and, what is sent on, s_t = a_t^2 (dN_t + s_{t+1}). Every
    // lane has two tokens, as a sum and as s -> by s + added, and then those of all from its own on.
    const int t = 2 * thread;
    const float last = entry[C - 1], a = expf(2.f * g[t]), also = expf(2.f * g[t + 1]), trace = number[TRACE];
    const float end = number[WITH_GAIN] + last * (2.f * last * number[WITH_COVARIANCE] + number[WITH_MEAN]);
    float sum = to_decay[t] + to_decay[t + 1], by = a * also, added = a * (to_noise[t] + also * to_noise[t + 1]);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const float x = __shfl_down_sync(~0u, sum, lanes), y = __shfl_down_sync(~0u, by, lanes);
        const float z = __shfl_down_sync(~0u, added, lanes);
        if (thread + lanes < 32) sum += x, added += by * z, by *= y;
    }
    const float rest = __shfl_down_sync(~0u, sum, 1), before = __shfl_down_sync(~0u, added + by * trace, 1);
    auto give = [&](int t, float sum, float d) {
        const i64 token = (at.first + t) * heads + at.head;
        if (t < at.tokens) dg[token] = sum + 2.f * (gathered[t] - noise[t]) * d, d_process[token] = d;
    };
    sum = to_decay[t + 1] + (thread < 31 ? rest + end : end);
    float d = to_noise[t + 1] + (thread < 31 ? before : trace);
    give(t + 1, sum, d);
    give(t, to_decay[t] + sum, to_noise[t] + also * d);
}
