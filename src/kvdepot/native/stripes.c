/* The inner loops: XXH3 stripe accumulation fused with a copy, and a copy past the cache, once per
 * instruction set, chosen at run time so that one build serves every machine. */
#include "bytes.h"

#define PRIME32_1 0x9E3779B1U

static void stripes_portable(uint64_t acc_memory[8], const uint8_t *source, uint8_t *target,
                             size_t nblocks, size_t tail, enum store store)
{
    uint64_t acc[8];
    memcpy(acc, acc_memory, sizeof acc);
    for (size_t block = 0; block <= nblocks; block++) {
        size_t count = block < nblocks ? STRIPES_PER_BLOCK : tail;
        for (size_t n = 0; n < count; n++, source += STRIPE_BYTES) {
            if (store != STORE_NONE) {
                memcpy(target, source, STRIPE_BYTES);
                target += STRIPE_BYTES;
            }
            for (int i = 0; i < 8; i++) {
                uint64_t value = load64(source + 8 * i);
                uint64_t key = value ^ load64(xxh3_secret + 8 * n + 8 * i);
                acc[i ^ 1] += value;
                acc[i] += (key & 0xFFFFFFFFU) * (key >> 32);
            }
        }
        for (int i = 0; block < nblocks && i < 8; i++) {
            acc[i] ^= acc[i] >> 47;
            acc[i] ^= load64(xxh3_secret + SECRET_BYTES - STRIPE_BYTES + 8 * i);
            acc[i] *= PRIME32_1;
        }
    }
    memcpy(acc_memory, acc, sizeof acc);
}

static void stream_portable(uint8_t *target, const uint8_t *source, size_t nbytes)
{
    memcpy(target, source, nbytes);
}

static const struct simd portable = {"portable", stripes_portable, stream_portable};

#if defined(__x86_64__)
#include <immintrin.h>

/* How far ahead of the loads the source is prefetched: the hardware stops at each 4 KiB page. */
#ifndef AHEAD_BYTES
#define AHEAD_BYTES 2048
#endif

#define AVX512 __attribute__((target("avx512f")))
#define AVX2 __attribute__((target("avx2")))
#define INLINE static inline __attribute__((always_inline))

INLINE AVX512 void loop_avx512(uint64_t acc_memory[8], const uint8_t *source, uint8_t *target,
                               size_t nblocks, size_t tail, const enum store store)
{
    __m512i acc = _mm512_loadu_si512(acc_memory);
    const size_t shift = -(uintptr_t)target & 63;
    const __m512i prime = _mm512_set1_epi64(PRIME32_1);
    const __m512i mask = _mm512_loadu_si512(xxh3_secret + SECRET_BYTES - STRIPE_BYTES);
    for (size_t block = 0; block <= nblocks; block++) {
        size_t count = block < nblocks ? STRIPES_PER_BLOCK : tail;
        for (size_t n = 0; n < count; n++) {
            _mm_prefetch((const char *)source + AHEAD_BYTES, _MM_HINT_T0);
            __m512i value = _mm512_loadu_si512(source);
            if (store == STORE_CACHED)
                _mm512_storeu_si512(target, value);
            if (store == STORE_STREAM)
                _mm512_stream_si512((void *)target, value);
            if (store == STORE_SHIFTED)
                _mm512_stream_si512((void *)(target + shift), _mm512_loadu_si512(source + shift));
            __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(xxh3_secret + 8 * n));
            __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
            __m512i swapped = _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)0x4E);
            acc = _mm512_add_epi64(acc, _mm512_add_epi64(product, swapped));
            source += STRIPE_BYTES;
            if (store != STORE_NONE)
                target += STRIPE_BYTES;
        }
        if (block < nblocks) {
            acc = _mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47));
            acc = _mm512_xor_si512(acc, mask);
            __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(acc, 32), prime);
            acc = _mm512_add_epi64(_mm512_mul_epu32(acc, prime), _mm512_slli_epi64(high, 32));
        }
    }
    _mm512_storeu_si512(acc_memory, acc);
    if (store >= STORE_STREAM)
        _mm_sfence();
}

static AVX512 void stripes_avx512(uint64_t acc[8], const uint8_t *source, uint8_t *target,
                                  size_t nblocks, size_t tail, enum store store)
{
    if (store == STORE_NONE)
        loop_avx512(acc, source, target, nblocks, tail, STORE_NONE);
    else if (store == STORE_CACHED)
        loop_avx512(acc, source, target, nblocks, tail, STORE_CACHED);
    else if (store == STORE_STREAM)
        loop_avx512(acc, source, target, nblocks, tail, STORE_STREAM);
    else
        loop_avx512(acc, source, target, nblocks, tail, STORE_SHIFTED);
}

static AVX512 void stream_avx512(uint8_t *target, const uint8_t *source, size_t nbytes)
{
    for (; nbytes >= 256; nbytes -= 256, source += 256, target += 256) {
        for (int i = 0; i < 4; i++)
            _mm_prefetch((const char *)source + AHEAD_BYTES + 64 * i, _MM_HINT_T0);
        for (int i = 0; i < 4; i++)
            _mm512_stream_si512((void *)(target + 64 * i), _mm512_loadu_si512(source + 64 * i));
    }
    _mm_sfence();
    memcpy(target, source, nbytes);
}

