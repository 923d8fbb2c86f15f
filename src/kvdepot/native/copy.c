/* Copies of memory: whole ranges with checksums in the same pass, and strided rows. */
#define _GNU_SOURCE
#include "bytes.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>

void copy_bytes(uint8_t *target, const uint8_t *source, size_t nbytes, int stream)
{
    if (!stream || nbytes < STREAM_RUN_BYTES) {
        memcpy(target, source, nbytes);
        return;
    }
    size_t head = -(uintptr_t)target & 63;
    memcpy(target, source, head);
    simd_current()->stream(target + head, source + head, nbytes - head);
}

int verify_chunk(uint8_t *target, const uint8_t *source, size_t nbytes, uint64_t expected, int stream)
{
    uint64_t actual = target ? checksum64_copy(target, source, nbytes, stream)
                             : checksum64(source, nbytes);
    return actual == expected ? 0 : -EBADMSG;
}

static void transfer_one(struct transfer_op *op, int stream)
{
    uint8_t *target = (uint8_t *)(uintptr_t)op->target;
    const uint8_t *source = (const uint8_t *)(uintptr_t)op->source;
    uint64_t *table = (uint64_t *)(uintptr_t)op->table;
    op->result = 0;
    if (op->mode == TRANSFER_COPY || op->chunk_bytes == 0) {
        if (target)
            copy_bytes(target, source, op->nbytes, stream);
        return;
    }
    for (uint64_t at = 0; at < op->nbytes; at += op->chunk_bytes, table++) {
        uint64_t left = op->nbytes - at, n = left < op->chunk_bytes ? left : op->chunk_bytes;
        uint8_t *to = target ? target + at : NULL;
        if (op->mode == TRANSFER_FILL) {
            uint64_t sum = to ? checksum64_copy(to, source + at, n, stream)
                              : checksum64(source + at, n);
            memcpy(table, &sum, sizeof sum);
        } else if (verify_chunk(to, source + at, n, load64(table), stream)) {
            op->result = -EBADMSG;
            return;
        }
        if (left <= op->chunk_bytes)
            return;
    }
}

/* Threads that share one batch, and their progress: whole chunks of an op at a time. */
struct shared_run {
    pthread_mutex_t mutex;
    struct transfer_op *ops;
    size_t count, op;
    uint64_t at;
    int stream;
};

enum { SHARE_BYTES = 2 << 20, THREADS_MAX = 64 };

/* The next part as an op of its own, and the op that it belongs to; 0 if none is left. */
static int take_part(struct shared_run *run, struct transfer_op *part, struct transfer_op **whole)
{
    pthread_mutex_lock(&run->mutex);
    int found = run->op < run->count;
    if (found) {
        struct transfer_op *op = *whole = &run->ops[run->op];
        uint64_t unit = op->chunk_bytes ? op->chunk_bytes : SHARE_BYTES;
        uint64_t n = (SHARE_BYTES + unit - 1) / unit * unit, left = op->nbytes - run->at;
        *part = *op;
        part->source += run->at;
        part->target += op->target ? run->at : 0;
        part->table += op->chunk_bytes ? run->at / op->chunk_bytes * sizeof(uint64_t) : 0;
        part->nbytes = left < n ? left : n;
        run->at += part->nbytes;
        if (run->at >= op->nbytes) {
            run->op++;
            run->at = 0;
        }
    }
    pthread_mutex_unlock(&run->mutex);
    return found;
}

