"""Keys are what they were yesterday, on every Python, and reject what is not a token id.

The golden keys were computed by `derive_by_hand`, which knows only hashlib and struct, before the
code under test was run; it stays here as their explanation.
"""

import hashlib
import os
import struct
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import (
    ROOT_LINK,
    check_key,
    digest_of,
    encode,
    tag_of,
    token_bytes,
)
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.errors import KeyFormatError

TOKENS = [0, 1, 2, 3, 70_000, 4_294_967_295, 5, 6, 7, 8]
GOLDEN = {
    b"correct horse": [
        "105641c789740590000000000000000064a9040b4874cf4f0d8b9c68eeb8c873",
        "105641c78974059064a9040b4874cf4f1c11657bb6aa62d897eec5f7e4904673",
    ],
    b"": [
        "8a94587a2ceb4166000000000000000079c30284561732dd465f2f513d2cb85a",
        "8a94587a2ceb416679c30284561732dd81b6367d0a2d64eaca24814dba956073",
    ],
    b"x" * 100: [
        "5df41eba6778c0a200000000000000001398aec246a7c059168c1cd55d2da822",
        "5df41eba6778c0a21398aec246a7c0590194bc66b0b4ef77a0080c39685fe9c8",
    ],
}
SOURCE = Path(__file__).parents[2] / "src"


def golden_namespace(secret: bytes) -> Namespace:
    return Namespace(
        model="tiny",
        fingerprint="f00d",
        layout=KVLayout.gqa(layers=2, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=4),
        shard_rank=1,
        shard_size=2,
        adapter="lora-é",
        tenant="acme",
        secret=secret,
        extra=(("isa", "vec"), ("backend", "flash")),
    )


def derive_by_hand(secret: bytes) -> list[str]:
    """The golden keys, from nothing but the documented format."""

    def text(value: str) -> bytes:
        return b"s" + struct.pack("<Q", len(value.encode())) + value.encode()

    def number(value: int) -> bytes:
        return b"i" + struct.pack("<q", value)

    def items(*parts: bytes) -> bytes:
        return b"t" + struct.pack("<Q", len(parts)) + b"".join(parts)

    layout = items(
        items(text("kind"), text("gqa")),
        items(text("layers"), number(2)),
        items(text("dtype"), text("bfloat16")),
        items(text("block_tokens"), number(4)),
        items(text("kv_heads"), number(8)),
        items(text("head_dim"), number(128)),
        items(text("value_head_dim"), number(128)),
        items(text("latent_dim"), number(0)),
        items(text("rope_dim"), number(0)),
        items(text("state_bytes"), number(0)),
        items(text("sliding_window"), b"n"),
        items(text("attention_chunk"), b"n"),
        items(text("layer_ids"), items(number(0), number(1))),
    )
    fields = items(
        number(1),
        text("tiny"),
        text("f00d"),
        b"b" + struct.pack("<Q", len(layout)) + layout,
        number(1),
        number(2),
        text("lora-é"),
        text("acme"),
        items(items(text("backend"), text("flash")), items(text("isa"), text("vec"))),
    )
    blake = hashlib.blake2b
    if len(secret) > 64:
        secret = blake(secret, digest_size=64, person=b"kvdepot-secret").digest()
    root = blake(fields, digest_size=64, key=secret, person=b"kvdepot-space-v1").digest()
    tag = blake(root, digest_size=8, person=b"kvdepot-tag-v1").digest()
    key = blake(root, digest_size=32, person=b"kvdepot-chain-v1").digest()
    first = bytes(16) + struct.pack("<4I", 0, 1, 2, 3)
    one = blake(first, digest_size=16, key=key, person=b"kvdepot-block-v1").digest()
    second = one + struct.pack("<4I", 70_000, 4_294_967_295, 5, 6)
    two = blake(second, digest_size=16, key=key, person=b"kvdepot-block-v1").digest()
    return [(tag + bytes(8) + one).hex(), (tag + one[:8] + two).hex()]


@pytest.mark.parametrize("secret", GOLDEN, ids=["secret", "no secret", "long secret"])
def test_golden_keys(secret: bytes) -> None:
    assert derive_by_hand(secret) == GOLDEN[secret]
    assert [key.hex() for key in golden_namespace(secret).keys(TOKENS)] == GOLDEN[secret]


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_golden_keys_in_another_process(hash_seed: str) -> None:
    """Under another Python too: `./dev e2e move`."""
    script = (
        "from kvdepot.core.layout import KVLayout\n"
        "from kvdepot.core.namespace import Namespace\n"
        "layout = KVLayout.gqa(layers=2, kv_heads=8, head_dim=128, dtype='bfloat16',"
        " block_tokens=4)\n"
        "space = Namespace(model='tiny', fingerprint='f00d', layout=layout, shard_rank=1,"
        " shard_size=2, adapter='lora-\\u00e9', tenant='acme', secret=b'correct horse',"
        " extra=(('isa', 'vec'), ('backend', 'flash')))\n"
        f"print(*(key.hex() for key in space.keys({TOKENS})))\n"
    )
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == GOLDEN[b"correct horse"]


