"""What a program asks of a depot, checked and as arrays: keys, buffers, layers, token ids."""

import builtins
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvdepot.config.settings import TenantConfig
from kvdepot.core.block import KEY_BYTES, TAG_BYTES, BlockKey
from kvdepot.core.depot import Layout, NamespaceHandle
from kvdepot.core.hf_config import model_layout
from kvdepot.core.keys import TokenIds, as_words, check_key, token_bytes
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.core.requests import BLOCK_DTYPE, Array, Offer
from kvdepot.errors import BadBufferError, ConfigError, KeyFormatError
from kvdepot.format.record import TOKEN_BYTES
from kvdepot.native import address_of

BLOCK_BYTES_MAX: Final = (1 << 31) - 8192
"""With its head, the most that the kernel reads or writes in one go."""


class Namespaces:
    """The namespaces that a program has registered with a depot, by the tag of their keys."""

    def __init__(self) -> None:
        self._known: dict[bytes, NamespaceHandle] = {}

    def add(self, namespace: Namespace) -> NamespaceHandle:
        """Know a namespace from now on."""
        return self._known.setdefault(namespace.tag, NamespaceHandle(namespace))

    def all(self) -> list[NamespaceHandle]:
        return list(self._known.values())

    def tags_of(self, tenant: str) -> list[bytes]:
        """Of the namespaces of a tenant that are known here."""
        known = self._known.values()
        return [space.tag for space in known if space.namespace.tenant == tenant]

    def of(self, key: BlockKey) -> NamespaceHandle:
        """The namespace of a key, or KeyFormatError."""
        space = self._known.get(check_key(key)[:TAG_BYTES])
        if space is not None:
            return space
        raise KeyFormatError(
            "the key's namespace is not registered with this store",
            hint="call store.namespace(…) first",
        )

    def check(self, keys: Sequence[BlockKey]) -> None:
        """Raise KeyFormatError if a key's namespace is not registered."""
        for key in {key[:TAG_BYTES]: key for key in keys}.values():
            self.of(key)

    def blocks(self, keys: Sequence[BlockKey]) -> Array:
        """Whole blocks, as rows of BLOCK_DTYPE without an address."""
        checked(keys)
        rows = np.zeros(len(keys), BLOCK_DTYPE)
        if len(keys):
            rows["key"] = as_words(keys)
        for space, mine in self._parts(keys, rows):
            part = rows[mine]
            part["payload_bytes"] = part["stop"] = space.block_bytes
            part["chunk_bytes"], part["producer"] = space.chunk_bytes, space.producer
            rows[mine] = part
        return rows

    def offer(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Any] | None,
        token_ids: TokenIds | None = None,
    ) -> Offer:
        """What `put_many` or, without buffers, `reserve` was asked. The caller keeps the buffers
        alive.
        """
        if buffers is not None:
            _check_lengths(keys, buffers)
        rows = self.blocks(keys)
        if buffers is not None:
            rows["address"], lengths = _addresses(buffers, writable=False)
            wrong = np.flatnonzero(lengths != rows["payload_bytes"])
            if len(wrong):
                expected, nbytes = rows["payload_bytes"][wrong[0]], lengths[wrong[0]]
                raise BadBufferError(f"a block here has {expected} bytes, the buffer has {nbytes}")
        return Offer(rows, self._tokens(keys, token_ids))

    def targets(self, keys: Sequence[BlockKey], intos: Sequence[Any], layers: Any) -> Array:
        """What `get_many` was asked. The caller keeps the buffers alive."""
        _check_lengths(keys, intos)
        rows = self.blocks(keys)
        if layers is not None:
            self._cut(keys, rows, layers)
        rows["address"], lengths = _addresses(intos, writable=True)
        wrong = np.flatnonzero(lengths != rows["stop"] - rows["start"])
        if len(wrong):
            row = rows[wrong[0]]
            raise BadBufferError(
                f"the target must have {row['stop'] - row['start']} bytes, "
                f"it has {lengths[wrong[0]]}"
            )
        return rows

    def _parts(
        self, keys: Sequence[BlockKey], rows: Array
    ) -> Iterator[tuple[NamespaceHandle, Array | slice]]:
        """The namespaces of the keys, and which rows are theirs."""
        if not len(keys):
            return
        tags = rows["key"][:, 0]
        if (tags == tags[0]).all():
            yield self.of(keys[0]), slice(None)
            return
        for tag, first in zip(*np.unique(tags, return_index=True), strict=True):
            yield self.of(keys[first]), np.flatnonzero(tags == tag)

    def _cut(self, keys: Sequence[BlockKey], rows: Array, layers: Any) -> None:
        """Ask for a range of layers of each block."""
        if not isinstance(layers, range) or layers.step != 1:
            raise BadBufferError(f"layers must be consecutive, got {layers}")
        for space, mine in self._parts(keys, rows):
            start, nbytes = space.layout.layer_range(layers.start, layers.stop)
            rows["start"][mine], rows["stop"][mine] = start, start + nbytes

    def _tokens(
        self, keys: Sequence[BlockKey], token_ids: TokenIds | None
    ) -> Sequence[bytes | memoryview]:
        """The token ids of each block; nothing if the caller has given none."""
        if token_ids is None:
            return ()
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
                hint="token_ids are those of the blocks in keys, and no others",
            )
        return parts


def make_namespace(
    model: str,
    layout: Layout,
    block_tokens: int,
    tenants: Mapping[str, TenantConfig],
    fields: Mapping[str, Any],
) -> Namespace:
    """What `namespace` was asked; `fields` are the others of core.namespace.Namespace."""
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
    """Refuse blocks that cannot be read and written as one."""
    if block_bytes > BLOCK_BYTES_MAX:
        raise ConfigError(
            "layout",
            f"a block of {block_bytes} bytes is over 2 GiB",
            hint="fewer block_tokens",
        )


def checked(keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
    """The keys, or KeyFormatError if one of them is none."""
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


def _check_lengths(keys: Sequence[BlockKey], buffers: Sequence[Any]) -> None:
    if len(keys) != len(buffers):
        raise BadBufferError(f"{len(keys)} keys but {len(buffers)} buffers")


def _addresses(buffers: Sequence[Any], *, writable: bool) -> tuple[list[int], Array]:
    """Addresses and lengths of callers' buffers."""
    found = [_buffer(buffer, writable=writable) for buffer in buffers]
    return [address for address, _ in found], np.array([nbytes for _, nbytes in found], np.int64)


def _buffer(buffer: Any, *, writable: bool) -> tuple[int, int]:
    """Address and length of a caller's buffer, or one clear error."""
    try:
        return address_of(buffer, writable)
    except builtins.BufferError as error:
        raise BadBufferError("the target buffer is read-only") from error
    except ValueError as error:
        raise BadBufferError("the buffer is not contiguous") from error
    except TypeError as error:
        raise BadBufferError(f"{type(buffer).__name__} is not a buffer") from error
