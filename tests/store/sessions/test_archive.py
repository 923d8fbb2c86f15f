"""A session as a file: what comes back is what went in, and damage is never taken in."""

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import BLOCK_BYTES, TOKENS, prompt, put, small, space_of, tiers

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.errors import ConfigError, FormatError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store
from kvdepot.testing.images import payload_for

BLOCKS = 4
IDS = [1, *range(1, TOKENS * BLOCKS)]
HEAD = 44
"""Of a block: its key and two lengths."""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Of a session of four blocks."""
    path = tmp_path / "chat.kvsession"
    with kvdepot.open(**small(tmp_path / "source")) as store:
        keys = prompt(space_of(store), 1, BLOCKS)
        payloads = [payload_for(key, BLOCK_BYTES) for key in keys]
        assert all(store.put_many(keys, payloads, token_ids=IDS))
        store.sessions.name("chat", keys)
        facts = store.sessions.export("chat", path)
    assert (facts["blocks"], facts["bytes"]) == (BLOCKS, path.stat().st_size)
    assert path.stat().st_mode & 0o077 == 0, "for its owner alone"
    return path


def opened(tmp_path: Path, name: str = "target") -> Store:
    return open_store(**small(tmp_path / name))


def expected(store: Store) -> list[BlockKey]:
    return prompt(space_of(store), 1, BLOCKS)


def test_another_store_has_the_same_blocks(archive: Path, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        facts = store.sessions.import_file(archive)
        assert facts["complete"] and facts["blocks"] == BLOCKS and not facts["damage"]
        (found,) = store.sessions.show("chat")
        assert (found["blocks"], found["model"]) == (BLOCKS, "contract")
        assert store.sessions.pin("chat", for_s=60)
    with opened(tmp_path) as store:
        assert tiers(store, expected(store)) == ["ssd"] * BLOCKS, "every byte is compared"
        assert [one for ids in store.routing.token_ids(expected(store)) for one in ids] == IDS


def test_it_is_not_written_over_a_file_or_by_half(tmp_path: Path, archive: Path) -> None:
    with opened(tmp_path) as store:
        keys = prompt(space_of(store), 1, 6)
        put(store, keys[:3])
        store.sessions.name("chat", keys)
        with pytest.raises(ConfigError, match="exists already"):
            store.sessions.export("chat", archive)
        with pytest.raises(ConfigError, match="block 3 of 6 cannot be read: absent"):
            store.sessions.export("chat", tmp_path / "other")
        assert not (tmp_path / "other").exists()


def test_a_folder_or_file_that_is_missing_is_one_error(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = prompt(space_of(store), 1, 3)
        put(store, keys)
        store.sessions.name("chat", keys)
        with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
            store.sessions.export("chat", tmp_path / "missing" / "chat.kvsession")
        with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
            store.sessions.import_file(tmp_path / "missing.kvsession")


def regions(size: int) -> list[int]:
    """Places in all parts of an archive: some of its head, and the borders within blocks."""
    record = HEAD + BLOCK_BYTES + 4 * TOKENS + 32
    first = size - BLOCKS * record
    places = [*range(0, first, 7), first - 1]
    for number in range(BLOCKS):
        start = first + number * record
        places += [start, start + 9, start + 33, start + HEAD, start + record // 2]
        places += [start + record - 33, start + record - 32, start + record - 1]
    return places


@pytest.mark.slow
def test_a_flipped_bit_is_refused_or_taken_in_up_to_there(archive: Path, tmp_path: Path) -> None:
    sound = archive.read_bytes()
    with opened(tmp_path) as store:
        keys = expected(store)
        for place in regions(len(sound)):
            harmed = bytearray(sound)
            harmed[place] ^= 1 << random.Random(place).randrange(8)
            judge(store, keys, tmp_path / "harmed", bytes(harmed), len(sound), place)


@pytest.mark.slow
def test_a_file_that_ends_early_is_taken_in_up_to_there(archive: Path, tmp_path: Path) -> None:
    sound = archive.read_bytes()
    with opened(tmp_path) as store:
        keys = expected(store)
        for length in regions(len(sound)):
            judge(store, keys, tmp_path / "short", sound[:length], len(sound), length)


def judge(
    store: Store, keys: list[BlockKey], path: Path, content: bytes, size: int, place: int
) -> None:
    """Import a damaged archive into an emptied store: what is there is right, and lies before."""
    store.remove(keys)
    path.write_bytes(content)
    record = HEAD + BLOCK_BYTES + 4 * TOKENS + 32
    whole = max(0, place - (size - BLOCKS * record)) // record
    try:
        facts = store.sessions.import_file(path)
    except (FormatError, ConfigError):
        assert whole == 0 and not store.match(keys)
        return
    assert facts["blocks"] == whole == len(store.match(keys)) and not facts["complete"]
    into = [bytearray(BLOCK_BYTES) for _ in keys]
    for key, got, target in zip(keys, store.get_many(keys, into), into, strict=True):
        assert not got or bytes(target) == payload_for(key, BLOCK_BYTES)


def test_what_is_no_archive_is_refused(tmp_path: Path, archive: Path) -> None:
    sound = archive.read_bytes()
    later = bytearray(sound)
    later[8] = 9
    with opened(tmp_path) as store:
        for content, why in (
            (b"", "not an archive"),
            (b"x" * 99, "not an archive"),
            (later, "version 9"),
        ):
            (tmp_path / "odd").write_bytes(content)
            with pytest.raises(FormatError, match=why):
                store.sessions.import_file(tmp_path / "odd")
        with pytest.raises(FormatError, match="not a regular file"):
            store.sessions.import_file(tmp_path)
        (tmp_path / "more").write_bytes(sound + b"x")
        facts = store.sessions.import_file(tmp_path / "more")
        assert facts["complete"] and "after the last block" in facts["damage"]


def rewritten(archive: Path, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The archive with another head, and right digests."""
    whole = archive.read_bytes()
    magic, version, zero, length = struct.unpack_from("<8sHHI", whole)
    head = json.loads(whole[16 : 16 + length])
    change(head["namespaces"][0])
    text = json.dumps(head).encode()
    start = struct.pack("<8sHHI", magic, version, zero, len(text)) + text
    digest = hashlib.blake2b(start, digest_size=32, person=b"kvdepot-archive").digest()
    return start + digest + whole[16 + length + 32 :]


