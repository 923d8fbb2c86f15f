"""XXH3, 64 bits, seed 0, after the public specification; long inputs run on numpy.

Within a block of 1024 bytes the accumulators only add up, so the sums of all blocks are one array
expression. From block to block they are scrambled in sequence.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.native.memory import Bytes

_U64 = np.uint64
_Words = npt.NDArray[np.uint64]

_MASK: Final = (1 << 64) - 1
_PRIME32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_MX1: Final = 0x165667919E3779F9
_MX2: Final = 0x9FB21C651E98DF25
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_STRIPE: Final = 64
_BLOCK: Final = 1024
# Blocks of one array expression: some hundred KiB, so that the temporaries stay in the cache.
_SLAB: Final = 256


def _key(at: int) -> _Words:
    return np.frombuffer(_SECRET, "<u8", 8, at)


_STRIPE_KEYS: Final = np.stack([_key(8 * n) for n in range(16)])
_SCRAMBLE_KEY: Final = _key(192 - _STRIPE)
_LAST_KEY: Final = _key(192 - _STRIPE - 7)
_START: Final = np.array([_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0]], _U64)
_SWAP: Final = np.array([1, 0, 3, 2, 5, 4, 7, 6])
_LOW: Final = _U64(0xFFFFFFFF)
_32: Final = _U64(32)
_47: Final = _U64(47)
_SCRAMBLE_PRIME: Final = _U64(_PRIME32[0])


def _secret64(at: int) -> int:
    value: int = struct.unpack_from("<Q", _SECRET, at)[0]
    return value


def _fold(a: int, b: int) -> int:
    product = a * b
    return (product & _MASK) ^ (product >> 64)


def _avalanche(h: int) -> int:
    h = ((h ^ (h >> 37)) * _MX1) & _MASK
    return h ^ (h >> 32)


def _avalanche_xxh64(h: int) -> int:
    h = ((h ^ (h >> 33)) * _PRIME64[1]) & _MASK
    h = ((h ^ (h >> 29)) * _PRIME64[2]) & _MASK
    return h ^ (h >> 32)


def _rotate(h: int, bits: int) -> int:
    return ((h << bits) | (h >> (64 - bits))) & _MASK


def _upto16(data: bytes) -> int:
    n = len(data)
    if n > 8:
        low = int.from_bytes(data[:8], "little") ^ _secret64(24) ^ _secret64(32)
        high = int.from_bytes(data[-8:], "little") ^ _secret64(40) ^ _secret64(48)
        swapped = int.from_bytes(low.to_bytes(8, "little"), "big")
        return _avalanche((n + swapped + high + _fold(low, high)) & _MASK)
    if n >= 4:
        words = int.from_bytes(data[-4:], "little") + (int.from_bytes(data[:4], "little") << 32)
        h = words ^ _secret64(8) ^ _secret64(16)
        h ^= _rotate(h, 49) ^ _rotate(h, 24)
        h = (h * _MX2) & _MASK
        h = ((h ^ ((h >> 35) + n)) * _MX2) & _MASK
        return h ^ (h >> 28)
    if n:
        word = data[0] << 16 | data[n >> 1] << 24 | data[-1] | n << 8
        first, second = struct.unpack_from("<2I", _SECRET)
        return _avalanche_xxh64(word ^ first ^ second)
    return _avalanche_xxh64(_secret64(56) ^ _secret64(64))


def _mix16(data: bytes, at: int, secret_at: int) -> int:
    low, high = struct.unpack_from("<2Q", data, at)
    return _fold(low ^ _secret64(secret_at), high ^ _secret64(secret_at + 8))


def _upto240(data: bytes) -> int:
    n = len(data)
    acc = n * _PRIME64[0]
    if n <= 128:
        for pair in range((n - 1) // 32 + 1):
            acc += _mix16(data, 16 * pair, 32 * pair)
            acc += _mix16(data, n - 16 * (pair + 1), 32 * pair + 16)
        return _avalanche(acc & _MASK)
    acc = _avalanche((acc + sum(_mix16(data, 16 * i, 16 * i) for i in range(8))) & _MASK)
    acc += sum(_mix16(data, 16 * i, 16 * (i - 8) + 3) for i in range(8, n // 16))
    return _avalanche((acc + _mix16(data, n - 16, 136 - 17)) & _MASK)


def _stripe_sums(words: _Words, keys: _Words) -> _Words:
    """Words of shape (..., stripes, 8) to what they add to the eight accumulators."""
    mixed = words ^ keys
    products: _Words = mixed & _LOW
    mixed >>= _32
    products *= mixed
    sums: _Words = products.sum(axis=-2, dtype=_U64)
    sums += words.sum(axis=-2, dtype=_U64)[..., _SWAP]
    return sums


def _merge(acc: list[int], nbytes: int) -> int:
    h = nbytes * _PRIME64[0]
    for i in range(4):
        first, second = acc[2 * i : 2 * i + 2]
        h += _fold(first ^ _secret64(11 + 16 * i), second ^ _secret64(19 + 16 * i))
    return _avalanche(h & _MASK)


def _long(data: Bytes) -> int:
    """The checksum of more than 240 bytes."""
    acc, nblocks = _START.copy(), (data.nbytes - 1) // _BLOCK
    for first in range(0, nblocks, _SLAB):
        last = min(first + _SLAB, nblocks)
        words = data[first * _BLOCK : last * _BLOCK].view("<u8").reshape(-1, 16, 8)
        for sums in _stripe_sums(words, _STRIPE_KEYS):
            acc += sums
            acc ^= acc >> _47
            acc ^= _SCRAMBLE_KEY
            acc *= _SCRAMBLE_PRIME
    tail = (data.nbytes - 1 - nblocks * _BLOCK) // _STRIPE
    if tail:
        rest = data[nblocks * _BLOCK : nblocks * _BLOCK + tail * _STRIPE]
        acc += _stripe_sums(rest.view("<u8").reshape(tail, 8), _STRIPE_KEYS[:tail])
    acc += _stripe_sums(data[-_STRIPE:].view("<u8").reshape(1, 8), _LAST_KEY)
    return _merge(acc.tolist(), data.nbytes)


def xxh3_64(data: Bytes) -> int:
    """The checksum of one contiguous array."""
    if data.nbytes > 240:
        return _long(data)
    return _upto16(data.tobytes()) if data.nbytes <= 16 else _upto240(data.tobytes())


def checksums_of(data: Bytes, chunk_bytes: int) -> _Words:
    """The checksum of each chunk of `data`; the last chunk may be short."""
    starts = range(0, data.nbytes, chunk_bytes)
    return np.array([xxh3_64(data[at : at + chunk_bytes]) for at in starts], "<u8")
