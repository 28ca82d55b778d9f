// Runs the CUDA kernels of metaplastic.ops on a CPU: one fibre per thread, one block after another.
//
// Only what those kernels use is here. Fibres of a warp meet at every warp instruction (shuffle, ballot, matrix
// product), those of a block at __syncthreads(). Shared memory starts as NaN: reading what nobody wrote shows.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define SHARED u32* shared = emulation::shared_memory

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulation {
struct Dim { unsigned x; };
struct Fibre { ucontext_t context; Dim thread; int lane, warp; bool done; std::vector<char> stack; };
struct Warp { long generation; int arrived; u32 slots[2][32][6]; };
struct Meeting { long generation; int arrived; };

static std::vector<Fibre> fibres;
static std::vector<Warp> warps;
static Fibre* current;
static ucontext_t scheduler;
static Dim block, grid;
static long block_generation;
static int block_arrived;
static Meeting meetings[16];
static u32* shared_memory;
static std::function<void()> body;

static void yield() { swapcontext(&current->context, &scheduler); }

static void meet_warp() {
    Warp& warp = warps[current->warp];
    long generation = warp.generation;
    if (++warp.arrived == 32) warp.arrived = 0, warp.generation++;
    else while (warp.generation == generation) yield();
}

// Every lane gives some words and sees those of all lanes.
static u32 (*exchange(std::initializer_list<u32> words))[6] {
    Warp& warp = warps[current->warp];
    int parity = warp.generation & 1, i = 0;  // a lane may be one instruction ahead of another, never two
    for (u32 word : words) warp.slots[parity][current->lane][i++] = word;
    meet_warp();
    return warp.slots[parity];
}

static void enter() {
    body();
    current->done = true;
    swapcontext(&current->context, &scheduler);
}

template <class... Arguments, size_t... index>
void call(void (*kernel)(Arguments...), void** arguments, std::index_sequence<index...>) {
    kernel(*(std::remove_reference_t<Arguments>*)arguments[index]...);
}

// As the driver launches: `arguments` points to every argument's value.
template <class... Arguments>
void launch(void (*kernel)(Arguments...), unsigned blocks, int threads, int shared_bytes, void** arguments) {
    body = [=] { call(kernel, arguments, std::index_sequence_for<Arguments...>()); };
    grid.x = blocks;
    for (block.x = 0; block.x < blocks; block.x++) {
        std::vector<u32> memory(shared_bytes / 4 + 4, 0x7fc00000u);
        shared_memory = (u32*)(((uintptr_t)memory.data() + 15) & ~(uintptr_t)15);
        fibres = std::vector<Fibre>(threads);
        warps = std::vector<Warp>((threads + 31) / 32);
        block_generation = block_arrived = 0;
        for (int i = 0; i < threads; i++) {
            Fibre& fibre = fibres[i];
            fibre.thread.x = i, fibre.lane = i & 31, fibre.warp = i >> 5, fibre.stack.resize(1 << 16);
            getcontext(&fibre.context);
            fibre.context.uc_stack.ss_sp = fibre.stack.data();
            fibre.context.uc_stack.ss_size = fibre.stack.size();
            makecontext(&fibre.context, enter, 0);
        }
        for (int left = threads; left;)
            for (Fibre& fibre : fibres)
                if (!fibre.done) {
                    current = &fibre;
                    swapcontext(&scheduler, &fibre.context);
                    left -= fibre.done;
                }
    }
}
}  // namespace emulation

#define threadIdx (emulation::current->thread)
#define blockIdx (emulation::block)
#define gridDim (emulation::grid)

static inline void __syncthreads() {
    using namespace emulation;
    long generation = block_generation;
    if (++block_arrived == (int)fibres.size()) block_arrived = 0, block_generation++;
    else while (block_generation == generation) yield();
}
static inline float __uint_as_float(u32 x) { float r; memcpy(&r, &x, 4); return r; }
static inline u32 __float_as_uint(float x) { u32 r; memcpy(&r, &x, 4); return r; }

template <class T> T shuffle(T value, int source) {
    u32 words[2] = {};
    memcpy(words, &value, sizeof(T));
    auto all = emulation::exchange({words[0], words[1]});
    T result;
    memcpy(&result, all[source & 31], sizeof(T));
    return result;
}
template <class T> T __shfl_sync(u32, T x, int source) { return shuffle(x, source); }
template <class T> T __shfl_xor_sync(u32, T x, int mask) { return shuffle(x, emulation::current->lane ^ mask); }
template <class T> T __shfl_up_sync(u32, T x, int by) {
    int lane = emulation::current->lane;
    return shuffle(x, lane < by ? lane : lane - by);
}
template <class T> T __shfl_down_sync(u32, T x, int by) {
    int lane = emulation::current->lane;
    return shuffle(x, lane + by > 31 ? lane : lane + by);
}
static inline u32 __ballot_sync(u32, bool x) {
    auto all = emulation::exchange({(u32)x});
    u32 result = 0;
    for (int lane = 0; lane < 32; lane++) result |= all[lane][0] << lane;
    return result;
}
static inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    u64 both = (u64)b << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; i++) result |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}

