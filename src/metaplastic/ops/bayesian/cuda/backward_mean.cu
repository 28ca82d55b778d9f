// The recursion of the means' gradients, from the last chunk of a sequence to its first:
//     dM0 = last dM - G^T (U dM) + F^T dY
// Two warps take 16 columns of values, half the keys each, dM^T in their registers; they only exchange their parts of
// U dM. A block takes BLOCK_COLUMNS of them, whose warps read the same U, G, F. Writes dM^T of every chunk, and
// (U dM)^T in float32.
#define THREADS (4 * BLOCK_COLUMNS)
#include "backward.cuh"

using Wide = Split<C, KEYS>;
using Reads = Exact<BLOCK_COLUMNS>;  // bf16, until it is in registers
constexpr int OWN = KEYS / 2;  // keys of a warp
constexpr int STAGE = 3 * Wide::words + Reads::words;
constexpr int STAGES = KEYS > 128 ? 1 : 2;  // one chunk is read while the next arrives, if there is room
constexpr int EXCHANGED = THREADS * C / 2;  // takes the place of U if it can
constexpr int WORDS = STAGES * STAGE + (EXCHANGED > Wide::words ? EXCHANGED : 0);
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_mean(
    const u16* gain, const u16* closed, const u16* read, const u16* d_output, const float* vectors, const float* scales,
    const float* d_final, const i64* table, const i64* chunks, float* d_means, float* d_innovation, float* d_initial,
    int heads) {
    SHARED;
    constexpr int BLOCKS = VALUES / BLOCK_COLUMNS;
    int block = blockIdx.x, columns = block % BLOCKS * BLOCK_COLUMNS, head = block / BLOCKS % heads;
    i64 sequence = block / BLOCKS / heads, first = chunks[sequence], count = chunks[sequence + 1] - first;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4 * 2;
    int half = warp % 2, first_key = half * OWN;
    columns += warp / 2 * 16;  // of this warp

    float d[OWN / 8][4];  // states are [VALUES, KEYS] in device memory
    auto of = [&](int n, int i) { return (columns + group + i * 8) * KEYS + first_key + 8 * n + pair; };
    const float* from = d_final + (sequence * heads + head) * KEYS * VALUES;
#pragma unroll
    for (int n = 0; n < OWN / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float2 x = *(const float2*)(from + of(n, i));
            d[n][2 * i] = x.x, d[n][2 * i + 1] = x.y;
        }
    auto write = [&](float* to, int n) {
#pragma unroll
        for (int i = 0; i < 2; i++) *(float2*)(to + of(n, i)) = make_float2(d[n][2 * i], d[n][2 * i + 1]);
    };
    auto times = [&](float by) {
#pragma unroll
        for (int n = 0; n < OWN / 8; n++)
#pragma unroll
            for (int r = 0; r < 4; r++) d[n][r] *= by;
    };
    auto stage = [&](i64 chunk) { return shared + (chunk - first) % STAGES * STAGE; };
    auto fetch_all = [&](i64 chunk) {
        i64 token = table[2 * chunk], index = chunk * heads + head;
        int tokens = (int)table[2 * chunk + 1];
        u32* to = stage(chunk);
        Reads reads(to + 3 * Wide::words);
        fetch(Wide(to), gain + index * 2 * C * KEYS);
        fetch(Wide(to + Wide::words), closed + index * 2 * C * KEYS);
        fetch(Wide(to + 2 * Wide::words), read + index * 2 * C * KEYS);
        const u16* rows = d_output + (token * heads + head) * VALUES + (columns - warp / 2 * 16);
        for (int i = threadIdx.x; i < C * BLOCK_COLUMNS / 8; i += THREADS) {
            int row = i / (BLOCK_COLUMNS / 8), column = i % (BLOCK_COLUMNS / 8) * 8;
            bool valid = row < tokens;
            const u16* from = valid ? rows + (i64)row * heads * VALUES + column : rows;
            copy_16((u32*)(reads.at + row * reads.stride + column), from, valid);
        }
        copies_issued();
    };
    if (count) fetch_all(first + count - 1);
    for (i64 chunk = first + count - 1; chunk >= first; chunk--) {
        i64 index = chunk * heads + head;
        const float* number = scales + index * SCALES;
        u32* now = stage(chunk);
        Wide u(now), closing(now + Wide::words), reading(now + 2 * Wide::words);
        Reads reads(now + 3 * Wide::words);
        float4* exchange = (float4*)(EXCHANGED > Wide::words ? shared + STAGES * STAGE : now) + lane;
        float* state = d_means + index * KEYS * VALUES;
        float last = vectors[index * VECTORS * C + C - 1], most = 0.f;
        float gain_down = number[GAIN], closed_down = number[CLOSED], read_down = number[READ];
#pragma unroll
        for (int n = 0; n < OWN / 8; n++)
#pragma unroll
            for (int r = 0; r < 4; r++) most = larger(most, size_of(d[n][r]));
        Scale of_state(largest_of_warp(most));
        copies_arrived();
        __syncthreads();
        if (STAGES == 2 && chunk > first) fetch_all(chunk - 1);
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
        __syncthreads();
#pragma unroll
        for (int n = 0; n < C / 8; n++) {
#pragma unroll
            for (int r = 0; r < 4; r++) x[n][r] *= down;
            exchange[32 * (warp * C / 8 + n)] = {x[n][0], x[n][1], x[n][2], x[n][3]};
        }
        __syncthreads();
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
        if (STAGES == 1 && chunk > first) {
            __syncthreads();
            fetch_all(chunk - 1);
        }
    }
#pragma unroll
    for (int n = 0; n < OWN / 8; n++) write(d_initial + (sequence * heads + head) * KEYS * VALUES, n);
}
