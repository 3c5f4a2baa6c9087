/* AArch64 NEON: 32 registers of 4 floats, fused multiply-add always there. */
#include "products.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define TARGET
#define LANES 4
typedef float32x4_t V;
#define vload vld1q_f32
#define vstore vst1q_f32
#define vzero() vdupq_n_f32(0)
#define vall vld1q_dup_f32
#define vfma(a, b, c) vfmaq_f32(c, a, b)
#define fma1(a, b, c) __builtin_fmaf(a, b, c)

/* 24 sums, three vectors of b, one broadcast. */
#define TILE_ROWS 8
#define TILE_VECS 3
#define FEW_ROWS 8
#define GROUPS_OF_1 2
#define GROUPS_OF_2 2
#define GROUPS_OF_3 1
#define GROUPS_OF_4 1
#define GROUPS_OF_MORE 1
#define WIDE(R) ((R) == 1 ? 16 : (R) == 2 ? 8 : (R) <= 4 ? 6 : 3)

INLINE void load_transposed(const float *w, ptrdiff_t ld, V col[LANES])
{
    float32x4x2_t a = vtrnq_f32(vld1q_f32(w), vld1q_f32(w + ld));
    float32x4x2_t b = vtrnq_f32(vld1q_f32(w + 2 * ld), vld1q_f32(w + 3 * ld));
    col[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    col[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    col[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    col[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

#define FORM form_neon
#define FORM_NAME "neon"
#define FORM_FUSED 1
#define FORM_RUN run_neon
#include "sgemm.inc"
#endif