@pytest.mark.parametrize("keyed", [False, True])
def test_a_tag_with_another_description_is_refused(
    archive: Path, tmp_path: Path, keyed: bool
) -> None:
    def change(part: dict[str, Any]) -> None:
        part["description"] |= {"tenant": "another", "keyed": keyed}

    (tmp_path / "forged").write_bytes(rewritten(archive, change))
    with opened(tmp_path) as store:
        keys = expected(store)
        with pytest.raises((ConfigError, FormatError), match=r"secret|description"):
            store.sessions.import_file(tmp_path / "forged")
        assert not store.match(keys) and not store.sessions.list()


@pytest.mark.parametrize("has_time", [True, False])
def test_an_older_archive_does_not_replace_a_newer_session(
    archive: Path, tmp_path: Path, has_time: bool
) -> None:
    older = archive.read_bytes() if has_time else rewritten(archive, lambda p: p.pop("named_s"))
    (tmp_path / "older").write_bytes(older)
    with opened(tmp_path) as store:
        assert not store.sessions.import_file(tmp_path / "older")["kept_newer"]
        keys = prompt(space_of(store), 1, BLOCKS + 2)
        put(store, keys)
        store.sessions.name("chat", keys)
        assert store.sessions.import_file(tmp_path / "older")["kept_newer"]
        (found,) = store.sessions.show("chat")
        assert found["blocks"] == BLOCKS + 2
        store.sessions.export("chat", tmp_path / "newer")
    with opened(tmp_path, "third") as store:
        for name, kept, blocks in (("older", False, BLOCKS), ("newer", False, BLOCKS + 2)):
            assert store.sessions.import_file(tmp_path / name)["kept_newer"] is kept
            (found,) = store.sessions.show("chat")
            assert found["blocks"] == blocks
