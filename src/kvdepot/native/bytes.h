/* Checksums and copies of plain memory. Nothing here touches Python or keeps state, apart from the
 * instruction set chosen once at import. */
#ifndef KVDEPOT_BYTES_H
#define KVDEPOT_BYTES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t load64(const void *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    return v;
}

static inline uint32_t load32(const void *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap32(v);
#endif
    return v;
}

enum { STRIPE_BYTES = 64, STRIPES_PER_BLOCK = 16, BLOCK_BYTES = 1024, SECRET_BYTES = 192 };

extern const uint8_t xxh3_secret[SECRET_BYTES];

/* How hashed bytes are stored in the target: not at all, through the cache, bypassing it, or
 * bypassing it in aligned lines of 64 bytes of the target, which begin `shift` bytes after each
 * stripe. */
enum store { STORE_NONE, STORE_CACHED, STORE_STREAM, STORE_SHIFTED };

/* One instruction set: `stripes` accumulates nblocks whole blocks (each followed by a scramble) and
 * then `tail` further stripes, storing what it reads; `stream` copies past the cache. Targets are
 * 64-byte aligned, except with STORE_CACHED; with STORE_SHIFTED it is target + shift that is, the
 * first `shift` bytes may be left out and as many after the end may be stored. */
struct simd {
    const char *name;
    void (*stripes)(uint64_t acc[8], const uint8_t *source, uint8_t *target, size_t nblocks,
                    size_t tail, enum store store);
    void (*stream)(uint8_t *target, const uint8_t *source, size_t nbytes);
};

const struct simd *simd_current(void);
/* Choose by name ("avx512", "avx2", "portable"); NULL chooses the best. 0, or -1 when not usable. */
int simd_select(const char *name);

/* XXH3, 64 bits, seed 0. */
uint64_t checksum64(const uint8_t *source, size_t nbytes);
/* The same, and `source` is copied to `target` in the same pass. */
uint64_t checksum64_copy(uint8_t *target, const uint8_t *source, size_t nbytes, int stream);

/* A batch that moves at least STREAM_BATCH_BYTES goes past the cache with every contiguous run of
 * at least STREAM_RUN_BYTES: twice the rate of memcpy once the working set leaves the cache. */
enum { STREAM_BATCH_BYTES = 1 << 20, STREAM_RUN_BYTES = 1 << 12 };

void copy_bytes(uint8_t *target, const uint8_t *source, size_t nbytes, int stream);

struct transfer_op {
    int64_t result;
    uint64_t source, target, nbytes, chunk_bytes, table, mode;
};
enum { TRANSFER_COPY, TRANSFER_FILL, TRANSFER_VERIFY };
/* `threads` share the work, the caller's included; they end with the call. */
void transfer_run(struct transfer_op *ops, size_t count, int threads);

/* A block of a call, as core.requests.BLOCK_DTYPE, and where the parts of its record are. */
struct block {
    uint64_t key[4];
    int64_t payload_bytes, chunk_bytes, address, start, stop;
    uint64_t producer;
};
enum { RECORD_KEY_AT = 16, RECORD_TABLE_AT = 192, RECORD_HEAD_BYTES = 4096 };
/* Copy payload[start:stop] of each record to the address of its block, if it has one. `intact` is 1
 * if the record has the key of the block and, with `verify`, the right checksums in all chunks of
 * that range; else its target is undefined. `ops` has room for each block. */
void copy_out_run(const struct block *blocks, const uint64_t *records, struct transfer_op *ops,
                  uint8_t *intact, size_t count, int verify, int threads);
/* Copy the payload of each block from its address into its record, with the checksums. */
void copy_in_run(const struct block *blocks, const uint64_t *records, struct transfer_op *ops,
                 size_t count);

/* One chunk of a verified copy; target may be NULL. 0 or -EBADMSG. */
int verify_chunk(uint8_t *target, const uint8_t *source, size_t nbytes, uint64_t expected,
                 int stream);

struct strided {
    uint64_t address, rows, row_bytes;
    int64_t stride;
};
void gather_pieces(uint8_t *target, const struct strided *pieces, size_t count, int stream);
void scatter_pieces(const struct strided *pieces, size_t count, const uint8_t *source, int stream);

/* Rows of `width` bytes, the next one a pitch after the start of the last: cudaMemcpy2DAsync's. */
struct rectangle {
    uint64_t target, target_pitch, source, source_pitch, width, height;
};

#endif
