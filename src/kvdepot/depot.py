"""The depot, which `kvdepot.open` returns: the interface for programs.

A `Depot` checks arguments, converts keys and buffers to arrays, and calls an engine: that of a
store in this process (`store.store.Store`) or of a daemon (`daemon.client.remote.RemoteStore`).
"""

import builtins
import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from kvdepot.config.settings import TenantConfig
from kvdepot.core.admin import DepotAdmin, DepotVolumes
from kvdepot.core.audit import DepotAudits
from kvdepot.core.block import ANSWERS, KEY_BYTES, TAG_BYTES, BlockKey, GetResult, PutResult
from kvdepot.core.block_wait import IDLE_S, BlockWait
from kvdepot.core.depot import (
    CLOSE_TIMEOUT_S,
    FlushReport,
    Layout,
    Lease,
    Match,
    NamespaceHandle,
    PrefetchHint,
    Reservation,
    checked_deadline,
)
from kvdepot.core.hf_config import model_layout
from kvdepot.core.keys import Keys, TokenIds, as_words, check_key, token_bytes
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.core.requests import BLOCK_DTYPE, Array, Offer
from kvdepot.core.sessions import DepotSessions
from kvdepot.errors import BadBufferError, ConfigError, KeyFormatError
from kvdepot.format.record import TOKEN_BYTES
from kvdepot.native import address_of

BLOCK_BYTES_MAX: Final = (1 << 31) - 8192
"""Largest block. Its record is the most that one system call reads or writes."""
_BLOCK: Final = struct.Struct("<32s5qQ")
"""A row of BLOCK_DTYPE."""
_UNUSABLE: Final = (builtins.BufferError, ValueError, TypeError)


@dataclass(frozen=True, slots=True)
class DepotCalls:
    """The engine's calls on arrays, for one caller. They raise StoreClosedError after `close`."""

    register: Callable[[NamespaceHandle], None]
    match: Callable[[Keys], bytes]
    """Returns the fastest tier of each block of the longest resident prefix
    (index in TIER_NAMES)."""
    lease: Callable[[Keys, "Namespaces"], Lease]
    read: Callable[[Array, float], bytes]
    """Fills the buffers of blocks. Returns an index into ANSWERS for each."""
    put: Callable[[Offer, float], list[PutResult]]
    reserve: Callable[[Offer, float], Reservation]
    prefetch: Callable[[Keys, float], PrefetchHint]
    remove: Callable[[Keys | None, bytes], int]
    """Removes blocks; without keys all blocks of the namespace with this tag."""
    flush: Callable[[float, Keys | None], FlushReport]


@dataclass(frozen=True, slots=True)
class DepotDefaults:
    """Defaults for arguments that a caller leaves out."""

    block_tokens: int
    put_timeout_s: float
    read_timeout_s: float
    tenants: Mapping[str, TenantConfig]


