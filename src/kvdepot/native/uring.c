/* A lane over io_uring, by its system calls. One thread uses a ring at a time; the caller sees to it. */
#include "lanes.h"

#include <errno.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#define __NR_io_uring_register 427
#endif
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#ifndef IORING_ENTER_EXT_ARG
#define IORING_ENTER_EXT_ARG (1U << 3)
#endif
#ifndef IORING_FEAT_EXT_ARG
#define IORING_FEAT_EXT_ARG (1U << 8)
#endif

/* Numbers and shapes of newer kernels, spelled out because headers may be older. */
enum { REGISTER_BUFFERS2 = 15, REGISTER_BUFFERS_UPDATE };
enum { REGISTER_SPARSE = 1 };
struct table_new {
    uint32_t count, flags;
    uint64_t reserved, data, tags;
};
struct table_update {
    uint32_t first, reserved;
    uint64_t data, tags;
    uint32_t count, reserved2;
};
struct wait_arg {
    uint64_t sigmask;
    uint32_t sigmask_size, pad;
    uint64_t timeout;
};
struct wait_time {
    int64_t seconds;
    long long nanoseconds;
};

struct ring {
    struct lane lane;
    int fd;
    uint32_t unsubmitted, entries;
    void *sq_map, *cq_map;
    size_t sq_map_bytes, cq_map_bytes, sqes_bytes;
    uint32_t *sq_head, *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    int memory_refused;
    struct registry have; /* a slot the kernel refused has the generation but nbytes 0 */
};

static int setup(uint32_t entries, struct io_uring_params *params)
{
    memset(params, 0, sizeof *params);
    params->flags = IORING_SETUP_COOP_TASKRUN;
    int fd = (int)syscall(__NR_io_uring_setup, entries, params);
    if (fd < 0 && errno == EINVAL) {
        memset(params, 0, sizeof *params);
        fd = (int)syscall(__NR_io_uring_setup, entries, params);
    }
    if (fd >= 0 && !(params->features & IORING_FEAT_EXT_ARG)) {
        close(fd);
        errno = ENOSYS;
        return -1;
    }
    return fd;
}

int ring_available(const char **reason)
{
    struct io_uring_params params;
    int fd = setup(1, &params);
    if (fd < 0) {
        *reason = errno == ENOSYS ? "the kernel has no io_uring, or one older than 5.11"
                  : errno == EPERM || errno == EACCES ? "io_uring is not permitted here"
                                                      : strerror(errno);
        return 0;
    }
    close(fd);
    *reason = "";
    return 1;
}

static int ring_register(struct ring *ring, unsigned opcode, const void *value, size_t nbytes)
{
    return syscall(__NR_io_uring_register, ring->fd, opcode, value, nbytes) < 0 ? errno : 0;
}

static int update_memory(struct ring *ring, uint32_t at, const struct iovec *range)
{
    struct table_update update = {.first = at, .data = (uint64_t)(uintptr_t)range, .count = 1};
    return ring_register(ring, REGISTER_BUFFERS_UPDATE, &update, sizeof update);
}

static void ring_close(struct lane *lane)
{
    struct ring *ring = (struct ring *)lane;
    if (ring->sqes)
        munmap(ring->sqes, ring->sqes_bytes);
    if (ring->cq_map && ring->cq_map != ring->sq_map)
        munmap(ring->cq_map, ring->cq_map_bytes);
    if (ring->sq_map)
        munmap(ring->sq_map, ring->sq_map_bytes);
    if (ring->fd >= 0)
        close(ring->fd);
    free(lane->slots);
    free(ring);
}

static void *map(const struct ring *ring, size_t nbytes, off_t offset)
{
    void *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd, offset);
    return p == MAP_FAILED ? NULL : p;
}

static int map_rings(struct ring *ring, const struct io_uring_params *params)
{
    ring->sq_map_bytes = params->sq_off.array + params->sq_entries * sizeof(uint32_t);
    ring->cq_map_bytes = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    ring->sqes_bytes = params->sq_entries * sizeof(struct io_uring_sqe);
    ring->sq_map = map(ring, ring->sq_map_bytes, IORING_OFF_SQ_RING);
    ring->cq_map = map(ring, ring->cq_map_bytes, IORING_OFF_CQ_RING);
    ring->sqes = map(ring, ring->sqes_bytes, IORING_OFF_SQES);
    if (!ring->sq_map || !ring->cq_map || !ring->sqes)
        return -1;
    char *sq = ring->sq_map, *cq = ring->cq_map;
    ring->sq_head = (uint32_t *)(sq + params->sq_off.head);
    ring->sq_tail = (uint32_t *)(sq + params->sq_off.tail);
    ring->sq_mask = (uint32_t *)(sq + params->sq_off.ring_mask);
    ring->sq_array = (uint32_t *)(sq + params->sq_off.array);
    ring->cq_head = (uint32_t *)(cq + params->cq_off.head);
    ring->cq_tail = (uint32_t *)(cq + params->cq_off.tail);
    ring->cq_mask = (uint32_t *)(cq + params->cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)(cq + params->cq_off.cqes);
    return 0;
}

static void ring_prepare(struct ring *ring, const struct slot *slot, struct io_uring_sqe *sqe)
{
    uint64_t address = slot->address + slot->done, nbytes = slot->nbytes - slot->done;
    memset(sqe, 0, sizeof *sqe);
    sqe->user_data = (uint64_t)(uintptr_t)slot;
    sqe->fd = slot->fd;
    if (slot->opcode == OP_SYNC) {
        sqe->opcode = IORING_OP_FSYNC;
        sqe->fsync_flags = IORING_FSYNC_DATASYNC;
        return;
    }
    sqe->opcode = slot->opcode == OP_READ ? IORING_OP_READ : IORING_OP_WRITE;
    sqe->addr = address;
    sqe->len = (uint32_t)(nbytes < (1U << 30) ? nbytes : (1U << 30));
    sqe->off = slot->offset + slot->done;
    for (uint16_t i = 0; i < MEMORY_SLOTS; i++) {
        const struct memory_slot *memory = &ring->have.memory[i];
        if (address >= memory->address && address - memory->address < memory->nbytes &&
            nbytes <= memory->nbytes - (address - memory->address)) {
            sqe->opcode = slot->opcode == OP_READ ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
            sqe->buf_index = i;
            return;
        }
    }
}

