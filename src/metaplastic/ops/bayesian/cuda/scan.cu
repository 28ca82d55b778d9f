// The covariances and means of all heads from chunk to chunk, side by side.
//
// A block carries the covariance of a head (covariance.cuh), or some columns of its mean (mean.cuh), which follows some
// chunks behind and reads what the other announces. Blocks draw their work in turn: all covariances are at work or done
// before the first mean waits for one, however many blocks the device runs at once. With CAREFUL 1 those heads are done
// once more that float32 was too little for: what that takes, code that hardly ever runs, would slow all down.
#include "covariance.cuh"
#include "mean.cuh"

constexpr int WORDS = CovarianceMemory::WORDS > MeanMemory::WORDS ? CovarianceMemory::WORDS : MeanMemory::WORDS;
extern "C" __device__ const int launch_shape[2] = {THREADS, 4 * WORDS + 16};

extern "C" __global__ void __launch_bounds__(THREADS, 1) scan(
    const void* __restrict__ queries, const void* __restrict__ keys, const void* __restrict__ values,
    const float* __restrict__ sent, const float* __restrict__ known, const float* __restrict__ vectors,
    const i64* __restrict__ table, const i64* __restrict__ first, const float* covariance, const float* mean,
    float* factors, float* spreads, float* gains, float* innovations, float* reads, float* covariances, float* means,
    float* final_covariance, float* final_mean, float* rests, u16* entry_rests, int* entry_careful,
    int* progress, int* hard, int rooms, int sequences, int heads, int groups, int values_of_group) {
    SHARED;
    int* const drawn = (int*)(shared + WORDS);
    if (threadIdx.x == 0) *drawn = atomicAdd(progress, 1);
    __syncthreads();
    const int ticket = *drawn, items = sequences * heads * groups;
    __syncthreads();
    const Scan all = {queries, keys, values, sent, known, vectors, table, first, covariance, mean, factors, spreads,
                      gains, innovations, reads, covariances, means, final_covariance, final_mean, rests, entry_rests,
                      entry_careful, progress + 1, hard, heads, groups, values_of_group};
    const bool wanted = !CAREFUL || hard[ticket % items];
    if (ticket >= items) {
        if (wanted) filter_mean(shared, all, (ticket - items) % items, (ticket - items) / items);
        return;
    }
    // Who comes so many tickets later has the same room, once all before are out of it.
    int* const left = CAREFUL && items > rooms ? hard + items + ticket % rooms : 0;
    if (left) {
        if (threadIdx.x == 0) await(left, ticket / rooms);
        __syncthreads();
        if (!wanted && threadIdx.x == 0) announce(left, ticket / rooms + 1);
    }
    if (wanted) filter_covariance(shared, all, ticket, ticket % rooms, left, ticket / rooms + 1);
}
