"""Computes the key of a block, 32 bytes, from token ids.

    key    = tag (8) | link (8) | digest (16)
    digest = BLAKE2b-128(key=chain key, person="kvdepot-block-v1")(parent digest | tokens)
    link   = first half of the parent's digest; zeros for the first block of a prompt

Tokens are little-endian u32, so every block hashes exactly 16 + 4 * block_tokens bytes: two
different (parent, tokens) pairs are two different inputs of equal length, and neither moving a
token over the boundary nor appending one can give the same input. BLAKE2b marks its last block,
so it cannot be length-extended either.

The first block's parent digest is 16 zero bytes. A real digest whose first half is zero (one in
2^64) makes its children look like first blocks *by their link only*: their digests still cover the
whole parent digest, so the keys stay distinct; a prefix tree merely sees a root where there is
a child.

For engines that name blocks by chained hashes of their own, without tokens, keys are made from
these: digest = BLAKE2b-128(key=chain key, person="kvdepot-hash-v1")(engine's hash), and the link is
the first half of the digest of the parent's hash.
"""

import contextlib
import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot.core.block import KEY_BYTES, LINK_BYTES, TAG_BYTES, BlockKey
from kvdepot.errors import ConfigError, KeyFormatError

TokenIds: TypeAlias = Iterable[int] | npt.NDArray[np.integer[Any]]
"""Token ids of a prompt: a list or other sequence of ints, an array.array, a numpy array."""

DIGEST_BYTES: Final = 16
CHAIN_KEY_BYTES: Final = 32
ROOT_LINK: Final = bytes(LINK_BYTES)
Keys: TypeAlias = npt.NDArray[np.uint64]
"""Keys as rows of four words: tag, link, and the digest's two halves."""
_ROOT_DIGEST: Final = bytes(DIGEST_BYTES)
_TOKEN_BYTES: Final = 4
_PERSON: Final = b"kvdepot-block-v1"
_HASH_PERSON: Final = b"kvdepot-hash-v1"
_U32: Final = "I" if array("I").itemsize == _TOKEN_BYTES else "L"

Encodable: TypeAlias = "int | str | bytes | tuple[Encodable, ...] | None"


def encode(value: Encodable) -> bytes:
    """Encode a value so that different values have different bytes: the input of identity digests.

    None is "n"; an int is "i" and 8 bytes, signed little-endian; str (UTF-8, not normalised) and
    bytes are "s" and "b", an 8-byte length and the content; a tuple is "t", an 8-byte count and
    its items. Every form includes its length, so concatenation is unambiguous.
    """
    match value:
        case None:
            return b"n"
        case int():
            return b"i" + value.to_bytes(8, "little", signed=True)
        case str():
            content = value.encode()
            return b"s" + struct.pack("<Q", len(content)) + content
        case bytes():
            return b"b" + struct.pack("<Q", len(value)) + value
        case tuple():
            return b"t" + struct.pack("<Q", len(value)) + b"".join(map(encode, value))


def token_bytes(token_ids: TokenIds) -> memoryview:
    """The bytes of `token_ids` as little-endian u32. Copies them at most once.

    Raises KeyFormatError unless the ids are one-dimensional integers, 0 <= id < 2^32.
    """
    if isinstance(token_ids, str | bytes | bytearray):
        raise KeyFormatError(
            f"token ids must be integers, not {type(token_ids).__name__}",
            hint="tokenize the text first",
        )
    if hasattr(token_ids, "__array__") or isinstance(token_ids, array | memoryview):
        return _from_buffer(np.asarray(token_ids))
    try:
        packed = array(_U32, token_ids)  # three times faster than numpy here, and range-checked
    except OverflowError as error:
        raise KeyFormatError("a token id is negative or 2^32 or more") from error
    except TypeError as error:
        raise KeyFormatError(f"token ids must be integers: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")


