/* Copies of memory: whole ranges with checksums in the same pass, and strided rows. */
#include "bytes.h"

#include <errno.h>

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

void transfer_run(struct transfer_op *ops, size_t count)
{
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++)
        total += ops[i].target ? ops[i].nbytes : 0;
    for (size_t i = 0; i < count; i++)
        transfer_one(&ops[i], total >= STREAM_BATCH_BYTES);
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
