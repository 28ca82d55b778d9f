// What the warps of a block added to a tile's gradients, summed and written: part of backward_tensor.cu.
#pragma once
#include "backward_tile.cuh"

// Gradients in global memory. dq and dk are bf16 if one block takes all values, else a sum for each block.
struct Gradients {
    float *q, *k;
    u16 *w, *beta;
    float* g;
};

// What a warp adds, from all its keys, of a tile's tokens: a lane has dw and dbeta of two tokens and two values each, in
// the layout of a product's result, still divided by c; and its part of c_s z_s of every token.
struct OfWarp {
    float dw[4], dbeta[4], z[TILE];
    float tail, rounded_tail;  // what dg gets from the end of the tile
    float correction;          // and, carefully, from the token that is the lane's row
};

// Leaves a warp's part of the sums, or writes dw and dbeta if nobody else has a part in them.
__device__ __forceinline__ void share_sums(u32* shared, const Gradients& to, OfWarp& of, const Tile& tile, bool direct,
                                           int buffer, int heads) {
    const int lane = thread_index() & 31, warp = thread_index() >> 5, group = warp / KEY_PARTS;
    const int row = lane >> 2, column = lane & 3;
    float* const floats = (float*)shared;
    const volatile Chunk& chunk = *(const Chunk*)(shared + CHUNK_AT);
    float* const token_sums = floats + TOKEN_SUMS + buffer * SUMS + warp * 12;
    const float z = sum_each(of.z) * tile.inverse(shared, row);  // of token = row
    const float bracket = tile.careful ? of.correction : ((const volatile Fixed*)(shared + FIXED_AT))->prior * z;
    if (column == 0) floats[SUM_Z + warp * 8 + row] += z;
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int at = tile.token(2 * column + c % 2) * 2 * VALUE_ROW + group * 16 + row + c / 2 * 8;
        const float by = tile.inverse(shared, 2 * column + c % 2);
        of.dw[c] *= by, of.dbeta[c] *= -by;
        sum[c % 2] -= of.dw[c] * low_bf16(((const u16*)(shared + WRITE))[at]);
        sum[c % 2] -= of.dbeta[c] * low_bf16(((const u16*)(shared + EVIDENCE))[at]);
    }
    for (int h = 0; h < 2; h++) {
        for (int offset = 4; offset < 32; offset *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], offset);
        sum[h] += __shfl_sync(~0u, bracket, (2 * column + h) * 4);
        if (row == 0) token_sums[2 * column + h] = sum[h];
    }
    if (direct) of.tail = warp_sum(of.tail), of.rounded_tail = warp_sum(of.rounded_tail);
    if (lane < 2) token_sums[TILE + lane] = lane ? of.rounded_tail : of.tail;
    u32 words[4];
#pragma unroll
    for (int h = 0; h < 2; h++) {  // to [token = row][two values]
        words[h] = transpose(pack_bf16(of.dw[2 * h], of.dw[2 * h + 1]));
        words[2 + h] = transpose(pack_bf16(of.dbeta[2 * h], of.dbeta[2 * h + 1]));
    }
    if (KEY_PARTS > 1) {
        *((uint4*)(shared + ROW_SUMS + buffer * SUMS) + warp * 32 + lane) = {words[0], words[1], words[2], words[3]};
    } else if (row < tile.tokens) {
        const i64 at = (chunk.row + (tile.first + row) * heads) * VALUES + value_block() * ROWS + group * 16;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            *(u32*)(to.w + at + 8 * h + 2 * column) = words[h];
            *(u32*)(to.beta + at + 8 * h + 2 * column) = words[2 + h];
        }
    }
}