INLINE AVX2 __m256i half_avx2(__m256i acc, __m256i value, const uint8_t *secret)
{
    __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    __m256i swapped = _mm256_shuffle_epi32(value, 0x4E);
    return _mm256_add_epi64(acc, _mm256_add_epi64(product, swapped));
}

INLINE AVX2 __m256i scramble_avx2(__m256i acc, const uint8_t *secret)
{
    const __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    acc = _mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47));
    acc = _mm256_xor_si256(acc, _mm256_loadu_si256((const __m256i *)secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(acc, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(acc, prime), _mm256_slli_epi64(high, 32));
}

INLINE AVX2 void loop_avx2(uint64_t acc[8], const uint8_t *source, uint8_t *target, size_t nblocks,
                           size_t tail, const enum store store)
{
    const size_t shift = -(uintptr_t)target & 63;
    __m256i low = _mm256_loadu_si256((const __m256i *)acc);
    __m256i high = _mm256_loadu_si256((const __m256i *)(acc + 4));
    for (size_t block = 0; block <= nblocks; block++) {
        size_t count = block < nblocks ? STRIPES_PER_BLOCK : tail;
        for (size_t n = 0; n < count; n++) {
            _mm_prefetch((const char *)source + AHEAD_BYTES, _MM_HINT_T0);
            __m256i first = _mm256_loadu_si256((const __m256i *)source);
            __m256i second = _mm256_loadu_si256((const __m256i *)(source + 32));
            if (store == STORE_CACHED) {
                _mm256_storeu_si256((__m256i *)target, first);
                _mm256_storeu_si256((__m256i *)(target + 32), second);
            }
            if (store == STORE_STREAM) {
                _mm256_stream_si256((__m256i *)target, first);
                _mm256_stream_si256((__m256i *)(target + 32), second);
            }
            for (int i = 0; store == STORE_SHIFTED && i < 64; i += 32)
                _mm256_stream_si256((__m256i *)(target + shift + i),
                                    _mm256_loadu_si256((const __m256i *)(source + shift + i)));
            low = half_avx2(low, first, xxh3_secret + 8 * n);
            high = half_avx2(high, second, xxh3_secret + 8 * n + 32);
            source += STRIPE_BYTES;
            if (store != STORE_NONE)
                target += STRIPE_BYTES;
        }
        if (block < nblocks) {
            low = scramble_avx2(low, xxh3_secret + SECRET_BYTES - STRIPE_BYTES);
            high = scramble_avx2(high, xxh3_secret + SECRET_BYTES - STRIPE_BYTES + 32);
        }
    }
    _mm256_storeu_si256((__m256i *)acc, low);
    _mm256_storeu_si256((__m256i *)(acc + 4), high);
    if (store >= STORE_STREAM)
        _mm_sfence();
}

static AVX2 void stripes_avx2(uint64_t acc[8], const uint8_t *source, uint8_t *target,
                              size_t nblocks, size_t tail, enum store store)
{
    if (store == STORE_NONE)
        loop_avx2(acc, source, target, nblocks, tail, STORE_NONE);
    else if (store == STORE_CACHED)
        loop_avx2(acc, source, target, nblocks, tail, STORE_CACHED);
    else if (store == STORE_STREAM)
        loop_avx2(acc, source, target, nblocks, tail, STORE_STREAM);
    else
        loop_avx2(acc, source, target, nblocks, tail, STORE_SHIFTED);
}

static AVX2 void stream_avx2(uint8_t *target, const uint8_t *source, size_t nbytes)
{
    for (; nbytes >= 128; nbytes -= 128, source += 128, target += 128) {
        _mm_prefetch((const char *)source + AHEAD_BYTES, _MM_HINT_T0);
        _mm_prefetch((const char *)source + AHEAD_BYTES + 64, _MM_HINT_T0);
        for (int i = 0; i < 4; i++)
            _mm256_stream_si256((__m256i *)(target + 32 * i),
                                _mm256_loadu_si256((const __m256i *)(source + 32 * i)));
    }
    _mm_sfence();
    memcpy(target, source, nbytes);
}

static const struct simd avx512 = {"avx512", stripes_avx512, stream_avx512};
static const struct simd avx2 = {"avx2", stripes_avx2, stream_avx2};
#endif

static const struct simd *current = &portable;

const struct simd *simd_current(void) { return current; }

int simd_select(const char *name)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if ((!name || !strcmp(name, "avx512")) && __builtin_cpu_supports("avx512f")) {
        current = &avx512;
        return 0;
    }
    if ((!name || !strcmp(name, "avx2")) && __builtin_cpu_supports("avx2")) {
        current = &avx2;
        return 0;
    }
#endif
    if (!name || !strcmp(name, "portable")) {
        current = &portable;
        return 0;
    }
    return -1;
}
