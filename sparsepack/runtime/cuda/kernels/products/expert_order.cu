// Which places each expert has, in their order: a stable counting sort by one block.
//
//     chosen  int64 [places]       the expert of each place
//     order   int32 [places]       the places by expert
//     ends    int32 [experts + 1]  where in `order` each expert's places begin, and the last one's end
//
// counted: int32 [1], places of so many positions, `each` of one, count, or null: all. Others are not in `order`.
//
// Launch: grid (1), WARPS warps, each with as many places that follow each other; shared: an int for each warp and expert, and
// one more for each expert.

#include "common/common.cuh"

static constexpr int WARPS = 32;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    expert_order(const long long* chosen, int places, const int* counted, int each, int experts, int* order,
                 int* ends) {
    extern __shared__ __align__(16) int counts[];  // [WARPS][experts]: places of an expert before a warp's
    __shared__ int of_lanes[32];
    int* const begins = counts + WARPS * experts;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    wait_for_previous();
    const int count = counted ? min(load_l2(counted) * each, places) : places;
    const int of_warp = (count + WARPS * 32 - 1) / (WARPS * 32) * 32;
    int* const own = counts + warp * experts;
    for (int i = threadIdx.x; i < WARPS * experts; i += WARPS * 32) counts[i] = 0;
    __syncthreads();

    // 32 places at a time are counted, and first stored behind those counted before, where `begins` are known.
    const auto pass = [&](bool stores) {
        for (int i = warp * of_warp; i < min((warp + 1) * of_warp, count); i += 32) {
            const int expert = i + lane < count ? (int)load_l2(chosen + i + lane) : -1;
            const u32 same = __match_any_sync(ALL_LANES, expert);
            if (stores && expert >= 0)
                order[begins[expert] + own[expert] + __popc(same & ((1u << lane) - 1))] = i + lane;
            __syncwarp();
            if (expert >= 0 && lane == __ffs(same) - 1) own[expert] += __popc(same);
            __syncwarp();
        }
    };
    pass(false);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += WARPS * 32) {
        int sum = 0;
        for (int w = 0; w < WARPS; ++w) {
            const int here = counts[w * experts + e];
            counts[w * experts + e] = sum;
            sum += here;
        }
        begins[e] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        const int of_lane = (experts + 31) / 32, first = min(lane * of_lane, experts);
        const int last = min(first + of_lane, experts);
        int sum = 0;
        for (int e = first; e < last; ++e) sum += begins[e];
        of_lanes[lane] = sum;
        __syncwarp();
        sum = 0;
        for (int l = 0; l < lane; ++l) sum += of_lanes[l];
        for (int e = first; e < last; ++e) {
            const int here = begins[e];
            ends[e] = begins[e] = sum;
            sum += here;
        }
        if (lane == 31) ends[experts] = sum;
    }
    __syncthreads();
    pass(true);
}
