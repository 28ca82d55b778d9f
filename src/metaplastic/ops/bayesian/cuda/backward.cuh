// What the kernels of the backward pass share beside numbers: products of tiles, loads and stores, decays within a chunk.
#pragma once
#include "backward_numbers.cuh"

constexpr int C = 64;  // tokens of a chunk
constexpr int WIDE = KEYS > VALUES ? KEYS : VALUES;
constexpr int AT_ONCE = WIDE > 128 ? 1 : 2;  // blocks of a chunk each that a multiprocessor has room for
// Of a token over its noise, were its key the least known one: beyond, backward_careful.cu works on the chunk, and also
// where one has less than this share of that, if that is not negligible beside the noise.
constexpr float LARGEST_VARIANCE = 32.f, SMALLEST_SHARE = 0x1p-8f, NEGLIGIBLE = 0x1p-8f;
constexpr int MEAN_COLUMNS = KEYS <= 128 && VALUES % 128 == 0 ? 128 : 64;  // values of a block of backward_mean.cu
constexpr int VECTORS = 5;  // per chunk: decay since the entry, gathered noise, decay to the end, 1 / deviation, noise

// Per chunk and head: by what the split matrices of device memory are to be multiplied (what takes the place of another
// takes its number too), the same of both entry states, and sums that the decay's gradient needs: dM M0, P0 dP, the
// trace of dP, dU U (dP and dM are those of the states after the chunk); whether backward_careful.cu works on it, and
// for that what float32 leaves of P0 dP; and, as an int, how many blocks of the recursions have left it behind.
enum { GAIN, CLOSED, READ, SOURCE = READ, INNOVATION, WEIGHTS, D_RESIDUAL, D_WEIGHTS, PRODUCTS, MEAN, COVARIANCE,
       WITH_MEAN, WITH_COVARIANCE, TRACE, WITH_GAIN, CAREFUL, WITH_COVARIANCE_REST, LEFT_BY, SCALES = 20 };

template <int COLUMNS> using Exact = Tile<C, COLUMNS, false>;

// What a warp of the eight holds of a matrix of 64 x N: 32 rows and N / 4 columns.
template <int N> struct Part {
    static_assert(N % 64 == 0, "");
    static constexpr int pairs = N / 64;
    float x[2][2 * pairs][4];
    __device__ __forceinline__ Part() {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 2 * pairs; j++)
#pragma unroll
                for (int r = 0; r < 4; r++) x[i][j][r] = 0.f;
    }
    static __device__ __forceinline__ int row() { return threadIdx.x / 128 * 32; }
    static __device__ __forceinline__ int column() { return threadIdx.x / 32 % 4 * (N / 4); }
    // f(row, column, x, y) for every pair of neighbours.
    template <class F> __device__ __forceinline__ void each(F f) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 2 * pairs; j++)
