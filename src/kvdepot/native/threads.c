/* A lane over a pool of threads that make plain system calls. */
#define _GNU_SOURCE
#include "lanes.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct pool {
    pthread_mutex_t mutex;
    pthread_cond_t wanted;
    struct slot *first, *last;
    uint32_t limit, threads, idle, queued;
    int closed;
};

struct channel {
    struct lane lane;
    struct pool *pool;
    pthread_mutex_t mutex;
    pthread_cond_t landed;
    struct slot *finished;
};

struct pool *pool_open(uint32_t threads)
{
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wanted, NULL);
    pool->limit = threads;
    return pool;
}

static void pool_free(struct pool *pool)
{
    pthread_cond_destroy(&pool->wanted);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

void pool_close(struct pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    pool->closed = 1;
    int last = pool->threads == 0;
    pthread_cond_broadcast(&pool->wanted);
    pthread_mutex_unlock(&pool->mutex);
    if (last)
        pool_free(pool);
}

/* One system call. A pipe or socket has no offset; its bytes come in order. */
static int64_t perform(const struct slot *slot)
{
    struct iovec range = {(void *)(uintptr_t)(slot->address + slot->done), slot->nbytes - slot->done};
    off_t offset = (off_t)(slot->offset + slot->done);
    ssize_t n;
    if (slot->opcode == OP_SYNC)
        n = fdatasync(slot->fd);
    else if (slot->opcode == OP_READ)
        n = preadv(slot->fd, &range, 1, offset);
    else
        n = pwritev(slot->fd, &range, 1, offset);
    if (n < 0 && errno == ESPIPE && slot->opcode == OP_READ)
        n = readv(slot->fd, &range, 1);
    else if (n < 0 && errno == ESPIPE && slot->opcode == OP_WRITE)
        n = writev(slot->fd, &range, 1);
    return n < 0 ? -errno : n;
}

static void deliver(struct slot *slot)
{
    struct channel *channel = (struct channel *)slot->lane;
    pthread_mutex_lock(&channel->mutex);
    slot->next = channel->finished;
    channel->finished = slot;
    pthread_cond_signal(&channel->landed);
    pthread_mutex_unlock(&channel->mutex);
}

static void *serve(void *argument)
{
    struct pool *pool = argument;
    pthread_setname_np(pthread_self(), "kvdepot-io");
    pthread_mutex_lock(&pool->mutex);
    while (pool->first || !pool->closed) {
        struct slot *slot = pool->first;
        if (!slot) {
            pool->idle++;
            pthread_cond_wait(&pool->wanted, &pool->mutex);
            pool->idle--;
            continue;
        }
        pool->first = slot->next;
        pool->queued--;
        pthread_mutex_unlock(&pool->mutex);
        slot->result = perform(slot);
        deliver(slot);
        pthread_mutex_lock(&pool->mutex);
    }
    int last = --pool->threads == 0;
    pthread_mutex_unlock(&pool->mutex);
    if (last)
        pool_free(pool);
    return NULL;
}

/* Called with the mutex held. Signals stay with the threads of the interpreter. */
static void start_thread(struct pool *pool)
{
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, &attributes, serve, pool) == 0)
        pool->threads++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static void channel_submit(struct lane *lane, struct slot *slot)
{
    struct pool *pool = ((struct channel *)lane)->pool;
    slot->next = NULL;
    pthread_mutex_lock(&pool->mutex);
    if (pool->first)
        pool->last->next = slot;
    else
        pool->first = slot;
    pool->last = slot;
    pool->queued++;
    if (pool->queued > pool->idle && pool->threads < pool->limit)
        start_thread(pool);
    if (pool->threads == 0) { /* not one thread could be had: do it here */
        pool->first = NULL;
        pool->queued = 0;
        pthread_mutex_unlock(&pool->mutex);
        slot->result = perform(slot);
        deliver(slot);
        return;
    }
    pthread_cond_signal(&pool->wanted);
    pthread_mutex_unlock(&pool->mutex);
}

static uint32_t channel_withdraw(struct lane *lane)
{
    struct pool *pool = ((struct channel *)lane)->pool;
    uint32_t count = 0;
    struct slot *kept = NULL;
    pthread_mutex_lock(&pool->mutex);
    for (struct slot **link = &pool->first; *link;) {
        if ((*link)->lane == lane) {
            *link = (*link)->next;
            count++;
        } else {
            kept = *link;
            link = &kept->next;
        }
    }
    pool->last = kept;
    pool->queued -= count;
    pthread_mutex_unlock(&pool->mutex);
    return count;
}

static int channel_reap(struct lane *lane, int wait, int64_t deadline_ns, struct slot **finished)
{
    struct channel *channel = (struct channel *)lane;
    struct timespec until = {deadline_ns / 1000000000, deadline_ns % 1000000000};
    int error = 0;
    pthread_mutex_lock(&channel->mutex);
    while (wait && !channel->finished && !error)
        error = deadline_ns == NO_DEADLINE
                    ? pthread_cond_wait(&channel->landed, &channel->mutex)
                    : pthread_cond_timedwait(&channel->landed, &channel->mutex, &until);
    *finished = channel->finished;
    channel->finished = NULL;
    pthread_mutex_unlock(&channel->mutex);
    return error && !*finished ? -ETIME : 0;
}

static void channel_close(struct lane *lane)
{
    struct channel *channel = (struct channel *)lane;
    pthread_cond_destroy(&channel->landed);
    pthread_mutex_destroy(&channel->mutex);
    free(lane->slots);
    free(channel);
}

static const struct lane_type channel_type = {channel_submit, channel_reap, channel_withdraw,
                                              channel_close};

struct lane *channel_open(struct pool *pool, uint32_t depth)
{
    struct channel *channel = calloc(1, sizeof *channel);
    struct slot *slots = calloc(depth, sizeof *slots);
    if (!channel || !slots) {
        free(channel);
        free(slots);
        errno = ENOMEM;
        return NULL;
    }
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&channel->landed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&channel->mutex, NULL);
    channel->lane = (struct lane){.type = &channel_type, .slots = slots, .depth = depth};
    channel->pool = pool;
    return &channel->lane;
}
