"""Frames that make no sense cost their sender the connection, and nobody else anything."""

import contextlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.raw_client import RawClient, hello
from tests.support.store_contract import BLOCK_BYTES, prompt, put, small, space_of, tiers
from tests.support.waiting import eventually

import kvdepot
from kvdepot.core.namespace import FORMAT_VERSION
from kvdepot.daemon.wire.frames import (
    FRAME_BYTES_MAX,
    KEYS_MAX,
    Deliver,
    Fetch,
    FirstTokenReport,
    FrameKind,
    HintBySession,
    Number,
    Register,
    Seconds,
    SessionUpdate,
    WaitHint,
    with_table,
)
from kvdepot.testing.daemons import DaemonProcess

SLOW = (FrameKind.SERVICE, FrameKind.FLUSH, FrameKind.REMOVE_NAMESPACE)
QUESTIONS = [kind for kind in FrameKind if kind < FrameKind.WELCOME]
KEY = bytes(32)
EMPTY = np.empty(0, "<u4")
NAN, FOREVER = float("nan"), float("inf")


def call(service: str, which: str, /, **given: Any) -> bytes:
    """The body of SERVICE."""
    return json.dumps({"service": service, "call": which, "given": given}).encode()


NONSENSE: list[tuple[FrameKind, bytes]] = [
    (FrameKind.HELLO, hello()),
    (FrameKind.TAKEN, b""),
    (FrameKind.WELCOME, b""),
    (FrameKind.MATCH, KEY[:-1]),
    (FrameKind.MATCH, KEY * (KEYS_MAX + 1)),
    (FrameKind.LEASE, b"x"),
    (FrameKind.WHERE, Number(99).body()),
    (FrameKind.WHERE, b""),
    (FrameKind.RELEASE, Number(99).body()),
    (FrameKind.RELEASE, b"odd"),
    (FrameKind.DELIVER, Deliver(99, 0, 1, False, 1.0).body()),
    (FrameKind.DELIVER, b"short"),
    (FrameKind.FETCH, b"short"),
    (FrameKind.FETCH, Fetch(0, 0, False, NAN).body() + KEY),
    (FrameKind.FETCH, Fetch(0, 0, False, FOREVER).body() + KEY),
    (FrameKind.FETCH, Fetch(0, 0, False, -1.0).body() + KEY),
    (FrameKind.FETCH, Fetch(9, 5, False, 1.0).body() + KEY),
    (FrameKind.FETCH, Fetch(0, 0, False, 1.0).body() + KEY[1:]),
    (FrameKind.RESERVE, Seconds(NAN).body() + KEY),
    (FrameKind.RESERVE, Seconds(1.0).body() + b"x"),
    (FrameKind.SEAL, Number(99).body() + struct.pack("<I", 0)),
    (FrameKind.SEAL, Number(99).body() + b"abc"),
    (FrameKind.ABANDON, b""),
    (FrameKind.REMOVE, b"x"),
    (FrameKind.REMOVE_NAMESPACE, b"short"),
    (FrameKind.FLUSH, Seconds(NAN).body()),
    (FrameKind.FLUSH, b""),
    (FrameKind.STATS, b"x"),
    (FrameKind.HAS_SECRET, b"\xff\xfe"),
    (FrameKind.HINT, b"short"),
    (FrameKind.HINT, Seconds(NAN).body() + KEY),
    (FrameKind.HINT, Seconds(1.0).body() + b"x"),
    (FrameKind.HINT, Seconds(1.0).body() + KEY * (KEYS_MAX + 1)),
    (FrameKind.HINT_SESSION, b"short"),
    (FrameKind.HINT_SESSION, HintBySession(bytes(8), -1.0).body() + b"name"),
    (FrameKind.HINT_SESSION, HintBySession(bytes(8), 1.0).body()),
    (FrameKind.HINT_SESSION, HintBySession(bytes(8), 1.0).body() + b"\xff\xfe"),
    (FrameKind.HINT_SESSION, HintBySession(bytes(8), 1.0).body() + b"n" * 201),
    (FrameKind.AWAIT_HINT, b"short"),
    (FrameKind.AWAIT_HINT, WaitHint(1, FOREVER).body()),
    (FrameKind.CANCEL_HINT, b""),
    (FrameKind.SESSION, b"short"),
    (FrameKind.SESSION, SessionUpdate(bytes(8), 0, 4, 0).body() + b"name" + KEY),
    (FrameKind.SESSION, SessionUpdate(bytes(8), 9, 4, 0).body() + b"name" + KEY),
    (FrameKind.SESSION, SessionUpdate(bytes(8), 1, 0, 0).body() + KEY),
    (FrameKind.SESSION, SessionUpdate(bytes(8), 1, 4, 0).body() + b"name" + KEY[1:]),
    (FrameKind.SESSION, SessionUpdate(b"others..", 1, 4, 0).body() + b"name" + KEY),
    (FrameKind.SESSION, SessionUpdate(bytes(8), 1, 4, 0).body() + b"name" + KEY * (KEYS_MAX + 1)),
    (FrameKind.SERVICE, b""),
    (FrameKind.SERVICE, b"[" * 1000),
    (FrameKind.SERVICE, b"[]"),
    (FrameKind.SERVICE, call("volumes", "close")),
    (FrameKind.SERVICE, call("volumes", "__init__")),
    (FrameKind.SERVICE, call("engine", "remove")),
    (FrameKind.SERVICE, call("volumes", "resize", tier="ssd", capacity=1)),
    (FrameKind.SERVICE, call("volumes", "resize", tier="ssd", capacity="1GiB", more="")),
    (FrameKind.SERVICE, call("sessions", "pin", name=["a"])),
    (FrameKind.SERVICE, call("admin", "check", deep="yes")),
    (FrameKind.FIRST_TOKEN, b"short"),
    (FrameKind.FIRST_TOKEN, FirstTokenReport(9, 1, NAN, 1.0, 1.0, 1).body()),
    (FrameKind.FIRST_TOKEN, FirstTokenReport(9, 10, 1.0, 1.0, 1.0, 1).body()),
    (FrameKind.FIRST_TOKEN, FirstTokenReport(9, 1, 1.0, 1.0, 1.0, 200).body()),
    (FrameKind.REGISTER, b"short"),
    (FrameKind.REGISTER, Register(bytes(8), 10, 10).body() + b"no json"),
]


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("daemon")
    with DaemonProcess(folder, small(folder / "kv")) as daemon:
        yield daemon
        assert daemon.stop() == 0, "it has survived all of it"