#pragma unroll
                for (int r = 0; r < 4; r += 2)
                    f(row() + 16 * i + lane / 4 + 4 * r, column() + 8 * j + lane % 4 * 2, x[i][j][r], x[i][j][r + 1]);
    }
    // The same with the numbers of the row (of 4) and the column (of 4 pairs) among those that a thread has.
    template <class F> __device__ __forceinline__ void each_of(F f) {
        int n = 0;
        each([&](int row, int column, float& x, float& y) {
            f(row, column, x, y, n / (4 * pairs) * 2 + n % 2, n / 2 % (2 * pairs) * 2), n++;
        });
    }
    // f of these rows or columns: taken from shared memory once, before something is written there.
    template <class F> static __device__ __forceinline__ void of_rows(float (&to)[4], F f) {
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = f(row() + 8 * i + threadIdx.x % 32 / 4);
    }
    template <class F> static __device__ __forceinline__ void of_columns(float (&to)[4 * pairs], F f) {
#pragma unroll
        for (int i = 0; i < 4 * pairs; i++) to[i] = f(column() + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2);
    }
    __device__ __forceinline__ void times(float by) {
        each([&](int, int, float& x, float& y) { x *= by, y *= by; });
    }
    __device__ __forceinline__ float largest() {
        float most = 0.f;
        each([&](int, int, float& x, float& y) { most = larger(most, larger(size_of(x), size_of(y))); });
        return most;
    }
    // `by` times the part.
    template <class T> __device__ __forceinline__ void to(T tile, Scale scale, float by = 1.f) {
        by *= scale.up;
        each([&](int row, int column, float& x, float& y) { tile.put(row, column, by * x, by * y); });
    }
    // The same to device memory; the low plane follows the high one. Of two neighbouring tiles of 8 columns one lane of
    // two takes what both have of the first, the other one of the second: whole sectors are written at once.
    __device__ __forceinline__ void to_memory(u16* memory, float* number, Scale scale, float by = 1.f) {
        by *= scale.up;
        const int lane = threadIdx.x % 32, odd = lane % 2;
        memory += (row() + lane / 4) * N + column() + 8 * odd + lane % 4 / 2 * 4;
        auto put = [&](u16* to, u32 first, u32 second) {
            const u32 other = __shfl_xor_sync(~0u, odd ? first : second, 1);
            put_words(to, odd ? other : first, odd ? second : other);
        };
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 2 * pairs; j += 2)
#pragma unroll
                for (int r = 0; r < 4; r += 2) {
                    const float(&a)[4] = x[i][j], (&b)[4] = x[i][j + 1];
                    u32 first[2], second[2];  // high and low
                    split(by * a[r], by * a[r + 1], first[0], first[1]);
                    split(by * b[r], by * b[r + 1], second[0], second[1]);
                    u16* to = memory + (16 * i + 4 * r) * N + 8 * j;
                    put(to, first[0], second[0]), put(to + C * N, first[1], second[1]);
                }
        if (threadIdx.x == 0) *number = scale.down;
    }
    // Sums over columns of f(row, column, x, y), for the four warps that share a row: sums[4][64].
    template <class F> __device__ __forceinline__ void row_sums(float* sums, F f) {
        float s[4] = {0.f, 0.f, 0.f, 0.f};
        int lane = threadIdx.x % 32;
        each_of([&](int row, int column, float& x, float& y, int i, int) { s[i] += f(row, column, x, y); });
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[i] += __shfl_xor_sync(~0u, s[i], 1);
            s[i] += __shfl_xor_sync(~0u, s[i], 2);
            if (lane % 4 == 0) sums[threadIdx.x / 32 % 4 * C + row() + 8 * i + lane / 4] = s[i];
        }
    }
};
template <int N> __device__ __forceinline__ Two from_memory(const u16* memory, float down, int row, int column) {
    Two x = joined(*(const u32*)(memory + row * N + column), *(const u32*)(memory + (C + row) * N + column));
    return {down * x.x, down * x.y};
}

// Operands of m16 n8 k16: a is 16 x 16 at (m, k), b two times 16 x 8 at (k, n) and (k, n + 8). Stored as named or, with
// TRANSPOSED, the other way round.
template <bool TRANSPOSED, int STRIDE> __device__ __forceinline__ int place_a(int m, int k) {
    int lane = threadIdx.x % 32;
    if (TRANSPOSED) return (k + lane % 8 + lane / 16 * 8) * STRIDE + m + lane % 16 / 8 * 8;
    return (m + lane % 16) * STRIDE + k + lane / 16 * 8;
}
template <bool TRANSPOSED, int STRIDE> __device__ __forceinline__ int place_b(int k, int n) {
    int lane = threadIdx.x % 32;
    if (TRANSPOSED) return (n + lane % 8 + lane / 16 * 8) * STRIDE + k + lane % 16 / 8 * 8;
    return (k + lane % 16) * STRIDE + n + lane / 16 * 8;
}
template <bool TURNED> __device__ __forceinline__ void load(u32 (&r)[4], const u16* row) {
    if (TURNED) load_transposed(r, row);
    else load_matrices(r, row);
}
template <bool TRANSPOSED, int STRIDE> __device__ __forceinline__ void load_a(u32 (&r)[4], const u16* a, int m, int k) {
    load<TRANSPOSED>(r, a + place_a<TRANSPOSED, STRIDE>(m, k));
}
template <bool TRANSPOSED, int STRIDE> __device__ __forceinline__ void load_b(u32 (&r)[4], const u16* b, int k, int n) {
    load<!TRANSPOSED>(r, b + place_b<TRANSPOSED, STRIDE>(k, n));
}
__device__ __forceinline__ void multiply_pair(float (&d)[4], float (&e)[4], const u32 (&a)[4], const u32 (&b)[4]) {
    multiply_half(d, a[0], a[1], a[2], a[3], b[0], b[1]);
    multiply_half(e, a[0], a[1], a[2], a[3], b[2], b[3]);
}

