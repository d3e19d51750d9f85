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
#include <sched.h>
#endif
#include "threads.h"

#include <stddef.h>

#if defined(_WIN32)
static void give_way(void) {}
#else
static void give_way(void) { sched_yield(); }
#endif

enum { MAX_THREADS = 256, SPINS = 1000 };

typedef struct {
    const Phase *phases;
    int count;
    int64_t next[MAX_PHASES], left[MAX_PHASES]; /* of each phase: the next tile, and the tiles that are not done */
    int open;                                   /* the phase whose tiles may be taken */
} Work;

static void begin(Work *work, const Phase *phases, int count) {
    *work = (Work){.phases = phases, .count = count};
    for (int i = 0; i < count; i++) work->left[i] = phases[i].count;
}

/* A phase begins when the tiles of the one before are done: a thread waits for those that others have taken, and for no
 * thread that has none. */
static void wait_for(Work *work, int phase) {
    for (int i = 0; __atomic_load_n(&work->open, __ATOMIC_ACQUIRE) < phase; i++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        if (i >= SPINS) give_way(); /* there may be more threads than cores */
    }
}

static void take_tiles(void *argument) {
    Work *work = argument;
    for (int i = 0; i < work->count; i++) {
        const Phase *phase = &work->phases[i];
        wait_for(work, i);
        for (;;) {
            const int64_t index = __atomic_fetch_add(&work->next[i], 1, __ATOMIC_RELAXED);
            if (index >= phase->count) break;
            phase->tile(phase->context, index);
            if (__atomic_sub_fetch(&work->left[i], 1, __ATOMIC_ACQ_REL)) continue;
            if (phase->then) phase->then(phase->context);
            __atomic_store_n(&work->open, i + 1, __ATOMIC_RELEASE);
        }
    }
}

#if defined(_WIN32)
void run_phases(const Phase *phases, int count, int threads) {
    Work work;
    begin(&work, phases, count);
    (void)threads;
    take_tiles(&work);
}
const char *thread_pool(void) { return "none"; }
#else
typedef void (*GompParallel)(void (*)(void *), void *, unsigned, unsigned);

/* Kept once it is found: a look-up takes 3 microseconds of a call. */
static GompParallel find_openmp(void) {
    static GompParallel kept;
    GompParallel found = __atomic_load_n(&kept, __ATOMIC_RELAXED);
    if (!found) *(void **)&found = dlsym(RTLD_DEFAULT, "GOMP_parallel"); /* torch loads its runtime with RTLD_GLOBAL */
    __atomic_store_n(&kept, found, __ATOMIC_RELAXED);
    return found;
}

static void *thread_main(void *work) {
    take_tiles(work);
    return NULL;
}

void run_phases(const Phase *phases, int count, int threads) {
    Work work;
    int64_t most = 1;
    begin(&work, phases, count);
    for (int i = 0; i < count; i++) most = phases[i].count > most ? phases[i].count : most;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > most) threads = (int)most;
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
