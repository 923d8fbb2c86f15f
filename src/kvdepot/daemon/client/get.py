"""Onboarding through the daemon: it brings blocks into memory we map, we verify and copy them."""

import time
from collections.abc import Iterator, Sequence, Sized
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.block import ANSWERS, MISS, BlockKey, GetResult
from kvdepot.core.keys import as_keys
from kvdepot.daemon.client.connections import Connections, DaemonAwayError, Link, expect
from kvdepot.daemon.wire import messages
from kvdepot.daemon.wire.frames import KEYS_MAX, Flag, Frame, FrameKind
from kvdepot.format.copy_ops import copy_op, transfers, verified_ops
from kvdepot.format.record import HEAD_BYTES, PAGE, TABLE_OFFSET, holds_key, record_bytes
from kvdepot.memory.memory import Memory
from kvdepot.native import COPY, TRANSFER_DTYPE, VERIFY, transfer

AWAY: Final = GetResult(None, "failed")
"""The answer for every block while there is no daemon."""
_FROM_MEMORY: Final = ANSWERS[0]
_FROM_CXL: Final = GetResult("cxl")
CORRUPT: Final = GetResult(None, "corrupt")
Array = npt.NDArray[Any]


def batches(keys: Sized) -> Iterator[range]:
    """Keys in parts that fit in a frame, as ranges of their indices."""
    for start in range(0, len(keys), KEYS_MAX):
        yield range(start, min(start + KEYS_MAX, len(keys)))


class Getter:
    """Serves `get` over one connection."""

    def __init__(self, connections: Connections, link: Link, timeout_s: float) -> None:
        self._connections = connections
        self._link = link
        self._deadline = time.monotonic() + timeout_s

    def fetch(self, blocks: Array) -> list[GetResult]:
        """Fill the buffer of each block, a row of BLOCK_DTYPE, or say why not. DaemonAwayError:
        nothing can be said of any.
        """
        answers = [AWAY] * len(blocks)
        for span, indices in _by_span(blocks):
            for part in batches(indices):
                chosen = indices[part.start : part.stop]
                found = self._fetch(span, blocks[chosen])
                for index, answer in zip(chosen.tolist(), found, strict=True):
                    answers[index] = answer
        return answers

    def _fetch(self, span: tuple[int, int], blocks: Array) -> list[GetResult]:
        answers, damaged = self._ask(span, blocks, again=False)
        if not damaged:
            return answers
        # The daemon verifies these too: it drops the damaged copy and looks for another.
        found, lost = self._ask(span, blocks[damaged], again=True)
        for at, index in enumerate(damaged):
            answers[index] = CORRUPT if at in lost else found[at]
        return answers

    def _ask(
        self, span: tuple[int, int], blocks: Array, *, again: bool
    ) -> tuple[list[GetResult], list[int]]:
        """The answers, and which blocks are damaged. `again`: the daemon verifies all itself."""
        left_s = max(0.0, self._deadline - time.monotonic())
        head = messages.Fetch(*span, again, left_s)
        serial = self._link.send(FrameKind.FETCH, head.body() + blocks["key"].tobytes())
        damaged: list[int] = []
        limit_s = left_s + self._connections.call_s
        while (frame := self._link.answer(serial, limit_s)).kind is FrameKind.ARRIVED:
            flags = frame.flags
            number, arrivals = arrivals_of(frame, len(blocks))
            verify = self._connections.welcome.verify and not flags & Flag.VERIFIED
            take = self._take_whole if span == (0, 0) else self._take_parts
            bad = take(arrivals, blocks, verify=bool(verify))
            damaged += {*bad, *self._wrong(arrivals, blocks)}
            if flags & Flag.LAST:
                answers = _only(arrivals, len(blocks), self._connections.welcome)
                break
            if flags & Flag.LENT:
                self._link.follow_up(serial, FrameKind.TAKEN)
        else:
            number, answers = answers_of(frame, len(blocks))
        self._connections.check_intact()
        if number:
            self._link.send(FrameKind.RELEASE, messages.Number(number).body())
        return answers, damaged

    def _wrong(self, arrivals: Array, blocks: Array) -> list[int]:
        """Blocks that have come whose slots hold another."""
        views = (self._connections.arena.view, self._connections.staging.view)
        keys = as_keys(blocks["key"])
        return [
            index
            for location, index, staged in arrivals.tolist()
            if not holds_key(views[staged], location, keys[index])
        ]

    def _take_whole(self, arrivals: Array, blocks: Array, *, verify: bool) -> list[int]:
        """Copy blocks that have come. Returns which are damaged."""
        chosen = blocks[arrivals["index"]]
        ops = np.zeros(len(chosen), TRANSFER_DTYPE)
        ops["nbytes"], ops["target"] = chosen["payload_bytes"], chosen["address"]
        ops["chunk_bytes"] = chosen["chunk_bytes"]
        slots = slots_in(self._connections, arrivals, chosen["payload_bytes"])
        ops["source"], ops["table"] = slots + HEAD_BYTES, slots + TABLE_OFFSET
        ops["mode"] = VERIFY if verify else COPY
        transfer(ops)
        bad: list[int] = arrivals["index"][ops["result"] != 0].tolist()
        return bad

    def _take_parts(self, arrivals: Array, blocks: Array, *, verify: bool) -> list[int]:
        """`_take_whole` for ranges of layers. A chunk shared with others is verified first."""
        ops: list[tuple[Any, ...]] = []
        partial: list[tuple[Any, ...]] = []
        indices = []
        for location, index, staged in arrivals.tolist():
            _, payload_bytes, chunk_bytes, target, start, stop, _ = blocks[index].item()
            memory = self._connections.staging if staged else self._connections.arena
            slot = address_in(memory, location, payload_bytes)
            indices.append(index)
            copy: tuple[int, ...] | None = copy_op(slot, target, start, stop)
            if verify:
                span = (start, stop)
                check, copy = verified_ops(slot, target, span, payload_bytes, chunk_bytes)
                ops.append(check)
            if copy is not None:
                partial.append(copy)
        codes = transfers(ops).tolist() if ops else []
        if partial:
            transfers(partial)
        return [index for index, code in zip(indices, codes, strict=False) if code]


