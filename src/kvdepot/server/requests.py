"""Serves the requests of one connection, one after the other."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from kvdepot.core.config import Config
from kvdepot.errors import ConfigError, KVDepotError, WireError
from kvdepot.server.admin import AdminRequests
from kvdepot.server.client_holdings import ClientHoldings
from kvdepot.server.hints import HintRequests
from kvdepot.server.limits import TAKE_TIMEOUT_S
from kvdepot.store.mapped import BlockSize, Hold, MappedBlocks, MappedStore
from kvdepot.store.store import Store
from kvdepot.wire import messages
from kvdepot.wire.frames import Channel, Flag, Frame, FrameKind

_AS_CONFIGURED: Final = 2
_INDEX: Final = np.dtype("<u4")
_LEASE: Final = np.dtype("<u8")


class ClientGoneError(KVDepotError):
    """The client closed its connection in the middle of an answer."""


class RequestHandler:
    """One connection's requests and answers."""

    def __init__(
        self,
        channel: Channel,
        client: ClientHoldings,
        store: Store,
        mapped: MappedStore,
        config: Config,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._channel = channel
        self._client = client
        self._store = store
        self._mapped = mapped
        self._config = config
        self._describe = describe
        self._handlers: Final = {
            FrameKind.REGISTER: self._register,
            FrameKind.MATCH: self._match,
            FrameKind.LEASE: self._lease,
            FrameKind.WHERE: self._where,
            FrameKind.RELEASE: self._release,
            FrameKind.DELIVER: self._deliver,
            FrameKind.FETCH: self._fetch,
            FrameKind.RESERVE: self._reserve,
            FrameKind.SEAL: self._seal,
            FrameKind.ABANDON: self._abandon,
            FrameKind.TOUCH: self._touch,
            FrameKind.REMOVE: self._remove,
            FrameKind.REMOVE_NAMESPACE: self._remove_namespace,
            FrameKind.FLUSH: self._flush,
            FrameKind.CHECK: self._check,
            FrameKind.STATS: self._stats,
            FrameKind.HAS_SECRET: self._has_secret,
            **HintRequests(channel, client, mapped).handlers,
            **AdminRequests(channel, store).handlers,
        }

    def serve(self, frame: Frame) -> None:
        """Answer one request. WireError: it makes no sense, and the client must go."""
        verb = self._handlers.get(frame.kind)
        if verb is None:
            raise WireError(f"{frame.kind.name} is not a request")
        verb(frame)

    def _number(self, frame: Frame, value: int) -> None:
        self._channel.send(FrameKind.NUMBER, frame.serial, messages.Number(value).body())

    def _register(self, frame: Frame) -> None:
        head, description = messages.split(messages.Register, frame.body)
        size = BlockSize(head.block_bytes, head.chunk_bytes)
        try:
            _check_json(description)
            self._mapped.register(head.tag, size, description)
        except ConfigError as error:
            refusal = {"path": error.path, "reason": str(error), "hint": error.hint}
            self._channel.send(FrameKind.REFUSED, frame.serial, json.dumps(refusal).encode())
        else:
            self._number(frame, 1)

    def _match(self, frame: Frame) -> None:
        keys = messages.KeyBatch(bytes(frame.body))
        self._channel.send(FrameKind.TIERS, frame.serial, self._mapped.match(keys.words()))

    def _lease(self, frame: Frame) -> None:
        number, hold = self._client.lease(messages.KeyBatch(bytes(frame.body)).words())
        self._tell_where(frame, number, hold)

    def _where(self, frame: Frame) -> None:
        number = messages.Number.parse(frame.body).value
        self._tell_where(frame, number, self._client.held(number))

    def _tell_where(self, frame: Frame, number: int, hold: Hold) -> None:
        rows = np.empty(len(hold.rows), messages.PLACE_DTYPE)
        rows["location"], rows["nbytes"] = self._mapped.where(hold)
        self._channel.send(FrameKind.LEASED, frame.serial, messages.with_table(number, rows))

    def _release(self, frame: Frame) -> None:
        if len(frame.body) % _LEASE.itemsize:
            raise WireError("leases of odd length")
        self._client.release(np.frombuffer(bytes(frame.body), _LEASE).tolist())

    def _deliver(self, frame: Frame) -> None:
        asked = messages.Deliver.parse(frame.body)
        if asked.verify > _AS_CONFIGURED:
            raise WireError(f"verify {asked.verify}")
        keys = self._client.held(asked.lease).words[asked.start : asked.stop]
        verify = None if asked.verify == _AS_CONFIGURED else bool(asked.verify)
        timeout_s = messages.checked_timeout(asked.timeout_s)

        def arrive(arrivals: MappedBlocks, _: bool) -> None:
            self._announce(frame.serial, arrivals)

        answers = self._mapped.deliver(keys, timeout_s, verify, arrive)
        self._done(frame, asked.lease, answers)

    def _fetch(self, frame: Frame) -> None:
        head, raw = messages.split(messages.Fetch, frame.body)
        keys = messages.KeyBatch(raw).words()
        span = (head.start, head.stop)
        if span != (0, 0) and head.start >= head.stop:
            raise WireError(f"bytes {head.start} to {head.stop}")
        timeout_s = messages.checked_timeout(head.timeout_s)
        hold, number = Hold(), 0

        def arrive(arrivals: MappedBlocks, last: bool) -> None:
            nonlocal number
            if last:
                number = self._client.keep(hold)
            self._announce(frame.serial, arrivals, number)

        try:
            answers = self._mapped.fetch(
                keys, span, timeout_s, hold, arrive, verify=bool(head.verify)
            )
            if number:
                return
            number = self._client.keep(hold)
        finally:
            if not number:
                self._mapped.release(hold)
        self._done(frame, number, answers)

    def _announce(self, serial: int, arrivals: MappedBlocks, number: int = 0) -> None:
        """Tell the client of blocks that have come; wait while it takes what is only lent.

        With a number, that of a hold, nothing else will come.
        """
        rows = np.empty(len(arrivals.indices), messages.ARRIVAL_DTYPE)
        rows["index"], rows["location"] = arrivals.indices, arrivals.locations
        rows["staged"] = arrivals.staged
        lent = bool(arrivals.staged.any())
        flags = (Flag.LENT if lent else 0) | (Flag.LAST if number else 0)
        flags |= Flag.VERIFIED if arrivals.verified else 0
        self._channel.send(FrameKind.ARRIVED, serial, messages.with_table(number, rows), flags)
        if lent:
            self._await_taken(serial)

    def _await_taken(self, serial: int) -> None:
        answer = self._channel.receive(TAKE_TIMEOUT_S)
        if answer is None:
            raise ClientGoneError("the client is gone")
        if answer.kind is not FrameKind.TAKEN or answer.serial != serial:
            raise WireError(f"{answer.kind.name} instead of TAKEN")

    def _done(self, frame: Frame, number: int, answers: bytes) -> None:
        self._channel.send(FrameKind.DONE, frame.serial, messages.Number(number).body() + answers)

    def _reserve(self, frame: Frame) -> None:
        head, raw = messages.split(messages.Seconds, frame.body)
        timeout_s = messages.checked_timeout(head.timeout_s)
        keys = messages.KeyBatch(raw).words()
        pad = bool(frame.flags & Flag.PAD)
        number, offers, answers = self._client.reserve(keys, timeout_s, pad=pad)
        rows = np.empty(len(answers), messages.SLOT_DTYPE)
        rows["outcome"] = [messages.PUT_CODES[answer] for answer in answers]
        rows["location"] = [
            messages.NOWHERE if offer is None else offer.slot for offer in offers[: len(answers)]
        ]
        self._channel.send(FrameKind.RESERVED, frame.serial, messages.with_table(number, rows))

    def _seal(self, frame: Frame) -> None:
        number, indices = messages.table(frame.body, _INDEX)
        self._client.seal(number, indices.tolist())
        self._number(frame, len(indices))

    def _abandon(self, frame: Frame) -> None:
        self._client.abandon(messages.Number.parse(frame.body).value)

    def _touch(self, frame: Frame) -> None:
        keys = messages.KeyBatch(bytes(frame.body)).list()
        self._number(frame, self._store.touch(keys))

    def _remove(self, frame: Frame) -> None:
        keys = messages.KeyBatch(bytes(frame.body)).list()
        self._number(frame, self._store.remove(keys))

    def _remove_namespace(self, frame: Frame) -> None:
        tag = messages.checked_tag(bytes(frame.body))
        self._number(frame, self._store.remove_tag(tag))

    def _flush(self, frame: Frame) -> None:
        timeout_s = messages.checked_timeout(messages.Seconds.parse(frame.body).timeout_s)
        report = self._store.flush(timeout_s)
        answer = messages.Flushed(report.ok, report.waiting, report.given_up)
        self._channel.send(FrameKind.FLUSHED, frame.serial, answer.body())

    def _check(self, frame: Frame) -> None:
        deep = bool(messages.Number.parse(frame.body).value)
        report = self._store.check(deep=deep)
        self._channel.send_text(frame.serial, json.dumps(report.as_dict()).encode())

    def _stats(self, frame: Frame) -> None:
        if frame.body:
            raise WireError("STATS with a body")
        stats = {**self._store.stats(), "daemon": dict(self._describe())}
        self._channel.send_text(frame.serial, json.dumps(stats, default=str).encode())

    def _has_secret(self, frame: Frame) -> None:
        tenant = messages.checked_text(bytes(frame.body), "a tenant's name")
        known = self._config.tenants.get(tenant)
        secret = known is not None and (known.secret_file is not None or known.secret_hex)
        self._number(frame, int(bool(secret)))


def _check_json(description: bytes) -> None:
    try:
        json.loads(description)
    except (ValueError, RecursionError) as error:
        raise WireError("a description that is no JSON") from error
