/* Lanes shared by the threads of one process: each call of `run` borrows one for as long as it has
 * anything in flight. */
#ifndef KVDEPOT_ENGINE_H
#define KVDEPOT_ENGINE_H

#include <sys/types.h>

#include "lanes.h"

enum { LANES_MAX = 16 };

struct engine;

/* NULL and errno. */
struct engine *engine_open(int uring, uint32_t depth, uint32_t threads, uint64_t split_bytes);
/* Closes idle lanes now, and borrowed ones when they are returned. No lane is lent afterwards. */
void engine_close(struct engine *engine);
/* Closes and frees the engine. If I/O is in flight it is leaked until the process ends. */
void engine_free(struct engine *engine);
int engine_closed(struct engine *engine);
int engine_foreign(const struct engine *engine); /* 1 in a child of the process that opened it */
uint64_t engine_split_bytes(const struct engine *engine);

/* NULL and *error: -ETIME if no lane was returned in time, -EBADF if closed, or -errno. */
struct lane *engine_borrow(struct engine *engine, int64_t deadline_ns, int *error);
void engine_return(struct engine *engine, struct lane *lane);

/* 0, or the errno of the refusal; then nothing was registered. */
int engine_register(struct engine *engine, uint64_t address, uint64_t nbytes);

#endif
