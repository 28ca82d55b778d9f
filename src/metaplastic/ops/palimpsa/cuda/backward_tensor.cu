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
// where the bracket is prior z_t. Where the decay over a tile is near 1, one sum may go on in the tile before it. The
// smaller it is, the more dg is a small difference of large terms: first dg is taken directly at the end of every tile,
// then the tile is also done carefully, the bracket summed with the very n and x, rounded to bf16, that products use.
// dw . w + dbeta . beta is half of dw . w + dk . k.
//
// An item is 16 ROW_GROUPS values of one head of one span. A block does one of them, or, TURNED, a turn of it: the later
// half of what is left of its chunks, in the last turn all of them. Every turn is a launch, and blocks of the next one
// begin as soon as all of this one have begun, so that where some heads take longer, others need not wait long. A block
// waits for its item's turn before, and only then takes a room of the scratch: who has a room waits for nobody. What a
// turn leaves of dM and dJ lies where the state was that its first chunk began from: nobody needs that any more.
//
// A warp takes 16 values and KEY_BLOCKS blocks of 16 keys, one block at a time: lane (row, column) holds keys 2 row,
// 2 row + 1 and values 2 column + {0, 1, 8, 9} of a block, the layout of a product's result. What a block of keys
// starts from is fetched while the one before is done.
//
// Given when compiling: KEY_BLOCKS, KEY_PARTS (together: K), ROW_GROUPS, VALUE_BLOCKS (together: V), BLOCKS (per
// multiprocessor); ENTRY, 8 or 16: tokens from one of a chunk's states to the next; STREAM: if 1, dM and dJ of a warp's
// blocks of keys but the first are kept in the scratch, not in shared memory (KEY_PARTS is 1), and registers are so
// scarce that x is made of n and mu as rounded; PULL: if 1, only what the span adds to d_first is wanted; TURNED: 0, 1.
#include "backward_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
backward_tensor(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ w,
                const u16* __restrict__ beta, const float* __restrict__ g, const float* __restrict__ prior,
                const u16* __restrict__ d_output, const i64* __restrict__ spans,
                const int* __restrict__ ranks,  // heads, slow ones first, and how unlike they are: states.cu
                float4* chunks,                 // states before them: states.cu
                const float* __restrict__ d_last_m, const float* __restrict__ d_last_j,
                float* __restrict__ dq, float* __restrict__ dk,  // of bf16 if one block takes all values
                u16* __restrict__ dw, u16* __restrict__ dbeta, float* __restrict__ dg, float* __restrict__ dprior,
                float* __restrict__ d_first_m, float* __restrict__ d_first_j,
                float4* scratch,  // [room][entry but the first, dM and -dJ if STREAM][warp][key block][4][lane]
                int* progress,    // TURNED, zeros: [item] chunks done, then [room] whether it is taken
                int rooms,  // TURNED; else every block has its own
                int turn, int turns,
                int alike,  // heads less unlike than that end together, and take no turns
                int count,  // of spans
                int tokens, int heads, double query_scale) {  // the others as in backward.cu
    SHARED;
    float* const floats = (float*)shared;
    const int thread = threadIdx.x, lane = thread & 31, warp = of_warp(thread >> 5), row = lane >> 2, column = lane & 3;
    const int group = warp / KEY_PARTS, part = warp % KEY_PARTS, block = blockIdx.x % VALUE_BLOCKS;
    const int number = blockIdx.x / VALUE_BLOCKS, head_here = ranks[number / count];
    const int parts = TURNED && ranks[heads] < alike ? 1 : turns;
    const Job job = job_at(spans, number % count, head_here, turn, parts, heads);
    if (TURNED) next_may_begin();
    const bool last_of_turn = TURNED && turn && blockIdx.x == gridDim.x - 1;  // what follows waits for it alone
    if (TURNED && turn && (turn >= parts || job.begin == job.end)) {
        if (last_of_turn) await_kernels_before();
        return;
    }
    if (thread == 0) shared[HEAD] = head_here;
    if (TURNED && thread == 0) {
        if (turn) await(progress + blockIdx.x, (job.length + CHUNK - 1) / CHUNK - job.end);
        shared[ROOM] = claim(progress + gridDim.x, rooms);
    }
    __syncthreads();
    // Read anew, as thread_index, but where there are turns: which of the two needs fewer registers.
    const int own_head = TURNED ? of_warp(shared[HEAD]) : 0;
    auto head = [&]() -> i64 { return TURNED ? own_head : *(volatile int*)(shared + HEAD); };
    const int room = TURNED ? of_warp(shared[ROOM]) : (int)blockIdx.x;
    const float p = prior[head()], scale = (float)query_scale;
    const u32 identity = (2 * column == row ? 0x3f80u : 0u) | (2 * column + 1 == row ? 0x3f800000u : 0u);
    const u32 identity_2 = __shfl_sync(~0u, identity, lane);  // the compiler would not keep the same word twice

    // This lane's part of key block b of a state [V, K], and of one in pieces.
    const int own_element = (block * ROWS + group * 16 + 2 * column) * KEYS + part * KEY_BLOCKS * 16 + 2 * row;
    auto place = [&](i64 state, int b) { return state * KEYS * VALUES + own_element + b * 16; };
    // The state before the chunk's token `base`, a multiple of ENTRY; `state`: the chunk's.
    auto entry = [&](i64 state, int base) -> const float4* {
        if (base) return scratch + ((i64)room * (ENTRIES - 1 + STREAM) + base / ENTRY - 1) * STATE_PIECES;
        return chunks + (state * VALUE_BLOCKS + block) * STATE_PIECES;
    };
    auto resident = [&](int b) { return !STREAM || b == 0; };  // whether a block's dM and -dJ are in shared memory
    float4* const own_gradient = (float4*)(floats + GRADIENT) + warp * RESIDENT * 128 + lane;
    auto streamed = [&](int b) -> float4* {  // else; 32-bit offsets: registers are what is scarce
        return scratch + (u32)((room * ENTRIES + ENTRIES - 1) * STATE_PIECES + own_piece(b));
    };
    auto write_gradient = [&](const float (&m)[2][4], const float (&x)[2][4], int b) {
        if (resident(b)) write_block(m, x, own_gradient + b * 128);
        else write_block(m, x, streamed(b));
    };
    // What a block of keys starts from, on its way to shared memory.
    float4* const next_entry = (float4*)(floats + NEXT_ENTRY) + warp * 128 + lane;
    float4* const next_gradient = (float4*)(floats + NEXT_GRADIENT) + warp * 128 + lane;
    auto fetch_block = [&](int b, const float4* from) {
        copy_block(next_entry, from + b * 128);
        if (!resident(b)) copy_block(next_gradient, streamed(b));
        copies_issued();
    };
    // Of the tile; where a token is meant that depends on the lane, its number is the lane's row.
    Tile tile = {};
    float entry_decay;                         // from the state that the tile's is made from to its first token
    float alpha = 1.f, carry;                  // decay of the token after it, which dM and dJ wait for; c to there
    bool direct;                               // whether dg of that token is taken directly
    u32 w_factor[2] = {}, b_factor[2] = {}, d_factor[2] = {};  // the token's w, beta, dy, of the group's values
    float of_dw[4], of_dbeta[4], of_k[2], sum_z = 0.f;  // of_k: dk . k of tokens 2 column and the next
    float of_z[TILE];                          // the lane's part of every token's c_s z_s, carefully of its bracket
    float tail;                                // what dg gets from the end of the tile
    int start = 0;                             // the chunk's first token within the span
    const float4* own_entry = nullptr;         // this lane's part of the state that the tile's is made from
    // All tokens of the tile, for one block of keys.
    auto sweep = [&](const bool careful, int b) {  // called with both constants, each compiled for itself
        const int key_block = part * KEY_BLOCKS + b, before = tile.first & (ENTRY - 1), base = tile.first - before;
        // Of tokens beyond the tile's last anything will do where only results that nobody reads are made of it.
        float M[2][4], I[2][4], dM[2][4], X[2][4], of_dq[4] = {}, of_n[4] = {}, of_x[4] = {};  // X = -dJ
        copies_arrived();
        read_block(dM, X, !STREAM ? own_gradient + b * 128 : b ? next_gradient : own_gradient, carry);
        read_block<true>(M, I, next_entry, entry_decay, p);
        if (b == 0) fetch_tile(shared, q, d_output, job.first, start + tile.first, heads, head(), block);
        if (b + 1 < KEY_BLOCKS) fetch_block(b + 1, own_entry);
        if (before > 8) add_tokens(shared, 0, M, I, key_block, group, base);
        else if (before) add_tokens<8>(shared, 0, M, I, key_block, group, base);
        const uint2 raw = *(const uint2*)(shared + KEY + (tile.first + row) * KEY_ROW + key_block * 8 + 2 * column);
        const u32 k_factor[2] = {__byte_perm(raw.x, raw.y, 0x5410), __byte_perm(raw.x, raw.y, 0x7632)};
        const u32 square[2] = {times(k_factor[0], k_factor[0]), times(k_factor[1], k_factor[1])};
        u32 n[2][4], x[2][4], turned[4], end_m[4] = {}, end_j[4] = {};
        if (!PULL) {  // what comes after the tile acts like a token after its last
#pragma unroll
            for (int i = 0; i < 4; i++) {
                n[0][i] = pack_bf16(dM[i / 2][i % 2 * 2], dM[i / 2][i % 2 * 2 + 1]);
                x[0][i] = pack_bf16(X[i / 2][i % 2 * 2], X[i / 2][i % 2 * 2 + 1]);
                end_m[i] = n[0][i], end_j[i] = x[0][i];
            }
            multiply(of_n, n[0], w_factor[0], w_factor[1]), multiply(of_x, x[0], b_factor[0], b_factor[1]);
            turned[0] = transpose(n[0][0]), turned[1] = transpose(n[0][2]);
            turned[2] = transpose(n[0][1]), turned[3] = transpose(n[0][3]);
            multiply(of_dw, turned, k_factor[0], k_factor[1]);
            turned[0] = transpose(x[0][0]), turned[1] = transpose(x[0][2]);
            turned[2] = transpose(x[0][1]), turned[3] = transpose(x[0][3]);
            multiply(of_dbeta, turned, square[0], square[1]);
        }
        // The products that update M and I and those that make dy q^T share their other factors: a lane whose inner
        // indices a product does not use reads zeros.
        const u32* const record = shared + UPDATE + key_block * RECORD;
        const u32* const update_m = record + (column == 0 ? row * 8 : 66);
        const u32* const update_i = record + (column == 1 || column == 2 ? row * 8 + 2 * column : 64);
        const u32* const query = record + (column == 3 ? row * 8 + 6 : 64);
        const u32* const other = shared + OTHER + (group * 32 + lane) * 2;
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
                const float by = careful ? tile.inverse(shared, s) : 0.f, scaled_prior = p * by;
                float z = 0.f;
#pragma unroll
                for (int i = 0; i < 4; i++) {  // two values of one key
                    const int v = i / 2, at = 2 * h + i % 2, e = i % 2 * 2;
                    const float r0 = reciprocal(I[v][e]), r1 = reciprocal(I[v][e + 1]);
                    const float mu0 = M[v][e] * r0, mu1 = M[v][e + 1] * r1;
                    const float n0 = dy_q[v][e] * r0, n1 = dy_q[v][e + 1] * r1;
                    mu[v][at] = pack_bf16(mu0, mu1);
                    const float x0 = n0 * mu0, x1 = n1 * mu1;
                    n[v][at] = pack_bf16(n0, n1);
                    x[v][at] = STREAM ? times(n[v][at], mu[v][at]) : pack_bf16(x0, x1);
                    float& sum = careful ? z : of_z[s];
                    sum = STREAM ? fmaf(n0, mu0, fmaf(n1, mu1, sum)) : sum + (x0 + x1);
                    if (careful) {
                        of_z[s] = fmaf(low_bf16(n[v][at]), M[v][e], of_z[s]);
                        of_z[s] = fmaf(high_bf16(n[v][at]), M[v][e + 1], of_z[s]);
                        of_z[s] = fmaf(-low_bf16(x[v][at]), I[v][e] - scaled_prior, of_z[s]);
                        of_z[s] = fmaf(-high_bf16(x[v][at]), I[v][e + 1] - scaled_prior, of_z[s]);
                    }
                }
                if (careful) sum_z = fmaf(by, z, sum_z);
            }
#pragma unroll
            for (int v = 0; v < 2; v++)
                multiply(dM[v], n[v], identity, identity_2), multiply(X[v], x[v], identity, identity_2);
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
                multiply(of_dw, turned, past[h] ? k_factor[0] : 0u, past[h] ? k_factor[1] : 0u);
                turned[0] = transpose(x[0][2 * h]), turned[1] = transpose(x[1][2 * h]);
                turned[2] = transpose(x[0][2 * h + 1]), turned[3] = transpose(x[1][2 * h + 1]);
                multiply(of_dbeta, turned, past[h] ? square[0] : 0u, past[h] ? square[1] : 0u);
            }
        }
        if (!PULL && direct) {
            const float last_prior = p * tile.inverse(shared, TILE - 1);
#pragma unroll
            for (int i = 0; i < 4; i++) {  // with the words that stood for dM and dJ in the products
                const int v = i / 2, e = i % 2 * 2;
                const float of_m = fmaf(low_bf16(end_m[i]), M[v][e], high_bf16(end_m[i]) * M[v][e + 1]);
                const float first = I[v][e] - last_prior, second = I[v][e + 1] - last_prior;
                tail += fmaf(-low_bf16(end_j[i]), first, fmaf(-high_bf16(end_j[i]), second, of_m));
            }
        }
        write_gradient(dM, X, b);
        if (PULL) return;
        float to_dk[4];
        const int lane = thread_index() & 31, row = lane >> 2, column = lane & 3;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int token = tile.first + 2 * column + c;
            const u32 key = shared[KEY + token * KEY_ROW + key_block * 8 + row];
            const float by = floats[INVERSE + token];
            to_dk[c] = by * fmaf(-2.f * low_bf16(key), of_x[c], of_n[c]);
            to_dk[2 + c] = by * fmaf(-2.f * high_bf16(key), of_x[2 + c], of_n[2 + c]);
            of_k[c] = fmaf(to_dk[c], low_bf16(key), fmaf(to_dk[2 + c], high_bf16(key), of_k[c]));
        }
        ((uint4*)(shared + KEY_SUMS))[(warp * KEY_BLOCKS + b) * 32 + lane] = {
            pack_bf16(of_dq[0], of_dq[1]), pack_bf16(of_dq[2], of_dq[3]),
            pack_bf16(to_dk[0], to_dk[1]), pack_bf16(to_dk[2], to_dk[3])};
    };
    // Before the barrier: what other warps add to dw, dbeta and dg.
    auto share_row_sums = [&]() {
        const int lane = thread_index() & 31, row = lane >> 2, column = lane & 3;
        float bracket = sum_each(of_z);  // of token = row
        if (!tile.careful) {
            const float z = bracket * tile.inverse(shared, row);
            if (column == 0) sum_z += z;
            bracket = p * z;
        }
        float sum[2] = {-of_k[0], -of_k[1]};
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int at = tile.token(2 * column + c % 2) * 2 * VALUE_ROW + group * 16 + row + c / 2 * 8;
            const float by = tile.inverse(shared, 2 * column + c % 2);
            of_dw[c] *= by, of_dbeta[c] *= -by;
            sum[c % 2] -= of_dw[c] * low_bf16(((const u16*)(shared + WRITE))[at]);
        }
        for (int h = 0; h < 2; h++) {
            for (int offset = 4; offset < 32; offset *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], offset);
            const float bracket_here = __shfl_sync(~0u, bracket, (2 * column + h) * 4);
            if (row == 0) floats[TOKEN_SUMS + warp * 12 + 2 * column + h] = fmaf(0.5f, sum[h], bracket_here);
        }
        if (direct) tail = warp_sum(tail);
        if (lane == 0) floats[TOKEN_SUMS + warp * 12 + TILE] = tail;
        if (part == 0) return;
        float4* const own = (float4*)(floats + ROW_SUMS) + ((part - 1) * ROW_GROUPS + group) * 64 + lane;
        own[0] = {of_dw[0], of_dw[1], of_dw[2], of_dw[3]};
        own[32] = {of_dbeta[0], of_dbeta[1], of_dbeta[2], of_dbeta[3]};
    };
    auto write_row_sums = [&](i64 first) {
        const int lane = thread_index() & 31, row = lane >> 2, column = lane & 3;
        if (part == 0) {
#pragma unroll
            for (int other = 1; other < KEY_PARTS; other++) {
                const float4* const sums = (const float4*)(floats + ROW_SUMS);
                const float4* const from = sums + ((other - 1) * ROW_GROUPS + group) * 64 + lane;
                const float4 a = from[0], c = from[32];
                of_dw[0] += a.x, of_dw[1] += a.y, of_dw[2] += a.z, of_dw[3] += a.w;
                of_dbeta[0] += c.x, of_dbeta[1] += c.y, of_dbeta[2] += c.z, of_dbeta[3] += c.w;
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 a = transpose(pack_bf16(of_dw[2 * h], of_dw[2 * h + 1]));  // to [token = row][two values]
                const u32 c = transpose(pack_bf16(of_dbeta[2 * h], of_dbeta[2 * h + 1]));
                const i64 at = ((first + row) * heads + head()) * VALUES + block * ROWS + group * 16 + 8 * h +
                               2 * column;
                if (row < tile.tokens) *(u32*)(dw + at) = a, *(u32*)(dbeta + at) = c;
            }
        }
        if (warp == WARPS - 1) {
            float sum = 0.f;
#pragma unroll
            for (int other = 0; other < WARPS; other++)
                sum += lane <= TILE ? floats[TOKEN_SUMS + other * 12 + lane] : 0.f;
            const float running = __shfl_sync(~0u, lane ? 0.f : floats[RUNNING], 0);
            const float at_end = __shfl_sync(~0u, sum, TILE), after = direct ? at_end : running;
            if (lane >= tile.tokens) sum = 0.f;
#pragma unroll
            for (int offset = 1; offset < TILE; offset *= 2) sum += __shfl_down_sync(~0u, sum, offset);
            if (lane == 0) floats[RUNNING] = after + sum;
            float* const to = dg + ((i64)block * tokens + first) * heads + head();
            if (lane >= 1 && lane < tile.tokens) to[lane * heads] = after + sum;
            if (lane == 0 && first + tile.tokens < job.first + job.length) to[tile.tokens * heads] = after;
        }
    };

    for (int b = 0; b < KEY_BLOCKS; b++) {
        const i64 last = (i64)job.span * heads + head();
        float m[2][4], j[2][4];
        if (TURNED && turn) load_pieces(m, j, entry(job.state + job.end, 0) + own_piece(b));
        else {
            load_block(m, d_last_m, place(last, b)), load_block(j, d_last_j, place(last, b));
#pragma unroll
            for (int e = 0; e < 8; e++) j[e / 4][e % 4] = -j[e / 4][e % 4];
        }
        write_gradient(m, j, b);
    }
    for (int x = thread; x < TILE * ALL_BLOCKS * 4; x += THREADS) shared[UPDATE + x / 4 * RECORD + 64 + x % 4] = 0u;
    const int until = min(job.end * CHUNK, job.length);
    if (until) fetch_tile(shared, q, d_output, job.first, until, heads, head(), block);
    for (start = (job.end - 1) * CHUNK; start >= job.begin * CHUNK; start -= CHUNK) {
        const int chunk_tokens = min(CHUNK, job.length - start);
        const i64 state = job.state + start / CHUNK;
        const i64 row0 = (job.first + start) * heads + head();
        __syncthreads();
        fetch_chunk(shared, k, w, beta, row0, heads, block, chunk_tokens);
        auto fetch_state = [&](int b) { copy_block(next_entry, entry(state, 0) + own_piece(b)), copies_issued(); };
        fetch_state(0);
        for (int t = thread; t < CHUNK; t += THREADS)
            floats[DECAY + t] = t < chunk_tokens ? g[row0 + t * heads] : 0.f;
        copies_arrived();
        __syncthreads();
        write_tiles(shared, chunk_tokens);
        // The states before every ENTRY tokens, from which every tile's is made.
        const float2 wholes = prepare_entries(shared);
        __syncthreads();
#pragma unroll 1
        for (int b = 0; b < KEY_BLOCKS; b++) {
            float m[2][4], j[2][4];
            copies_arrived();
            read_block<true>(m, j, next_entry, 1.f);
            if (b + 1 < KEY_BLOCKS) fetch_state(b + 1);
#pragma unroll 1
            for (int e = 1; e < ENTRIES && e * ENTRY < chunk_tokens; e++) {
                const int before = (e - 1) * ENTRY;
                const float whole = __shfl_sync(~0u, before < 32 ? wholes.x : wholes.y, before & 31);
#pragma unroll
                for (int c = 0; c < 8; c++) m[c / 4][c % 4] *= whole, j[c / 4][c % 4] *= whole;
                add_tokens(shared, e - 1, m, j, part * KEY_BLOCKS + b, group, before);
                write_block<true>(m, j, (float4*)entry(state, e * ENTRY) + own_piece(b));
            }
        }
        __syncthreads();
        direct = true;
        for (int end = chunk_tokens; end > 0; end = tile.first) {
            tile = read_tile(shared, end);
            direct = direct || tile.direct;
            const int base = tile.first / ENTRY * ENTRY;
            own_entry = entry(state, base) + own_piece(0);
            fetch_block(0, own_entry);
            entry_decay = prepare_start(shared, base, tile.first);
            prepare_tile(shared, tile, p, scale);
            const int d_row = min(TILE - tile.tokens + row, TILE - 1);
            const int d_at = NEXT_D_OUTPUT + d_row * ROWS / 2 + group * 8 + column;
            for (int v = 0; v < 2; v++) d_factor[v] = row < tile.tokens ? shared[d_at + 4 * v] : 0u;
            __syncthreads();
            // Once a chunk: the one to come, on its way to the cache, late enough to be there still when it is
            // wanted.
            if (start > job.begin * CHUNK && tile.first == 0) {
                const float4* const before = entry(state - 1, 0);
                const i64 row0 = (job.first + start - CHUNK) * heads + head();
                prefetch_chunk(k, w, beta, before, row0, heads, block);
            }
            const i64 first = job.first + start + tile.first;
            const int at = tile.token(row) * VALUE_ROW + group * 8 + column;
            w_factor[0] = shared[WRITE + at], w_factor[1] = shared[WRITE + at + 4];
            b_factor[0] = shared[EVIDENCE + at], b_factor[1] = shared[EVIDENCE + at + 4];
            carry = floats[GAUGE + end - 1] * alpha;
#pragma unroll
            for (int c = 0; c < 4; c++) of_dw[c] = of_dbeta[c] = of_z[c] = of_z[4 + c] = 0.f;
            tail = of_k[0] = of_k[1] = 0.f;
#pragma unroll 1
            for (int b = 0; b < KEY_BLOCKS; b++)
                if (!PULL && tile.careful) sweep(true, b);
                else sweep(false, b);
            if (!PULL) share_row_sums();
            alpha = expf(floats[DECAY + tile.first]);
            copies_arrived();
            __syncthreads();
            if (PULL) continue;
            const i64 own_row = ((i64)block * tokens + first) * heads + head();
            write_key_sums(shared, dq, dk, own_row, heads, tile.tokens, scale);
            write_row_sums(first);
            direct = tile.first % 16 == 0 || floats[DECAY + tile.first] < STEEP_BELOW;
        }
    }

    // What remains: the gradient of the span's first state and dg of its first token, or what the next turn needs;
    // dprior.
    tail = 0.f;
    const i64 last = (i64)job.span * heads + head();
    for (int b = 0; b < KEY_BLOCKS; b++) {
        float dM[2][4], X[2][4], M[2][4] = {}, J[2][4] = {};
        if (resident(b)) read_block(dM, X, own_gradient + b * 128, alpha);
        else read_block(dM, X, streamed(b), alpha);
        if (job.begin) {
            write_block<true>(dM, X, (float4*)entry(job.state + job.begin, 0) + own_piece(b));
            continue;
        }
        if (job.length) load_pieces(M, J, entry(job.state, 0) + own_piece(b));
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const i64 at = place(last, b) + (e / 4 * 8 + e % 2) * KEYS + e % 4 / 2;
            tail += dM[e / 4][e % 4] * M[e / 4][e % 4] - X[e / 4][e % 4] * J[e / 4][e % 4];
            if (d_first_m) d_first_m[at] = dM[e / 4][e % 4], d_first_j[at] = -X[e / 4][e % 4];
        }
    }
    if (!PULL) {
        tail = warp_sum(tail), sum_z = warp_sum(sum_z);
        __syncthreads();
        if (lane == 0) floats[TOKEN_SUMS + warp * 12] = tail, floats[TOKEN_SUMS + warp * 12 + 1] = sum_z;
        __syncthreads();
        if (thread < 2) {
            float sum = 0.f;
            for (int other = 0; other < WARPS; other++) sum += floats[TOKEN_SUMS + other * 12 + thread];
            float* const whole = dprior + last * VALUE_BLOCKS + block;
            if (thread) *whole = (TURNED && turn ? __ldcg(whole) : 0.f) - sum;
            else if (job.length && !job.begin) dg[((i64)block * tokens + job.first) * heads + head()] = sum;
        }
    }
    if (!TURNED) return;
    __syncthreads();
    if (thread == 0) {
        announce(progress + blockIdx.x, (job.length + CHUNK - 1) / CHUNK - job.begin);
        announce(progress + gridDim.x + room, 0);
        if (last_of_turn) await_kernels_before();
    }
}
