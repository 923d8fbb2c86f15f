#include "batch.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "bytes.h"

enum { UNIT_BYTES = 256 << 10 };
/* Virtual disks complete a whole queue at once. A batch with checks therefore has at most half of
 * the remaining bytes in flight, within these limits, so that bytes are checked while others are
 * read. */
enum { CHECKED_FLIGHT_MIN = 8 << 20, CHECKED_FLIGHT_MAX = 32 << 20 };
#define NO_OP SIZE_MAX

struct op_state {
    uint64_t checked;         /* payload bytes verified or copied */
    uint64_t arrived_at;      /* where this op's flags begin in batch.arrived */
    size_t next_ready;
    uint32_t pieces, submitted, prefix, in_flight;
    int error;
    uint8_t head_submitted, head_arrived, head_checked, finished, ready;
};

struct batch {
    struct lane *lane;
    struct io_op *ops;
    struct op_state *states;
    uint8_t *arrived;
    struct slot *free_slots;
    uint64_t split_bytes, left_bytes, in_flight_bytes;
    size_t count, cursor, unfinished;
    size_t ready_first, ready_last;
    uint32_t in_flight;
    int stream, checks;
};

int64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static uint64_t pieces_of(const struct io_op *op, uint64_t split_bytes)
{
    if (op->opcode == OP_SYNC)
        return 1;
    return op->nbytes / split_bytes + (op->nbytes % split_bytes != 0);
}

struct batch *batch_open(struct lane *lane, struct io_op *ops, size_t count, uint64_t split_bytes)
{
    struct batch *batch = calloc(1, sizeof *batch);
    if (!batch)
        return NULL;
    batch->lane = lane;
    batch->ops = ops;
    batch->count = batch->unfinished = count;
    batch->split_bytes = split_bytes;
    batch->ready_first = batch->ready_last = NO_OP;
    batch->states = calloc(count ? count : 1, sizeof *batch->states);
    if (!batch->states)
        goto failed;
    uint64_t total = 0, copied = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t pieces = pieces_of(&ops[i], split_bytes);
        if (pieces >= PIECE_HEAD)
            goto failed;
        batch->states[i].pieces = (uint32_t)pieces;
        batch->states[i].arrived_at = total;
        batch->states[i].head_arrived = ops[i].opcode != OP_READ || ops[i].head_bytes == 0;
        total += pieces;
        batch->left_bytes += ops[i].nbytes;
        batch->checks |= ops[i].opcode == OP_READ && (ops[i].table || ops[i].copy_target);
        if (ops[i].opcode == OP_READ && ops[i].copy_target)
            copied += ops[i].payload_bytes;
    }
    batch->stream = copied >= STREAM_BATCH_BYTES;
    batch->arrived = calloc(total ? total : 1, 1);
    if (!batch->arrived)
        goto failed;
    for (uint32_t i = 0; i < lane->depth; i++) {
        lane->slots[i].next = batch->free_slots;
        batch->free_slots = &lane->slots[i];
    }
    return batch;
failed:
    batch_free(batch);
    return NULL;
}

void batch_free(struct batch *batch)
{
    free(batch->states);
    free(batch->arrived);
    free(batch);
}

uint32_t batch_in_flight(const struct batch *batch) { return batch->in_flight; }

static void make_ready(struct batch *batch, size_t index)
{
    struct op_state *state = &batch->states[index];
    if (state->ready || state->finished)
        return;
    state->ready = 1;
    state->next_ready = NO_OP;
    if (batch->ready_first == NO_OP)
        batch->ready_first = index;
    else
        batch->states[batch->ready_last].next_ready = index;
    batch->ready_last = index;
}

static void finish(struct batch *batch, size_t index, int64_t result)
{
    batch->ops[index].result = result;
    batch->states[index].finished = 1;
    batch->unfinished--;
}

static void send(struct batch *batch, size_t index, uint32_t piece)
{
    const struct io_op *op = &batch->ops[index];
    struct slot *slot = batch->free_slots;
    batch->free_slots = slot->next;
    slot->lane = batch->lane;
    slot->op = (uint32_t)index;
    slot->piece = piece;
    slot->fd = (int)op->fd;
    slot->opcode = (int)op->opcode;
    slot->done = 0;
    if (piece == PIECE_HEAD) {
        slot->address = op->head_address;
        slot->offset = op->head_offset;
        slot->nbytes = op->head_bytes;
    } else if (op->opcode == OP_SYNC) {
        slot->address = slot->offset = slot->nbytes = 0;
    } else {
        uint64_t at = piece * batch->split_bytes, left = op->nbytes - at;
        slot->address = op->address + at;
        slot->offset = op->offset + at;
        slot->nbytes = left < batch->split_bytes ? left : batch->split_bytes;
    }
    batch->states[index].in_flight++;
    batch->in_flight++;
    batch->in_flight_bytes += slot->nbytes;
    batch->lane->type->submit(batch->lane, slot);
}

