#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

struct engine {
    pthread_mutex_t mutex;
    pthread_cond_t returned;
    struct lane *idle;
    struct pool *pool; /* NULL for rings */
    struct registry registry;
    uint64_t split_bytes;
    uint32_t depth, lanes;
    int uring, closed;
    pid_t pid;
};

static struct lane *open_lane(struct engine *engine)
{
    struct lane *lane = engine->uring ? ring_open(engine->depth)
                                      : channel_open(engine->pool, engine->depth);
    if (lane)
        engine->lanes++;
    return lane;
}

struct engine *engine_open(int uring, uint32_t depth, uint32_t threads, uint64_t split_bytes)
{
    struct engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return NULL;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->returned, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&engine->mutex, NULL);
    engine->uring = uring;
    engine->depth = depth;
    engine->split_bytes = split_bytes;
    engine->pid = getpid();
    engine->pool = uring ? NULL : pool_open(threads);
    engine->idle = uring || engine->pool ? open_lane(engine) : NULL;
    if (!engine->idle) {
        int error = errno;
        engine_free(engine);
        errno = error;
        return NULL;
    }
    return engine;
}

int engine_foreign(const struct engine *engine) { return getpid() != engine->pid; }
uint64_t engine_split_bytes(const struct engine *engine) { return engine->split_bytes; }

static void close_lane(struct engine *engine, struct lane *lane)
{
    lane->type->close(lane);
    if (--engine->lanes == 0 && engine->closed && engine->pool) {
        pool_close(engine->pool);
        engine->pool = NULL;
    }
}

static void give_back(struct engine *engine, struct lane *lane)
{
    if (engine->closed) {
        close_lane(engine, lane);
        return;
    }
    if (engine->uring)
        ring_sync(lane, &engine->registry);
    lane->next = engine->idle;
    engine->idle = lane;
    pthread_cond_signal(&engine->returned);
}

void engine_close(struct engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    __atomic_store_n(&engine->closed, 1, __ATOMIC_RELEASE);
    while (engine->idle) {
        struct lane *lane = engine->idle;
        engine->idle = lane->next;
        close_lane(engine, lane);
    }
    pthread_cond_broadcast(&engine->returned);
    pthread_mutex_unlock(&engine->mutex);
}

void engine_free(struct engine *engine)
{
    engine_close(engine);
    if (engine->lanes > 0)
        return;
    if (engine->pool)
        pool_close(engine->pool);
    pthread_cond_destroy(&engine->returned);
    pthread_mutex_destroy(&engine->mutex);
    free(engine);
}

int engine_closed(struct engine *engine)
{
    return __atomic_load_n(&engine->closed, __ATOMIC_ACQUIRE);
}

/* 0, or -ETIME at the deadline. */
static int wait_returned(struct engine *engine, int64_t deadline_ns)
{
    struct timespec until = {deadline_ns / 1000000000, deadline_ns % 1000000000};
    if (deadline_ns == NO_DEADLINE)
        pthread_cond_wait(&engine->returned, &engine->mutex);
    else if (pthread_cond_timedwait(&engine->returned, &engine->mutex, &until))
        return -ETIME;
    return 0;
}

static struct lane *borrow_locked(struct engine *engine, int64_t deadline_ns, int *error)
{
    for (;;) {
        if (engine->closed) {
            *error = -EBADF;
            return NULL;
        }
        struct lane *lane = engine->idle;
        if (lane) {
            engine->idle = lane->next;
            return lane;
        }
        if (engine->lanes < LANES_MAX && (lane = open_lane(engine)))
            return lane;
        if (engine->lanes == 0) {
            *error = -errno;
            return NULL;
        }
        if ((*error = wait_returned(engine, deadline_ns)))
            return NULL;
    }
}

struct lane *engine_borrow(struct engine *engine, int64_t deadline_ns, int *error)
{
    pthread_mutex_lock(&engine->mutex);
    struct lane *lane = borrow_locked(engine, deadline_ns, error);
    if (lane && engine->uring)
        ring_sync(lane, &engine->registry);
    pthread_mutex_unlock(&engine->mutex);
    return lane;
}

void engine_return(struct engine *engine, struct lane *lane)
{
    pthread_mutex_lock(&engine->mutex);
    give_back(engine, lane);
    pthread_mutex_unlock(&engine->mutex);
}

/* Bring every idle ring up to date; at least one, so that the answer is the kernel's. */
static int sync_idle(struct engine *engine)
{
    int refused = 0, error;
    if (!engine->idle && engine->lanes < LANES_MAX)
        engine->idle = open_lane(engine);
    for (struct lane *lane = engine->idle; lane; lane = lane->next)
        if ((error = ring_sync(lane, &engine->registry)))
            refused = error;
    return refused;
}

static void forget_memory(struct engine *engine, uint64_t address, uint64_t nbytes)
{
    uint64_t generation = ++engine->registry.generation;
    for (int i = 0; i < MEMORY_SLOTS; i++) {
        struct memory_slot *slot = &engine->registry.memory[i];
        if (slot->nbytes && slot->address < address + nbytes && address < slot->address + slot->nbytes)
            *slot = (struct memory_slot){0, 0, generation};
    }
}

static int remember_memory(struct engine *engine, uint64_t address, uint64_t nbytes)
{
    uint64_t generation = ++engine->registry.generation;
    for (int i = 0; i < MEMORY_SLOTS && nbytes > 0; i++) {
        struct memory_slot *slot = &engine->registry.memory[i];
        if (slot->nbytes)
            continue;
        uint64_t n = nbytes < MEMORY_SLOT_BYTES ? nbytes : MEMORY_SLOT_BYTES;
        *slot = (struct memory_slot){address, n, generation};
        address += n;
        nbytes -= n;
    }
    return nbytes > 0 ? ENOSPC : 0;
}

static int usable(const struct engine *engine) { return engine->uring && !engine->closed; }

int engine_register(struct engine *engine, uint64_t address, uint64_t nbytes)
{
    pthread_mutex_lock(&engine->mutex);
    int refused = usable(engine) ? 0 : ENOSYS;
    if (!refused && engine->idle && ring_memory_refused(engine->idle))
        refused = ring_memory_refused(engine->idle);
    if (!refused) {
        forget_memory(engine, address, nbytes);
        refused = remember_memory(engine, address, nbytes);
        if (!refused)
            refused = sync_idle(engine);
        if (refused) {
            forget_memory(engine, address, nbytes);
            sync_idle(engine);
        }
    }
    pthread_mutex_unlock(&engine->mutex);
    return refused;
}
