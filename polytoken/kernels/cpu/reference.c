/* The contract as scalar loops: what the tests hold every form to. Slow on purpose. */
#include <math.h>

#include "products.h"

void sgemm_reference(const sproduct *p, int fused)
{
    for (ptrdiff_t i = 0; i < p->m; i++)
        for (ptrdiff_t j = 0; j < p->n; j++) {
            float acc = 0;
            for (ptrdiff_t q = 0; q < p->k; q++) {
                float a = p->a[i * p->ars + q * p->acs], b = p->b[q * p->brs + j * p->bcs];
                acc = fused ? fmaf(a, b, acc) : a * b + acc;
            }
            float *c = &p->c[i * p->crs + j * p->ccs];
            float value = p->alpha == 1 ? acc : p->alpha * acc;
            *c = p->beta == 0 ? value : value + p->beta * *c;
        }
}

void dgemm_reference(const dproduct *p, int fused)
{
    for (ptrdiff_t i = 0; i < p->m; i++)
        for (ptrdiff_t j = 0; j < p->n; j++) {
            double acc = 0;
            for (ptrdiff_t q = 0; q < p->k; q++) {
                double a = p->a[i * p->ars + q * p->acs], b = p->b[q * p->brs + j * p->bcs];
                acc = fused ? fma(a, b, acc) : a * b + acc;
            }
            double *c = &p->c[i * p->crs + j * p->ccs];
            double value = p->alpha == 1 ? acc : p->alpha * acc;
            *c = p->beta == 0 ? value : value + p->beta * *c;
        }
}

/* A complex step is four real ones: re += ar*br, re += -ai*bi, im += ar*bi, im += ai*br. */
void cgemm_reference(const cproduct *p, int fused)
{
    const complex32 alpha = p->alpha, beta = p->beta;
    for (ptrdiff_t i = 0; i < p->m; i++)
        for (ptrdiff_t j = 0; j < p->n; j++) {
            float re = 0, im = 0;
            for (ptrdiff_t q = 0; q < p->k; q++) {
                complex32 a = p->a[i * p->ars + q * p->acs], b = p->b[q * p->brs + j * p->bcs];
                a.im = p->conj_a ? -a.im : a.im;
                b.im = p->conj_b ? -b.im : b.im;
                re = fused ? fmaf(a.re, b.re, re) : a.re * b.re + re;
                re = fused ? fmaf(-a.im, b.im, re) : -a.im * b.im + re;
                im = fused ? fmaf(a.re, b.im, im) : a.re * b.im + im;
                im = fused ? fmaf(a.im, b.re, im) : a.im * b.re + im;
            }
            complex32 *c = &p->c[i * p->crs + j * p->ccs], value = {re, im};
            if (alpha.re != 1 || alpha.im != 0)
                value = (complex32){alpha.re * re - alpha.im * im, alpha.re * im + alpha.im * re};
            if (beta.re != 0 || beta.im != 0)
                value = (complex32){value.re + (beta.re * c->re - beta.im * c->im),
                                    value.im + (beta.re * c->im + beta.im * c->re)};
            *c = value;
        }
}
