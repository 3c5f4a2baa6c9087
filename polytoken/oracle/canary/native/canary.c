/* The reference canary for a machine without a GPU: a thread of its own does a trifle.
 *
 *     cc -shared -fPIC -O2 -o canary.so canary.c -lpthread
 *
 * It measures what a GPU's canary does: how long it takes until somebody else's work is begun, and until it is done. */
#include "canary.h"

#include <pthread.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *work(void *out) {
    *(double *)out = now();
    return NULL;
}

int ds4_gpu_canary_probe(double seconds[2]) {
    const double start = now();
    double begun = 0.0;
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, &begun) != 0) return 0;
    if (pthread_join(thread, NULL) != 0) return 0;
    seconds[0] = begun - start;
    seconds[1] = now() - start;
    return 1;
}
