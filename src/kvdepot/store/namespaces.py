"""The namespaces a store knows, and what a caller asks of it, checked before anything is done."""

import builtins
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdepot.config.settings import TenantConfig
from kvdepot.core.block import KEY_BYTES, TAG_BYTES, BlockKey
from kvdepot.core.depot import Layout, NamespaceHandle
from kvdepot.core.hf_config import model_layout
from kvdepot.core.keys import TokenIds, check_key, token_bytes
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.errors import BadBufferError, ConfigError, KeyFormatError
from kvdepot.format.record import TOKEN_BYTES
from kvdepot.native import address_of
from kvdepot.store.read.disk_reads import BlockRead
from kvdepot.store.write.put import NewBlock

BLOCK_BYTES_MAX = (1 << 31) - 8192
"""With its head, the most that the kernel reads or writes in one go."""

_PARSED_MAX = 4096


class Namespaces:
    """Namespaces by the tag of their keys."""

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

    def new_blocks(
        self, keys: Sequence[BlockKey], buffers: Sequence[Any], token_ids: TokenIds | None = None
    ) -> list[NewBlock]:
        """What `put_many` was asked. The caller keeps the buffers alive."""
        _check_lengths(keys, buffers)
        checked(keys)
        pairs = zip(keys, buffers, strict=True)
        offers = [self._new_block(key, buffer) for key, buffer in pairs]
        self._add_tokens(offers, token_ids)
        return offers

    def empty_blocks(
        self, keys: Sequence[BlockKey], token_ids: TokenIds | None = None
    ) -> list[NewBlock]:
        """What `reserve` was asked: offers whose bytes come later."""
        spaces = [self.of(key) for key in keys]
        offers = [
            NewBlock(key, 0, space.block_bytes, space.chunk_bytes, producer=space.producer)
            for key, space in zip(keys, spaces, strict=True)
        ]
        self._add_tokens(offers, token_ids)
        return offers

    def _add_tokens(self, offers: Sequence[NewBlock], token_ids: TokenIds | None) -> None:
        """Give each offer its token ids, if the caller has told them."""
        if token_ids is None:
            return
        tokens, at = token_bytes(token_ids), 0
        for offer in offers:
            end = at + TOKEN_BYTES * self._known[offer.key[:TAG_BYTES]].layout.block_tokens
            offer.tokens = tokens[at:end]
            at = end
        if at != len(tokens):
            raise KeyFormatError(
                f"{len(offers)} blocks have {at // TOKEN_BYTES} tokens, "
                f"{len(tokens) // TOKEN_BYTES} were given",
                hint="token_ids are those of the blocks in keys, and no others",
            )

    def reads(self, keys: Sequence[BlockKey], intos: Sequence[Any], layers: Any) -> list[BlockRead]:
        """What `get_many` was asked. The caller keeps the buffers alive."""
        _check_lengths(keys, intos)
        checked(keys)
        return [self._read(key, into, layers) for key, into in zip(keys, intos, strict=True)]

    def whole_reads(self, keys: Sequence[BlockKey]) -> list[BlockRead]:
        """What `deliver` was asked: blocks to be looked at where they are."""
        spaces = [self.of(key) for key in keys]
        return [
            BlockRead(key, 0, space.block_bytes, space.chunk_bytes, 0, space.block_bytes)
            for key, space in zip(keys, spaces, strict=True)
        ]

    def _new_block(self, key: BlockKey, buffer: Any) -> NewBlock:
        space = self._known.get(key[:TAG_BYTES]) or self.of(key)
        address, nbytes = _buffer(buffer, writable=False)
        if nbytes != space.block_bytes:
            raise BadBufferError(
                f"a block here has {space.block_bytes} bytes, the buffer has {nbytes}"
            )
        return NewBlock(key, address, nbytes, space.chunk_bytes, producer=space.producer)

    def _read(self, key: BlockKey, into: Any, layers: Any) -> BlockRead:
        space = self._known.get(key[:TAG_BYTES]) or self.of(key)
        start, nbytes = 0, space.block_bytes
        if layers is not None:
            if not isinstance(layers, range) or layers.step != 1:
                raise BadBufferError(f"layers must be consecutive, got {layers}")
            start, nbytes = space.layout.layer_range(layers.start, layers.stop)
        address, length = _buffer(into, writable=True)
        if length != nbytes:
            raise BadBufferError(f"the target must have {nbytes} bytes, it has {length}")
        return BlockRead(key, address, space.block_bytes, space.chunk_bytes, start, start + nbytes)


@dataclass(frozen=True, slots=True)
class Described:
    """A namespace as its description tells it."""

    layout: KVLayout
    model: str
    tenant: str
    namespace: Namespace | None
    """None: it takes a secret that is not known here."""


class DescribedNamespaces:
    """Namespaces whose description is here, whether or not a program has registered them."""

    def __init__(
        self, descriptions: Callable[[], dict[bytes, bytes]], tenants: Mapping[str, TenantConfig]
    ) -> None:
        self._descriptions = descriptions
        self._tenants = tenants
        self._parsed: dict[bytes, Described | None] = {}
        """By description; None: it is none."""

    def all(self) -> dict[bytes, Described]:
        """By tag."""
        found: dict[bytes, Described] = {}
        for tag, text in self._descriptions().items():
            if text not in self._parsed:
                if len(self._parsed) >= _PARSED_MAX:
                    self._parsed.clear()
                self._parsed[text] = self._parse(text)
            known = self._parsed[text]
            if known is not None:
                found[tag] = known
        return found

    def _parse(self, text: bytes) -> Described | None:
        try:
            told = json.loads(text)
            layout = KVLayout.from_description(told["layout"])
            model, tenant = str(told["model"]), str(told["tenant"])
        except (ValueError, KeyError, TypeError):
            return None
        known = self._tenants.get(tenant)
        try:
            secret = known.secret() if known is not None else b""
            return Described(layout, model, tenant, Namespace.from_description(told, secret))
        except ConfigError:
            return Described(layout, model, tenant, None)


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
