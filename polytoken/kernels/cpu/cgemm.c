/* Complex product in the same fixed order; see the reference for the four steps. MLX uses it for complex64 only. */
#include "products.h"

enum { ROWS = 2, COLS = 8 };

INLINE float step(float a, float b, float c, const int fused) { return fused ? __builtin_fmaf(a, b, c) : a * b + c; }

INLINE void run(const cproduct *p, float *panel, const int fused)
{
    const complex32 alpha = p->alpha, beta = p->beta;
    for (ptrdiff_t j = 0; j < p->n; j += COLS) {
        const ptrdiff_t cols = p->n - j < COLS ? p->n - j : COLS;
        /* real and imaginary parts apart, so that both are plain vectors */
        for (ptrdiff_t q = 0; q < p->k; q++)
            for (ptrdiff_t t = 0; t < COLS; t++) {
                complex32 b = {0, 0};
                if (t < cols)
                    b = p->b[q * p->brs + (j + t) * p->bcs];
                panel[(2 * q) * COLS + t] = b.re;
                panel[(2 * q + 1) * COLS + t] = p->conj_b ? -b.im : b.im;
            }
        for (ptrdiff_t i = 0; i < p->m; i += ROWS) {
            const ptrdiff_t rows = p->m - i < ROWS ? p->m - i : ROWS;
            float re[ROWS][COLS] = {{0}}, im[ROWS][COLS] = {{0}};
            for (ptrdiff_t q = 0; q < p->k; q++) {
                const float *br = panel + (2 * q) * COLS, *bi = br + COLS;
                for (int r = 0; r < ROWS; r++) {
                    complex32 a = p->a[(i + (r < rows ? r : rows - 1)) * p->ars + q * p->acs];
                    a.im = p->conj_a ? -a.im : a.im;
                    for (int t = 0; t < COLS; t++) {
                        re[r][t] = step(a.re, br[t], re[r][t], fused);
                        re[r][t] = step(-a.im, bi[t], re[r][t], fused);
                        im[r][t] = step(a.re, bi[t], im[r][t], fused);
                        im[r][t] = step(a.im, br[t], im[r][t], fused);
                    }
                }
            }
            for (ptrdiff_t r = 0; r < rows; r++)
                for (ptrdiff_t t = 0; t < cols; t++) {
                    complex32 *c = &p->c[(i + r) * p->crs + (j + t) * p->ccs], value = {re[r][t], im[r][t]};
                    if (alpha.re != 1 || alpha.im != 0)
                        value = (complex32){alpha.re * value.re - alpha.im * value.im,
                                            alpha.re * value.im + alpha.im * value.re};
                    if (beta.re != 0 || beta.im != 0)
                        value = (complex32){value.re + (beta.re * c->re - beta.im * c->im),
                                            value.im + (beta.re * c->im + beta.im * c->re)};
                    *c = value;
                }
        }
    }
}

#if defined(__x86_64__)
#define FUSED_TARGET __attribute__((noinline, target("avx2,fma")))
#else
#define FUSED_TARGET __attribute__((noinline))
#endif

FUSED_TARGET static void run_fused(const cproduct *p, float *panel) { run(p, panel, 1); }
__attribute__((noinline)) static void run_apart(const cproduct *p, float *panel) { run(p, panel, 0); }

void cgemm_run(const cproduct *p, int fused)
{
    float *panel = scratch(SCRATCH_PANEL, sizeof(float) * 2 * COLS * (size_t)p->k);
    if (!panel)
        cgemm_reference(p, fused);
    else if (fused)
        run_fused(p, panel);
    else
        run_apart(p, panel);
}
