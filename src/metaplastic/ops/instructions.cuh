// What the kernels of all operators share: types, and the instructions C++ has no word for.
//
// No header of CUDA is needed, so that the run-time compiler alone suffices. With EMULATED defined the same sources
// compile with a C++ compiler for the host (tests/ops/cuda_emulation.h), where they are checked without a GPU.
#pragma once
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#ifdef EMULATED
#include "cuda_emulation.h"
#else
#define SHARED extern __shared__ __align__(16) u32 shared[]

__device__ __forceinline__ float reciprocal(float x) {  // 1 ulp
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// bf16 of two floats in one word, rounded to nearest; `low` in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float half_to_float(u16 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}

__device__ __forceinline__ u16 float_to_half(float x) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

// d[16 x 8] += a[16 x 8] b[8 x 8]. Lane (g, t) = (lane / 4, lane % 4) holds a[g][2t..], a[g + 8][2t..], b[2t..][g] (two
// bf16 a word) and d[g][2t], d[g][2t + 1], d[g + 8][2t], d[g + 8][2t + 1].
__device__ __forceinline__ void multiply_8(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
}

// The same with an inner size of 16: a2, a3, b1 hold inner indices 8 + 2t, 9 + 2t.
__device__ __forceinline__ void multiply_16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of float32 numbers, inner size 8, of which the tensor cores see the upper 19 bits: a[g][t], a[g + 8][t],
// a[g][t + 4], a[g + 8][t + 4]; b[t][g], b[t + 4][g]. Any order of inner indices will do if it is the same for both.
__device__ __forceinline__ void multiply_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0,
                                              float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

__device__ __forceinline__ float reciprocal_root(float x) {  // 2 ulp
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// By the copy engine (compute capability 9.0), a multiple of 16 bytes: into shared memory, where a barrier counts the
// bytes that one thread tells it to expect (they and that thread's arrival complete its phase, in any order); and out
// of it. Few large copies: each costs its warp the same. `copies_may_follow` stands between what a thread, or one it
// met, read or wrote in shared memory and copies there; `copies_may_read` between another block's announcement and
// copies of what it wrote.
__device__ __forceinline__ void barrier_expect(u64* barrier, int bytes) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1; }" ::
        "r"((u32)__cvta_generic_to_shared(barrier)), "r"(bytes) : "memory");
}
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void copy_in(void* to, const void* from, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
        "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes), "r"((u32)__cvta_generic_to_shared(barrier))
        : "memory");
}
__device__ __forceinline__ void copy_out(void* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; cp.async.bulk.commit_group;" ::
        "l"(to), "r"((u32)__cvta_generic_to_shared(from)), "r"(bytes) : "memory");
}
// This thread's copies out: all but the last `LATER` are read, all are written.
template <int LATER> __device__ __forceinline__ void copies_out_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(LATER) : "memory");
}
__device__ __forceinline__ void copies_out_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void copies_may_follow() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void copies_may_read() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
#endif

// Some warps of a block meet, `threads` in all; barriers 1 .. 15.
__device__ __forceinline__ void meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

// Between blocks: `announce` makes what this thread has seen written visible to who awaits the number at `to`.
__device__ __forceinline__ void announce(int* to, int number) {
    asm volatile("fence.acq_rel.gpu; st.relaxed.gpu.b32 [%0], %1;" :: "l"(to), "r"(number) : "memory");
}
__device__ __forceinline__ void await(const int* from, int number) {
    int found;
    do asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(found) : "l"(from) : "memory");
    while (found < number);
}
// As `announce`, one more.
__device__ __forceinline__ void announce_one(int* to) {
    asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.s32 [%0], 1;" :: "l"(to) : "memory");
}

// Of a kernel launched to begin early (compute capability 9.0): the one before it lets it, once all of its blocks are
// at work or done; and it waits for the end of that one.
__device__ __forceinline__ void next_may_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_kernels_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Registers a thread, given to or taken from whole groups of 4 warps, where the device can (a multiple of 8).
template <int REGISTERS> __device__ __forceinline__ void more_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
#endif
}
template <int REGISTERS> __device__ __forceinline__ void fewer_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
#endif
}

// 16 bytes from global to shared memory in the background; zeros if not `valid` (`source` is then not read).
__device__ __forceinline__ void copy_16(u32* destination, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::
        "r"((u32)__cvta_generic_to_shared(destination)), "l"(source), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copies_issued() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void copies_arrived_but_last() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
__device__ __forceinline__ void copies_arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A barrier in shared memory that a thread may announce at (`arrive`) long before it waits: phase after phase, each
// complete when `threads` have arrived. `wait` returns once the phase of this parity (0, 1, 0, ...) is complete.
__device__ __forceinline__ void barrier_start(u64* barrier, int threads) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::
        "r"((u32)__cvta_generic_to_shared(barrier)), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::
        "r"((u32)__cvta_generic_to_shared(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, int parity) {
    u32 complete;
    do
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(complete) : "r"((u32)__cvta_generic_to_shared(barrier)), "r"(parity) : "memory");
    while (!complete);
}
#endif

__device__ __forceinline__ float low_bf16(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_bf16(u32 word) { return __uint_as_float(word & 0xffff0000u); }

// x as the sum of two bf16 (low half: x rounded, high half: what is missing); the sum is within 2^-17 of x.
__device__ __forceinline__ u32 split(float x) {
    float rounded = low_bf16(pack_bf16(x, 0.f));
    return pack_bf16(rounded, x - rounded);
}
