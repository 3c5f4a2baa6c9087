/* Python's view of the products: `polytoken.kernels._products`. */
#if !defined(__linux__)
#error "the exact products are for Linux; elsewhere MLX does not import its CPU products from a library"
#endif

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>

#include "block.h"
#include "products.h"

enum { ROW_MAJOR = 101, COL_MAJOR = 102, NO_TRANS = 111, TRANS = 112, CONJ_TRANS = 113 };

/* ---- forms and threads -------------------------------------------------------------------------------------------- */

static PyObject *py_forms(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    PyObject *all = PyTuple_New((Py_ssize_t)forms_count());
    for (size_t i = 0; all && i < forms_count(); i++) {
        PyObject *name = PyUnicode_FromString(forms_at(i)->name);
        if (!name) {
            Py_DECREF(all);
            return NULL;
        }
        PyTuple_SET_ITEM(all, (Py_ssize_t)i, name);
    }
    return all;
}

static PyObject *py_form(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyUnicode_FromString(forms_current()->name);
}

static PyObject *py_fused(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyBool_FromLong(forms_current()->fused);
}

static PyObject *py_set_form(PyObject *self, PyObject *arg)
{
    (void)self;
    const char *name = PyUnicode_AsUTF8(arg);
    if (!name)
        return NULL;
    if (!forms_choose(name))
        return PyErr_Format(PyExc_ValueError, "this machine cannot run the form %R", arg);
    Py_RETURN_NONE;
}

static PyObject *py_threads(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyLong_FromLong(threads_count());
}

static PyObject *py_set_threads(PyObject *self, PyObject *arg)
{
    (void)self;
    long count = PyLong_AsLong(arg);
    if (count == -1 && PyErr_Occurred())
        return NULL;
    if (count > 1000 || !threads_set((int)count))
        return PyErr_Format(PyExc_ValueError, "threads must be from 1 to 64, not %ld", count);
    Py_RETURN_NONE;
}

/* ---- products on buffers, for tests and measurements ------------------------------------------------------------- */

typedef struct {
    int order, transa, transb, m, n, k, lda, ldb, ldc, fused;
    Py_buffer a, b, c;
} call;

static void release(call *p)
{
    PyBuffer_Release(&p->a);
    PyBuffer_Release(&p->b);
    PyBuffer_Release(&p->c);
}

/* A stored matrix of `rows` by `cols` (as the order sees it) with leading dimension ld must fit its buffer. */
static int fits(const char *name, const Py_buffer *buffer, int item, int order, int rows, int cols, int ld)
{
    long long lines = order == ROW_MAJOR ? rows : cols, length = order == ROW_MAJOR ? cols : rows;
    if (ld < (length > 1 ? length : 1)) {
        PyErr_Format(PyExc_ValueError, "leading dimension of %s is too small", name);
        return 0;
    }
    if (buffer->itemsize != item) {
        PyErr_Format(PyExc_ValueError, "%s must hold items of %d bytes", name, item);
        return 0;
    }
    if (lines > 0 && length > 0 && ((lines - 1) * ld + length) * item > (long long)buffer->len) {
        PyErr_Format(PyExc_ValueError, "%s is too short", name);
        return 0;
    }
    return 1;
}

/* (transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, order=101, fused=-1); alpha, beta parsed by caller */
static int parse(PyObject *args, PyObject *kwargs, int item, call *p, PyObject **alpha, PyObject **beta)
{
    static char *names[] = {"transa", "transb", "m",   "n", "k",   "alpha", "a",     "lda",
                            "b",      "ldb",    "beta", "c", "ldc", "order", "fused", NULL};
    memset(p, 0, sizeof *p);
    p->order = ROW_MAJOR;
    p->fused = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiiiiOy*iy*iOw*i|ii", names, &p->transa, &p->transb, &p->m, &p->n,
                                     &p->k, alpha, &p->a, &p->lda, &p->b, &p->ldb, beta, &p->c, &p->ldc, &p->order,
                                     &p->fused))
        return 0;
    int na = p->transa == NO_TRANS, nb = p->transb == NO_TRANS;
    const char *wrong = NULL;
    if (p->order != ROW_MAJOR && p->order != COL_MAJOR)
        wrong = "order must be 101 or 102";
    else if (p->transa < NO_TRANS || p->transa > CONJ_TRANS || p->transb < NO_TRANS || p->transb > CONJ_TRANS)
        wrong = "transposition must be 111, 112 or 113";
    else if (p->m < 0 || p->n < 0 || p->k < 0)
        wrong = "sizes must not be negative";
    if (wrong)
        PyErr_SetString(PyExc_ValueError, wrong);
    if (wrong || !fits("a", &p->a, item, p->order, na ? p->m : p->k, na ? p->k : p->m, p->lda) ||
        !fits("b", &p->b, item, p->order, nb ? p->k : p->n, nb ? p->n : p->k, p->ldb) ||
        !fits("c", &p->c, item, p->order, p->m, p->n, p->ldc)) {
        release(p);
        return 0;
    }
    return 1;
}

