/* AVX-512F: 32 registers of 16 floats. */
#include "products.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx2,fma")))
#define LANES 16
typedef __m512 V;
#define vload _mm512_loadu_ps
#define vstore _mm512_storeu_ps
#define vzero _mm512_setzero_ps
#define vall(p) _mm512_set1_ps(*(p))
#define vfma _mm512_fmadd_ps
#define fma1(a, b, c) __builtin_fmaf(a, b, c)

/* 28 sums and two vectors of b; the broadcast is part of the multiply-add. */
#define TILE_ROWS 14
#define TILE_VECS 2
#define FEW_ROWS 8
#define GROUPS_OF_1 2
#define GROUPS_OF_2 2
#define GROUPS_OF_3 1
#define GROUPS_OF_4 1
#define GROUPS_OF_MORE 1
#define WIDE(R) ((R) <= 2 ? 8 : (R) <= 4 ? 4 : 2)
#define BLOCK_K 256

/* Rows u, u + 4, u + 8, u + 12 share a register, loaded as quarters, so that a 4x4 turn within each quarter finishes
 * the work: 32 shuffles for 256 floats. */
INLINE TARGET void load_transposed(const float *w, ptrdiff_t ld, V col[LANES])
{
    _Pragma("GCC unroll 4") for (int h = 0; h < 4; h++) {
        V r[4];
        _Pragma("GCC unroll 4") for (int u = 0; u < 4; u++) {
            const float *q = w + u * ld + 4 * h;
            V v = _mm512_castps128_ps512(_mm_loadu_ps(q));
            v = _mm512_insertf32x4(v, _mm_loadu_ps(q + 4 * ld), 1);
            v = _mm512_insertf32x4(v, _mm_loadu_ps(q + 8 * ld), 2);
            r[u] = _mm512_insertf32x4(v, _mm_loadu_ps(q + 12 * ld), 3);
        }
        V a = _mm512_unpacklo_ps(r[0], r[1]), b = _mm512_unpackhi_ps(r[0], r[1]);
        V c = _mm512_unpacklo_ps(r[2], r[3]), d = _mm512_unpackhi_ps(r[2], r[3]);
        col[4 * h + 0] = _mm512_shuffle_ps(a, c, _MM_SHUFFLE(1, 0, 1, 0));
        col[4 * h + 1] = _mm512_shuffle_ps(a, c, _MM_SHUFFLE(3, 2, 3, 2));
        col[4 * h + 2] = _mm512_shuffle_ps(b, d, _MM_SHUFFLE(1, 0, 1, 0));
        col[4 * h + 3] = _mm512_shuffle_ps(b, d, _MM_SHUFFLE(3, 2, 3, 2));
    }
}

#define FORM form_avx512
#define FORM_NAME "avx512"
#define FORM_FUSED 1
#define FORM_RUN run_avx512
#include "sgemm.inc"
#endif