class Depot(ABC):
    """Keeps KV blocks in memory and on drives. Use it as a context manager or call `close`.

    A buffer is any object with a contiguous buffer: bytes, bytearray, memoryview, a numpy array, a
    torch CPU tensor through numpy. The depot uses it only until the call returns. No call raises
    because of a failed drive or daemon. After `close` every call but `close` raises
    StoreClosedError. Thread-safe.
    """

    sessions: DepotSessions
    """Sessions by name: pins, prefetch, archives."""
    volumes: DepotVolumes
    """The drives of the store, and changes to them."""
    audits: DepotAudits
    """Audits of blocks, and namespaces in quarantine."""
    admin: DepotAdmin
    """Checks, recordings and reports of engines."""

    def __init__(self, calls: DepotCalls, defaults: DepotDefaults) -> None:
        self._calls = calls
        self._defaults = defaults
        self._namespaces = Namespaces()

    def namespace(
        self,
        known: Namespace | None = None,
        /,
        *,
        model: str = "",
        layout: Layout | None = None,
        tenant: str = "",
        secret: bytes | None = None,
        **fields: Any,
    ) -> NamespaceHandle:
        """Register a namespace and return its handle, which computes keys.

        Give either `known`, a Namespace, or its fields. `layout` is a KVLayout, or the path or
        content of a Hugging Face config.json of a model with one KV group; blocks then have the
        configured `block_tokens`. `secret` seeds the keys; by default it is that of the tenant in
        the configuration. `fields` are the other fields of core.namespace.Namespace: fingerprint,
        shard_rank, shard_size, adapter, extra. Raises ConfigError if a field is invalid or the
        blocks do not fit the store.
        """
        if known is None:
            known = self._make_namespace(
                model, layout, {**fields, "tenant": tenant, "secret": secret}
            )
        check_block_bytes(known.layout.block_bytes)
        self._calls.register(NamespaceHandle(known))
        return self._namespaces.add(known)

    def put_many(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Any],
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> list[PutResult]:
        """Copy blocks into memory. They are written to drives in the background: see `flush`.

        Give the keys of one prompt head first. Returns a result for each block: STORED; PRESENT if
        the store has it already; THROTTLED if there was no room in time; REFUSED if it can never
        fit. STORED and PRESENT are true. A block that only drives have is copied into memory again
        (STORED) if there is room, but not written again.

        Blocks for up to `timeout_s` (default writeback.put_timeout) while memory is full of blocks
        in use, or more than writeback.dirty_limit waits to be written. With 0 it does not wait for
        writes; the block may then be evicted before it is written. Raises BadBufferError or
        KeyFormatError for invalid arguments, before anything is stored.

        `token_ids` are those of all these blocks, in order. They are stored with the blocks, for
        routers (docs/routers.md) and for inspection. Blocks without them are not announced.
        """
        keys, buffers = list(keys), list(buffers)  # a lazy sequence would free what we point to
        offer = self._namespaces.offer(keys, buffers, token_ids)
        limit_s = self._defaults.put_timeout_s if timeout_s is None else timeout_s
        return self._calls.put(offer, limit_s)

    def get_many(
        self,
        keys: Sequence[BlockKey],
        intos: Sequence[Any],
        *,
        layers: range | None = None,
        timeout_s: float | None = None,
    ) -> list[GetResult]:
        """Read blocks, or a range of their layers, into buffers.

        Returns a result for each block. If it is true the buffer holds exactly the bytes that were
        put; if it is false it has a reason, and the content of the buffer is undefined. Blocks for
        `timeout_s` at most (default ssd.read_timeout); later blocks are misses. Buffers need no
        alignment. Raises BadBufferError or KeyFormatError for invalid arguments, before anything is
        read.
        """
        keys, intos = list(keys), list(intos)
        blocks = self._namespaces.blocks(keys, intos, writable=True, layers=layers)
        limit_s = self._defaults.read_timeout_s if timeout_s is None else timeout_s
        return [ANSWERS[code] for code in self._calls.read(blocks, limit_s)]

    def reserve(
        self,
        keys: Sequence[BlockKey],
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> Reservation:
        """Reserve slots in memory that the caller fills in place: a put without a copy.

        Give the keys of one prompt head first. Blocks for up to `timeout_s` (default
        writeback.put_timeout) until the first block has room; further blocks without room are
        THROTTLED. `token_ids` as for put_many.
        """
        offer = self._namespaces.offer(keys, None, token_ids)
        limit_s = self._defaults.put_timeout_s if timeout_s is None else timeout_s
        return self._calls.reserve(offer, limit_s)

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Return the longest resident prefix of `keys`. No I/O; does not count as a use."""
        return Match.of(self._calls.match(as_words(checked(keys))))

    def lease(self, keys: Sequence[BlockKey]) -> Lease:
        """Protect the longest resident prefix from eviction until the lease
        ends. Counts as a use.
        """
        return self._calls.lease(as_words(checked(keys)), self._namespaces)

    def prefetch(self, keys: Sequence[BlockKey], deadline_s: float) -> PrefetchHint:
        """Read blocks of one prompt, given head first, into memory within `deadline_s` seconds.

        Works in the background, as far as memory has room. Does not block. If blocks are missing
        and a tier is shared with other nodes, also looks for new blocks there.
        """
        deadline_s = checked_deadline(deadline_s)
        self._namespaces.check(checked(keys))
        return self._calls.prefetch(as_words(keys), deadline_s)

    def wait_for(
        self, keys: Sequence[BlockKey], timeout_s: float, *, idle_s: float = IDLE_S
    ) -> Match:
        """Wait until all blocks are resident, for `timeout_s` at most. Returns the longest resident
        prefix.

        Use it for blocks that another node is writing to a shared tier. Blocks that arrive are read
        into memory, as by `prefetch`. Gives up when no further block has come for `idle_s`, or when
        the shared tier is down: the others must be computed here.
        """
        wait = BlockWait(time.monotonic(), timeout_s, idle_s)
        found, asked = 0, len(keys)
        while found < len(keys) and wait.left_s(now_s := time.monotonic()) > 0:
            hint = self.prefetch(keys[found : found + asked], wait.until_s - now_s)
            found += hint.resident
            has_come = wait.note(now_s, found)
            if not (has_come or hint.may_come):
                break
            asked = len(keys) if has_come else 1  # the next block tells if any has come
            if not has_come:
                time.sleep(max(0.0, min(wait.look_s - now_s, wait.left_s(now_s))))
        return self.match(keys)

    def remove(
        self,
        keys: BlockKey | Sequence[BlockKey] = (),
        *,
        namespace: NamespaceHandle | bytes | None = None,
    ) -> int:
        """Delete blocks from all tiers, durably: those with these keys, or all of a namespace (its
        handle, or the tag of its keys). Returns the number of blocks that were stored.

        Lookups do not find a leased block any more; its copies are dropped when its last lease
        ends. In a store opened read-only the removal lasts until the store is closed.
        """
        if namespace is not None:
            tag = namespace if isinstance(namespace, bytes) else namespace.tag
            return self._calls.remove(None, tag)
        return self._calls.remove(
            as_words(checked([keys] if isinstance(keys, bytes) else keys)), b""
        )

    def flush(
        self, timeout_s: float = CLOSE_TIMEOUT_S, *, keys: Sequence[BlockKey] | None = None
    ) -> FlushReport:
        """Wait until all blocks put before this call are written, and durable as configured.

        The report is true if all of them are. `not_durable` counts the others by reason: blocks in
        memory, and blocks evicted unwritten since the last flush. Blocks evicted from a drive do
        not count. `tiers` has the counts of each tier. With `keys` the report is about these blocks
        only, and `blocks` has an answer for each. Failed writes are tried again. Blocks for
        `timeout_s` at most.
        """
        words = None if keys is None else as_words(checked(list(keys)))
        return self._calls.flush(timeout_s, words)

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return counters, and the contents and state of each tier, as plain values."""

    @abstractmethod
    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> FlushReport:
        """Flush as `flush` does, then stop the threads and release everything. May be called
        twice.
        """

    @property
    @abstractmethod
    def memory(self) -> tuple[memoryview, ...]:
        """All memory in which views of blocks may lie, to be page-locked for a device."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_namespace(
        self, model: str, layout: Layout | None, fields: Mapping[str, Any]
    ) -> Namespace:
        if layout is None:
            raise ConfigError("layout", "is missing", hint="layout=kvdepot.KVLayout.gqa(…)")
        return make_namespace(
            model, layout, self._defaults.block_tokens, self._defaults.tenants, fields
        )


class Namespaces:
    """The namespaces that a program has registered with a depot, by the tag of their keys."""

    def __init__(self) -> None:
        self._known: dict[bytes, NamespaceHandle] = {}

    def add(self, namespace: Namespace) -> NamespaceHandle:
        """Add a namespace, if it is new, and return its handle."""
        return self._known.setdefault(namespace.tag, NamespaceHandle(namespace))

    def tags_of(self, tenant: str) -> list[bytes]:
        """Tags of the registered namespaces of a tenant."""
        known = self._known.values()
        return [space.tag for space in known if space.namespace.tenant == tenant]

    def of(self, key: BlockKey) -> NamespaceHandle:
        """The namespace of a key. KeyFormatError if it is not registered."""
        space = self._known.get(check_key(key)[:TAG_BYTES])
        if space is None:
            raise _unknown()
        return space

    def check(self, keys: Sequence[BlockKey]) -> None:
        """Raise KeyFormatError if a key's namespace is not registered."""
        for key in {key[:TAG_BYTES]: key for key in keys}.values():
            self.of(key)

    def blocks(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Any] | None = None,
        *,
        writable: bool = False,
        layers: range | None = None,
    ) -> Array:
        """Rows of BLOCK_DTYPE for blocks, or for a range of their layers: with the addresses of
        the buffers, which the caller keeps alive, or without addresses.
        """
        if buffers is not None and len(keys) != len(buffers):
            raise BadBufferError(f"{len(keys)} keys but {len(buffers)} buffers")
        known, rows, address = self._known, [], 0
        for index, key in enumerate(keys):
            is_key = type(key) is bytes and len(key) == KEY_BYTES
            space = (known.get(key[:TAG_BYTES]) if is_key else None) or self.of(key)
            start, stop = 0, space.block_bytes
            if layers is not None:
                start, stop = _part(space.layout, layers)
            if buffers is not None:
                try:
                    address, nbytes = address_of(buffers[index], writable)
                except _UNUSABLE as error:
                    raise _unusable(buffers[index], error) from error
                if nbytes != stop - start:
                    raise BadBufferError(f"the buffer must have {stop - start} bytes, not {nbytes}")
            rows.append(
                _BLOCK.pack(
                    key, space.block_bytes, space.chunk_bytes, address, start, stop, space.producer
                )
            )
        return np.frombuffer(bytearray().join(rows), BLOCK_DTYPE)

    def offer(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Any] | None,
        token_ids: TokenIds | None = None,
    ) -> Offer:
        """The offer of a `put_many` or, without buffers, of a `reserve`. The caller keeps the
        buffers alive.
        """
        tokens = () if token_ids is None else self._tokens(keys, token_ids)
        return Offer(self.blocks(keys, buffers), tokens)

    def _tokens(
        self, keys: Sequence[BlockKey], token_ids: TokenIds
    ) -> Sequence[bytes | memoryview]:
        """Split the token ids by block."""
        tokens, at = token_bytes(token_ids), 0
        parts = []
        for key in keys:
            end = at + TOKEN_BYTES * self._known[key[:TAG_BYTES]].layout.block_tokens
            parts.append(tokens[at:end])
            at = end
        if at != len(tokens):
            raise KeyFormatError(
                f"{len(keys)} blocks have {at // TOKEN_BYTES} tokens, "
                f"{len(tokens) // TOKEN_BYTES} were given",
                hint="pass the token_ids of exactly the blocks in keys",
            )
        return parts