// part += a b, as the tiles are scaled, over inner indices from `begin` to `end` (multiples of 16). A_T, B_T: stored
// transposed.
template <bool A_T, bool B_T, int N, class A, class B>
__device__ __forceinline__ void add_product(Part<N>& part, A a, B b, int begin, int end) {
    constexpr int pairs = Part<N>::pairs, a_step = 16 * (A_T ? A::stride : 1), b_step = 16 * (B_T ? 1 : B::stride);
    constexpr int a_next = 16 * (A_T ? 1 : A::stride), b_next = 16 * (B_T ? B::stride : 1);
    const u16 *from_a = a.at + place_a<A_T, A::stride>(Part<N>::row(), begin);
    const u16 *from_b = b.at + place_b<B_T, B::stride>(begin, Part<N>::column());
#pragma unroll 1
    for (int k = begin; k < end; k += 16, from_a += a_step, from_b += b_step) {
        u32 ah[2][4], al[2][4], bh[pairs][4], bl[pairs][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load<A_T>(ah[i], from_a + i * a_next);
            if (A::has_low) load<A_T>(al[i], from_a + i * a_next + A::plane);
        }
#pragma unroll
        for (int j = 0; j < pairs; j++) {
            load<!B_T>(bh[j], from_b + j * b_next);
            if (B::has_low) load<!B_T>(bl[j], from_b + j * b_next + B::plane);
        }
        if (A::has_low)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < pairs; j++) multiply_pair(part.x[i][2 * j], part.x[i][2 * j + 1], al[i], bh[j]);
        if (B::has_low)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < pairs; j++) multiply_pair(part.x[i][2 * j], part.x[i][2 * j + 1], ah[i], bl[j]);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < pairs; j++) multiply_pair(part.x[i][2 * j], part.x[i][2 * j + 1], ah[i], bh[j]);
    }
}

// A split matrix of device memory into shared memory, in the background.
template <int ROWS, int COLUMNS> __device__ __forceinline__ void fetch(Split<ROWS, COLUMNS> to, const u16* from) {
    constexpr int per_row = COLUMNS / 8, step = THREADS / per_row;  // low rows follow the high ones in both
    static_assert(THREADS % per_row == 0 && 2 * ROWS % step == 0, "");
    int row = threadIdx.x / per_row, column = threadIdx.x % per_row * 8;
    u16* place = to.at + row * to.stride + column;
    from += row * COLUMNS + column;
#pragma unroll
    for (int i = 0; i < 2 * ROWS; i += step) copy_16((u32*)(place + i * to.stride), from + i * COLUMNS, true);
}

__device__ __forceinline__ void fetch_vectors(float* to, const float* from) {
    if (threadIdx.x < VECTORS * C / 4) copy_16((u32*)to + 4 * threadIdx.x, from + 4 * threadIdx.x, true);
}

// The same of a bf16 input, as it is, from the chunk's first token on: `pitch` numbers from token to token.
template <int COLUMNS>
__device__ __forceinline__ void fetch_tokens(Exact<COLUMNS> to, const u16* from, int pitch, int tokens) {
#pragma unroll
    for (int i = threadIdx.x; i < C * COLUMNS / 8; i += THREADS) {
        const int row = i / (COLUMNS / 8), column = i % (COLUMNS / 8) * 8;
        const bool valid = row < tokens;
        copy_16((u32*)(to.at + row * to.stride + column), valid ? from + (i64)row * pitch + column : from, valid);
    }
}

// Tokens of a bf16 input [tokens, heads, COLUMNS] on their way through registers into an exact tile.
template <int COLUMNS> struct Tokens {
    static constexpr int count = C * COLUMNS / 8 / THREADS;
    static_assert(count * 8 * THREADS == C * COLUMNS, "");
    uint4 x[count];
    // From the chunk's first token at this head.
    __device__ __forceinline__ void load(const u16* from, int heads, int tokens, int pitch = COLUMNS) {
#pragma unroll
        for (int i = 0; i < count; i++) {
            int at = threadIdx.x + THREADS * i, row = at / (COLUMNS / 8), column = at % (COLUMNS / 8) * 8;
            x[i] = {0, 0, 0, 0};
            if (row < tokens) x[i] = *(const uint4*)(from + (i64)row * heads * pitch + column);
        }
    }
    __device__ __forceinline__ float largest() const {
        float most = 0.f;
#pragma unroll
        for (int i = 0; i < count; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 word = j == 0 ? x[i].x : j == 1 ? x[i].y : j == 2 ? x[i].z : x[i].w;
                most = larger(most, larger(size_of(low_bf16(word)), size_of(high_bf16(word))));
            }
        return most;
    }
    __device__ __forceinline__ void store(Exact<COLUMNS> to, Scale scale) const {
#pragma unroll
        for (int i = 0; i < count; i++) {
            int at = threadIdx.x + THREADS * i, row = at / (COLUMNS / 8), column = at % (COLUMNS / 8) * 8;
            auto word = [&](u32 w) { return pack_half(scale.up * low_bf16(w), scale.up * high_bf16(w)); };
            *(uint4*)(to.at + row * to.stride + column) = {word(x[i].x), word(x[i].y), word(x[i].z), word(x[i].w)};
        }
    }
};

