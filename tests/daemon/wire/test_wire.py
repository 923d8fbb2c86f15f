"""What travels between a client and the daemon: the same on both sides, and nothing but that."""

import math
import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.core.block import BlockKey
from kvdepot.daemon.wire import frames
from kvdepot.daemon.wire.frames import (
    FRAME_BYTES_MAX,
    HEAD_BYTES,
    KEYS_MAX,
    Channel,
    Flag,
    FrameKind,
    pack,
    parse,
)
from kvdepot.errors import WireError

FORMS = [
    frames.Hello(frames.MAGIC, 5, 2, 3, 6, 4, bytes(range(16))),
    frames.Welcome(
        bytes(16), b"i" * 16, 1, 256, 2.0, 0.25, 1 << 40, 1 << 41, 1 << 26, True, False, 6
    ),
    frames.FirstTokenReport(100, 80, 0.5, 0.4, math.inf, 1),
    frames.Deliver(7, 1, 2, True, 0.5),
    frames.Fetch(1, 2, True, 0.5),
    frames.Register(b"12345678", 1 << 30, 1 << 20),
    frames.Seconds(1.5),
    frames.Number(1 << 63),
    frames.Flushed(True),
]


@given(
    kind=st.sampled_from(FrameKind),
    serial=st.integers(0, (1 << 32) - 1),
    body=st.binary(max_size=500),
    flags=st.integers(0, 255),
)
def test_a_frame_is_read_as_it_was_written(
    kind: FrameKind, serial: int, body: bytes, flags: int
) -> None:
    frame = parse(memoryview(pack(kind, serial, body, flags)))
    assert (frame.kind, frame.flags, frame.serial, bytes(frame.body)) == (kind, flags, serial, body)


@given(data=st.binary(max_size=200))
def test_anything_else_is_an_error_and_no_other_one(data: bytes) -> None:
    try:
        frame = parse(memoryview(data))
    except WireError:
        return
    for form in FORMS:
        try:
            type(form).parse(frame.body)
        except WireError:
            continue
    for dtype in (frames.PLACE_DTYPE, frames.ARRIVAL_DTYPE, frames.SLOT_DTYPE):
        try:
            frames.table(frame.body, dtype)
        except WireError:
            continue


@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
def test_forms_have_one_length(form: frames.Fixed) -> None:
    body = form.body()
    assert type(form).parse(memoryview(body)) == form
    for wrong in (body[:-1], body + b"x", b""):
        with pytest.raises(WireError):
            type(form).parse(memoryview(wrong))
    assert frames.split(type(form), memoryview(body + b"rest")) == (form, b"rest")


def test_frames_are_bounded() -> None:
    most = FRAME_BYTES_MAX - HEAD_BYTES
    parse(memoryview(pack(FrameKind.TEXT, 1, bytes(most))))
    with pytest.raises(WireError):
        pack(FrameKind.TEXT, 1, bytes(most + 1))
    with pytest.raises(WireError):
        parse(memoryview(bytes([FrameKind.TEXT]) + bytes(FRAME_BYTES_MAX)))


def test_every_answer_about_a_full_frame_of_keys_fits() -> None:
    raw = bytes(32 * KEYS_MAX)
    assert len(frames.key_words(raw)) == KEYS_MAX
    pack(FrameKind.FETCH, 1, frames.Fetch(0, 0, False, 0.0).body() + raw)
    for dtype in (frames.PLACE_DTYPE, frames.ARRIVAL_DTYPE, frames.SLOT_DTYPE):
        pack(FrameKind.LEASED, 1, frames.with_table(1, np.zeros(KEYS_MAX, dtype)))
    with pytest.raises(WireError):
        frames.key_words(bytes(32 * (KEYS_MAX + 1)))


def test_keys_travel_as_they_are() -> None:
    keys = [BlockKey(os.urandom(32)) for _ in range(5)]
    raw = b"".join(keys)
    assert frames.key_words(raw).tobytes() == raw


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0])
def test_timeouts_are_finite(timeout_s: float) -> None:
    with pytest.raises(WireError):
        frames.checked_timeout(timeout_s)
    assert frames.checked_timeout(1e9) == frames.TIMEOUT_S_MAX


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channels = Channel(pair[0]), Channel(pair[1])
    yield channels
    for channel in channels:
        channel.close()


def test_descriptors_come_with_their_frame(ends: tuple[Channel, Channel]) -> None:
    reading, writing = os.pipe()
    ends[0].send_with([reading, writing], FrameKind.WELCOME, 3, b"body")
    frame, descriptors = ends[1].receive_with(1.0)
    assert frame is not None and (frame.kind, bytes(frame.body)) == (FrameKind.WELCOME, b"body")
    os.write(descriptors[1], b"through")
    assert os.read(reading, 10) == b"through"
    assert not any(os.get_inheritable(fd) for fd in descriptors)
    for fd in (reading, writing, *descriptors):
        os.close(fd)


def test_a_text_of_any_length(ends: tuple[Channel, Channel]) -> None:
    for nbytes in (0, 1, FRAME_BYTES_MAX // 2, FRAME_BYTES_MAX // 2 + 1, 10 * FRAME_BYTES_MAX):
        text = os.urandom(nbytes)
        sender = threading.Thread(target=ends[0].send_text, args=(9, text))
        sender.start()
        first = ends[1].receive(5.0)
        assert first is not None
        assert ends[1].receive_text(first, 5.0) == text
        sender.join()


def test_a_text_that_is_interrupted(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(FrameKind.TEXT, 9, b"some", Flag.MORE)
    ends[0].send(FrameKind.NUMBER, 9, bytes(8))
    first = ends[1].receive(5.0)
    assert first is not None
    with pytest.raises(WireError):
        ends[1].receive_text(first, 5.0)


def test_the_end_is_seen_at_once(ends: tuple[Channel, Channel]) -> None:
    assert ends[1].is_open()
    ends[0].send(FrameKind.NUMBER, 1, bytes(8))
    ends[0].hang_up()
    assert not ends[1].is_open(), "also with something left to read"
    assert ends[1].receive(1.0) is not None
    assert ends[1].receive(1.0) is None


def test_waiting_ends(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(BlockingIOError):
        ends[0].receive(0.01)
    ends[0].cut()
    assert ends[0].receive(10.0) is None