#define REAL_PRODUCT(letter, real)                                                                                   \
    static PyObject *py_##letter##gemm(PyObject *self, PyObject *args, PyObject *kwargs)                             \
    {                                                                                                                \
        (void)self;                                                                                                  \
        call p;                                                                                                      \
        PyObject *palpha, *pbeta;                                                                                    \
        if (!parse(args, kwargs, sizeof(real), &p, &palpha, &pbeta))                                                 \
            return NULL;                                                                                             \
        real alpha = (real)PyFloat_AsDouble(palpha), beta = (real)PyFloat_AsDouble(pbeta);                           \
        if (!PyErr_Occurred()) {                                                                                     \
            Py_BEGIN_ALLOW_THREADS                                                                                   \
            if (p.fused < 0)                                                                                         \
                exact_cblas_##letter##gemm(p.order, p.transa, p.transb, p.m, p.n, p.k, alpha, p.a.buf, p.lda,        \
                                           p.b.buf, p.ldb, beta, p.c.buf, p.ldc);                                    \
            else                                                                                                     \
                reference_cblas_##letter##gemm(p.fused, p.order, p.transa, p.transb, p.m, p.n, p.k, alpha, p.a.buf,  \
                                               p.lda, p.b.buf, p.ldb, beta, p.c.buf, p.ldc);                         \
            Py_END_ALLOW_THREADS                                                                                     \
        }                                                                                                            \
        release(&p);                                                                                                 \
        if (PyErr_Occurred())                                                                                        \
            return NULL;                                                                                             \
        Py_RETURN_NONE;                                                                                              \
    }

REAL_PRODUCT(s, float)
REAL_PRODUCT(d, double)

