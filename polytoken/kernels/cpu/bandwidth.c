/* How fast one thread can read memory: the floor under every product that must stream its weights once. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "products.h"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef unsigned long long V32 __attribute__((vector_size(32)));
typedef unsigned long long V64 __attribute__((vector_size(64)));

/* Which way of walking memory is fastest differs between machines, so several are tried: `streams` neighbouring rows of
 * `row` bytes side by side, each prefetched `ahead` bytes early. */
typedef struct {
    size_t streams, row, ahead;
} walk;

static const walk walks[] = {{1, 1 << 16, 0},   {1, 1 << 16, 1024}, {1, 1 << 16, 2048},
                             {4, 1 << 13, 512}, {8, 1 << 13, 0},    {8, 1 << 13, 512},
                             {16, 1 << 13, 512}};
enum { WALKS = sizeof walks / sizeof *walks };

/* Reads everything and folds it by exclusive or, which cannot overflow, trap or be left out. */
#define DEFINE_READ(name, vec, attributes)                                                                 \
    attributes static unsigned long long name(const char *data, size_t bytes, walk w)                      \
    {                                                                                                      \
        enum { STEP = 128 / sizeof(vec) };                                                                 \
        vec sum[STEP] = {{0}};                                                                             \
        for (size_t base = 0; base + w.streams * w.row <= bytes; base += w.streams * w.row)                \
            for (size_t at = 0; at < w.row; at += 128)                                                     \
                for (size_t s = 0; s < w.streams; s++) {                                                   \
                    const char *from = data + base + s * w.row + at;                                       \
                    if (w.ahead) {                                                                         \
                        __builtin_prefetch(from + w.ahead);                                                \
                        __builtin_prefetch(from + w.ahead + 64);                                           \
                    }                                                                                      \
                    _Pragma("GCC unroll 8") for (int i = 0; i < STEP; i++) sum[i] ^= ((const vec *)from)[i]; \
                }                                                                                          \
        for (int i = 1; i < STEP; i++)                                                                     \
            sum[0] ^= sum[i];                                                                              \
        return sum[0][0] ^ sum[0][1] ^ sum[0][2] ^ sum[0][3];                                              \
    }

DEFINE_READ(read_plain, V32, __attribute__((noinline)))
#if defined(__x86_64__)
DEFINE_READ(read_avx2, V32, __attribute__((noinline, target("avx2"))))
DEFINE_READ(read_avx512, V64, __attribute__((noinline, target("avx512f"))))
#endif

double read_bandwidth(size_t bytes, double seconds, double *sustained)
{
    unsigned long long (*read)(const char *, size_t, walk) = read_plain;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        read = read_avx2;
    if (__builtin_cpu_supports("avx512f"))
        read = read_avx512;
#endif
    void *data;
    bytes = (bytes + 131071) / 131072 * 131072;
    if (posix_memalign(&data, 1 << 21, bytes + 4096) != 0)
        return 0;
    /* a floor is what the machine can do at best, so large pages where they are allowed */
    madvise(data, bytes + 4096, MADV_HUGEPAGE);
    memset(data, 1, bytes + 4096);
    double best = 0, start = now();
    int fastest = 0;
    volatile unsigned long long sink = 0;
    do
        for (int i = 0; i < WALKS; i++) {
            double t = now();
            sink ^= read(data, bytes, walks[i]);
            t = now() - t;
            if (t > 0 && (double)bytes / t > best) {
                best = (double)bytes / t;
                fastest = i;
            }
        }
    while (!sustained && now() - start < seconds);
    if (sustained) {
        double t, passes = 0;
        start = now();
        do {
            sink ^= read(data, bytes, walks[fastest]);
            passes++;
            t = now() - start;
        } while (t < seconds);
        *sustained = t > 0 ? passes * (double)bytes / t / 1e9 : best / 1e9;
    }
    free(data);
    return best / 1e9;
}