static int flight_is_full(const struct batch *batch)
{
    uint64_t limit = batch->left_bytes / 2;
    if (!batch->free_slots || !batch->checks)
        return !batch->free_slots;
    limit = limit > CHECKED_FLIGHT_MIN ? limit : CHECKED_FLIGHT_MIN;
    return batch->in_flight_bytes >= (limit < CHECKED_FLIGHT_MAX ? limit : CHECKED_FLIGHT_MAX);
}

/* Submit as much as may be in flight. A sync is submitted when all operations before it have
 * ended. */
static void fill(struct batch *batch)
{
    while (!flight_is_full(batch) && batch->cursor < batch->count) {
        size_t index = batch->cursor;
        struct op_state *state = &batch->states[index];
        if (batch->ops[index].opcode == OP_SYNC && batch->in_flight > 0)
            return;
        if (!state->error && !state->head_arrived && !state->head_submitted) {
            state->head_submitted = 1;
            send(batch, index, PIECE_HEAD);
        } else if (!state->error && state->submitted < state->pieces) {
            send(batch, index, state->submitted++);
        } else {
            if (state->in_flight == 0)
                make_ready(batch, index);
            batch->cursor++;
        }
    }
}

/* Record a finished slot; the rest of a short transfer is submitted again. */
static void land(struct batch *batch, struct slot *slot)
{
    struct op_state *state = &batch->states[slot->op];
    int64_t result = slot->result;
    if (result > 0)
        slot->done += (uint64_t)result;
    int again = result == -EINTR || (result > 0 && slot->done < slot->nbytes);
    if (again && !state->error) {
        batch->lane->type->submit(batch->lane, slot);
        return;
    }
    if (result == -EINVAL && slot->done > 0)
        result = -EIO; /* the unaligned rest of an O_DIRECT transfer that ended early */
    if (result == 0 && slot->done < slot->nbytes)
        result = -EIO;
    if (result < 0 && !state->error)
        state->error = (int)result;
    if (slot->piece == PIECE_HEAD)
        state->head_arrived = 1;
    else
        batch->arrived[state->arrived_at + slot->piece] = 1;
    while (state->prefix < state->pieces && batch->arrived[state->arrived_at + state->prefix])
        state->prefix++;
    state->in_flight--;
    batch->in_flight--;
    batch->in_flight_bytes -= slot->nbytes;
    batch->left_bytes -= slot->piece == PIECE_HEAD ? 0 : slot->nbytes;
    slot->next = batch->free_slots;
    batch->free_slots = slot;
    make_ready(batch, slot->op);
}

/* Where in the main I/O the range ends, or 0 when it does not begin inside it. */
static uint64_t end_in_main(const struct io_op *op, uint64_t address, uint64_t nbytes)
{
    uint64_t at = address - op->address;
    if (address < op->address || at >= op->nbytes)
        return 0;
    return nbytes < op->nbytes - at ? at + nbytes : op->nbytes;
}

static uint64_t prefix_bytes(const struct batch *batch, size_t index)
{
    uint64_t bytes = batch->states[index].prefix * batch->split_bytes;
    return bytes < batch->ops[index].nbytes ? bytes : batch->ops[index].nbytes;
}

static int head_ready(const struct batch *batch, size_t index)
{
    const struct io_op *op = &batch->ops[index];
    uint64_t prefix = prefix_bytes(batch, index);
    if (!batch->states[index].head_arrived)
        return 0;
    if (op->head_check && op->head_bytes == 0 &&
        end_in_main(op, op->head_address, HEAD_BYTES) > prefix)
        return 0;
    if (!op->table)
        return 1;
    uint64_t entries = op->payload_bytes / op->chunk_bytes + (op->payload_bytes % op->chunk_bytes != 0);
    return end_in_main(op, op->table, 8 * entries) <= prefix;
}

static int check_head(const struct io_op *op)
{
    const uint8_t *head = (const uint8_t *)(uintptr_t)op->head_address;
    uint64_t limit = HEAD_BYTES, end = end_in_main(op, op->head_address, HEAD_BYTES);
    if (op->head_bytes)
        limit = op->head_bytes < HEAD_BYTES ? op->head_bytes : HEAD_BYTES;
    else if (end)
        limit = end - (op->head_address - op->address);
    if (limit < HEAD_USED_AT + 4 || 8 + op->expect_bytes > limit)
        return -EBADMSG;
    uint32_t used = load32(head + HEAD_USED_AT);
    if (used < HEAD_USED_MIN || used > limit || checksum64(head + 8, used - 8) != load64(head))
        return -EBADMSG;
    return memcmp(head + 8, (const void *)(uintptr_t)op->expect_address, op->expect_bytes)
               ? -EBADMSG : 0;
}