def _from_buffer(ids: npt.NDArray[Any]) -> memoryview:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise KeyFormatError(
            f"token ids must be one-dimensional integers, got {ids.dtype} of shape {ids.shape}",
            hint="pass one prompt at a time, as int32 or int64",
        )
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 1 << 32):
        raise KeyFormatError("a token id is negative or 2^32 or more")
    return np.ascontiguousarray(ids, dtype="<u4").data.cast("B")


def chain(
    tag: bytes, chain_key: bytes, tokens: memoryview, block_tokens: int, parent: BlockKey | None
) -> list[BlockKey]:
    """Compute the keys of the full blocks in `tokens` (from `token_bytes`); a partial tail has
    none.

    `parent` is the key of the block before the first one, or None at the start of a prompt.
    """
    digest = _ROOT_DIGEST if parent is None else digest_of(parent)
    link = ROOT_LINK if parent is None else digest[:LINK_BYTES]
    start = hashlib.blake2b(digest_size=DIGEST_BYTES, key=chain_key, person=_PERSON)
    step = block_tokens * _TOKEN_BYTES
    keys = []
    for offset in range(0, len(tokens) - step + 1, step):
        block = start.copy()
        block.update(digest)
        block.update(tokens[offset : offset + step])
        digest = block.digest()
        keys.append(BlockKey(tag + link + digest))
        link = digest[:LINK_BYTES]
    return keys


def hashed_key(
    tag: bytes, chain_key: bytes, engine_hash: bytes, parent_hash: bytes | None
) -> BlockKey:
    """Compute the key of a block that an engine names by a hash of all tokens up to its end.

    `parent_hash` names the block before it; None at the start of a prompt.
    """
    start = hashlib.blake2b(digest_size=DIGEST_BYTES, key=chain_key, person=_HASH_PERSON)
    digest = start.copy()
    digest.update(engine_hash)
    link = ROOT_LINK
    if parent_hash is not None:
        start.update(parent_hash)
        link = start.digest()[:LINK_BYTES]
    return BlockKey(tag + link + digest.digest())


def check_key(key: bytes) -> BlockKey:
    """Return `key` as a BlockKey. Raises KeyFormatError unless it is 32 bytes."""
    if not isinstance(key, bytes):
        raise KeyFormatError(f"a key is bytes, not {type(key).__name__}")
    if len(key) != KEY_BYTES:
        raise KeyFormatError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    return BlockKey(key)


def as_words(keys: Sequence[BlockKey]) -> Keys:
    """Keys as an array of four words each."""
    return np.frombuffer(b"".join(keys), dtype=np.uint64).reshape(-1, 4)


def as_keys(words: Keys) -> list[BlockKey]:
    """The keys of an array of words (`as_words`)."""
    packed = words.tobytes()
    return [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]


def tag_word(tag: bytes) -> int:
    """A namespace's tag as the first word of its keys."""
    return int.from_bytes(tag[:TAG_BYTES], "little")


def tag_from_hex(text: str) -> bytes:
    """The tag of a namespace that a caller has named in hexadecimal. Raises ConfigError."""
    with contextlib.suppress(ValueError):
        tag = bytes.fromhex(text)
        if len(tag) == TAG_BYTES:
            return tag
    reason = f"{text!r:.40} is not a namespace's tag"
    raise ConfigError("namespace", reason, hint="16 hexadecimal digits")


def tag_of(key: BlockKey) -> bytes:
    """The namespace's 8 bytes, equal for all keys of one namespace."""
    return key[:TAG_BYTES]


def digest_of(key: BlockKey) -> bytes:
    """The 16 bytes that identify the block's tokens and all tokens before them."""
    return key[-DIGEST_BYTES:]


def without_link(key: BlockKey) -> BlockKey:
    """The key without its link, for a block that is useful without those before it (sliding
    windows): such blocks are evicted independently.
    """
    return BlockKey(key[:TAG_BYTES] + ROOT_LINK + key[TAG_BYTES + LINK_BYTES :])
