// Labels of keys that are cached: formats/blocks/labels.py.
//
//     keys      CacheType [B, kv_heads, context, head_dim]
//     channels  int32 [kv_heads, LABEL_CHANNELS], of a head; -1: none, a zero
//     codes     u8 [B, kv_heads, context, LABEL_BYTES], scales float16 [B, kv_heads, context]
//
// Launch: grid (positions / WARPS rounded up, kv_heads, B), a warp for each position from `first` on, or from that of
// its sequence.
//
// Macros: LABEL_WORDS, KV

#include "attention/cache_type.cuh"
#include "attention/labels.cuh"

static constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    label_append(const CacheType* keys, const int* channels, u8* codes, u16* scales, const int* positions, int first,
                 int count, int context, int head_dim) {
    launch_dependents();
    wait_for_previous();
    const int number = blockIdx.x * WARPS + threadIdx.x / 32;
    if (number >= count) return;
    const int position = (positions ? min(max(load_l2(positions + blockIdx.z), 0), context - 1) : first) + number;
    const long long row = ((long long)blockIdx.z * gridDim.y + blockIdx.y) * context + position;
    const CacheType* key = keys + row * head_dim;
    const int* heavy = channels + blockIdx.y * LABEL_CHANNELS;
    const auto channel = [&](int c) { return heavy[c] < 0 ? 0 : from_cache_type(load_l2(key + heavy[c])); };
    write_label(channel, codes + row * LABEL_BYTES, scales + row);
}