static void *share(void *argument)
{
    struct shared_run *run = argument;
    struct transfer_op part, *whole;
    while (take_part(run, &part, &whole)) {
        transfer_one(&part, run->stream);
        if (part.result)
            __atomic_store_n(&whole->result, part.result, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void run_shared(struct shared_run *run, int threads)
{
    pthread_t started[THREADS_MAX];
    int count = 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_mutex_init(&run->mutex, NULL);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals stay with the interpreter's threads */
    while (count < threads - 1 && count < THREADS_MAX &&
           pthread_create(&started[count], NULL, share, run) == 0)
        count++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    share(run);
    while (count > 0)
        pthread_join(started[--count], NULL);
    pthread_mutex_destroy(&run->mutex);
}

void transfer_run(struct transfer_op *ops, size_t count, int threads)
{
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++)
        total += ops[i].target ? ops[i].nbytes : 0;
    int stream = total >= STREAM_BATCH_BYTES;
    if (threads > 1) {
        struct shared_run run = {.ops = ops, .count = count, .stream = stream};
        for (size_t i = 0; i < count; i++)
            ops[i].result = 0;
        run_shared(&run, threads);
        return;
    }
    for (size_t i = 0; i < count; i++)
        transfer_one(&ops[i], stream);
}

/* What to verify or copy of one record. Returns 1 if the range has to be copied afterwards, because
 * it ends within chunks. */
static int plan_copy_out(const struct block *block, uint64_t record, int verify,
                         struct transfer_op *op)
{
    int64_t start = block->start, stop = block->stop, chunk = block->chunk_bytes;
    uint64_t payload = record + RECORD_HEAD_BYTES;
    *op = (struct transfer_op){.source = payload + start, .target = block->address,
                               .nbytes = stop - start, .mode = TRANSFER_COPY};
    if (!verify)
        return 0;
    int64_t first = start / chunk * chunk, last = (stop + chunk - 1) / chunk * chunk;
    last = last < block->payload_bytes ? last : block->payload_bytes;
    int whole = first == start && last == stop;
    *op = (struct transfer_op){.source = payload + first, .target = whole ? block->address : 0,
                               .nbytes = last - first, .chunk_bytes = chunk,
                               .table = record + RECORD_TABLE_AT + first / chunk * 8,
                               .mode = TRANSFER_VERIFY};
    return !whole && block->address;
}

void copy_out_run(const struct block *blocks, const uint64_t *records, struct transfer_op *ops,
                  uint8_t *intact, size_t count, int verify, int threads)
{
    for (size_t i = 0; i < count; i++) {
        const uint8_t *record = (const uint8_t *)(uintptr_t)records[i];
        intact[i] = memcmp(record + RECORD_KEY_AT, blocks[i].key, sizeof blocks[i].key) == 0;
        plan_copy_out(&blocks[i], records[i], verify, &ops[i]);
        if (!intact[i])
            ops[i].nbytes = 0;
    }
    transfer_run(ops, count, threads);
    for (size_t i = 0; i < count; i++) {
        intact[i] = intact[i] && ops[i].result == 0;
        if (intact[i] && plan_copy_out(&blocks[i], records[i], verify, &ops[i])) {
            plan_copy_out(&blocks[i], records[i], 0, &ops[i]);
            transfer_one(&ops[i], 0);
        }
    }
}

void copy_in_run(const struct block *blocks, const uint64_t *records, struct transfer_op *ops,
                 size_t count)
{
    for (size_t i = 0; i < count; i++)
        ops[i] = (struct transfer_op){.source = blocks[i].address,
                                      .target = records[i] + RECORD_HEAD_BYTES,
                                      .nbytes = blocks[i].payload_bytes,
                                      .chunk_bytes = blocks[i].chunk_bytes,
                                      .table = records[i] + RECORD_TABLE_AT,
                                      .mode = TRANSFER_FILL};
    transfer_run(ops, count, 1);
}

void gather_pieces(uint8_t *target, const struct strided *pieces, size_t count, int stream)
{
    for (const struct strided *piece = pieces; piece < pieces + count; piece++) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)piece->address;
        for (uint64_t i = 0; i < piece->rows; i++, row += piece->stride, target += piece->row_bytes)
            copy_bytes(target, row, piece->row_bytes, stream);
    }
}

void scatter_pieces(const struct strided *pieces, size_t count, const uint8_t *source, int stream)
{
    for (const struct strided *piece = pieces; piece < pieces + count; piece++) {
        uint8_t *row = (uint8_t *)(uintptr_t)piece->address;
        for (uint64_t i = 0; i < piece->rows; i++, row += piece->stride, source += piece->row_bytes)
            copy_bytes(row, source, piece->row_bytes, stream);
    }
}