def test_parts_of_a_key() -> None:
    space = golden_namespace(b"")
    first, second = space.keys(TOKENS)
    assert tag_of(first) == tag_of(second) == space.tag == bytes.fromhex("8a94587a2ceb4166")
    assert first[8:16] == ROOT_LINK == bytes(8)
    assert second[8:16] == digest_of(first)[:8]
    assert len(digest_of(first)) == 16


def test_parent_whose_digest_begins_with_zeros_is_not_the_start_of_a_prompt() -> None:
    space = golden_namespace(b"")
    parent = BlockKey(space.tag + bytes(8) + bytes(8) + b"12345678")
    (child,) = space.keys(TOKENS[:4], parent=parent)
    (first,) = space.keys(TOKENS[:4])
    assert child[8:16] == first[8:16]
    assert child != first


def test_parent_must_be_a_key_of_the_namespace() -> None:
    space, other = golden_namespace(b"a"), golden_namespace(b"b")
    with pytest.raises(KeyFormatError, match="another namespace"):
        space.keys(TOKENS, parent=other.keys(TOKENS)[0])
    with pytest.raises(KeyFormatError, match="32 bytes"):
        space.keys(TOKENS, parent=b"short")


@pytest.mark.parametrize(
    "ids",
    [
        [-1],
        [1 << 32],
        [1.5],
        ["a"],
        [None],
        [[1, 2]],
        "text",
        b"bytes",
        np.array([-1]),
        np.array([1 << 32]),
        np.array([1.0]),
        np.array([True]),
        np.zeros((2, 2), dtype=np.int64),
        array("d", [1.0]),
        array("q", [-1]),
    ],
    ids=repr,
)
def test_bad_token_ids(ids: Any) -> None:
    with pytest.raises(KeyFormatError):
        token_bytes(ids)


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2, 4_294_967_295],
        (1, 2, 4_294_967_295),
        iter([1, 2, 4_294_967_295]),
        [np.int64(1), np.int32(2), np.uint32(4_294_967_295)],
        array("q", [1, 2, 4_294_967_295]),
        array("I", [1, 2, 4_294_967_295]),
        memoryview(array("I", [1, 2, 4_294_967_295])),
        np.array([1, 2, 4_294_967_295]),
        np.array([1, 2, 4_294_967_295], dtype=np.uint64),
        np.array([1, 2, 4_294_967_295], dtype=">u4"),
        np.array([1, 9, 2, 9, 4_294_967_295], dtype=np.uint32)[::2],
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_every_form_of_token_ids_gives_the_same_bytes(ids: Any) -> None:
    assert token_bytes(ids).tobytes() == struct.pack("<3I", 1, 2, 4_294_967_295)


def test_check_key() -> None:
    assert check_key(bytes(32)) == bytes(32)
    for bad in (b"", bytes(31), bytes(33), bytearray(32), "x" * 32, None):
        with pytest.raises(KeyFormatError):
            check_key(bad)  # type: ignore[arg-type]


def test_encoding_is_the_documented_one() -> None:
    assert encode(None) == b"n"
    assert encode(-2) == b"i" + b"\xfe" + b"\xff" * 7
    assert encode("é") == b"s" + b"\x02" + bytes(7) + b"\xc3\xa9"
    assert encode((b"a", ())) == b"t\x02" + bytes(7) + b"b\x01" + bytes(7) + b"a" + b"t" + bytes(8)


def test_a_key_from_an_engines_hash_is_what_it_was_yesterday() -> None:
    layout = KVLayout.opaque(4096, 16)
    space = Namespace(model="m", layout=layout, secret=b"s")
    named = hashlib.blake2b(
        b"\x01" * 32, digest_size=16, key=space._chain_key, person=b"kvdepot-hash-v1"
    ).digest()
    before = hashlib.blake2b(
        b"\x02" * 32, digest_size=16, key=space._chain_key, person=b"kvdepot-hash-v1"
    ).digest()
    assert space.hashed_key(b"\x01" * 32) == space.tag + ROOT_LINK + named
    assert space.hashed_key(b"\x01" * 32, b"\x02" * 32) == space.tag + before[:8] + named
    other = Namespace(model="m", layout=layout, secret=b"t")
    assert digest_of(other.hashed_key(b"\x01" * 32)) != named
