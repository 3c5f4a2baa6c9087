/* The three functions that stand behind MLX's imports: BLAS's arguments to strides, then the form in use. */
#include "products.h"

enum { COL_MAJOR = 102, NO_TRANS = 111, CONJ_TRANS = 113 };

/* Below this many multiply-adds waking another thread costs more than it brings. */
static const double worth_a_thread = 2e6;
/* Threads take whole groups of this many columns or rows, so that each has full register tiles. */
enum { SHARE = 32 };

#define STRIDES(p, order, transa, transb, lda, ldb, ldc)                             \
    do {                                                                             \
        int columns = (order) == COL_MAJOR;                                          \
        int unit_a = ((transa) == NO_TRANS) != columns;                              \
        int unit_b = ((transb) == NO_TRANS) != columns;                              \
        (p).ars = unit_a ? (lda) : 1, (p).acs = unit_a ? 1 : (lda);                  \
        (p).brs = unit_b ? (ldb) : 1, (p).bcs = unit_b ? 1 : (ldb);                  \
        (p).crs = columns ? 1 : (ldc), (p).ccs = columns ? (ldc) : 1;                \
    } while (0)

typedef struct {
    const sproduct *whole;
    const form *form;
} shared_product;

static void run_share(void *data, int part, int parts)
{
    const shared_product *s = data;
    sproduct p = *s->whole;
    const int by_columns = p.n >= p.m;
    const ptrdiff_t size = by_columns ? p.n : p.m, units = (size + SHARE - 1) / SHARE;
    const ptrdiff_t from = units * part / parts * SHARE;
    ptrdiff_t to = units * (part + 1) / parts * SHARE;
    to = to < size ? to : size;
    if (from >= to)
        return;
    if (by_columns) {
        p.b += from * p.bcs, p.c += from * p.ccs, p.n = to - from;
    } else {
        p.a += from * p.ars, p.c += from * p.crs, p.m = to - from;
    }
    s->form->sgemm(&p);
}

void exact_cblas_sgemm(int order, int transa, int transb, int m, int n, int k, float alpha, const float *a, int lda,
                       const float *b, int ldb, float beta, float *c, int ldc)
{
    sproduct p = {.m = m, .n = n, .k = k, .alpha = alpha, .a = a, .b = b, .beta = beta, .c = c};
    STRIDES(p, order, transa, transb, lda, ldb, ldc);
    if (m <= 0 || n <= 0)
        return;
    if (k <= 0) {
        p.alpha = 1;
        p.k = 0;
        sgemm_reference(&p, 0);
        return;
    }
    const form *f = forms_current();
    int parts = threads_count();
    if (parts > 1 && (double)m * n * k >= worth_a_thread) {
        shared_product s = {&p, f};
        threads_run(run_share, &s, parts);
    } else
        f->sgemm(&p);
}

void exact_cblas_dgemm(int order, int transa, int transb, int m, int n, int k, double alpha, const double *a, int lda,
                       const double *b, int ldb, double beta, double *c, int ldc)
{
    dproduct p = {.m = m, .n = n, .k = k, .alpha = alpha, .a = a, .b = b, .beta = beta, .c = c};
    STRIDES(p, order, transa, transb, lda, ldb, ldc);
    if (m <= 0 || n <= 0)
        return;
    if (k <= 0) {
        p.alpha = 1;
        p.k = 0;
        dgemm_reference(&p, 0);
        return;
    }
    dgemm_run(&p, forms_current()->fused);
}

void exact_cblas_cgemm(int order, int transa, int transb, int m, int n, int k, const void *alpha, const void *a,
                       int lda, const void *b, int ldb, const void *beta, void *c, int ldc)
{
    cproduct p = {.m = m, .n = n, .k = k, .alpha = *(const complex32 *)alpha, .a = a, .b = b,
                  .conj_a = transa == CONJ_TRANS, .conj_b = transb == CONJ_TRANS,
                  .beta = *(const complex32 *)beta, .c = c};
    STRIDES(p, order, transa, transb, lda, ldb, ldc);
    if (m <= 0 || n <= 0)
        return;
    if (k <= 0) {
        p.alpha = (complex32){1, 0};
        p.k = 0;
        cgemm_reference(&p, 0);
        return;
    }
    cgemm_run(&p, forms_current()->fused);
}

void reference_cblas_sgemm(int fused, int order, int transa, int transb, int m, int n, int k, float alpha,
                           const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc)
{
    sproduct p = {.m = m, .n = n, .k = k, .alpha = k > 0 ? alpha : 1, .a = a, .b = b, .beta = beta, .c = c};
    STRIDES(p, order, transa, transb, lda, ldb, ldc);
    sgemm_reference(&p, fused);
}

void reference_cblas_dgemm(int fused, int order, int transa, int transb, int m, int n, int k, double alpha,
                           const double *a, int lda, const double *b, int ldb, double beta, double *c, int ldc)
{
    dproduct p = {.m = m, .n = n, .k = k, .alpha = k > 0 ? alpha : 1, .a = a, .b = b, .beta = beta, .c = c};
    STRIDES(p, order, transa, transb, lda, ldb, ldc);
    dgemm_reference(&p, fused);
}

void reference_cblas_cgemm(int fused, int order, int transa, int transb, int m, int n, int k, const void *alpha,
                           const void *a, int lda, const void *b, int ldb, const void *beta, void *c, int ldc)
{
    cproduct p = {.m = m, .n = n, .k = k, .alpha = *(const complex32 *)alpha, .a = a, .b = b,
                  .conj_a = transa == CONJ_TRANS, .conj_b = transb == CONJ_TRANS,
                  .beta = *(const complex32 *)beta, .c = c};
    if (k <= 0)
        p.alpha = (complex32){1, 0};
    STRIDES(p, order, transa, transb, lda, ldb, ldc);
    cgemm_reference(&p, fused);
}
