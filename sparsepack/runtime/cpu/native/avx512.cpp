// The kernels with AVX-512 (F, BW, VL, DQ, VNNI).
#include "kernels.h"
#include "rows.h"
#include "simd_avx512.h"

namespace sparsepack {
namespace {
namespace zigzag {
#include "prepare.inc"
#include "zigzag_gemv.inc"
#include "zigzag_run.inc"
#include "zigzag_matmul.inc"
}  // namespace zigzag

#include "collect.inc"
#include "common.inc"
#include "rows.inc"
}  // namespace

const Kernels avx512_kernels = {
    "avx512",
    collect,
    zigzag::zigzag_gemv,
    zigzag::zigzag_matmul,
    rows_matmul,
    rms_norm,
    rotate,
    attention,
    gate,
    sum,
    to_half,
    decode_row,
};

}  // namespace sparsepack
