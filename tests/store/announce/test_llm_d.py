"""llm-d's index, by its documented algorithm: it hashes the tokens of events itself.

The key of a block is FNV-64a over the CBOR of [key of the parent, token ids, null]; that of no
parent is FNV-64a of the seed, which is empty. Events name blocks by the engine's hashes, so it
keeps which of its keys each of them is. A stand-in made from the documents, not llm-d itself.
"""

import random
from pathlib import Path

import pytest

pytest.importorskip("zmq")

from tests.support.routers import EventFollower
from tests.support.small_store import BLOCK, LAYOUT, TOKENS, settings
from tests.support.waiting import until

import kvdepot
from kvdepot.testing.images import payload_for


def fnv(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


def cbor_head(major: int, value: int) -> bytes:
    """The shortest form of a number, as canonical CBOR wants it."""
    if value < 24:
        return bytes([major << 5 | value])
    size = next(size for size in (1, 2, 4, 8) if value < 1 << 8 * size)
    return bytes([major << 5 | {1: 24, 2: 25, 4: 26, 8: 27}[size]]) + value.to_bytes(size, "big")


def key_of(parent: int, ids: tuple[int, ...]) -> int:
    tokens = cbor_head(4, len(ids)) + b"".join(cbor_head(0, one) for one in ids)
    return fnv(cbor_head(4, 3) + cbor_head(0, parent) + tokens + b"\xf6")


def keys_of(ids: list[int]) -> list[int]:
    keys, parent = [], fnv(b"")
    for at in range(0, len(ids), TOKENS):
        parent = key_of(parent, tuple(ids[at : at + TOKENS]))
        keys.append(parent)
    return keys


def index_of(router: EventFollower, medium: str) -> set[int]:
    """The keys of all blocks on a medium, each found by way of its parents."""
    blocks = {digest: one for some in router.blocks.values() for digest, one in some.items()}
    found: dict[int, int] = {}

    def key(digest: int) -> int:
        if digest not in found:
            parent, ids = blocks[digest]
            found[digest] = key_of(fnv(b"") if parent is None else key(parent), ids)
        return found[digest]

    return {key(digest) for digest in router.blocks.get(medium, {})}


def test_it_finds_the_prefixes_that_the_depot_has(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    events = {"endpoint": "tcp://127.0.0.1:0", "interval": 0.01, "resync_interval": 0.25}
    with kvdepot.open(**settings(tmp_path / "kv"), events=events) as store:
        space = store.namespace(model="m", layout=LAYOUT)
        prompts: list[list[int]] = []
        for _ in range(12):
            other = rng.choice(prompts)[: TOKENS * 2] if prompts else []
            ids = [*other, *(rng.randrange(1 << 32) for _ in range(3 * TOKENS))]
            prompts.append(ids)
            keys = space.keys(ids)
            payloads = [payload_for(key, BLOCK) for key in keys]
            assert all(store.put_many(keys, payloads, timeout_s=20.0, token_ids=ids))
        assert store.flush()
        store.remove(space.keys(prompts[3])[-1:])
        with EventFollower(store.stats()["events"]["endpoint"], topic="kv@") as router:

            def agrees() -> bool:
                router.follow(0.05)
                known = index_of(router, "STORAGE")
                for ids in prompts:
                    keys = keys_of(ids)
                    here = next((at for at, key in enumerate(keys) if key not in known), len(keys))
                    if here != len(store.routing.match(space.keys(ids))):
                        return False
                return True

            until(agrees)