// A piece of a float32 matrix of rows of PITCH on its way through registers into a split tile.
template <int ROWS, int COLUMNS, int PITCH> struct Piece {
    static constexpr int count = ROWS * COLUMNS / 4 / THREADS;
    static_assert(count * 4 * THREADS == ROWS * COLUMNS, "");
    float4 x[count];
    __device__ __forceinline__ void load(const float* from) {
#pragma unroll
        for (int i = 0; i < count; i++) {
            int at = threadIdx.x + THREADS * i;
            x[i] = *(const float4*)(from + at / (COLUMNS / 4) * PITCH + at % (COLUMNS / 4) * 4);
        }
    }
    __device__ __forceinline__ float largest() const {
        float most = 0.f;
#pragma unroll
        for (int i = 0; i < count; i++) most = larger(most, largest_of(x[i]));
        return most;
    }
    __device__ __forceinline__ void store(Split<ROWS, COLUMNS> to, Scale scale) {
#pragma unroll
        for (int i = 0; i < count; i++) {
            int at = threadIdx.x + THREADS * i;
            uint2 high, low;
            split(scale.up * x[i].x, scale.up * x[i].y, high.x, low.x);
            split(scale.up * x[i].z, scale.up * x[i].w, high.y, low.y);
            u16* place = to.at + at / (COLUMNS / 4) * to.stride + at % (COLUMNS / 4) * 4;
            *(uint2*)place = high;
            *(uint2*)(place + to.plane) = low;
        }
    }
    // The sum of its products with a split matrix of device memory.
    __device__ __forceinline__ float times(const u16* a, float a_down) const {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < count; i++) {
            const uint2* m = (const uint2*)a + threadIdx.x + THREADS * i;
            uint2 high = m[0], low = m[ROWS * COLUMNS / 4];
            Two p = joined(high.x, low.x), q = joined(high.y, low.y);
            sum += (p.x * x[i].x + p.y * x[i].y) + (q.x * x[i].z + q.y * x[i].w);
        }
        return a_down * sum;
    }
    // Instead of load: a - 2 b, split matrices of device memory.
    __device__ __forceinline__ void subtract_twice(const u16* a, float a_down, const u16* b, float b_down) {
#pragma unroll
        for (int i = 0; i < count; i++) {
            int at = threadIdx.x + THREADS * i;
            const uint2 *m = (const uint2*)a + at, *n = (const uint2*)b + at;
            uint2 ah = m[0], al = m[ROWS * COLUMNS / 4], bh = n[0], bl = n[ROWS * COLUMNS / 4];
            Two p = joined(ah.x, al.x), q = joined(ah.y, al.y), r = joined(bh.x, bl.x), s = joined(bh.y, bl.y);
            float twice = 2.f * b_down;
            x[i].x = a_down * p.x - twice * r.x, x[i].y = a_down * p.y - twice * r.y;
            x[i].z = a_down * q.x - twice * s.x, x[i].w = a_down * q.y - twice * s.y;
        }
    }
};

// Of the first 64 threads each has a token's log decay: they, and the sums of those after it in its block of 16, are
// what decay_ratios takes.
__device__ __forceinline__ void decay_sums(float x, float* g, float* rest) {
    const int at = threadIdx.x % 16;
    g[threadIdx.x] = x;
#pragma unroll
    for (int by = 1; by < 16; by *= 2) {
        const float y = __shfl_down_sync(~0u, x, by);
        if (at + by < 16) x += y;
    }
    x = __shfl_down_sync(~0u, x, 1);
    rest[threadIdx.x] = at < 15 ? x : 0.f;
}
// ratio[t * 65 + s] = exp(g_{s+1} + ... + g_t) for s <= t, else 0: sums of numbers of one sign, -inf allowed.
constexpr int RATIO = C + 1;
__device__ __forceinline__ void decay_ratios(float* ratio, const float* g, const float* rest) {
    const int s = threadIdx.x % C, own = s / 16, block = threadIdx.x / C;
    float sum = block > own ? rest[s] : 0.f;
#pragma unroll
    for (int b = 1; b < C / 16 - 1; b++)
        if (b > own && b < block) sum += g[16 * b] + rest[16 * b];
    ratio += 16 * block * RATIO + s;
#pragma unroll
    for (int t = 0; t < 16; t++) {
        const int after = 16 * block + t - s;
        if (after > 0) sum += g[16 * block + t];
        ratio[t * RATIO] = after >= 0 ? expf(sum) : 0.f;
    }
}

