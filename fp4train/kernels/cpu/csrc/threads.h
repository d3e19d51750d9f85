/* Tiles of a job on several threads. */
#ifndef FP4_THREADS_H
#define FP4_THREADS_H
#include <stdint.h>

typedef void (*Tile)(void *context, int64_t index);

/* tile(context, i) for every 0 <= i < count, at least one, in any order; then, where it is not NULL, then(context), once. */
typedef struct {
    Tile tile;
    void *context;
    int64_t count;
    void (*then)(void *context);
} Phase;

enum { MAX_PHASES = 2 };

/* Run phases one after the other, on at most `threads` threads, and return when all are done. */
void run_phases(const Phase *phases, int count, int threads);

/* "openmp": the pool that torch uses; "pthreads": threads started per call. */
const char *thread_pool(void);
#endif
