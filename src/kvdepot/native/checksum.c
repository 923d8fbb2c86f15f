/* XXH3, 64 bits, seed 0, after the public specification (xxHash, "XXH3 algorithm overview"). */
#include "bytes.h"

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MX1 0x165667919E3779F9ULL
#define PRIME_MX2 0x9FB21C651E98DF25ULL

const uint8_t xxh3_secret[SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t secret64(size_t at) { return load64(xxh3_secret + at); }
static uint64_t rotate_left(uint64_t v, int bits) { return (v << bits) | (v >> (64 - bits)); }

static uint64_t fold_product(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t h)
{
    h ^= h >> 37;
    h *= PRIME_MX1;
    return h ^ (h >> 32);
}

static uint64_t avalanche_xxh64(uint64_t h)
{
    h ^= h >> 33;
    h *= PRIME64_2;
    h ^= h >> 29;
    h *= PRIME64_3;
    return h ^ (h >> 32);
}

static uint64_t mix16(const uint8_t *p, size_t secret_at)
{
    return fold_product(load64(p) ^ secret64(secret_at), load64(p + 8) ^ secret64(secret_at + 8));
}

static uint64_t upto16(const uint8_t *p, size_t n)
{
    if (n > 8) {
        uint64_t low = load64(p) ^ (secret64(24) ^ secret64(32));
        uint64_t high = load64(p + n - 8) ^ (secret64(40) ^ secret64(48));
        return avalanche(n + __builtin_bswap64(low) + high + fold_product(low, high));
    }
    if (n >= 4) {
        uint64_t h = (load32(p + n - 4) + ((uint64_t)load32(p) << 32)) ^ secret64(8) ^ secret64(16);
        h ^= rotate_left(h, 49) ^ rotate_left(h, 24);
        h *= PRIME_MX2;
        h ^= (h >> 35) + n;
        h *= PRIME_MX2;
        return h ^ (h >> 28);
    }
    if (n > 0) {
        uint32_t word = (uint32_t)p[0] << 16 | (uint32_t)p[n >> 1] << 24 | p[n - 1] | (uint32_t)n << 8;
        return avalanche_xxh64(word ^ (uint64_t)(load32(xxh3_secret) ^ load32(xxh3_secret + 4)));
    }
    return avalanche_xxh64(secret64(56) ^ secret64(64));
}

static uint64_t upto128(const uint8_t *p, size_t n)
{
    uint64_t acc = n * PRIME64_1;
    for (size_t pair = (n - 1) / 32 + 1; pair-- > 0;) {
        acc += mix16(p + 16 * pair, 32 * pair);
        acc += mix16(p + n - 16 * (pair + 1), 32 * pair + 16);
    }
    return avalanche(acc);
}

static uint64_t upto240(const uint8_t *p, size_t n)
{
    uint64_t acc = n * PRIME64_1;
    for (size_t i = 0; i < 8; i++)
        acc += mix16(p + 16 * i, 16 * i);
    acc = avalanche(acc);
    for (size_t i = 8; i < n / 16; i++)
        acc += mix16(p + 16 * i, 16 * (i - 8) + 3);
    return avalanche(acc + mix16(p + n - 16, 136 - 17));
}

static uint64_t merge(const uint64_t acc[8], size_t n)
{
    uint64_t h = n * PRIME64_1;
    for (size_t i = 0; i < 4; i++)
        h += fold_product(acc[2 * i] ^ secret64(11 + 16 * i), acc[2 * i + 1] ^ secret64(19 + 16 * i));
    return avalanche(h);
}

static uint64_t beyond240(uint8_t *target, const uint8_t *p, size_t n, enum store store)
{
    uint64_t acc[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                       PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    size_t nblocks = (n - 1) / BLOCK_BYTES;
    size_t tail = (n - 1 - nblocks * BLOCK_BYTES) / STRIPE_BYTES;
    size_t ahead = store == STORE_SHIFTED && nblocks > 0 ? nblocks - 1 : 0;
    if (ahead) { /* all but the last block, so that what is stored after the end is still ours */
        simd_current()->stripes(acc, p, target, ahead, 0, STORE_SHIFTED);
        memcpy(target, p, STRIPE_BYTES);
    }
    simd_current()->stripes(acc, p + ahead * BLOCK_BYTES, store ? target + ahead * BLOCK_BYTES : NULL,
                            nblocks - ahead, tail, store == STORE_SHIFTED ? STORE_CACHED : store);
    size_t done = nblocks * BLOCK_BYTES + tail * STRIPE_BYTES;
    if (store != STORE_NONE)
        memcpy(target + done, p + done, n - done);
    const uint8_t *last = p + n - STRIPE_BYTES;
    for (int i = 0; i < 8; i++) {
        uint64_t value = load64(last + 8 * i);
        uint64_t key = value ^ secret64(SECRET_BYTES - STRIPE_BYTES - 7 + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (key & 0xFFFFFFFFU) * (key >> 32);
    }
    return merge(acc, n);
}

static uint64_t upto240_any(const uint8_t *p, size_t n)
{
    return n <= 16 ? upto16(p, n) : n <= 128 ? upto128(p, n) : upto240(p, n);
}

uint64_t checksum64(const uint8_t *source, size_t nbytes)
{
    return nbytes <= 240 ? upto240_any(source, nbytes) : beyond240(NULL, source, nbytes, STORE_NONE);
}

uint64_t checksum64_copy(uint8_t *target, const uint8_t *source, size_t nbytes, int stream)
{
    if (nbytes <= 240) {
        memcpy(target, source, nbytes);
        return upto240_any(source, nbytes);
    }
    int aligned = ((uintptr_t)target & 63) == 0;
    enum store past_cache = aligned ? STORE_STREAM : STORE_SHIFTED;
    return beyond240(target, source, nbytes, stream ? past_cache : STORE_CACHED);
}