static inline float reciprocal(float x) { return 1.f / x; }
static inline u32 round_bf16(float x) {
    u32 u = __float_as_uint(x);
    return x != x ? 0x7fffu : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static inline u32 pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
static inline float half_to_float(u16 x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
static inline u16 float_to_half(float x) { _Float16 h = (_Float16)x; u16 r; memcpy(&r, &h, 2); return r; }
static inline float half_of(u32 word, int high) { return __uint_as_float(high ? word & 0xffff0000u : word << 16); }

// Words [a0, a1, (a2, a3), b0, (b1)] of every lane -> the products that this lane's part of d gains.
static inline void multiply(float (&d)[4], u32 (*all)[6], int inner) {
    int row = emulation::current->lane >> 2, column = emulation::current->lane & 3, b0 = inner / 4;
    for (int i = 0; i < 4; i++) {
        int r = row + 8 * (i >> 1), c = 2 * column + (i & 1);
        double sum = d[i];
        for (int x = 0; x < inner; x++) {
            u32 a = all[(r & 7) * 4 + x % 8 / 2][(r >> 3) + 2 * (x >> 3)], b = all[c * 4 + x % 8 / 2][b0 + (x >> 3)];
            sum += (double)half_of(a, x & 1) * half_of(b, x & 1);
        }
        d[i] = (float)sum;
    }
}
static inline void multiply_8(float (&d)[4], u32 a0, u32 a1, u32 b) {
    multiply(d, emulation::exchange({a0, a1, b}), 8);
}
static inline void multiply_16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiply(d, emulation::exchange({a0, a1, a2, a3, b0, b1}), 16);
}
// What tensor cores see of a float32 number.
static inline float cut_tf32(u32 x) { return __uint_as_float(x & 0xffffe000u); }
static inline void multiply_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    auto bits = __float_as_uint;
    auto all = emulation::exchange({bits(a0), bits(a1), bits(a2), bits(a3), bits(b0), bits(b1)});
    int row = emulation::current->lane >> 2, column = emulation::current->lane & 3;
    for (int i = 0; i < 4; i++) {
        int half = i >> 1, c = 2 * column + (i & 1);
        double sum = d[i];
        for (int x = 0; x < 8; x++)
            sum += (double)cut_tf32(all[row * 4 + x % 4][half + 2 * (x / 4)]) * cut_tf32(all[c * 4 + x % 4][4 + x / 4]);
        d[i] = (float)sum;
    }
}
static inline float reciprocal_root(float x) { return 1.f / sqrtf(x); }
static inline void __syncwarp() { emulation::exchange({}); }
static inline int atomicAdd(int* to, int x) { int before = *to; *to += x; return before; }
static inline int atomicExch(int* to, int x) { int before = *to; *to = x; return before; }
template <class T> T __ldcg(const T* from) { return *from; }
static inline void __threadfence() {}
static inline int __popc(u32 x) { return __builtin_popcount(x); }
static inline void next_may_begin() {}
static inline void await_kernels_before() {}
static inline void announce_one(int* to) { ++*to; }
static inline void announce(int* to, int number) { *to = number; }
static inline void await(const int* from, int number) { if (*from < number) abort(); }  // earlier blocks are done
template <int> void more_registers() {}
template <int> void fewer_registers() {}
static inline void copy_16(u32* destination, const void* source, bool valid) {
    if (valid) memcpy(destination, source, 16);
    else memset(destination, 0, 16);
}
struct Barrier { u16 threads, missing; u32 phase : 1; int bytes : 31; };
static inline void barrier_start(u64* barrier, int threads) { *(Barrier*)barrier = {(u16)threads, (u16)threads, 0, 0}; }
static inline void barrier_count(u64* barrier, int arrived, int bytes) {
    Barrier* b = (Barrier*)barrier;
    b->missing -= arrived, b->bytes += bytes;
    if (b->missing == 0 && b->bytes == 0) b->missing = b->threads, b->phase++;
}
static inline void barrier_arrive(u64* barrier) { barrier_count(barrier, 1, 0); }
static inline void barrier_expect(u64* barrier, int bytes) { barrier_count(barrier, 1, bytes); }
static inline void barrier_wait(u64* barrier, int parity) {
    while (((Barrier*)barrier)->phase == (u32)parity) emulation::yield();
}
static inline void copy_in(void* to, const void* from, int bytes, u64* barrier) {
    if ((u64)to % 16 || (u64)from % 16 || bytes % 16) abort();
    memcpy(to, from, bytes), barrier_count(barrier, 0, -bytes);
}
static inline void copy_out(void* to, const void* from, int bytes) {
    if ((u64)to % 16 || (u64)from % 16 || bytes % 16) abort();
    memcpy(to, from, bytes);
}
template <int> void copies_out_read() {}
static inline void copies_out_written() {}
static inline void copies_may_follow() {}
static inline void copies_may_read() {}
static inline void meet(int barrier, int threads) {
    using namespace emulation;
    Meeting& m = meetings[barrier];
    long generation = m.generation;
    if (++m.arrived == threads) m.arrived = 0, m.generation++;
    else while (m.generation == generation) yield();
}
static inline void copies_issued() {}
static inline void copies_arrived_but_last() {}
static inline void copies_arrived() {}
