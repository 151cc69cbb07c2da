// Tokens whose keys and values lie in the host's memory, and the slots on the GPU where those read last are kept.
//
//     listed         int32 [B, kv_heads, list_capacity]   assign_slots: tokens that a step reads -> their slots
//     counts         int32 [B, kv_heads]                how many
//     slot_of        int32 [B, kv_heads, context]       of a token; another's, or -1: it may have none
//     token_of       int32 [B, kv_heads, slots]         of a slot; -1: none yet
//     last_read      int32 [B, kv_heads, slots]         position of the step that read it last
//     missed         int32 [B, kv_heads, list_capacity][2]  token and slot of what is fetched
//     missed_counts  int32 [B, kv_heads]                how many
//
// A token has a slot where each names the other. One that has none gets the slot that was read longest ago, of those
// that this step does not read; the new position's is fetched anew even where an earlier text left it a slot. There
// are as many slots as a step reads, at least. Everything is the same every run.
//
//     assign_slots: grid (kv_heads, B), SLOT_THREADS a block, a bit of dynamic shared memory for each slot, in words
//     fetch:        grid (any, kv_heads, B), FETCH_THREADS a block, which copies rows from the host's memory
//
// Macros: HEAD_DIM, KV

#include "attention/cache_type.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

static constexpr int SLOT_THREADS = 1024, SLOT_WARPS = SLOT_THREADS / 32, FETCH_THREADS = 256;
static constexpr int AGES = 256;  // older ones count as oldest
static constexpr int FETCHED_AT_ONCE = 4;

// The number of a block's threads before this one that say yes; `all` is that of the whole block.
struct BlockCount {
    int of_warps[SLOT_WARPS];
    __device__ __forceinline__ int before(bool yes, int& all) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const u32 votes = __ballot_sync(ALL_LANES, yes);
        __syncthreads();
        if (lane == 0) of_warps[warp] = __popc(votes);
        __syncthreads();
        int sum = of_warps[lane];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) sum += other;
        }
        all = __shfl_sync(ALL_LANES, sum, 31);
        const int earlier = __shfl_sync(ALL_LANES, sum, max(warp - 1, 0));
        return (warp ? earlier : 0) + __popc(votes & ((1u << lane) - 1));
    }
};

extern "C" __global__ void __launch_bounds__(SLOT_THREADS)
    assign_slots(int* listed, const int* counts, int* slot_of, int* token_of, int* last_read, int2* missed,
                 int* missed_counts, const int* positions, int context, int slots, int list_capacity) {
    extern __shared__ u32 read_now[];  // a bit for each slot
    __shared__ int ages[AGES];
    __shared__ int again, oldest, of_oldest;
    __shared__ BlockCount block;
    const int thread = threadIdx.x, lane = thread % 32;
    const long long row = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    listed += row * list_capacity, missed += row * list_capacity;
    slot_of += row * context, token_of += row * slots, last_read += row * slots;
    launch_dependents();
    const int words = (slots + 31) / 32;
    for (int i = thread; i < words; i += SLOT_THREADS) read_now[i] = 0;
    if (thread < AGES) ages[thread] = 0;
    if (thread == 0) again = -1;
    wait_for_previous();
    __syncthreads();
    const int position = min(max(load_l2(positions + blockIdx.y), 0), context - 1);
    const int count = load_l2(counts + row);

    int needed = 0;
    for (int start = 0; start < count; start += SLOT_THREADS) {
        const bool real = start + thread < count;
        const int token = real ? load_l2(listed + start + thread) : 0;
        const int slot = real ? load_l2(slot_of + token) : -1;
        const bool has = slot >= 0 && load_l2(token_of + slot) == token;
        if (has) {
            atomicOr(read_now + slot / 32, 1u << slot % 32);
            last_read[slot] = position;
            if (token == position) again = slot;
        }
        int all;
        const int n = needed + block.before(real && !has, all);
        if (real && !has) missed[n].x = token;
        needed += all;
    }
    __syncthreads();

    const auto age_of = [&](int slot) {
        const int age = position - load_l2(last_read + slot);
        return load_l2(token_of + slot) < 0 || age < 0 ? AGES - 1 : min(age, AGES - 1);
    };
    const auto is_free = [&](int slot) { return slot < slots && !(read_now[slot / 32] >> slot % 32 & 1); };
    if (needed) {
        for (int slot = thread; slot < slots; slot += SLOT_THREADS) {
            if (is_free(slot)) atomicAdd(ages + age_of(slot), 1);
        }
        __syncthreads();
        // The oldest ages until there are enough: a lane sums up AGES / 32 of them.
        if (thread < 32) {
            int own = 0;
            for (int i = 0; i < AGES / 32; ++i) own += ages[AGES - 1 - lane * (AGES / 32) - i];
            int through = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(ALL_LANES, through, step);
                if (lane >= step) through += other;
            }
            int older = through - own;
            if (older < needed && needed <= through) {
                int age = AGES - 1 - lane * (AGES / 32);
                while (older + ages[age] < needed) older += ages[age--];
                oldest = age, of_oldest = needed - older;
            }
        }
        __syncthreads();
        const int bound = oldest, left = of_oldest;  // all that are older than the bound, and so many of its age
        int older = 0, equal = 0;
        for (int start = 0; start < slots; start += SLOT_THREADS) {
            const int slot = start + thread;
            const int age = is_free(slot) ? age_of(slot) : -1;
            int all_older, all_equal;
            const int before_older = older + block.before(age > bound, all_older);
            const int before_equal = equal + block.before(age == bound, all_equal);
            older += all_older, equal += all_equal;
            if (!(age > bound || (age == bound && before_equal < left))) continue;
            int2* of = missed + before_older + min(before_equal, left);
            const int token = of->x, previous = load_l2(token_of + slot);
            of->y = slot;
            // A token that lost its slot; of those that get one now none names this slot.
            if (previous >= 0 && load_l2(slot_of + previous) == slot) slot_of[previous] = -1;
            token_of[slot] = token;
            last_read[slot] = position;
        }
        __syncthreads();
        for (int i = thread; i < needed; i += SLOT_THREADS) slot_of[missed[i].x] = missed[i].y;
    }
    if (thread == 0) {
        if (again >= 0) missed[needed] = make_int2(position, again);
        missed_counts[row] = needed + (again >= 0);
    }
    __syncthreads();
    for (int i = thread; i < count; i += SLOT_THREADS) listed[i] = load_l2(slot_of + load_l2(listed + i));
}

