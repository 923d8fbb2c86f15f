"""One connection: at rest in the daemon's loop, or served by a thread while it asks for more."""

import contextlib
import json
import os
from typing import TYPE_CHECKING, Final

from kvdepot.codec.record import VERSION as RECORD_VERSION
from kvdepot.core.namespace import FORMAT_VERSION
from kvdepot.errors import StoreClosedError, WireError
from kvdepot.server.client_holdings import Session
from kvdepot.server.limits import HELLO_TIMEOUT_S, LINGER_S
from kvdepot.server.requests import ClientGoneError, Desk
from kvdepot.server.threads import Job
from kvdepot.wire import messages
from kvdepot.wire.channel import Channel
from kvdepot.wire.frames import PROTOCOL, Frame, Kind
from kvdepot.wire.messages import versions

if TYPE_CHECKING:
    from kvdepot.server.daemon import Daemon

QUICK: Final = frozenset(
    {
        Kind.MATCH,
        Kind.LEASE,
        Kind.WHERE,
        Kind.RELEASE,
        Kind.TOUCH,
        Kind.ABANDON,
        Kind.CANCEL_HINT,
    }
)
"""Requests that never wait for a disk, for room or for the client."""
_STAY_S: Final = 0.02
"""A thread that has served a request waits this long for the next, before the loop takes over."""
_BROKEN: Final = (OSError, ClientGoneError, StoreClosedError)


class Connection:
    """Greets a client, serves it until it goes, and sees to it that nothing of it stays.

    Used by one thread at a time: the loop's, or the one that the loop has handed it to.
    """

    def __init__(self, daemon: "Daemon", channel: Channel) -> None:
        self.channel = channel
        self._daemon = daemon
        self._session: Session | None = None
        self._desk: Desk | None = None

    def take_turn(self) -> None:
        """The loop has seen that something has come. Does not block."""
        try:
            frame = self.channel.receive_now()
            if frame is None:
                self._hand_over(self._end)
            elif frame.kind in QUICK:
                self._serve(frame)
            else:
                self._hand_over(lambda: self._work(frame))
        except BlockingIOError:
            self._hand_over(self._see_off)  # it does not read its answers
        except WireError:
            self._daemon.tally.count("malformed")
            self._hand_over(self._see_off)
        except _BROKEN:
            self._hand_over(self._see_off)

    def meet(self) -> None:
        """Greet a new client. Blocks; in a thread of the crew."""
        self._work(None)

    def end(self) -> None:
        """The daemon stops: nobody serves this connection any more."""
        self._end()

    def _hand_over(self, job: Job) -> None:
        self._daemon.hand_over(self, job)

    def _work(self, frame: Frame | None) -> None:
        """Serve a frame, or greet, then what follows soon; then back to the loop."""
        self.channel.is_patient = True
        try:
            if frame is None:
                self._desk = self._greet()
            else:
                self._serve(frame)
            if self._desk is not None and self._serve_on():
                self.channel.is_patient = False
                self._daemon.take_back(self)
                return
        except WireError:
            self._daemon.tally.count("malformed")
            self._see_off()
        except _BROKEN:
            self._see_off()
        else:
            self._end()

    def _serve_on(self) -> bool:
        """Serve while requests keep coming. False: the client has closed."""
        with contextlib.suppress(BlockingIOError):
            while (frame := self.channel.receive(_STAY_S)) is not None:
                self._serve(frame)
            return False
        return True

    def _serve(self, frame: Frame) -> None:
        if self._session is None or self._desk is None or self._session.over:
            return
        self._daemon.tally.count("requests")
        self._desk.serve(frame)

    def _see_off(self) -> None:
        """Hang up, and give the client time to let go of memory that will be used again."""
        if self._session is not None:
            self._session.hang_up()
            self.channel.drain(LINGER_S)
            self._session.cut()
        self._end()

    def _end(self) -> None:
        self.channel.cut()
        if self._session is not None and self._session.leave(self.channel):
            self._daemon.forget(self._session)
        self.channel.close()
        self._daemon.ended(self)

    def _greet(self) -> Desk | None:
        """The desk for a new client. None: it was refused, and knows why."""
        frame = self.channel.receive(HELLO_TIMEOUT_S)
        if frame is None:
            return None
        if frame.kind is not Kind.HELLO:
            raise WireError(f"{frame.kind.name} instead of HELLO")
        hello = messages.Hello.parse(frame.body)
        if hello.magic != messages.MAGIC:
            raise WireError("a HELLO of somebody else")
        theirs = (hello.protocol, hello.format, hello.record)
        if theirs != (PROTOCOL, FORMAT_VERSION, RECORD_VERSION):
            self._refuse(frame.serial, f"the client speaks {versions(*theirs)}")
            return None
        session = self._daemon.session(hello.token, self.channel)
        if session is None:
            self._refuse(frame.serial, "there are too many clients, or the session is over")
            return None
        self._session = session
        self._welcome(frame.serial, session, new=hello.token == messages.NO_TOKEN)
        daemon = self._daemon
        return Desk(self.channel, session, daemon.places, daemon.config, daemon.describe)

    def _refuse(self, serial: int, reason: str) -> None:
        self._daemon.tally.count("refused")
        ours = versions(PROTOCOL, FORMAT_VERSION, RECORD_VERSION)
        refusal = {"reason": reason, "daemon": ours, "pid": os.getpid()}
        self.channel.send(Kind.REFUSED, serial, json.dumps(refusal).encode())

    def _welcome(self, serial: int, session: Session, *, new: bool) -> None:
        config, places = self._daemon.config, self._daemon.places
        arena_bytes, *cxl_bytes, staging_bytes = places.nbytes
        body = messages.Welcome(
            token=session.token,
            pid=os.getpid(),
            block_tokens=config.block_tokens,
            read_timeout_s=config.read_timeout,
            put_timeout_s=config.writeback.put_timeout,
            arena_bytes=arena_bytes,
            cxl_bytes=sum(cxl_bytes),
            staging_bytes=staging_bytes,
            verify=config.dram.verify,
            prefault=config.dram.prefault,
        ).body()
        if new:
            self.channel.send_with(places.descriptors, Kind.WELCOME, serial, body)
        else:
            self.channel.send(Kind.WELCOME, serial, body)
