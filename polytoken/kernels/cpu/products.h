/* Matrix products whose every output element is one fixed sum.
 *
 * The contract, for every form in this folder:
 *
 *     acc = 0;  for (p = 0; p < k; p++)  acc = fma(a[i,p], b[p,j], acc);
 *     c[i,j] = alpha * acc            (alpha == 1: acc itself)
 *     c[i,j] = c[i,j] + beta * old    (only when beta != 0; beta == 0 never reads c)
 *
 * Nothing else enters the value: not how many rows or columns there are, not where an operand lies, not which of
 * them is transposed, not the number of threads. Zeros appended to or put before the inner dimension change no bit.
 * The portable form rounds the product before adding it (no fused multiply-add there); all others give equal bits.
 *
 * Compile with -ffp-contract=off: the compiler must neither fuse nor unfuse what is written.
 */
#ifndef POLYTOKEN_PRODUCTS_H
#define POLYTOKEN_PRODUCTS_H

#include <stddef.h>

#define INLINE static inline __attribute__((always_inline))

/* c (m x n) = alpha * a (m x k) * b (k x n) + beta * c. Element (i, p) of a lies at a[i * ars + p * acs]; b and c alike.
 * Strides say everything that order, transposition and leading dimension say in BLAS. */
#define PRODUCT(name, real)              \
    typedef struct {                     \
        ptrdiff_t m, n, k;               \
        real alpha;                      \
        const real *a;                   \
        ptrdiff_t ars, acs;              \
        const real *b;                   \
        ptrdiff_t brs, bcs;              \
        real beta;                       \
        real *c;                         \
        ptrdiff_t crs, ccs;              \
    } name

typedef struct {
    float re, im;
} complex32;

PRODUCT(sproduct, float);
PRODUCT(dproduct, double);

typedef struct {
    ptrdiff_t m, n, k;
    complex32 alpha;
    const complex32 *a;
    ptrdiff_t ars, acs;
    const complex32 *b;
    ptrdiff_t brs, bcs;
    int conj_a, conj_b;
    complex32 beta;
    complex32 *c;
    ptrdiff_t crs, ccs;
} cproduct;

/* One instruction set's way to compute the same sums. The functions expect m, n, k > 0. The row operations are those of
 * rows.inc; their bits may differ from form to form. */
typedef struct {
    const char *name;
    int fused;
    void (*sgemm)(const sproduct *);
    void (*norm)(const float *x, const float *weight, float eps, ptrdiff_t n, float *y);
    void (*swiglu)(const float *gate, const float *up, ptrdiff_t n, float *y);
    void (*rotate)(const float *x, const float *cosines, const float *sines, float scale, ptrdiff_t width, float *y);
    void (*weigh)(float *scores, const unsigned char *mask, ptrdiff_t seen, ptrdiff_t n);
    void (*sums)(const float *s, ptrdiff_t ld, ptrdiff_t rows, ptrdiff_t n, float *sums);
} form;

extern const form form_avx512, form_avx2, form_neon, form_portable;

/* forms.c: which forms this machine can run, best first; the one in use. */
size_t forms_count(void);
const form *forms_at(size_t index);
const form *forms_current(void);
int forms_choose(const char *name);

/* dgemm.c, cgemm.c; `fused` as in the form. */
void dgemm_run(const dproduct *, int fused);
void cgemm_run(const cproduct *, int fused);

/* reference.c: the contract written down as scalar loops. */
void sgemm_reference(const sproduct *, int fused);
void dgemm_reference(const dproduct *, int fused);
void cgemm_reference(const cproduct *, int fused);

/* threads.c: grow-only buffers of the calling thread (NULL when memory is out), and the pool. */
enum { SCRATCH_ROWS, SCRATCH_PANEL, SCRATCH_SUMS, SCRATCH_BLOCK, SCRATCH_SCORES, SCRATCH_SLOTS };
void *scratch(int slot, size_t bytes);
int threads_count(void);
int threads_set(int count);
/* Calls job(data, part, parts) for every part, on this thread and the pool's; returns when all are done. */
void threads_run(void (*job)(void *, int, int), void *data, int parts);

/* cblas.c: what stands behind the three imported symbols. Same layout as the C interface of BLAS. */
void exact_cblas_sgemm(int order, int transa, int transb, int m, int n, int k, float alpha, const float *a, int lda,
                       const float *b, int ldb, float beta, float *c, int ldc);
void exact_cblas_dgemm(int order, int transa, int transb, int m, int n, int k, double alpha, const double *a, int lda,
                       const double *b, int ldb, double beta, double *c, int ldc);
void exact_cblas_cgemm(int order, int transa, int transb, int m, int n, int k, const void *alpha, const void *a,
                       int lda, const void *b, int ldb, const void *beta, void *c, int ldc);
void reference_cblas_sgemm(int fused, int order, int transa, int transb, int m, int n, int k, float alpha,
                           const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);
void reference_cblas_dgemm(int fused, int order, int transa, int transb, int m, int n, int k, double alpha,
                           const double *a, int lda, const double *b, int ldb, double beta, double *c, int ldc);
void reference_cblas_cgemm(int fused, int order, int transa, int transb, int m, int n, int k, const void *alpha,
                           const void *a, int lda, const void *b, int ldb, const void *beta, void *c, int ldc);

/* patch.c: import slots of an already loaded library. */
enum { PATCH_SYMBOLS = 3 };
extern const char *const patch_names[PATCH_SYMBOLS];
/* Points every import slot of patch_names[i] in the loaded library `file` at targets[i]; redirected[i] says how many
 * slots that was. Returns NULL, or why nothing was changed. */
const char *patch_install(const char *file, void *const targets[PATCH_SYMBOLS], int redirected[PATCH_SYMBOLS]);
/* Puts back what patch_install found; no effect when nothing is redirected. Returns NULL or a reason. */
const char *patch_restore(void);

/* bandwidth.c: best one-thread streaming-read rate in GB/s, 0 when memory is out. With `sustained`, which becomes the
 * mean rate over `seconds` of the way of walking that was fastest when each was tried once. */
double read_bandwidth(size_t bytes, double seconds, double *sustained);

#endif