def malformed(store: kvdepot.Depot) -> int:
    count: int = store.stats()["daemon"]["counters"]["malformed"]
    return count


def check_serves(daemon: DaemonProcess) -> None:
    """Others are served, and nothing is left of those who went."""
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 4)
        assert all(put(store, keys))
        assert None not in tiers(store, keys)
        assert eventually(lambda: len(store.stats()["daemon"]["sessions"]) == 1)
        assert store.stats()["leased"] == 0
        assert store.admin.check(deep=False)


@pytest.mark.parametrize(
    ("kind", "body"), NONSENSE, ids=[f"{kind.name}-{n}" for n, (kind, _) in enumerate(NONSENSE)]
)
def test_nonsense_costs_the_connection(
    shared_daemon: DaemonProcess, kind: FrameKind, body: bytes
) -> None:
    with kvdepot.open(shared_daemon.address) as store:
        before = malformed(store)
        with RawClient(shared_daemon.socket) as client:
            client.send(kind, body)
            assert client.heard_out() == []
        assert eventually(lambda: malformed(store) == before + 1)
    check_serves(shared_daemon)


@pytest.mark.parametrize(
    "data",
    [b"x", bytes(7), b"\xff" * 8, bytes(8), b"\x01" * 100, b"\x03\x00\x01\x00" + bytes(36)],
)
def test_what_is_no_frame_costs_the_connection(shared_daemon: DaemonProcess, data: bytes) -> None:
    for greeted in (False, True):
        with RawClient(shared_daemon.socket, greeted=greeted) as client:
            client.say(data)
            assert client.heard_out() == []
    check_serves(shared_daemon)


