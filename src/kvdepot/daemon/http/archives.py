"""Exports and imports of session archives over HTTP, block by block.

An archive is never whole in memory. Few are moved at a time. A transfer ends if the peer stalls too
long; the whole blocks that an import has received by then are kept.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kvdepot.core.log import RateLimitedLog
from kvdepot.errors import KVDepotError

ARCHIVE_BYTES_MAX: Final = 64 << 30
ARCHIVES_MAX: Final = 2
"""Most archives moved at the same time."""
STALL_S: Final = 60.0
MEDIA: Final = "application/octet-stream"
ARCHIVE: Final[dict[str, Any]] = {MEDIA: {"schema": {"type": "string", "format": "binary"}}}
"""The content of an archive, for /openapi.json."""
_JOINED_BYTES: Final = 1 << 20
"""Small pieces are sent together, up to this many bytes."""
_log: Final = RateLimitedLog("kvdepot.http")


class ArchiveTooLargeError(Exception):
    """The request has more bytes than an archive may have."""


class UploadedArchive:
    """The body of a request, received by the event loop and read by another thread."""

    def __init__(
        self, body: AsyncIterator[bytes], bytes_max: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._body = body
        self._loop = loop
        self._left = bytes_max
        self._chunk = memoryview(b"")
        self._waiting: Future[bytes] | None = None
        self._ended = False

    def read(self, size: int, /) -> bytes:
        parts = []
        while size and self._fill():
            part, self._chunk = self._chunk[:size], self._chunk[size:]
            parts.append(bytes(part))
            size -= len(part)
        return b"".join(parts)

    def readinto(self, into: memoryview, /) -> int:
        done = 0
        while done < len(into) and self._fill():
            part = self._chunk[: len(into) - done]
            into[done : done + len(part)] = part
            self._chunk = self._chunk[len(part) :]
            done += len(part)
        return done

    def end(self) -> None:
        """The request has ended: wake the reading thread."""
        self._ended = True
        if self._waiting is not None:
            self._waiting.cancel()

    def _fill(self) -> bool:
        """Wait for the next bytes. False at the end of the body, or if the peer stalls or
        disconnects.
        """
        while not self._chunk and not self._ended:
            self._waiting = asyncio.run_coroutine_threadsafe(self._next(), self._loop)
            try:
                chunk = self._waiting.result(STALL_S)
            except (TimeoutError, CancelledError, ClientDisconnect, StopAsyncIteration):
                self.end()
                return False
            self._left -= len(chunk)
            if self._left < 0:
                raise ArchiveTooLargeError
            self._chunk = memoryview(chunk)
        return bool(self._chunk)

    async def _next(self) -> bytes:
        async for chunk in self._body:
            return chunk
        self._ended = True
        return b""


class ArchiveDownload(StreamingResponse):
    """The response with an archive. After an error it is cut off, which the peer can detect."""

    def __init__(self, content: AsyncIterator[bytes], over: Callable[[], None]) -> None:
        headers = {"content-disposition": 'attachment; filename="session.kvsession"'}
        super().__init__(content, media_type=MEDIA, headers=headers)
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALL_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except* (KVDepotError, OSError, ClientDisconnect) as errors:
            _log.warning("an export was cut: %s", errors.exceptions[0])
        finally:
            self._over()


class ArchiveMover:
    """Moves archives for one server. Used by the thread of its event loop."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._threads = ThreadPoolExecutor(ARCHIVES_MAX, "kvdepot-archive")
        self._moving = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def begin(self) -> None:
        """Take one of the ARCHIVES_MAX places; `over` gives it back.
        HTTPException if none is free.
        """
        if self._moving >= ARCHIVES_MAX:
            raise HTTPException(
                429, f"{ARCHIVES_MAX} archives are being moved", {"retry-after": "5"}
            )
        self._moving += 1

    def over(self) -> None:
        self._moving -= 1

    async def download(self, begin: Callable[[], Iterator[bytes | memoryview]]) -> ArchiveDownload:
        """Send the pieces of an archive. Errors of `begin` are raised before anything is sent."""
        self.begin()
        try:
            pieces = await self._call(begin)
        except BaseException:
            self.over()
            raise
        return ArchiveDownload(self._chunks(pieces), self.over)

    async def upload(
        self, request: Request, take: Callable[[UploadedArchive], dict[str, Any]]
    ) -> dict[str, Any]:
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._bytes_max:
            raise self._too_large()
        self.begin()
        source = UploadedArchive(request.stream(), self._bytes_max, asyncio.get_running_loop())
        try:
            found: dict[str, Any] = await self._call(lambda: take(source))
        except ArchiveTooLargeError as error:
            raise self._too_large() from error
        finally:
            source.end()
            self.over()
        return found

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the archive has more than {self._bytes_max} bytes")

    async def _chunks(self, pieces: Iterator[bytes | memoryview]) -> AsyncIterator[bytes]:
        while chunk := await self._call(lambda: _joined(pieces)):
            yield chunk

    async def _call(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _joined(pieces: Iterator[bytes | memoryview]) -> bytes:
    """The next pieces joined to about _JOINED_BYTES; empty at the end."""
    parts, size = [], 0
    for piece in pieces:
        parts.append(bytes(piece))
        size += len(piece)
        if size >= _JOINED_BYTES:
            break
    return b"".join(parts)
