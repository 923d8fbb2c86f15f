"""Sessions leave and come over HTTP: what arrives is what was sent, or is left out and named."""

import asyncio
import http.client
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from tests.support.http_daemon import HttpDaemon
from tests.support.store_contract import BLOCK_BYTES, prompt, put, space_of, tiers
from tests.support.waiting import until

from kvdepot.core.block import BlockKey
from kvdepot.daemon.http import archives
from kvdepot.daemon.http.archives import ARCHIVES_MAX, MEDIA, ArchiveMover, UploadedArchive
from kvdepot.store.sessions.archive import MAGIC, _digest
from kvdepot.testing.images import payload_for

TOKEN = "0123456789abcdef"
BLOCKS = 4
EXPORT = "/api/sessions/chat%2F1/export"
IMPORT = "/api/sessions/import"
FIXED = struct.Struct("<8sHHI")


def told(daemon: HttpDaemon) -> list[BlockKey]:
    """A session of four blocks; its name has a slash."""
    keys = prompt(space_of(daemon.store), 1, BLOCKS)
    put(daemon.store, keys)
    daemon.store.sessions.name("chat/1", keys)
    return keys


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[HttpDaemon]:
    with HttpDaemon(tmp_path, TOKEN) as one:
        yield one


def send(daemon: HttpDaemon, content: bytes, **headers: str) -> Any:
    return daemon.ask("POST", IMPORT, content, **{"content-type": MEDIA, **headers})


def test_a_session_goes_to_another_daemon(daemon: HttpDaemon, tmp_path: Path) -> None:
    keys = told(daemon)
    reply = daemon.get(EXPORT)
    assert (reply.status, reply.headers["content-type"]) == (200, MEDIA)
    file = tmp_path / "file"
    daemon.store.sessions.export("chat/1", file)
    assert reply.body == file.read_bytes(), "the same as the command writes"
    (tmp_path / "other").mkdir()
    with HttpDaemon(tmp_path / "other", TOKEN) as other:
        answer = send(other, reply.body)
        assert answer.status == 200
        assert answer.json == {
            "session": "chat/1", "blocks": 4, "of_blocks": 4, "complete": True, "damage": "",
            "kept_newer": False,
        }  # fmt: skip
        space_of(other.store)
        assert tiers(other.store, keys) == ["dram"] * BLOCKS, "every byte is compared"
        (found,) = other.store.sessions.list()
        assert found["name"] == "chat/1"


def test_what_cannot_be_exported_is_refused_before_a_byte(daemon: HttpDaemon) -> None:
    keys = told(daemon)
    assert daemon.get("/api/sessions/unknown/export").status == 404
    assert daemon.get(EXPORT + "?namespace=" + "0" * 16).status == 404
    assert daemon.get(EXPORT + "?namespace=x").status == 400
    daemon.store.remove(keys[2:])
    reply = daemon.get(EXPORT)
    assert reply.status == 400 and "not all of its blocks" in reply.json["error"]


def test_the_head_of_an_export_reads_no_block(daemon: HttpDaemon) -> None:
    told(daemon)
    before = daemon.store.stats()["ledger"]["tokens"]
    reply = daemon.ask("HEAD", EXPORT)
    assert (reply.status, reply.body) == (200, b"")
    assert daemon.store.stats()["ledger"]["tokens"] == before


