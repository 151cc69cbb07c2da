// BULK 1: bulk copies (TMA) bring data into shared memory, which GPUs have from sm_90 on. 0: other copies do. A macro
// given to the compiler decides for GPUs that have both.

#pragma once

#ifndef BULK
#define BULK 1
#endif
#if __CUDA_ARCH__ < 900
#undef BULK
#define BULK 0
#endif
