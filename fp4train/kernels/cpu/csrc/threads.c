/* Threads take tiles one by one from a shared counter, so a slow or late thread takes fewer.
 *
 * The threads are those of the OpenMP runtime that torch has loaded: GOMP_parallel is looked up at run time. Linking with
 * -fopenmp could load a second runtime, whose thread pool would compete with torch's for the cores. If no such runtime is
 * loaded, each call starts its own threads.
 */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#endif
#include "threads.h"

#include <stddef.h>

enum { MAX_THREADS = 256 };

typedef struct {
    Tile tile;
    void *context;
    int64_t count, next;
} Work;

static void take_tiles(void *argument) {
    Work *work = argument;
    for (;;) {
        const int64_t index = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (index >= work->count) return;
        work->tile(work->context, index);
    }
}

#if defined(_WIN32)
void run_tiles(Tile tile, void *context, int64_t count, int threads) {
    Work work = {tile, context, count, 0};
    (void)threads;
    take_tiles(&work);
}
const char *thread_pool(void) { return "none"; }
#else
typedef void (*GompParallel)(void (*)(void *), void *, unsigned, unsigned);

static GompParallel find_openmp(void) {
    GompParallel found;
    *(void **)&found = dlsym(RTLD_DEFAULT, "GOMP_parallel"); /* torch loads its runtime with RTLD_GLOBAL */
    return found;
}

static void *thread_main(void *work) {
    take_tiles(work);
    return NULL;
}

void run_tiles(Tile tile, void *context, int64_t count, int threads) {
    Work work = {tile, context, count, 0};
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > count) threads = (int)count;
    if (threads <= 1) {
        take_tiles(&work);
        return;
    }
    const GompParallel parallel = find_openmp();
    if (parallel) {
        parallel(take_tiles, &work, (unsigned)threads, 0);
        return;
    }
    pthread_t started[MAX_THREADS];
    int running = 0;
    while (running < threads - 1 && pthread_create(&started[running], NULL, thread_main, &work) == 0) running++;
    take_tiles(&work);
    for (int i = 0; i < running; i++) pthread_join(started[i], NULL);
}

const char *thread_pool(void) { return find_openmp() ? "openmp" : "pthreads"; }
#endif
