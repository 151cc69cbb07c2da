// In the place of kernels/common/flag_in_data.cuh: kernels run one after the other, so that a value is there when it is
// read.

#pragma once

#include "common/common.cuh"

static constexpr u32 SENTINEL = 0xffffffff;

inline void ll_store(float* p, float x) { *p = x; }

template <int COUNT, typename At>
inline void ll_wait(float (&values)[COUNT], At at) {
    for (int i = 0; i < COUNT; ++i) values[i] = at(i) ? *at(i) : 0;
}

template <bool FLAGGED, int COUNT, typename At>
inline void ll_receive(float (&values)[COUNT], At at) {
    ll_wait(values, at);
}
