/* Buffers of the calling thread, and a small pool that sleeps between products.
 *
 * Parts of a product are whole columns or rows of the result, so which thread computes which part cannot be seen in
 * the bits. One product has the pool at a time; a second caller computes alone rather than wait. */
#include <pthread.h>
#include <stdlib.h>

#include "products.h"

/* ---- buffers ------------------------------------------------------------------------------------------------------ */

typedef struct {
    void *data[SCRATCH_SLOTS];
    size_t bytes[SCRATCH_SLOTS];
} buffers;

static pthread_key_t buffers_key;
static pthread_once_t buffers_once = PTHREAD_ONCE_INIT;
static int buffers_ready;

static void free_buffers(void *mine)
{
    buffers *b = mine;
    for (int i = 0; i < SCRATCH_SLOTS; i++)
        free(b->data[i]);
    free(b);
}

static void make_key(void) { buffers_ready = pthread_key_create(&buffers_key, free_buffers) == 0; }

void *scratch(int slot, size_t bytes)
{
    pthread_once(&buffers_once, make_key);
    if (!buffers_ready)
        return NULL;
    buffers *b = pthread_getspecific(buffers_key);
    if (!b) {
        b = calloc(1, sizeof *b);
        if (!b || pthread_setspecific(buffers_key, b) != 0) {
            free(b);
            return NULL;
        }
    }
    if (b->bytes[slot] < bytes || !b->data[slot]) {
        free(b->data[slot]);
        b->bytes[slot] = (bytes + 4095) / 4096 * 4096 + 4096;
        if (posix_memalign(&b->data[slot], 4096, b->bytes[slot]) != 0) {
            b->data[slot] = NULL;
            b->bytes[slot] = 0;
        }
    }
    return b->data[slot];
}

/* ---- pool --------------------------------------------------------------------------------------------------------- */

enum { MOST_THREADS = 64 };

static int wanted = 1;
static pthread_mutex_t taken = PTHREAD_MUTEX_INITIALIZER; /* held by the one caller that has the pool */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  /* guards what follows */
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, finished = PTHREAD_COND_INITIALIZER;
static int workers, fork_watched;
static void (*job)(void *, int, int);
static void *job_data;
static int job_parts, next_part, unfinished_parts;

int threads_count(void) { return __atomic_load_n(&wanted, __ATOMIC_RELAXED); }

int threads_set(int count)
{
    if (count < 1 || count > MOST_THREADS)
        return 0;
    __atomic_store_n(&wanted, count, __ATOMIC_RELAXED);
    return 1;
}

/* A forked child has none of its parent's threads, and may have inherited locked locks. */
static void forget_pool(void)
{
    pthread_mutex_init(&taken, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&work, NULL);
    pthread_cond_init(&finished, NULL);
    workers = 0;
    next_part = job_parts = unfinished_parts = 0;
}

/* Takes parts until none is left; called and returns with the lock held. */
static void take_parts(void)
{
    while (next_part < job_parts) {
        int part = next_part++;
        pthread_mutex_unlock(&lock);
        job(job_data, part, job_parts);
        pthread_mutex_lock(&lock);
        if (--unfinished_parts == 0)
            pthread_cond_signal(&finished);
    }
}

static void *worker(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        take_parts();
        pthread_cond_wait(&work, &lock);
    }
    return NULL;
}

void threads_run(void (*run)(void *, int, int), void *data, int parts)
{
    if (parts < 2 || pthread_mutex_trylock(&taken) != 0) {
        for (int part = 0; part < parts; part++)
            run(data, part, parts);
        return;
    }
    pthread_mutex_lock(&lock);
    if (!fork_watched)
        fork_watched = pthread_atfork(NULL, NULL, forget_pool) == 0;
    /* Workers that cannot be started are simply missing: the caller takes their parts. */
    while (fork_watched && workers < parts - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL) != 0)
            break;
        pthread_detach(thread);
        workers++;
    }
    job = run;
    job_data = data;
    job_parts = unfinished_parts = parts;
    next_part = 0;
    pthread_cond_broadcast(&work);
    take_parts();
    while (unfinished_parts > 0)
        pthread_cond_wait(&finished, &lock);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&taken);
}