static void ring_submit(struct lane *lane, struct slot *slot)
{
    struct ring *ring = (struct ring *)lane;
    uint32_t tail = *ring->sq_tail, at = tail & *ring->sq_mask;
    ring_prepare(ring, slot, &ring->sqes[at]);
    ring->sq_array[at] = at;
    __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
    ring->unsubmitted++;
}

static uint32_t ring_withdraw(struct lane *lane)
{
    struct ring *ring = (struct ring *)lane;
    uint32_t count = ring->unsubmitted;
    __atomic_store_n(ring->sq_tail, *ring->sq_tail - count, __ATOMIC_RELEASE);
    ring->unsubmitted = 0;
    return count;
}

static void take(struct ring *ring, struct slot **finished)
{
    uint32_t head = *ring->cq_head, tail = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);
    for (; head != tail; head++) {
        const struct io_uring_cqe *cqe = &ring->cqes[head & *ring->cq_mask];
        struct slot *slot = (struct slot *)(uintptr_t)cqe->user_data;
        slot->result = cqe->res;
        slot->next = *finished;
        *finished = slot;
    }
    __atomic_store_n(ring->cq_head, head, __ATOMIC_RELEASE);
}

static int ring_enter(struct ring *ring, int wait, int64_t deadline_ns)
{
    struct wait_time time;
    struct wait_arg arg = {.sigmask_size = _NSIG / 8};
    if (deadline_ns != NO_DEADLINE) {
        int64_t left = deadline_ns - clock_ns();
        if (left < 0)
            left = 0;
        time.seconds = left / 1000000000;
        time.nanoseconds = left % 1000000000;
        arg.timeout = (uint64_t)(uintptr_t)&time;
    }
    int submitted = (int)syscall(__NR_io_uring_enter, ring->fd, ring->unsubmitted, wait ? 1 : 0,
                                 IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &arg, sizeof arg);
    if (submitted < 0)
        return -errno;
    ring->unsubmitted -= (uint32_t)submitted;
    return 0;
}

/* The kernel reports what it submitted before it reports a timeout or a signal, so an error here
 * never hides a submission. EAGAIN and EBUSY mean it lacks room just now: what is in flight frees it. */
static int ring_reap(struct lane *lane, int wait, int64_t deadline_ns, struct slot **finished)
{
    struct ring *ring = (struct ring *)lane;
    take(ring, finished);
    if (*finished)
        wait = 0;
    if (!wait && ring->unsubmitted == 0 && *finished)
        return 0;
    for (;;) {
        int error = ring_enter(ring, wait, deadline_ns);
        take(ring, finished);
        if (*finished)
            return 0;
        if (error == -EAGAIN || error == -EBUSY) {
            struct timespec moment = {0, 100000};
            nanosleep(&moment, NULL);
            error = 0;
        }
        if (error && error != -EINTR)
            return !wait && error == -ETIME ? 0 : error;
        if (!wait)
            return 0;
        if (deadline_ns != NO_DEADLINE && clock_ns() >= deadline_ns)
            return -ETIME;
    }
}

static const struct lane_type ring_type = {ring_submit, ring_reap, ring_withdraw, ring_close};

struct lane *ring_open(uint32_t depth)
{
    struct io_uring_params params;
    struct ring *ring = calloc(1, sizeof *ring);
    if (!ring)
        return NULL;
    ring->lane.type = &ring_type;
    ring->lane.depth = depth;
    ring->lane.slots = calloc(depth, sizeof(struct slot));
    ring->fd = setup(depth, &params);
    if (ring->fd < 0 || !ring->lane.slots || map_rings(ring, &params) < 0) {
        int error = errno ? errno : ENOMEM;
        ring_close(&ring->lane);
        errno = error;
        return NULL;
    }
    struct table_new table = {.count = MEMORY_SLOTS, .flags = REGISTER_SPARSE};
    ring->memory_refused = ring_register(ring, REGISTER_BUFFERS2, &table, sizeof table);
    return &ring->lane;
}

int ring_memory_refused(const struct lane *lane) { return ((const struct ring *)lane)->memory_refused; }

static int sync_memory(struct ring *ring, const struct registry *registry, uint32_t at)
{
    struct memory_slot *have = &ring->have.memory[at];
    const struct memory_slot *want = &registry->memory[at];
    struct iovec nothing = {0}, range = {(void *)(uintptr_t)want->address, want->nbytes};
    int error = 0;
    if (have->nbytes)
        update_memory(ring, at, &nothing);
    *have = *want;
    if (want->nbytes)
        error = update_memory(ring, at, &range);
    if (error)
        have->nbytes = 0;
    return error;
}

int ring_sync(struct lane *lane, const struct registry *registry)
{
    struct ring *ring = (struct ring *)lane;
    int refused = 0, error;
    if (ring->have.generation == registry->generation)
        return 0;
    for (uint32_t i = 0; i < MEMORY_SLOTS && !ring->memory_refused; i++)
        if (ring->have.memory[i].generation != registry->memory[i].generation &&
            (error = sync_memory(ring, registry, i)))
            refused = error;
    ring->have.generation = registry->generation;
    return refused;
}