// keys, values            -- CacheType [B, kv_heads, context, HEAD_DIM], in the host's memory
// slot_keys, slot_values  -- [B, kv_heads, slots, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(FETCH_THREADS)
    fetch(const CacheType* keys, const CacheType* values, CacheType* slot_keys, CacheType* slot_values,
          const int2* missed, const int* missed_counts, int context, int slots, int list_capacity) {
    static constexpr int BYTES = HEAD_DIM * sizeof(CacheType);
    static constexpr bool WIDE = BYTES % 16 == 0;
    static constexpr int PIECE = WIDE ? 16 : 4, PIECES = BYTES / PIECE;  // of a row of keys; as many of values
    const long long row = (long long)blockIdx.z * gridDim.y + blockIdx.y;
    launch_dependents();
    wait_for_previous();
    missed += row * list_capacity;
    const int all = load_l2(missed_counts + row) * 2 * PIECES, step = gridDim.x * FETCH_THREADS;
    for (int start = blockIdx.x * FETCH_THREADS + threadIdx.x; start < all; start += step * FETCHED_AT_ONCE) {
        uint4 wide[FETCHED_AT_ONCE];
        u32 narrow[FETCHED_AT_ONCE];
        u8* to[FETCHED_AT_ONCE];
#pragma unroll
        for (int n = 0; n < FETCHED_AT_ONCE; ++n) {
            const int i = start + n * step;
            if (i >= all) break;
            const int2 of = load_l2(missed + i / (2 * PIECES));
            const bool value = i / PIECES % 2;
            const long long at = i % PIECES * PIECE;
            const u8* from = (const u8*)(value ? values : keys) + (row * context + of.x) * BYTES + at;
            to[n] = (u8*)(value ? slot_values : slot_keys) + (row * slots + of.y) * BYTES + at;
            if constexpr (WIDE) {
                wide[n] = load_l2((const uint4*)from);
            } else {
                narrow[n] = load_l2((const u32*)from);
            }
        }
#pragma unroll
        for (int n = 0; n < FETCHED_AT_ONCE; ++n) {
            if (start + n * step >= all) break;
            if constexpr (WIDE) {
                *(uint4*)to[n] = wide[n];
            } else {
                *(u32*)to[n] = narrow[n];
            }
        }
    }
}