// The tile that begins at the chunk's token `start`, its sums in one of two buffers; this thread is number `own` of
// `count`. `tokens` in all.
__device__ __forceinline__ void write_sums(u32* shared, const Gradients& to, int start, int buffer, int own,
                                           const int count, int tokens, int heads, float scale) {
    float* const floats = (float*)shared;
    const volatile Chunk& chunk = *(const Chunk*)(shared + CHUNK_AT);
    const volatile Fixed& fixed = *(const Fixed*)(shared + FIXED_AT);
    const Tile tile = tile_at(shared, start, chunk.tokens);
    const i64 row0 = chunk.row + start * heads;
    const u32* const sums = shared + KEY_SUMS + buffer * SUMS;
    constexpr int KEY_ITEMS = 32 * ALL_BLOCKS, ROW_ITEMS = KEY_PARTS > 1 ? 32 * ROW_GROUPS : 0;
#pragma unroll 1
    for (int x = own; x < KEY_ITEMS + ROW_ITEMS; x += count) {
        const bool of_key = x < KEY_ITEMS;
        const int y = of_key ? x : x - KEY_ITEMS, lane = y % 32;
        // Of a row group's keys: [block][lane]; of its values: [part][lane].
        const uint4* const from = (const uint4*)(of_key ? sums : sums + ROW_SUMS - KEY_SUMS) +
                                  (of_key ? y : y / 32 * KEY_PARTS * 32 + lane);
        float sum[8] = {};
        auto add = [&](uint4 more) {
            const u32 words[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
            for (int i = 0; i < 4; i++) sum[2 * i] += low_bf16(words[i]), sum[2 * i + 1] += high_bf16(words[i]);
        };
        if (of_key) {
#pragma unroll
            for (int group = 0; group < ROW_GROUPS; group++) add(from[group * ALL_BLOCKS * 32]);
            const int s = 2 * (lane % 4);
            i64 at = ((i64)value_block() * tokens * heads + row0 + s * heads) * KEYS + y / 32 * 16 + lane / 4 * 2;
#pragma unroll
            for (int next = 0; next < 2; next++, at += heads * KEYS) {
                if (s + next >= tile.tokens) break;
                const float q0 = scale * sum[2 * next], q1 = scale * sum[2 * next + 1];
                const float k0 = sum[4 + 2 * next], k1 = sum[5 + 2 * next];
                if (VALUE_BLOCKS == 1) {
                    *(u32*)((u16*)to.q + at) = pack_bf16(q0, q1), *(u32*)((u16*)to.k + at) = pack_bf16(k0, k1);
                } else {
                    *(float2*)(to.q + at) = {q0, q1}, *(float2*)(to.k + at) = {k0, k1};
                }
            }
        } else {
#pragma unroll
            for (int part = 0; part < KEY_PARTS; part++) add(from[part * 32]);
            const int s = lane / 4;
            const i64 at = (row0 + s * heads) * VALUES + value_block() * ROWS + y / 32 * 16 + lane % 4 * 2;
            if (s < tile.tokens) {
                *(u32*)(to.w + at) = pack_bf16(sum[0], sum[1]), *(u32*)(to.w + at + 8) = pack_bf16(sum[2], sum[3]);
                *(u32*)(to.beta + at) = pack_bf16(sum[4], sum[5]);
                *(u32*)(to.beta + at + 8) = pack_bf16(sum[6], sum[7]);
            }
        }
    }
    if (own / 32 == count / 32 - 1) {
        const int lane = own % 32;
        float sum = 0.f;
#pragma unroll
        for (int other = 0; other < WARPS; other++)
            sum += lane < TILE + 2 ? ((const float*)sums)[TOKEN_SUMS - KEY_SUMS + other * 12 + lane] : 0.f;
        const bool direct = is_direct(shared, tile, chunk.tokens);
        const float running = __shfl_sync(~0u, lane ? 0.f : floats[RUNNING], 0);
        const float direct_sum = __shfl_sync(~0u, sum, TILE);
        const float rounded_sum = __shfl_sync(~0u, sum, TILE + 1);
        const float after = direct ? direct_sum : running, rounded_after = direct ? rounded_sum : running;
        if (lane >= tile.tokens) sum = 0.f;
#pragma unroll
        for (int offset = 1; offset < TILE; offset *= 2) sum += __shfl_down_sync(~0u, sum, offset);
        if (lane == 0) floats[RUNNING] = rounded_after + sum;
        float* const place = to.g + (i64)value_block() * tokens * heads + row0;
        if (lane >= 1 && lane < tile.tokens) place[lane * heads] = rounded_after + sum;
        if (lane == 0 && chunk.start + start + tile.tokens < fixed.length) place[tile.tokens * heads] = after;
    }
}