def answers_of(frame: Frame, count: int) -> tuple[int, list[GetResult]]:
    """What DONE says: the number of the hold, and an answer for each block."""
    head, codes = messages.split(messages.Number, expect(frame, FrameKind.DONE).body)
    if len(codes) != count or (codes and max(codes) >= len(ANSWERS)):
        raise DaemonAwayError("answers that make no sense")
    return head.value, [ANSWERS[code] for code in codes]


def arrivals_of(frame: Frame, count: int) -> tuple[int, Array]:
    """What ARRIVED says: the number of the hold if it is the last, and rows of ARRIVAL_DTYPE."""
    number, rows = messages.table(frame.body, messages.ARRIVAL_DTYPE)
    if len(rows) and rows["index"].max() >= count:
        raise DaemonAwayError("a block arrived that was not asked for")
    return number, rows


def slots_in(connections: Connections, arrivals: Array, payload_bytes: Array) -> Array:
    """Addresses of slots. The daemon is trusted with our bytes, not with our process."""
    staged = arrivals["staged"] != 0
    arena, staging = connections.arena, connections.staging
    room = np.where(staged, staging.nbytes, arena.nbytes)
    places = arrivals["location"]
    ends = places + HEAD_BYTES + -(-payload_bytes // PAGE) * PAGE
    if ((places < 0) | (places % PAGE != 0) | (ends > room)).any():
        raise DaemonAwayError("a slot outside of the memory")
    found: Array = np.where(staged, staging.address, arena.address) + places
    return found


def address_in(memory: Memory, location: int, payload_bytes: int) -> int:
    """`slots_in` for one slot."""
    end = location + record_bytes(payload_bytes)
    if location < 0 or location % PAGE or end > memory.nbytes:
        raise DaemonAwayError(f"a slot at {location}, outside of the memory")
    return memory.address + location


def payload_in(memory: Memory, location: int, payload_bytes: int) -> memoryview:
    start = address_in(memory, location, payload_bytes) - memory.address + HEAD_BYTES
    return memory.view[start : start + payload_bytes]


def keys_of(keys: Sequence[BlockKey], part: range) -> bytes:
    """Keys of a part, as they travel."""
    return b"".join(keys[part.start : part.stop])


def _only(arrivals: Array, count: int, welcome: messages.Welcome) -> list[GetResult]:
    """Answers where all that is there has come from memory at once."""
    if len(arrivals) == count and not welcome.cxl_bytes:
        return [_FROM_MEMORY] * count
    answers = [MISS] * count
    for location, index, _ in arrivals.tolist():
        answers[index] = _FROM_MEMORY if location < welcome.arena_bytes else _FROM_CXL
    return answers


def _by_span(blocks: Array) -> Iterator[tuple[tuple[int, int], Array]]:
    """Which bytes are wanted, (0, 0) for all, and the blocks of which they are."""
    starts, stops = blocks["start"], blocks["stop"]
    is_whole = stops - starts == blocks["payload_bytes"]
    if is_whole.any():
        yield (0, 0), np.flatnonzero(is_whole)
    parts = zip(starts[~is_whole].tolist(), stops[~is_whole].tolist(), strict=True)
    for start, stop in sorted(set(parts)):
        yield (start, stop), np.flatnonzero(~is_whole & (starts == start) & (stops == stop))
