/* A batch of I/O operations in progress. Operations are split into pieces, which are submitted in
 * slots. Arrived bytes are verified and copied in order while the rest is in flight. The lane (a
 * ring, or a channel to the thread pool) only transports slots. */
#ifndef KVDEPOT_BATCH_H
#define KVDEPOT_BATCH_H

#include <stddef.h>
#include <stdint.h>

enum { OP_READ, OP_WRITE, OP_SYNC };

struct io_op {
    int64_t result, fd;
    uint64_t opcode, offset, address, nbytes;
    uint64_t head_offset, head_address, head_bytes;
    uint64_t expect_address, expect_bytes, head_check;
    uint64_t table, payload_address, payload_bytes, chunk_bytes, copy_target;
};

enum { HEAD_BYTES = 4096, HEAD_USED_AT = 64, HEAD_USED_MIN = 64 };

struct lane;

/* One piece in flight. `result` is set by the lane: bytes moved, or -errno. */
struct slot {
    struct slot *next;
    struct lane *lane;
    uint64_t address, nbytes, offset, done;
    int64_t result;
    uint32_t op, piece;
    int fd, opcode;
};

enum { PIECE_HEAD = UINT32_MAX };
#define NO_DEADLINE INT64_MAX

int64_t clock_ns(void);

/* The operations of a lane. `reap` returns finished slots, and waits for at least one if `wait` is
 * set: 0, -ETIME at the deadline, or -errno if the lane is broken. `withdraw` cancels all slots
 * that have not been started and returns their number. */
struct lane_type {
    void (*submit)(struct lane *lane, struct slot *slot);
    int (*reap)(struct lane *lane, int wait, int64_t deadline_ns, struct slot **finished);
    uint32_t (*withdraw)(struct lane *lane);
    void (*close)(struct lane *lane);
};

struct lane {
    const struct lane_type *type;
    struct lane *next;
    struct slot *slots;
    uint32_t depth;
};

struct batch;

/* NULL when out of memory. The ops stay the caller's and must outlive the batch. */
struct batch *batch_open(struct lane *lane, struct io_op *ops, size_t count, uint64_t split_bytes);
/* 0 if all ops have ended; else -ETIME or -errno, which is also the result of unfinished ops. The
 * lane may then have slots in flight: see batch_drain. */
int batch_run(struct batch *batch, int64_t deadline_ns);
/* After a failed batch_run: 1 once nothing is in flight any more, 0 at the deadline. */
int batch_drain(struct batch *batch, int64_t deadline_ns);
uint32_t batch_in_flight(const struct batch *batch);
void batch_free(struct batch *batch);

#endif
