/* How fast one thread can read memory: the floor under every product that must stream its weights once. */
#include <stdlib.h>
#include <string.h>
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

/* Reads everything and folds it by exclusive or, which cannot overflow, trap or be left out. */
#define DEFINE_READ(name, vec, attributes)                                                  \
    attributes static unsigned long long name(const char *data, size_t bytes)               \
    {                                                                                       \
        vec a = {0}, b = {0}, c = {0}, d = {0};                                             \
        const vec *v = (const vec *)data;                                                   \
        for (size_t i = 0; i + 4 <= bytes / sizeof(vec); i += 4) {                          \
            __builtin_prefetch((const char *)(v + i) + 1024);                               \
            a ^= v[i], b ^= v[i + 1], c ^= v[i + 2], d ^= v[i + 3];                         \
        }                                                                                   \
        a ^= b ^ c ^ d;                                                                     \
        return a[0] ^ a[1] ^ a[2] ^ a[3];                                                   \
    }

DEFINE_READ(read_plain, V32, __attribute__((noinline)))
#if defined(__x86_64__)
DEFINE_READ(read_avx2, V32, __attribute__((noinline, target("avx2"))))
DEFINE_READ(read_avx512, V64, __attribute__((noinline, target("avx512f"))))
#endif

double read_bandwidth(size_t bytes, double seconds)
{
    unsigned long long (*read)(const char *, size_t) = read_plain;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        read = read_avx2;
    if (__builtin_cpu_supports("avx512f"))
        read = read_avx512;
#endif
    void *data;
    bytes = (bytes + 4095) / 4096 * 4096;
    if (posix_memalign(&data, 4096, bytes) != 0)
        return 0;
    memset(data, 1, bytes);
    double best = 0, start = now();
    volatile unsigned long long sink = 0;
    do {
        double t = now();
        sink ^= read(data, bytes);
        t = now() - t;
        if (t > 0 && (double)bytes / t > best)
            best = (double)bytes / t;
    } while (now() - start < seconds);
    free(data);
    return best / 1e9;
}