@pytest.mark.parametrize("nbytes", [FRAME_BYTES_MAX + 1, 2 * FRAME_BYTES_MAX])
def test_a_frame_that_is_too_long_is_not_read(shared_daemon: DaemonProcess, nbytes: int) -> None:
    with RawClient(shared_daemon.socket) as client:
        client.say(bytes([FrameKind.MATCH]) + bytes(nbytes - 1))
        assert client.heard_out() == []
    check_serves(shared_daemon)


def test_a_frame_as_long_as_allowed_is_read(shared_daemon: DaemonProcess) -> None:
    with RawClient(shared_daemon.socket) as client:
        answer = client.ask(FrameKind.MATCH, KEY * KEYS_MAX)
        assert answer is not None and answer.kind is FrameKind.TIERS
        answer = client.ask(FrameKind.RESERVE, Seconds(0.0).body() + KEY * KEYS_MAX)
        assert answer is not None and answer.kind is FrameKind.RESERVED


def test_the_first_frame_must_be_a_greeting(shared_daemon: DaemonProcess) -> None:
    for body in (hello(magic=b"SOMEBODY"), hello()[:-1], b""):
        with RawClient(shared_daemon.socket, greeted=False) as client:
            client.send(FrameKind.HELLO, body)
            assert client.heard_out() == []
    with RawClient(shared_daemon.socket, greeted=False) as client:
        client.send(FrameKind.STATS)
        assert client.heard_out() == []
    check_serves(shared_daemon)


@pytest.mark.parametrize("change", ["protocol", "store_format", "record", "token"])
def test_another_version_or_session_is_refused_with_a_reason(
    shared_daemon: DaemonProcess, change: str
) -> None:
    other: dict[str, object] = {change: 999} if change != "token" else {"token": b"?" * 16}
    with RawClient(shared_daemon.socket, greeted=False) as client:
        answer = client.ask(FrameKind.HELLO, hello(**other))  # type: ignore[arg-type]
        assert answer is not None and answer.kind is FrameKind.REFUSED
        said = bytes(answer.body).decode()
        assert ("999" in said and f"format {FORMAT_VERSION}" in said) or change == "token"
        assert client.heard_out() == []


def test_sizes_are_the_daemons(shared_daemon: DaemonProcess) -> None:
    """A namespace cannot be registered again with another size, nor a slot filled past its end."""
    with kvdepot.open(shared_daemon.address) as store:
        space = space_of(store)
        keys = prompt(space, 2, 2)
        assert all(put(store, keys))
        with RawClient(shared_daemon.socket) as client:
            for size in (BLOCK_BYTES + 1, 0, 1 << 40):
                body = Register(space.tag, size, 4096).body() + b"{}"
                answer = client.ask(FrameKind.REGISTER, body)
                assert answer is not None and answer.kind is FrameKind.REFUSED
            span = Fetch(0, BLOCK_BYTES + 1, False, 1.0).body()
            answer = client.ask(FrameKind.FETCH, span + keys[0])
            assert answer is not None and answer.kind is FrameKind.DONE
        assert None not in tiers(store, keys)


def test_a_slot_is_sealed_once_and_by_its_owner(shared_daemon: DaemonProcess) -> None:
    with kvdepot.open(shared_daemon.address) as store:
        keys = prompt(space_of(store), 3, 1)
        with store.reserve(keys) as slots:
            assert slots.view(0) is not None
            for number in range(1, 50):
                with RawClient(shared_daemon.socket) as thief:
                    thief.send(FrameKind.SEAL, with_table(number, EMPTY) + struct.pack("<I", 0))
                    assert thief.heard_out() == []
            assert len(store.match(keys)) == 0


