// Palimpsa's gradients on tensor cores: bf16 inputs, float32 states and sums, every decay. Equations: backward.cu.
//
// Tokens are taken in tiles of up to 8, the last tile first, but within a tile in their own order: the state before the
// tile is rebuilt from an earlier one (a sum with decays <= 1) and then written forward, so that nothing is reversed by
// subtraction or by dividing by a decay. With r = R_t, n_s = (dy_s q_s^T) r and x_s = n_s mu_s, what is needed at a
// token t of the tile are sums over the later tokens s of the tile and over what comes after the tile:
//
//     dM_t = sum_{s >= t} D[s, t] n_s + D[end, t] dM_end         dJ_t likewise with -x_s and dJ_end
//     dw_t = sum_s D[s, t] n_s k_t     dbeta_t = -sum_s D[s, t] x_s k_t^2     dq_s = mu_s^T dy_s
//     dk_t = sum_s D[s, t] n_s^T w_t - 2 k_t sum_s D[s, t] x_s^T beta_t       z_s = sum x_s,  dprior = -sum_s z_s
//
// n_s, mu_s and x_s exist at s only, but k_t, w_t, beta_t of all 8 tokens are at hand: for every s, a product of inner
// size 16 (keys or values) yields the contributions to all 8 t <= s, and the sums over s stay in its accumulators.
//
// Gauge: c_s = exp(g_2 + .. + g_s) in a tile of tokens 1.., D[s, t] = c_s / c_t. M and I = J + prior are kept divided
// by c_s (so keys, their squares and the prior come divided by c_s), which makes n_s and x_s multiples of c_s; results
// are divided by c_t at the end. A token with g < -STRONG begins a tile, so that c_s >= exp(-7 STRONG); the decay of a
// tile's first token only ever multiplies.
//
// dg, with dg_{n+1} = <dM_end, M_n> + <dJ_end, J_n> taken directly at the end of a tile, is the sum
//
//     dg_t = dg_{t+1} + (<n_t, M_t> - <x_t, J_t>) - dw_t . w_t - dbeta_t . beta_t
//
// where the bracket is prior z_t. Where decays within a tile are not near 1, dg is a small difference of large terms:
// the tile is done carefully, the bracket summed with the very n and x, rounded to bf16, that the products use. Where
// they are, one tile's sum may go on in the tile before it.
//
// A block takes 16 ROW_GROUPS values of one head of one span; a warp 16 of them and KEY_BLOCKS blocks of 16 keys, one
// block at a time: lane (row, column) holds keys 2 row, 2 row + 1 and values 2 column + {0, 1, 8, 9} of a block, the
// layout of a product's result. Given when compiling: KEY_BLOCKS, KEY_PARTS (together: K), ROW_GROUPS, VALUE_BLOCKS
// (together: V), BLOCKS (per multiprocessor) and PULL: if 1, only what the span adds to the gradient of its first state
// is wanted.
#include "backward_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
backward_tensor(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ w,
                const u16* __restrict__ beta, const float* __restrict__ g, const float* __restrict__ prior,
                const u16* __restrict__ d_output, const i64* __restrict__ spans,
                const float* __restrict__ chunks_m, const float* __restrict__ chunks_j,
                const float* __restrict__ d_last_m, const float* __restrict__ d_last_j,
                float* __restrict__ dq, float* __restrict__ dk,  // of bf16 if one block takes all values
                u16* __restrict__ dw, u16* __restrict__ dbeta, float* __restrict__ dg, float* __restrict__ dprior,
                float* __restrict__ d_first_m, float* __restrict__ d_first_j,
                float4* scratch,  // [block][warp][entry][key block][4][lane]
                int tokens, int heads, double query_scale) {  // the others as in backward.cu
    SHARED;
    float* const floats = (float*)shared;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, row = lane >> 2, column = lane & 3;
    const int group = warp / KEY_PARTS, part = warp % KEY_PARTS;
    // What is read again where it is needed: fewer registers are taken from tile to tile.
    const volatile Chunk& chunk = *(const Chunk*)(shared + CHUNK_AT);
    const volatile Fixed& fixed = *(const Fixed*)(shared + FIXED_AT);
    const u32 identity = (2 * column == row ? 0x3f80u : 0u) | (2 * column + 1 == row ? 0x3f800000u : 0u);
    // This lane's part of key block b of a state [V, K], as [value 8 v + ..][key + 2 value], and of its own scratch.
    const int own_element = (blockIdx.x % VALUE_BLOCKS * ROWS + group * 16 + 2 * column) * KEYS + part * KEY_BLOCKS * 16 + 2 * row;
    float4* const gradient = (float4*)(floats + GRADIENT) + warp * KEY_BLOCKS * 128 + lane;
    float4* const entries = scratch + ((i64)blockIdx.x * WARPS + warp) * KEY_BLOCKS * ENTRIES * 128 + lane;
    auto load_state = [&](float (&x)[2][4], const float* from, i64 state, int b) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float2 keys = {0.f, 0.f};
            const i64 at = state * KEYS * VALUES + own_element + (e / 2 * 8 + e % 2) * KEYS + b * 16;
            if (from) keys = __ldcg((const float2*)(from + at));
            x[e / 2][e % 2] = keys.x, x[e / 2][2 + e % 2] = keys.y;
        }
    };
    // Of the tile; where a token is meant that depends on the lane, its number is the lane's row.
    Tile tile = {};
    float alpha = 1.f, carry;                  // decay of the token after it, which `gradient` waits for; c to there
    bool direct;                               // whether dg of that token is taken directly
    int buffer = 0;                            // of the two that tiles take in turn
    u32 w_factor[2] = {}, b_factor[2] = {}, d_factor[2] = {};  // the token's w, beta, dy, of the group's values
    OfWarp of;                                 // what this warp adds
    // All tokens of the tile, for one block of keys.
    auto sweep = [&](const bool careful, int b) {  // called with both constants, each compiled for itself
        const int lane = thread_index() & 31, warp = thread_index() >> 5, row = lane >> 2, column = lane & 3;
        const int group = warp / KEY_PARTS, part = warp % KEY_PARTS;
        const int key_block = part * KEY_BLOCKS + b, base = tile.first / ENTRY * ENTRY;
        float4* const gradient = (float4*)(floats + GRADIENT) + warp * KEY_BLOCKS * 128 + lane;
        const float4* const entries = scratch + ((i64)blockIdx.x * WARPS + warp) * KEY_BLOCKS * ENTRIES * 128 + lane;
        float M[2][4], I[2][4], dM[2][4], X[2][4], of_dq[4] = {}, of_n[4] = {}, of_x[4] = {};
        float4 before[4];
#pragma unroll
        for (int i = 0; i < 4; i++) before[i] = __ldcg(entries + (base / ENTRY * KEY_BLOCKS + b) * 128 + i * 32);
        read_block(dM, X, gradient + b * 128, carry);
        const uint2 raw = *(const uint2*)(shared + KEY + tile.token(row) * KEY_ROW + key_block * 8 + 2 * column);
        const u32 k_factor[2] = {__byte_perm(raw.x, raw.y, 0x5410), __byte_perm(raw.x, raw.y, 0x7632)};
        u32 square[2], square_low[2], n[2][4], x[2][4], turned[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float k0 = low_bf16(k_factor[h]), k1 = high_bf16(k_factor[h]), s0 = k0 * k0, s1 = k1 * k1;
            square[h] = pack_bf16(s0, s1);
            square_low[h] = pack_bf16(s0 - low_bf16(square[h]), s1 - high_bf16(square[h]));
        }
        if (!PULL) {  // what comes after the tile acts like a token after its last
#pragma unroll
            for (int i = 0; i < 4; i++) {
                n[0][i] = pack_bf16(dM[i / 2][i % 2 * 2], dM[i / 2][i % 2 * 2 + 1]);
                x[0][i] = pack_bf16(X[i / 2][i % 2 * 2], X[i / 2][i % 2 * 2 + 1]);
            }
            multiply(of_n, n[0], w_factor[0], w_factor[1]), multiply(of_x, x[0], b_factor[0], b_factor[1]);
            turned[0] = transpose(n[0][0]), turned[1] = transpose(n[0][2]);
            turned[2] = transpose(n[0][1]), turned[3] = transpose(n[0][3]);
            multiply(of.dw, turned, k_factor[0], k_factor[1]);
            turned[0] = transpose(x[0][0]), turned[1] = transpose(x[0][2]);
            turned[2] = transpose(x[0][1]), turned[3] = transpose(x[0][3]);
            multiply(of.dbeta, turned, square[0], square[1]);
            if (careful) multiply(of.dbeta, turned, square_low[0], square_low[1]);
        }
        scale_block(M, I, before, floats[ENTRY_DECAY + buffer], fixed.prior);
#pragma unroll 1
        for (int from = base; from < tile.first; from += ENTRY)  // at most once, but a branch: predicates are few
            add_tokens(shared, DECAYED, M, I, key_block, group, from);
        // The products that update M and I and those that make dy q^T share their other factors: a lane whose inner
        // indices a product does not use reads zeros.
        const u32* const record = shared + UPDATE + buffer * PREPARED + key_block * RECORD;
        const u32* const update_m = record + (column == 0 ? row * 8 : 66);
        const u32* const update_i = record + (column == 1 || column == 2 ? row * 8 + 2 * column : 64);
        const u32* const query = record + (column == 3 ? row * 8 + 6 : 64);
        const u32* const other = shared + OTHER + buffer * PREPARED + (group * 32 + lane) * 2;
        // Two tokens at a time, so that a product of inner size 16 takes 8 values of both.
#pragma unroll
        for (int s0 = 0; s0 < TILE; s0 += 2) {
            u32 mu[2][4];  // [value tile][token, key]
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int s = s0 + h;
                const uint2 a = *(const uint2*)(update_m + s * ALL_BLOCKS * RECORD);
                const uint2 c = *(const uint2*)(update_i + s * ALL_BLOCKS * RECORD);
                const uint2 y = *(const uint2*)(query + s * ALL_BLOCKS * RECORD);
                const uint2 o = *(const uint2*)(other + s * ROW_GROUPS * 64);
                float dy_q[2][4] = {};
                multiply_8(M[0], a.x, a.y, o.x), multiply_8(M[1], a.x, a.y, o.y);
                multiply_8(I[0], c.x, c.y, o.x), multiply_8(I[1], c.x, c.y, o.y);
                multiply_8(dy_q[0], y.x, y.y, o.x), multiply_8(dy_q[1], y.x, y.y, o.y);
                const float scaled_prior = careful ? fixed.prior * floats[INVERSE + tile.token(s)] : 0.f;
                float error = 0.f;
#pragma unroll
                for (int i = 0; i < 4; i++) {  // two values of one key
                    const int v = i / 2, at = 2 * h + i % 2, e = i % 2 * 2;
                    const float r0 = reciprocal(I[v][e]), r1 = reciprocal(I[v][e + 1]);
                    const float mu0 = M[v][e] * r0, mu1 = M[v][e + 1] * r1;
                    const float n0 = dy_q[v][e] * r0, n1 = dy_q[v][e + 1] * r1;
                    mu[v][at] = pack_bf16(mu0, mu1);
                    const float x0 = n0 * mu0, x1 = n1 * mu1;
                    n[v][at] = pack_bf16(n0, n1), x[v][at] = pack_bf16(x0, x1);
                    of.z[s] += x0 + x1;
                    if (careful) {
                        error = fmaf(low_bf16(n[v][at]), M[v][e], fmaf(high_bf16(n[v][at]), M[v][e + 1], error));
                        error = fmaf(-low_bf16(x[v][at]), I[v][e] - scaled_prior, error);
                        error = fmaf(-high_bf16(x[v][at]), I[v][e + 1] - scaled_prior, error);
                    }
                }
                if (careful) {
                    error = warp_sum(error);
                    if (row == s) of.correction += error;
                }
            }
#pragma unroll
            for (int v = 0; v < 2; v++) multiply(dM[v], n[v], identity, identity), multiply(X[v], x[v], identity, identity);
            if (PULL) continue;
            const bool own[2] = {row == s0, row == s0 + 1}, past[2] = {row <= s0, row <= s0 + 1};
#pragma unroll
            for (int v = 0; v < 2; v++) {
                multiply(of_dq, mu[v], own[0] ? d_factor[v] : 0u, own[1] ? d_factor[v] : 0u);
                multiply(of_n, n[v], past[0] ? w_factor[v] : 0u, past[1] ? w_factor[v] : 0u);
                multiply(of_x, x[v], past[0] ? b_factor[v] : 0u, past[1] ? b_factor[v] : 0u);
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                turned[0] = transpose(n[0][2 * h]), turned[1] = transpose(n[1][2 * h]);
                turned[2] = transpose(n[0][2 * h + 1]), turned[3] = transpose(n[1][2 * h + 1]);
                multiply(of.dw, turned, past[h] ? k_factor[0] : 0u, past[h] ? k_factor[1] : 0u);
                turned[0] = transpose(x[0][2 * h]), turned[1] = transpose(x[1][2 * h]);
                turned[2] = transpose(x[0][2 * h + 1]), turned[3] = transpose(x[1][2 * h + 1]);
                multiply(of.dbeta, turned, past[h] ? square[0] : 0u, past[h] ? square[1] : 0u);
                if (careful) multiply(of.dbeta, turned, past[h] ? square_low[0] : 0u, past[h] ? square_low[1] : 0u);
            }
        }
        if (!PULL && direct) {
            const float last_prior = fixed.prior * tile.inverse(shared, TILE - 1);
            float after_m[2][4], after_x[2][4];
            read_block(after_m, after_x, gradient + b * 128, carry);
#pragma unroll
            for (int e = 0; e < 8; e += 2) {
                const float *const m = after_m[e / 4] + e % 4, *const x = after_x[e / 4] + e % 4, *const to = M[e / 4] + e % 4;
                const float J0 = I[e / 4][e % 4] - last_prior, J1 = I[e / 4][e % 4 + 1] - last_prior;
                of.tail = fmaf(m[0], to[0], fmaf(m[1], to[1], fmaf(-x[0], J0, fmaf(-x[1], J1, of.tail))));
                // With the words that stood for dM and -dJ in the products:
                const u32 a = pack_bf16(m[0], m[1]), c = pack_bf16(x[0], x[1]);
                of.rounded_tail = fmaf(low_bf16(a), to[0], fmaf(high_bf16(a), to[1], of.rounded_tail));
                of.rounded_tail = fmaf(-low_bf16(c), J0, fmaf(-high_bf16(c), J1, of.rounded_tail));
            }
        }
        write_block(dM, X, gradient + b * 128);
        if (PULL) return;
        float to_dk[4];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const u32 key = shared[KEY + tile.token(2 * column + c) * KEY_ROW + key_block * 8 + row];
            const float by = tile.inverse(shared, 2 * column + c);
            to_dk[c] = by * fmaf(-2.f * low_bf16(key), of_x[c], of_n[c]);
            to_dk[2 + c] = by * fmaf(-2.f * high_bf16(key), of_x[2 + c], of_n[2 + c]);
        }
        *((uint4*)(shared + KEY_SUMS + buffer * SUMS) + (warp * KEY_BLOCKS + b) * 32 + lane) = {
            pack_bf16(of_dq[0], of_dq[2]), pack_bf16(of_dq[1], of_dq[3]),
            pack_bf16(to_dk[0], to_dk[2]), pack_bf16(to_dk[1], to_dk[3])};
    };
    const auto tile_query = [&](int first) { return q + (chunk.row + first * heads) * KEYS; };
    const auto tile_d_output = [&](int first) {
        return d_output + (chunk.row + first * heads) * VALUES + value_block() * ROWS;
    };
    // Between tiles: the sums of the one before, which begins at `end`, and what the next one needs. `turn` counts.
    const Gradients to = {dq, dk, dw, dbeta, dg};
    u64 *const prepared = (u64*)(shared + BARRIERS), *const swept = prepared + 2;
    auto turn_over = [&](int end, u32 turn) {
        const Tile now = read_tile(shared, end), next = read_tile(shared, now.first);
        const int own = thread_index() - FIRST_PREPARING;
        Share<PREPARING> share;
        if (now.first) share.fetch(tile_query(next.first), tile_d_output(next.first), own, next.tokens, heads);
        if (end < chunk.tokens) {
            wait_for(swept + (turn + 1) % 2, (turn - 1) / 2 & 1);
            if (!PULL) write_sums(shared, to, end, (turn + 1) % 2, own, PREPARING, tokens, heads, (float)query_scale);
        }
        if (now.first == 0) return;
        share.prepare(shared, (turn + 1) % 2, own, next, fixed.prior, (float)query_scale);
        if (!starts_late(now.first, next.first)) prepare_start<PREPARING>(shared, (turn + 1) % 2, own, next.first);
        barrier_arrive(prepared + (turn + 1) % 2);
        // Once a chunk: the one to come, on its way to the cache, late enough to be there still when it is wanted.
        if (chunk.start && next.first < ENTRY && now.first >= ENTRY) {
            const i64 before = ((fixed.state + chunk.start / CHUNK - 1) * VALUES + value_block() * ROWS) * KEYS;
            prefetch_chunk(q, k, w, beta, d_output, chunks_m + before, chunks_j + before, chunk.row - CHUNK * heads,
                           heads, value_block(), own);
        }
    };
    // A tile that starts from decayed tokens, like the one after it: where those stand is free only now.
    auto start_late = [&](int end, u32 turn) {
        const Tile now = read_tile(shared, end);
        if (end == chunk.tokens || !starts_late(end, now.first)) return;
        __syncthreads();
        prepare_start<THREADS>(shared, turn % 2, thread_index(), now.first);
        __syncthreads();
    };
    // Everything, from the last chunk to the first, as a warp that sweeps or prepares, or both.
    auto walk = [&](const bool sweeps, const bool prepares) {
        for (int b = 0; b < KEY_BLOCKS && sweeps; b++) {
            float m[2][4], j[2][4];
            load_state(m, d_last_m, blockIdx.x / VALUE_BLOCKS, b), load_state(j, d_last_j, blockIdx.x / VALUE_BLOCKS, b);
#pragma unroll
            for (int e = 0; e < 8; e++) j[e / 4][e % 4] = -j[e / 4][e % 4];
            write_block(m, j, gradient + b * 128);
        }
        u32 turn = 0;
#pragma unroll 1
        for (int start = fixed.length ? (fixed.length - 1) / CHUNK * CHUNK : -1; start >= 0; start -= CHUNK) {
            const int chunk_tokens = min(CHUNK, fixed.length - start), own = thread_index() - FIRST_PREPARING;
            __syncthreads();
            float m[KEY_BLOCKS][2][4], j[KEY_BLOCKS][2][4];
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; b++) {
                if (!sweeps) break;
                load_state(m[b], chunks_m, fixed.state + start / CHUNK, b);
                load_state(j[b], chunks_j, fixed.state + start / CHUNK, b);
            }
            const i64 row0 = fixed.row + (i64)start * heads;
            fetch_chunk(shared, k, w, beta, row0, heads, value_block(), chunk_tokens);
            const int own_token = THREADS - 1 - thread_index();
            float decay = 0.f;
            if (own_token < chunk_tokens) decay = g[row0 + own_token * heads];
            if (turn) {
                if (!PULL) write_sums(shared, to, 0, (turn + 1) % 2, thread_index(), THREADS, tokens, heads, (float)query_scale);
                __syncthreads();
            }
            for (int t = own_token; t < CHUNK; t += THREADS) {
                if (t >= THREADS) decay = t < chunk_tokens ? g[row0 + t * heads] : 0.f;
                floats[DECAY + t] = decay;
            }
            if (thread_index() == 0) *(Chunk*)(shared + CHUNK_AT) = {row0, start, chunk_tokens};
            copies_arrived();
            __syncthreads();
            write_tiles(shared, chunk_tokens);
            // The states before the chunk's tokens 0, 16, 32, 48, from which every tile's is made.
            const float2 wholes = prepare_entries(shared);
            __syncthreads();
            auto prepare_last = [&]() {
                if (!ROOM) write_zeros(shared, own, PREPARING);
                const Tile last = read_tile(shared, chunk_tokens);
                Share<PREPARING> share;
                share.fetch(tile_query(last.first), tile_d_output(last.first), own, last.tokens, heads);
                share.prepare(shared, turn % 2, own, last, fixed.prior, (float)query_scale);
                prepare_start<PREPARING>(shared, turn % 2, own, last.first);
                barrier_arrive(prepared + turn % 2);
            };
            if (ROOM && prepares) prepare_last();
#pragma unroll 1
            for (int e = 0; e < ENTRIES && e * ENTRY < chunk_tokens && sweeps; e++) {
                const float whole = __shfl_sync(~0u, e == 3 ? wholes.y : wholes.x, e == 2 ? ENTRY : 0);
#pragma unroll
                for (int b = 0; b < KEY_BLOCKS; b++) {
                    if (e) {
#pragma unroll
                        for (int c = 0; c < 8; c++) m[b][c / 4][c % 4] *= whole, j[b][c / 4][c % 4] *= whole;
                        add_tokens(shared, CHUNK_DECAYED + (e - 1) * 4 * FACTOR, m[b], j[b], part * KEY_BLOCKS + b,
                                   group, (e - 1) * ENTRY);
                    }
                    write_block(m[b], j[b], entries + (e * KEY_BLOCKS + b) * 128);
                }
            }
            __syncthreads();  // what follows takes the place of the decayed tokens
            if (!ROOM && prepares) prepare_last();
            if (!sweeps) {
#pragma unroll 1
                for (int end = chunk_tokens; end > 0; end = read_tile(shared, end).first, turn++)
                    start_late(end, turn), turn_over(end, turn);
            } else {
#pragma unroll 1
                for (int end = chunk_tokens; end > 0; end = tile.first, turn++) {
                    tile = read_tile(shared, end), buffer = turn % 2;
                    wait_for(prepared + buffer, turn / 2 & 1);
                    start_late(end, turn);
                    direct = is_direct(shared, tile, chunk.tokens);
                    const u16* const d_at = tile_d_output(tile.first) + min(row, tile.tokens - 1) * heads * VALUES +
                                            group * 16 + 2 * column;
                    for (int v = 0; v < 2; v++) d_factor[v] = row < tile.tokens ? *(const u32*)(d_at + 8 * v) : 0u;
                    const int at = tile.token(row) * VALUE_ROW + group * 8 + column;
                    w_factor[0] = shared[WRITE + at], w_factor[1] = shared[WRITE + at + 4];
                    b_factor[0] = shared[EVIDENCE + at], b_factor[1] = shared[EVIDENCE + at + 4];
                    carry = floats[GAUGE + end - 1] * alpha;
#pragma unroll
                    for (int c = 0; c < 4; c++) of.dw[c] = of.dbeta[c] = of.z[c] = of.z[4 + c] = 0.f;
                    of.tail = of.rounded_tail = of.correction = 0.f;
#pragma unroll 1
                    for (int b = 0; b < KEY_BLOCKS; b++) {
                        if (prepares && b == TURN_AT) turn_over(end, turn);
                        if (!PULL && tile.careful) sweep(true, b);
                        else sweep(false, b);
                    }
                    if (!PULL) share_sums(shared, to, of, tile, direct, buffer, heads);
                    alpha = expf(floats[DECAY + tile.first]);
                    barrier_arrive(swept + buffer);
                }
            }
        }
        if (!PULL && turn) {
            __syncthreads();
            write_sums(shared, to, 0, (turn + 1) % 2, thread_index(), THREADS, tokens, heads, (float)query_scale);
        }

        // What remains: the gradient of the span's first state, dg of its first token, dprior.
        of.tail = 0.f;
        for (int b = 0; b < KEY_BLOCKS && sweeps; b++) {
            float dM[2][4], X[2][4], M[2][4], J[2][4];
            read_block(dM, X, gradient + b * 128, alpha);
            load_state(M, fixed.length ? chunks_m : nullptr, fixed.state, b);
            load_state(J, fixed.length ? chunks_j : nullptr, fixed.state, b);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const i64 at = (i64)(blockIdx.x / VALUE_BLOCKS) * KEYS * VALUES + own_element +
                               (e / 4 * 8 + e % 2) * KEYS + b * 16 + e % 4 / 2;
                of.tail += dM[e / 4][e % 4] * M[e / 4][e % 4] - X[e / 4][e % 4] * J[e / 4][e % 4];
                d_first_m[at] = dM[e / 4][e % 4], d_first_j[at] = -X[e / 4][e % 4];
            }
        }
        if (PULL) return;
        of.tail = warp_sum(of.tail);
        __syncthreads();
        if (lane == 0 && sweeps) floats[TOKEN_SUMS + warp] = of.tail;
        __syncthreads();
        if (thread_index() == 0) {
            float sum = 0.f, z = 0.f;
            for (int other = 0; other < WARPS; other++) sum += floats[TOKEN_SUMS + other];
            for (int x = 0; x < 8 * WARPS; x++) z += floats[SUM_Z + x];
            dprior[blockIdx.x] = -z;
            if (fixed.length) dg[(i64)value_block() * tokens * heads + fixed.row] = sum;
        }
    };

    if (thread == 0) {
        const i64 item = blockIdx.x / VALUE_BLOCKS, head = item % heads;
        const Span span = read_span(spans, item / heads);
        *(Fixed*)(shared + FIXED_AT) = {span.first * heads + head,
                                        span.chunk_base * heads + head * span.chunks + span.chunk, (int)span.length,
                                        prior[head]};
        for (int n = 0; n < 4; n++) barrier_start(prepared + n, n < 2 ? PREPARING : 32 * WARPS);
    }
    if (thread < 8 * WARPS) floats[SUM_Z + thread] = 0.f;
    write_zeros(shared, thread, THREADS);
    __syncthreads();
    if (HELPERS == 0) {
        walk(true, true);
    } else if (warp < WARPS) {
        if constexpr (SWEEP_REGISTERS > 0) more_registers<SWEEP_REGISTERS>();
        walk(true, false);
    } else {
        if constexpr (HELPER_REGISTERS > 0) fewer_registers<HELPER_REGISTERS>();
        walk(false, true);
    }
}
