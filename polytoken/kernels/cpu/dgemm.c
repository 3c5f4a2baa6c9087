/* Double precision in the same fixed order. MLX uses it for float64 arrays only, so one small tile is enough. */
#include "products.h"

enum { ROWS = 4, COLS = 8 };

/* Compiled twice: inlined where fused multiply-add may be used, and where it may not. */
INLINE void run(const dproduct *p, double *panel, const int fused)
{
    for (ptrdiff_t j = 0; j < p->n; j += COLS) {
        const ptrdiff_t cols = p->n - j < COLS ? p->n - j : COLS;
        for (ptrdiff_t q = 0; q < p->k; q++)
            for (ptrdiff_t t = 0; t < COLS; t++)
                panel[q * COLS + t] = t < cols ? p->b[q * p->brs + (j + t) * p->bcs] : 0;
        for (ptrdiff_t i = 0; i < p->m; i += ROWS) {
            const ptrdiff_t rows = p->m - i < ROWS ? p->m - i : ROWS;
            double s[ROWS][COLS] = {{0}};
            for (ptrdiff_t q = 0; q < p->k; q++) {
                const double *y = panel + q * COLS;
                for (int r = 0; r < ROWS; r++) {
                    /* rows that do not exist repeat the last one */
                    double x = p->a[(i + (r < rows ? r : rows - 1)) * p->ars + q * p->acs];
                    for (int t = 0; t < COLS; t++)
                        s[r][t] = fused ? __builtin_fma(x, y[t], s[r][t]) : x * y[t] + s[r][t];
                }
            }
            for (ptrdiff_t r = 0; r < rows; r++)
                for (ptrdiff_t t = 0; t < cols; t++) {
                    double *c = &p->c[(i + r) * p->crs + (j + t) * p->ccs];
                    double value = p->alpha == 1 ? s[r][t] : p->alpha * s[r][t];
                    *c = p->beta == 0 ? value : value + p->beta * *c;
                }
        }
    }
}

#if defined(__x86_64__)
#define FUSED_TARGET __attribute__((noinline, target("avx2,fma")))
#else
#define FUSED_TARGET __attribute__((noinline))
#endif

FUSED_TARGET static void run_fused(const dproduct *p, double *panel) { run(p, panel, 1); }
__attribute__((noinline)) static void run_apart(const dproduct *p, double *panel) { run(p, panel, 0); }

void dgemm_run(const dproduct *p, int fused)
{
    double *panel = scratch(SCRATCH_PANEL, sizeof(double) * COLS * (size_t)p->k);
    if (!panel)
        dgemm_reference(p, fused);
    else if (fused)
        run_fused(p, panel);
    else
        run_apart(p, panel);
}