def _unknown() -> KeyFormatError:
    return KeyFormatError(
        "the key's namespace is not registered with this store",
        hint="call store.namespace(…) first",
    )


def make_namespace(
    model: str,
    layout: Layout,
    block_tokens: int,
    tenants: Mapping[str, TenantConfig],
    fields: Mapping[str, Any],
) -> Namespace:
    """Make a namespace; `fields` are the further fields of core.namespace.Namespace."""
    if not isinstance(layout, KVLayout):
        layout = _layout_of(layout, block_tokens)
    given = dict(fields)
    if given.get("secret") is None:
        known = tenants.get(given.get("tenant", ""))
        given["secret"] = known.secret() if known is not None else b""
    try:
        namespace = Namespace(model=model, layout=layout, **given)
    except TypeError as error:
        raise ConfigError("namespace", str(error).split(") ", 1)[-1]) from error
    check_block_bytes(namespace.layout.block_bytes)
    return namespace


def check_block_bytes(block_bytes: int) -> None:
    """Raise ConfigError for blocks that one system call cannot read or write."""
    if block_bytes > BLOCK_BYTES_MAX:
        raise ConfigError(
            "layout",
            f"a block of {block_bytes} bytes is over 2 GiB",
            hint="use fewer block_tokens",
        )


def checked(keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
    """Return the keys. KeyFormatError if one of them is malformed."""
    if not (set(map(type, keys)) <= {bytes} and set(map(len, keys)) <= {KEY_BYTES}):
        for key in keys:
            check_key(key)
    return keys


def _layout_of(config: Mapping[str, Any] | str | os.PathLike[str], block_tokens: int) -> KVLayout:
    content = config if isinstance(config, Mapping) else Path(config)
    model = model_layout(content, block_tokens=block_tokens)
    if len(model.groups) != 1:
        raise ConfigError(
            "layout",
            f"the model has {len(model.groups)} KV groups",
            hint="register a namespace for each group of kvdepot.model_layout(…)",
        )
    return model.groups[0]


def _part(layout: KVLayout, layers: Any) -> tuple[int, int]:
    """The first byte of a range of layers, and the end of it."""
    if not isinstance(layers, range) or layers.step != 1:
        raise BadBufferError(f"layers must be consecutive, got {layers}")
    start, nbytes = layout.layer_range(layers.start, layers.stop)
    return start, start + nbytes


def _unusable(buffer: Any, error: Exception) -> BadBufferError:
    if isinstance(error, builtins.BufferError):
        return BadBufferError("the target buffer is read-only")
    if isinstance(error, ValueError):
        return BadBufferError("the buffer is not contiguous")
    return BadBufferError(f"{type(buffer).__name__} is not a buffer")