def test_numbers_of_hints_are_worth_nothing_to_others(shared_daemon: DaemonProcess) -> None:
    with RawClient(shared_daemon.socket) as thief:
        for number in range(1, 20):
            thief.send(FrameKind.CANCEL_HINT, Number(number).body())
            answer = thief.ask(FrameKind.AWAIT_HINT, WaitHint(number, 0.0).body())
            assert answer is not None and answer.kind is FrameKind.BROUGHT
    check_serves(shared_daemon)


def test_sessions_of_unknown_namespaces_are_not_kept(shared_daemon: DaemonProcess) -> None:
    with kvdepot.open(shared_daemon.address) as store:
        before = store.stats()["sessions"]["remembered"]
        with RawClient(shared_daemon.socket) as client:
            for number in range(100):
                name = f"{number:04}".encode()
                answer = client.ask(
                    FrameKind.SESSION, SessionUpdate(bytes(8), 1, 4, 0).body() + name + KEY
                )
                assert answer is not None and answer.kind is FrameKind.NUMBER
        assert store.stats()["sessions"]["remembered"] == before


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be somebody else")
def test_changes_are_for_the_daemons_user_and_root() -> None:
    """Any other user who can connect is told so, and the store stays as it is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o711)
        served = DaemonProcess(folder, small(folder / "kv"), "--group", "nogroup")
        with served as daemon, kvdepot.open(daemon.address) as store:
            said = resize_as(65534, daemon.socket)
            assert "user 65534 may use the store, but not change it" in said
            assert store.stats()["tiers"]["ssd"]["capacity_bytes"] == 16 << 20
            assert resize_as(0, daemon.socket) == "TEXT"
            assert store.stats()["tiers"]["ssd"]["capacity_bytes"] == 32 << 20


def resize_as(uid: int, path: Path) -> str:
    """What another user is told who wants 32 MiB."""
    inside, outside = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(OSError, AssertionError):
            os.setgid(uid)
            os.setuid(uid)
            body = call("volumes", "resize", tier="ssd", capacity="32MiB")
            answer = RawClient(path).ask(FrameKind.SERVICE, body)
            assert answer is not None
            refused = answer.kind is FrameKind.REFUSED
            os.write(outside, bytes(answer.body) if refused else answer.kind.name.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(outside)
    with open(inside) as pipe:
        return pipe.read()


def frames() -> st.SearchStrategy[bytes]:
    """Frames of every kind, with bodies that are random, or nearly right."""
    heads = st.builds(
        lambda kind, flags: struct.pack("<BBHI", kind, flags, 0, 1),
        st.sampled_from(QUESTIONS),
        st.integers(0, 255),
    )
    right = st.sampled_from([body for _, body in NONSENSE if len(body) < 4096])
    cut = st.builds(lambda body, at: body[:at], right, st.integers(0, 64))
    bodies = st.one_of(st.binary(max_size=200), right, cut, st.builds(bytes, st.integers(0, 4096)))
    return st.one_of(st.builds(lambda head, body: head + body, heads, bodies), st.binary())


@settings(max_examples=80, suppress_health_check=list(HealthCheck), deadline=None)
@given(said=st.lists(frames(), max_size=6), greeted=st.booleans(), patient=st.booleans())
def test_anything_may_be_said(
    shared_daemon: DaemonProcess, said: list[bytes], greeted: bool, patient: bool
) -> None:
    with RawClient(shared_daemon.socket, greeted=greeted) as client:
        client.socket.settimeout(0.05)
        for data in said:
            # CHECK and FLUSH are answered, but take their time.
            if data and data[0] not in SLOW:
                client.say(data)
        try:
            while patient and client.hear() is not None:
                pass
        except TimeoutError:
            return


def test_and_afterwards_all_is_well(shared_daemon: DaemonProcess) -> None:
    check_serves(shared_daemon)


@pytest.mark.slow
def test_who_says_nothing_keeps_nobody_waiting(
    shared_daemon: DaemonProcess, tmp_path: Path
) -> None:
    silent = [RawClient(shared_daemon.socket, greeted=False) for _ in range(5)]
    check_serves(shared_daemon)
    for client in silent:
        assert client.heard_out() == [], "it is hung up on after a while"
        client.close()