static PyObject *py_cgemm(PyObject *self, PyObject *args, PyObject *kwargs)
{
    (void)self;
    call p;
    PyObject *palpha, *pbeta;
    if (!parse(args, kwargs, sizeof(complex32), &p, &palpha, &pbeta))
        return NULL;
    Py_complex za = PyComplex_AsCComplex(palpha), zb = PyComplex_AsCComplex(pbeta);
    complex32 alpha = {(float)za.real, (float)za.imag}, beta = {(float)zb.real, (float)zb.imag};
    if (!PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        if (p.fused < 0)
            exact_cblas_cgemm(p.order, p.transa, p.transb, p.m, p.n, p.k, &alpha, p.a.buf, p.lda, p.b.buf, p.ldb,
                              &beta, p.c.buf, p.ldc);
        else
            reference_cblas_cgemm(p.fused, p.order, p.transa, p.transb, p.m, p.n, p.k, &alpha, p.a.buf, p.lda,
                                  p.b.buf, p.ldb, &beta, p.c.buf, p.ldc);
        Py_END_ALLOW_THREADS
    }
    release(&p);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* ---- what stands behind MLX ---------------------------------------------------------------------------------------- */

static PyObject *install(const char *file, void *const targets[PATCH_SYMBOLS])
{
    int redirected[PATCH_SYMBOLS];
    const char *why = patch_install(file, targets, redirected);
    if (why) {
        PyErr_SetString(PyExc_LookupError, why);
        return NULL;
    }
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < PATCH_SYMBOLS; i++) {
        if (!redirected[i])
            continue;
        PyObject *name = PyUnicode_FromString(patch_names[i]);
        if (!name || PyList_Append(names, name) != 0)
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    PyObject *result = names ? PyList_AsTuple(names) : NULL;
    Py_XDECREF(names);
    return result;
}

static PyObject *py_redirect(PyObject *self, PyObject *args)
{
    (void)self;
    const char *file;
    if (!PyArg_ParseTuple(args, "s", &file))
        return NULL;
    void *const targets[PATCH_SYMBOLS] = {(void *)exact_cblas_sgemm, (void *)exact_cblas_dgemm,
                                          (void *)exact_cblas_cgemm};
    return install(file, targets);
}

/* A BLAS keeps its own thread count; each has its own name for setting it. */
static void set_library_threads(void *library, int threads)
{
    static const char *const setters[] = {"openblas_set_num_threads", "scipy_openblas_set_num_threads",
                                          "MKL_Set_Num_Threads"};
    for (size_t i = 0; i < sizeof setters / sizeof *setters; i++) {
        void (*set)(int) = (void (*)(int))dlsym(library, setters[i]);
        if (set)
            set(threads);
    }
    void (*blis)(long) = (void (*)(long))dlsym(library, "bli_thread_set_num_threads");
    if (blis)
        blis(threads);
}

static PyObject *py_redirect_to_library(PyObject *self, PyObject *args)
{
    (void)self;
    const char *file, *path;
    int threads;
    if (!PyArg_ParseTuple(args, "ssi", &file, &path, &threads))
        return NULL;
    /* Never closed again: MLX may be inside one of its functions on another thread. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        PyErr_SetString(PyExc_OSError, dlerror());
        return NULL;
    }
    void *targets[PATCH_SYMBOLS];
    for (int i = 0; i < PATCH_SYMBOLS; i++) {
        char prefixed[64];
        snprintf(prefixed, sizeof prefixed, "scipy_%s", patch_names[i]);
        targets[i] = dlsym(library, patch_names[i]);
        if (!targets[i])
            targets[i] = dlsym(library, prefixed);
        if (!targets[i])
            return PyErr_Format(PyExc_OSError, "%s has neither %s nor %s", path, patch_names[i], prefixed);
    }
    set_library_threads(library, threads);
    return install(file, targets);
}

static PyObject *py_restore(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    const char *why = patch_restore();
    if (why) {
        PyErr_SetString(PyExc_OSError, why);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *measure_reading(PyObject *args, int sustain)
{
    Py_ssize_t bytes;
    double seconds, best, mean = 0;
    if (!PyArg_ParseTuple(args, "nd", &bytes, &seconds))
        return NULL;
    if (bytes < 4096)
        return PyErr_Format(PyExc_ValueError, "bytes must be at least 4096");
    Py_BEGIN_ALLOW_THREADS
    best = read_bandwidth((size_t)bytes, seconds, sustain ? &mean : NULL);
    Py_END_ALLOW_THREADS
    if (best == 0)
        return PyErr_NoMemory();
    return PyFloat_FromDouble(sustain ? mean : best);
}

static PyObject *py_read_bandwidth(PyObject *self, PyObject *args)
{
    (void)self;
    return measure_reading(args, 0);
}

static PyObject *py_sustained_bandwidth(PyObject *self, PyObject *args)
{
    (void)self;
    return measure_reading(args, 1);
}

#define ARGUMENTS "(transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, order=101, fused=-1)"
static PyMethodDef methods[] = {
    {"forms", py_forms, METH_NOARGS, "forms() -> names of the forms this machine can run, best first"},
    {"form", py_form, METH_NOARGS, "form() -> name of the form in use"},
    {"fused", py_fused, METH_NOARGS, "fused() -> whether the form in use has a fused multiply-add"},
    {"set_form", py_set_form, METH_O, "set_form(name): use this form from now on"},
    {"threads", py_threads, METH_NOARGS, "threads() -> most threads one product may use"},
    {"set_threads", py_set_threads, METH_O, "set_threads(count): most threads one product may use"},
    {"sgemm", (PyCFunction)(void (*)(void))py_sgemm, METH_VARARGS | METH_KEYWORDS,
     "sgemm" ARGUMENTS ": float32 product as in BLAS; fused 0 or 1 runs the scalar reference instead"},
    {"dgemm", (PyCFunction)(void (*)(void))py_dgemm, METH_VARARGS | METH_KEYWORDS, "dgemm" ARGUMENTS ": float64"},
    {"cgemm", (PyCFunction)(void (*)(void))py_cgemm, METH_VARARGS | METH_KEYWORDS, "cgemm" ARGUMENTS ": complex64"},
    {"redirect", py_redirect, METH_VARARGS,
     "redirect(file) -> symbols of the loaded library `file` that the exact products now stand behind"},
    {"redirect_to_library", py_redirect_to_library, METH_VARARGS,
     "redirect_to_library(file, path, threads) -> symbols that the BLAS at `path` now stands behind"},
    {"restore", py_restore, METH_NOARGS, "restore(): put the original functions back"},
    {"read_bandwidth", py_read_bandwidth, METH_VARARGS,
     "read_bandwidth(bytes, seconds) -> best one-thread streaming read in GB/s"},
    {"sustained_bandwidth", py_sustained_bandwidth, METH_VARARGS,
     "sustained_bandwidth(bytes, seconds) -> mean rate of the fastest one-thread streaming read in GB/s"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_products", "Exact fixed-order matrix products.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__products(void)
{
    PyObject *self = PyModule_Create(&module);
    PyObject *capsule = self ? PyCapsule_New((void *)&blocks, BLOCK_CAPSULE, NULL) : NULL;
    if (!capsule || PyModule_AddObject(self, "blocks", capsule) != 0) { /* takes the capsule when it succeeds */
        Py_XDECREF(capsule);
        Py_CLEAR(self);
    }
    return self;
}