// For one of the first 64 threads, its row of Part::row_sums.
__device__ __forceinline__ float sum_of_four(const float* sums) {
    return (sums[threadIdx.x] + sums[C + threadIdx.x]) + (sums[2 * C + threadIdx.x] + sums[3 * C + threadIdx.x]);
}

// The sum over all 256 threads; `room`: 8 floats.
__device__ __forceinline__ float sum_of_block(float x, float* room) {
#pragma unroll
    for (int by = 16; by; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    float all = 0.f;
    for (int i = 0; i < 8; i++) all += room[i];
    return all;
}

// part += a b, with a, 16 x 16, in registers, and N columns of b from inner index k and column n on; the low part of b
// lies `plane` behind it. Ordered so that products do not wait for each other.
template <bool B_T, int STRIDE, int N>
__device__ __forceinline__ void add_row(
    float (*part)[4], const u32 (&high)[4], const u32 (&low)[4], const u16* b, int plane, int k, int n) {
    u32 bh[N / 16][4], bl[N / 16][4];
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
        load_b<B_T, STRIDE>(bh[i], b, k, n + 16 * i);
        load_b<B_T, STRIDE>(bl[i], b + plane, k, n + 16 * i);
    }
#pragma unroll
    for (int i = 0; i < N / 16; i++) multiply_pair(part[2 * i], part[2 * i + 1], low, bh[i]);
#pragma unroll
    for (int i = 0; i < N / 16; i++) multiply_pair(part[2 * i], part[2 * i + 1], high, bl[i]);
#pragma unroll
    for (int i = 0; i < N / 16; i++) multiply_pair(part[2 * i], part[2 * i + 1], high, bh[i]);
}

// Which chunk and head a block works on, and where.
struct Place {
    i64 first, index;  // the chunk's first token; chunk * heads + head
    int tokens, head, heads;
    // `order`: which chunk is whose turn; without it they come as they are.
    __device__ __forceinline__ Place(const i64* table, int heads, const i64* order = 0) : heads(heads) {
        i64 chunk = blockIdx.x / heads;
        if (order) chunk = order[chunk];
        head = blockIdx.x % heads;
        index = chunk * heads + head;
        first = table[2 * chunk], tokens = (int)table[2 * chunk + 1];
    }
    template <class T> __device__ __forceinline__ T* tokens_of(T* x, int size) const {
        return x + (first * heads + head) * size;
    }
    template <class T> __device__ __forceinline__ T* of(T* x, int size) const { return x + index * size; }
};

// Whether backward_careful.cu works on any of the chunks and heads `begin`, `begin` + `step`, ... before `end`, or on a
// chunk of a head of a sequence: the same answer in every thread.
__device__ __forceinline__ bool any_careful(const float* scales, i64 begin, i64 end, int step) {
    int found = 0;
    for (i64 index = begin + threadIdx.x % 32 * step; index < end; index += 32 * step)
        found |= scales[index * SCALES + CAREFUL] != 0.f;
    return __ballot_sync(~0u, found) != 0;
}
__device__ __forceinline__ bool has_careful(const float* scales, i64 first, i64 end, int heads, int head) {
    return any_careful(scales, first * heads + head, end * heads, heads);
}

// A block of a recursion counts a chunk that it leaves behind: one thread, once a barrier stands behind all that the
// block wrote for it.
__device__ __forceinline__ void leave(float* number) { announce_one((int*)number + LEFT_BY); }
// A kernel after it that is launched early works on a chunk once so many blocks have left it. Its blocks stand in the
// order in which chunks are left, and the last one sees the recursion end: what is launched next finds all of it done.
__device__ __forceinline__ void await_recursion(const float* number, int blocks) {
    if (threadIdx.x == 0) await((const int*)number + LEFT_BY, blocks);
    __syncthreads();
}
__device__ __forceinline__ void end_after_recursion() {
    if (blockIdx.x == gridDim.x - 1) await_kernels_before();
}
