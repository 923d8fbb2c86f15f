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
/* Idle lanes are closed now, borrowed ones when they come back. No lane is lent afterwards. */
void engine_close(struct engine *engine);
/* Closes; frees unless something is still in flight, which is then left to the process's end. */
void engine_free(struct engine *engine);
int engine_closed(struct engine *engine);
int engine_foreign(const struct engine *engine); /* 1 in a child of the process that opened it */
uint64_t engine_split_bytes(const struct engine *engine);

/* NULL and *error: -ETIME when none came back in time, -EBADF when closed, or -errno. */
struct lane *engine_borrow(struct engine *engine, int64_t deadline_ns, int *error);
void engine_return(struct engine *engine, struct lane *lane);

/* 0, or the errno of the refusal, after which nothing is registered that was not before. */
int engine_register(struct engine *engine, uint64_t address, uint64_t nbytes);

#endif