/* Verify or copy the payload from `checked` on, as far as it has arrived but not much more than one
 * unit. 1 when something was done, 0 when nothing could be, or -EBADMSG. */
static int check_payload(const struct batch *batch, size_t index, int all_arrived)
{
    const struct io_op *op = &batch->ops[index];
    struct op_state *state = &batch->states[index];
    uint64_t prefix = prefix_bytes(batch, index), unit_end = state->checked + UNIT_BYTES;
    int progressed = 0;
    while (state->checked < op->payload_bytes && state->checked < unit_end) {
        uint64_t at = state->checked, n = op->table ? op->chunk_bytes : UNIT_BYTES;
        if (n > op->payload_bytes - at)
            n = op->payload_bytes - at;
        const uint8_t *source = (const uint8_t *)(uintptr_t)(op->payload_address + at);
        uint64_t end = end_in_main(op, op->payload_address + at, n);
        if (!all_arrived && (end == 0 || end > prefix))
            return progressed;
        uint8_t *target = op->copy_target ? (uint8_t *)(uintptr_t)(op->copy_target + at) : NULL;
        if (!op->table) {
            copy_bytes(target, source, n, batch->stream);
        } else {
            const uint8_t *entry = (const uint8_t *)(uintptr_t)(op->table + 8 * (at / op->chunk_bytes));
            if (verify_chunk(target, source, n, load64(entry), batch->stream))
                return -EBADMSG;
        }
        state->checked += n;
        progressed = 1;
    }
    return progressed;
}

/* Verify or copy one unit of work of an op. 1 if there may be more to do now. */
static int advance(struct batch *batch, size_t index)
{
    const struct io_op *op = &batch->ops[index];
    struct op_state *state = &batch->states[index];
    int all_arrived = state->prefix == state->pieces && state->head_arrived;
    if (!state->error && op->opcode == OP_READ && head_ready(batch, index)) {
        if (op->head_check && !state->head_checked) {
            state->head_checked = 1;
            state->error = check_head(op);
        }
        if (!state->error && (op->table || op->copy_target)) {
            int outcome = check_payload(batch, index, all_arrived);
            if (outcome > 0 && state->checked < op->payload_bytes)
                return 1;
            state->error = outcome < 0 ? outcome : 0;
        }
    }
    if (state->error ? state->in_flight == 0 : all_arrived)
        finish(batch, index, state->error);
    return 0;
}

static void work(struct batch *batch)
{
    size_t index = batch->ready_first;
    struct op_state *state = &batch->states[index];
    if (!state->finished && advance(batch, index))
        return;
    batch->ready_first = state->next_ready;
    state->ready = 0;
}

/* Cancel what has not started and set the result of every unfinished op. */
static int give_up(struct batch *batch, int error)
{
    batch->in_flight -= batch->lane->type->withdraw(batch->lane);
    int64_t result = error == -ETIME ? -ETIMEDOUT : error;
    for (size_t i = 0; i < batch->count; i++)
        if (!batch->states[i].finished)
            batch->ops[i].result = result;
    return error;
}

static int is_past(int64_t deadline_ns)
{
    return deadline_ns != NO_DEADLINE && clock_ns() >= deadline_ns;
}

int batch_run(struct batch *batch, int64_t deadline_ns)
{
    int refill = 0;
    if (batch->count > 0 && is_past(deadline_ns))
        return give_up(batch, -ETIME); /* nothing starts after its deadline */
    for (;;) {
        fill(batch);
        int wait = batch->ready_first == NO_OP;
        if (wait && batch->in_flight == 0)
            return 0;
        struct slot *finished = NULL;
        int error = batch->in_flight ? batch->lane->type->reap(batch->lane, wait, deadline_ns, &finished)
                                     : 0;
        /* Finished slots make room for further transfers, which are submitted before the checks. */
        refill = finished && !refill && batch->cursor < batch->count;
        while (finished) {
            struct slot *slot = finished;
            finished = slot->next;
            land(batch, slot);
        }
        if (batch->ready_first != NO_OP && !error && !refill)
            work(batch);
        if (!error && batch->unfinished == 0)
            return 0;
        if (!error && is_past(deadline_ns))
            error = -ETIME;
        if (error)
            return give_up(batch, error);
    }
}

int batch_drain(struct batch *batch, int64_t deadline_ns)
{
    while (batch->in_flight > 0) {
        struct slot *finished = NULL;
        int error = batch->lane->type->reap(batch->lane, 1, deadline_ns, &finished);
        for (; finished; finished = finished->next)
            batch->in_flight--;
        if (error && batch->in_flight > 0)
            return 0;
    }
    return 1;
}
