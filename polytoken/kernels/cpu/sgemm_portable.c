/* Any machine: four lanes of the compiler's own vectors, product rounded before it is added. */
#include "products.h"

#define TARGET
#define LANES 4
typedef float V __attribute__((vector_size(16)));
typedef float unaligned_V __attribute__((vector_size(16), aligned(4), may_alias));
#define vload(p) ((V)(*(const unaligned_V *)(p)))
#define vstore(p, v) ((void)(*(unaligned_V *)(p) = (v)))
#define vzero() ((V){0, 0, 0, 0})
#define vall(p) ((V){*(p), *(p), *(p), *(p)})
#define vfma(a, b, c) ((a) * (b) + (c))
#define fma1(a, b, c) ((a) * (b) + (c))

#define TILE_ROWS 6
#define TILE_VECS 2
#define FEW_ROWS 8
#define GROUPS_OF_1 2
#define GROUPS_OF_2 2
#define GROUPS_OF_3 1
#define GROUPS_OF_4 1
#define GROUPS_OF_MORE 1
#define WIDE(R) ((R) == 1 ? 8 : (R) <= 4 ? 3 : 1)

INLINE void load_transposed(const float *w, ptrdiff_t ld, V col[LANES])
{
    for (int t = 0; t < LANES; t++)
        col[t] = (V){w[t], w[ld + t], w[2 * ld + t], w[3 * ld + t]};
}

#define FORM form_portable
#define FORM_NAME "portable"
#define FORM_FUSED 0
#define FORM_RUN run_portable
#include "sgemm.inc"
