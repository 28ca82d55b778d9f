// The recursion of the means' gradients, from the last chunk of a sequence to its first:
//     dM0 = last dM - G^T (U dM) + F^T dY
// Two warps take 16 columns of values, half the keys each, dM^T in their registers; they only exchange their parts of
// U dM. A block takes MEAN_COLUMNS of them, whose warps read the same U, G, F: many, so that few multiprocessors do and
// others work on what it leaves. Writes dM^T of every chunk, and (U dM)^T in float32.
#define THREADS (KEYS <= 128 && VALUES % 128 == 0 ? 512 : 256)  // 4 * MEAN_COLUMNS
#include "backward.cuh"

using Wide = Split<C, KEYS>;
using Reads = Exact<MEAN_COLUMNS>;  // bf16, until it is in registers
constexpr int OWN = KEYS / 2;  // keys of a warp
constexpr int EXCHANGED = THREADS * C / 2;
constexpr bool IN_U = KEYS > 128;  // no room of its own: what is exchanged takes the place of U
static_assert(!IN_U || EXCHANGED <= Wide::words, "");
constexpr int WORDS = 3 * Wide::words + Reads::words + (IN_U ? 0 : EXCHANGED);
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_mean(
    const u16* gain, const u16* closed, const u16* read, const u16* d_output, const float* vectors, float* scales,
    const float* d_final, const i64* table, const i64* chunks, float* d_means, float* d_innovation, float* d_initial,
    int heads) {
    SHARED;
    constexpr int BLOCKS = VALUES / MEAN_COLUMNS;
    int block = blockIdx.x, columns = block % BLOCKS * MEAN_COLUMNS, head = block / BLOCKS % heads;
    i64 sequence = block / BLOCKS / heads, first = chunks[sequence], count = chunks[sequence + 1] - first;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4 * 2;
    int half = warp % 2, first_key = half * OWN;
    columns += warp / 2 * 16;  // of this warp

    float d[OWN / 8][4];  // states of chunks are [VALUES, KEYS] in device memory, of sequences [KEYS, VALUES]
    auto of = [&](int n, int i) { return (columns + group + i * 8) * KEYS + first_key + 8 * n + pair; };
    auto of_sequence = [&](int n, int r) {
        i64 key = first_key + 8 * n + pair + r % 2;
        return ((sequence * heads + head) * KEYS + key) * VALUES + columns + group + r / 2 * 8;
    };
#pragma unroll
    for (int n = 0; n < OWN / 8; n++)
#pragma unroll
        for (int r = 0; r < 4; r++) d[n][r] = d_final ? d_final[of_sequence(n, r)] : 0.f;
    auto write = [&](float* to, int n) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            put_words(to + of(n, i), __float_as_uint(d[n][2 * i]), __float_as_uint(d[n][2 * i + 1]));
    };
    auto times = [&](float by) {
#pragma unroll
        for (int n = 0; n < OWN / 8; n++)
#pragma unroll
            for (int r = 0; r < 4; r++) d[n][r] *= by;
    };
    Wide u(shared), closing(shared + Wide::words), reading(shared + 2 * Wide::words);
    Reads reads(shared + 3 * Wide::words);
    float4* exchange = (float4*)(IN_U ? shared : shared + 3 * Wide::words + Reads::words) + lane;
    // U of a chunk is wanted earlier than the rest, and its room is free earlier.
    auto fetch_gain = [&](i64 chunk) {
        fetch(u, gain + (chunk * heads + head) * 2 * C * KEYS);
        copies_issued();
    };
    auto fetch_rest = [&](i64 chunk, i64 token, int tokens) {
        i64 index = chunk * heads + head;
        fetch(closing, closed + index * 2 * C * KEYS);
        fetch(reading, read + index * 2 * C * KEYS);
        const u16* rows = d_output + (token * heads + head) * VALUES + (columns - warp / 2 * 16);
        fetch_tokens(reads, rows, heads * VALUES, tokens);
        copies_issued();
    };
    next_may_begin();
    if (count) {
        fetch_gain(first + count - 1);
        copies_arrived();
        __syncthreads();
        fetch_rest(first + count - 1, table[2 * (first + count - 1)], (int)table[2 * (first + count) - 1]);
    }
    for (i64 chunk = first + count - 1; chunk >= first; chunk--) {
        i64 index = chunk * heads + head;
        float* number = scales + index * SCALES;
        float* state = d_means + index * KEYS * VALUES;
        const i64* next = table + 2 * (chunk > first ? chunk - 1 : chunk);  // read long before it is wanted
        const i64 token = next[0];
        const int tokens = (int)next[1];
        float last = vectors[index * VECTORS * C + C - 1], most = 0.f;
        float gain_down = number[GAIN], closed_down = number[CLOSED], read_down = number[READ];
#pragma unroll
        for (int n = 0; n < OWN / 8; n++)
#pragma unroll
            for (int r = 0; r < 4; r++) most = larger(most, size_of(d[n][r]));
        Scale of_state(largest_of_warp(most));
        float x[C / 8][4];
#pragma unroll
        for (int n = 0; n < C / 8; n++)
#pragma unroll
            for (int r = 0; r < 4; r++) x[n][r] = 0.f;
#pragma unroll
        for (int k = 0; k < OWN; k += 16) {
            u32 ah[4], al[4];
            split_operand(ah, al, d[k / 8], d[k / 8 + 1], of_state.up);
            write(state, k / 8), write(state, k / 8 + 1);
            add_row<true, Wide::stride, C>(x, ah, al, u.at, u.plane, first_key + k, 0);
        }
        float down = of_state.down * gain_down;
        copies_arrived();
        __syncthreads();
        if (!IN_U && chunk > first) fetch_gain(chunk - 1);
#pragma unroll
        for (int n = 0; n < C / 8; n++) {
#pragma unroll
            for (int r = 0; r < 4; r++) x[n][r] *= down;
            exchange[32 * (warp * C / 8 + n)] = {x[n][0], x[n][1], x[n][2], x[n][3]};
        }
        meet(1 + warp / 2, 64);
        float* to = d_innovation + index * WIDE * C;
        most = 0.f;
#pragma unroll
        for (int n = 0; n < C / 8; n++) {
            float4 other = exchange[32 * ((warp ^ 1) * C / 8 + n)];
            x[n][0] += other.x, x[n][1] += other.y, x[n][2] += other.z, x[n][3] += other.w;
#pragma unroll
            for (int r = 0; r < 4; r += 2) {
                most = larger(most, larger(size_of(x[n][r]), size_of(x[n][r + 1])));
                if (n / (C / 16) == half)
                    *(float2*)(to + (columns + group + r * 4) * C + 8 * n + pair) = make_float2(x[n][r], x[n][r + 1]);
            }
        }
        Scale of_gained(largest_of_warp(most));
        u32 high[C / 16][4], low[C / 16][4];  // (U dM)^T, negative
#pragma unroll
        for (int n = 0; n < C / 16; n++) split_operand(high[n], low[n], x[2 * n], x[2 * n + 1], -of_gained.up);
        u32 a[C / 16][4];  // dY^T
        most = 0.f;
#pragma unroll
        for (int k = 0; k < C / 16; k++) {
            load_a<true, Reads::stride>(a[k], reads.at, warp / 2 * 16, 16 * k);
#pragma unroll
            for (int i = 0; i < 4; i++)
                most = larger(most, larger(size_of(low_bf16(a[k][i])), size_of(high_bf16(a[k][i]))));
        }
        Scale of_reads(largest_of_warp(most));
#pragma unroll
        for (int k = 0; k < C / 16; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[k][i] = pack_half(of_reads.up * low_bf16(a[k][i]), of_reads.up * high_bf16(a[k][i]));
        float by = of_gained.up / closed_down;  // powers of two
        times(last * by);
#pragma unroll
        for (int k = 0; k < C; k += 16)
            add_row<false, Wide::stride, OWN>(d, high[k / 16], low[k / 16], closing.at, closing.plane, k, first_key);
        times(of_gained.down * closed_down * (of_reads.up / read_down));
#pragma unroll
        for (int k = 0; k < C; k += 16) {
            u32 bh[OWN / 16][4], bl[OWN / 16][4];
#pragma unroll
            for (int n = 0; n < OWN / 16; n++) {
                load_b<false, Wide::stride>(bh[n], reading.at, k, first_key + 16 * n);
                load_b<false, Wide::stride>(bl[n], reading.at + reading.plane, k, first_key + 16 * n);
            }
#pragma unroll
            for (int n = 0; n < OWN / 16; n++) multiply_pair(d[2 * n], d[2 * n + 1], a[k / 16], bl[n]);
#pragma unroll
            for (int n = 0; n < OWN / 16; n++) multiply_pair(d[2 * n], d[2 * n + 1], a[k / 16], bh[n]);
        }
        times(of_reads.down * read_down);
        if (IN_U && chunk > first) {
            __syncthreads();
            fetch_gain(chunk - 1);
        }
        copies_arrived();
        __syncthreads();
        if (threadIdx.x == 0) leave(number);
        if (chunk > first) fetch_rest(chunk - 1, token, tokens);
    }
#pragma unroll
    for (int n = 0; n < OWN / 8; n++)
#pragma unroll
        for (int r = 0; r < 4; r++) d_initial[of_sequence(n, r)] = d[n][r];
}
