/* Tiles of a job on several threads. */
#ifndef FP4_THREADS_H
#define FP4_THREADS_H
#include <stdint.h>

typedef void (*Tile)(void *context, int64_t index);

/* Call tile(context, i) for every 0 <= i < count, on at most `threads` threads, and return when all are done. */
void run_tiles(Tile tile, void *context, int64_t count, int threads);

/* "openmp": the pool that torch uses; "pthreads": threads started per call. */
const char *thread_pool(void);
#endif