def test_a_block_that_goes_meanwhile_cuts_the_export(
    daemon: HttpDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = told(daemon)
    monkeypatch.setattr(archives, "_JOINED_BYTES", 1)
    desk = daemon.store.sessions
    whole = desk.export_pieces

    def pieces(name: str, *, namespace: str = "") -> Iterator[bytes | memoryview]:
        found = whole(name, namespace=namespace)
        yield next(found)
        daemon.store.remove(keys[1:])
        yield from found

    monkeypatch.setattr(desk, "export_pieces", pieces)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        daemon.get(EXPORT)
    assert daemon.get("/healthz").status == 200
    monkeypatch.undo()
    put(daemon.store, keys)
    for _ in range(ARCHIVES_MAX + 1):
        assert daemon.get(EXPORT).status == 200, "its place is free again"


def test_a_damaged_archive_is_taken_in_up_to_the_damage(
    daemon: HttpDaemon, tmp_path: Path, seed: int
) -> None:
    keys = told(daemon)
    sound, chance = daemon.get(EXPORT).body, random.Random(seed)
    record = (len(sound) - sound.index(bytes(keys[0]))) // BLOCKS
    first = len(sound) - BLOCKS * record
    for place in [3, first - 1, *(chance.randrange(first, len(sound)) for _ in range(6))]:
        daemon.store.remove(keys)
        harmed = bytearray(sound)
        harmed[place] ^= 1 << chance.randrange(8)
        cut = bytes(harmed) if chance.randrange(2) else sound[:place]
        reply, whole = send(daemon, cut), max(0, place - first) // record
        assert len(daemon.store.match(keys)) == whole
        if place < first:
            assert reply.status == 400 and reply.json["error"].startswith("archive: ")
        else:
            assert reply.status == 200 and not reply.json["complete"]
            assert (reply.json["blocks"], reply.json["of_blocks"]) == (whole, BLOCKS)
            assert f"block {whole}" in reply.json["damage"]
        into = [bytearray(BLOCK_BYTES) for _ in keys]
        for key, got, target in zip(keys, daemon.store.get_many(keys, into), into, strict=True):
            assert not got or bytes(target) == payload_for(key, BLOCK_BYTES)


def test_more_than_the_limit_is_refused(tmp_path: Path) -> None:
    with HttpDaemon(tmp_path, TOKEN, archive_max=BLOCK_BYTES) as daemon:
        told(daemon)
        whole = daemon.get(EXPORT).body
        assert send(daemon, whole).status == 413
        parts = urlsplit(daemon.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        sent = {"authorization": f"Bearer {TOKEN}", "content-type": MEDIA}
        pieces = (whole[at : at + 512] for at in range(0, len(whole), 512))
        connection.request("POST", IMPORT, pieces, sent, encode_chunked=True)
        assert connection.getresponse().status == 413, "also where its length is not said before"
        connection.close()


def test_what_is_no_archive_is_refused(daemon: HttpDaemon) -> None:
    assert send(daemon, b"").status == 400
    assert send(daemon, b"x" * 100).status == 400
    assert daemon.ask("POST", IMPORT, {"session": "x"}).status == 415


def test_a_sender_that_goes_away_leaves_what_was_whole(daemon: HttpDaemon) -> None:
    keys = told(daemon)
    whole = daemon.get(EXPORT).body
    daemon.store.remove(keys)
    record = (len(whole) - whole.index(bytes(keys[0]))) // BLOCKS
    parts = urlsplit(daemon.url)
    with socket.create_connection((parts.hostname, parts.port or 0), timeout=60) as peer:
        head = (
            f"POST {IMPORT} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {TOKEN}\r\n"
            f"content-type: {MEDIA}\r\ncontent-length: {len(whole)}\r\n\r\n"
        )
        peer.sendall(head.encode() + whole[: len(whole) - record - 1])
    until(lambda: len(daemon.store.match(keys)) == BLOCKS - 2)
    until(lambda: daemon.http._served.archives._moving == 0)
    assert send(daemon, whole).json["complete"]


def test_few_archives_are_moved_at_once() -> None:
    mover = ArchiveMover(1)
    for _ in range(ARCHIVES_MAX):
        mover.begin()
    with pytest.raises(HTTPException) as refused:
        mover.begin()
    assert refused.value.status_code == 429
    mover.over()
    mover.begin()
    mover.close()


def test_a_sender_that_stops_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "STALL_S", 0.01)

    async def stops() -> AsyncIterator[bytes]:
        yield b"abc"
        await asyncio.Event().wait()

    async def read() -> bytes:
        loop = asyncio.get_running_loop()
        source = UploadedArchive(stops(), 100, loop)
        return await loop.run_in_executor(None, source.read, 10)

    assert asyncio.run(read()) in (b"abc", b"")


HEADS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@pytest.mark.slow
def test_no_head_ends_as_an_error_of_ours(daemon: HttpDaemon) -> None:
    """Heads with a right digest, and something wrong in them."""
    told(daemon)
    whole = daemon.get(EXPORT).body
    length = FIXED.unpack(whole[: FIXED.size])[3]
    said = json.loads(whole[FIXED.size : FIXED.size + length])
    rest = whole[FIXED.size + length + 32 :]
    places: list[list[Any]] = [[], *([name] for name in said)]
    space = said["namespaces"][0]
    places += [["namespaces", 0], *(["namespaces", 0, name] for name in space)]
    places += [["namespaces", 0, "description", name] for name in space["description"]]
    layout = space["description"]["layout"]
    places += [["namespaces", 0, "description", "layout", name] for name in layout]

    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(places), HEADS)
    def fuzz(place: list[Any], value: Any) -> None:
        changed = json.loads(json.dumps(said))
        at = changed
        for name in place[:-1]:
            at = at[name]
        if place:
            at[place[-1]] = value
        else:
            changed = value
        head = json.dumps(changed).encode()
        fixed = FIXED.pack(MAGIC, 1, 0, len(head))
        reply = send(daemon, fixed + head + _digest(fixed, head) + rest)
        assert reply.status in (200, 400), (reply.status, reply.text, place, value)
        assert "Traceback" not in reply.text

    fuzz()
    assert daemon.get("/healthz").status == 200
    assert daemon.store.admin.check()
