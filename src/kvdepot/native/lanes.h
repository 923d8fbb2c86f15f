/* The two kinds of lane, and the table of registered memory that rings mirror. */
#ifndef KVDEPOT_LANES_H
#define KVDEPOT_LANES_H

#include "batch.h"

enum { MEMORY_SLOTS = 64 };
#define MEMORY_SLOT_BYTES (UINT64_C(1) << 30)

/* Memory that callers have registered. `generation` changes when a slot is freed and reused; a ring
 * compares it with its own. 0 is an empty slot. */
struct registry {
    struct memory_slot {
        uint64_t address, nbytes, generation;
    } memory[MEMORY_SLOTS];
    uint64_t generation;
};

/* NULL and errno when the kernel does not allow a ring. */
struct lane *ring_open(uint32_t depth);
/* Copy the registry to the ring's tables, as far as the kernel allows. The ring must not be in use.
 * 0, or the errno of the last refusal. */
int ring_sync(struct lane *lane, const struct registry *registry);
/* The errno with which the kernel refused the table itself, or 0. */
int ring_memory_refused(const struct lane *lane);
/* 1, or 0 and a reason. */
int ring_available(const char **reason);

struct pool;
/* Threads start when they are first needed and sleep while there is nothing to do. */
struct pool *pool_open(uint32_t threads);
/* Threads end when their current call returns; the last one frees the pool. */
void pool_close(struct pool *pool);
struct lane *channel_open(struct pool *pool, uint32_t depth);

#endif
