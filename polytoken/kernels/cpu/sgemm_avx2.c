/* AVX2 with FMA: 16 registers of 8 floats, two fused multiply-adds a cycle with a latency of four or five. */
#include "products.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
typedef __m256 V;
#define vload _mm256_loadu_ps
#define vstore _mm256_storeu_ps
#define vzero _mm256_setzero_ps
#define vall _mm256_broadcast_ss
#define vfma _mm256_fmadd_ps
#define fma1(a, b, c) __builtin_fmaf(a, b, c)

/* 12 sums, two vectors of b, one broadcast. */
#define TILE_ROWS 6
#define TILE_VECS 2
#define FEW_ROWS 8
#define GROUPS_OF_1 3
#define GROUPS_OF_2 2
#define GROUPS_OF_3 1
#define GROUPS_OF_4 1
#define GROUPS_OF_MORE 1
#define WIDE(R) ((R) == 1 ? 8 : (R) == 2 ? 6 : (R) == 3 ? 4 : (R) == 4 ? 3 : (R) <= 6 ? 2 : 1)

/* Rows u and u + 4 share a register, loaded as halves, so that a 4x4 turn within each half finishes the work:
 * 16 shuffles for 64 floats instead of 24. */
INLINE TARGET void load_transposed(const float *w, ptrdiff_t ld, V col[LANES])
{
    _Pragma("GCC unroll 2") for (int h = 0; h < 2; h++) {
        V r[4];
        _Pragma("GCC unroll 4") for (int u = 0; u < 4; u++)
            r[u] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(w + u * ld + 4 * h)),
                                        _mm_loadu_ps(w + (u + 4) * ld + 4 * h), 1);
        V a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
        V c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
        col[4 * h + 0] = _mm256_shuffle_ps(a, c, _MM_SHUFFLE(1, 0, 1, 0));
        col[4 * h + 1] = _mm256_shuffle_ps(a, c, _MM_SHUFFLE(3, 2, 3, 2));
        col[4 * h + 2] = _mm256_shuffle_ps(b, d, _MM_SHUFFLE(1, 0, 1, 0));
        col[4 * h + 3] = _mm256_shuffle_ps(b, d, _MM_SHUFFLE(3, 2, 3, 2));
    }
}

#define FORM form_avx2
#define FORM_NAME "avx2"
#define FORM_FUSED 1
#define FORM_RUN run_avx2
#include "sgemm.inc"
#endif
