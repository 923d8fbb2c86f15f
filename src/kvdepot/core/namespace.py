"""Namespaces: blocks are only shared within one.

Namespaces that differ in any field share no key. A tenant's secret is needed to compute the
tenant's keys, and so to probe for blocks. Without one (`secret=b""`) tenants are separated by name
only, and the names are enough to compute the keys.

    root      = BLAKE2b-512(key=secret, person="kvdepot-space-v1")(encoded fields)
    tag       = BLAKE2b-64(person="kvdepot-tag-v1")(root)
    chain key = BLAKE2b-256(person="kvdepot-chain-v1")(root)

A secret longer than 64 bytes, BLAKE2b's limit, is replaced by its BLAKE2b-512 digest
(person="kvdepot-secret"). The tag is stored with the description, so a guessable secret can be
searched for offline: use 16 random bytes or more.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvdepot.core.block import TAG_BYTES, BlockKey
from kvdepot.core.keys import (
    CHAIN_KEY_BYTES,
    TokenIds,
    chain,
    check_key,
    encode,
    hashed_key,
    tag_of,
    token_bytes,
)
from kvdepot.core.layout import KVLayout
from kvdepot.errors import ConfigError, KeyFormatError

FORMAT_VERSION: Final = 1
"""Part of every key. Raised when the meaning of stored bytes changes."""

_VOLATILE: Final = frozenset(
    {
        "transformers_version",
        "_name_or_path",
        "_commit_hash",
        "_attn_implementation_autoset",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """All facts that make blocks incompatible or private: model, layout, shard, tenant and others.

    Immutable; picklable (the pickle contains the secret); safe to share between threads.
    """

    model: str
    """The model's name, as a person would write it."""
    layout: KVLayout
    """Layout of a block's bytes, with its dtype and its number of tokens."""
    fingerprint: str = ""
    """Config and weights revision, from `fingerprint()`. Empty: unknown; only the name counts."""
    shard_rank: int = 0
    """Tensor-parallel shard; 0 of 1 if all ranks have the same bytes (MLA)."""
    shard_size: int = 1
    adapter: str = ""
    """LoRA or other adapter id; empty for none."""
    tenant: str = ""
    """Owner of the blocks; empty for none."""
    secret: bytes = field(default=b"", repr=False)
    """The tenant's secret; empty means isolation by name only."""
    extra: tuple[tuple[str, str], ...] = ()
    """Further facts that the engine's bytes depend on: attention backend, instruction set, cache
    salt, KV group. Pairs of name and value, sorted by name."""
    tag: bytes = field(init=False, repr=False, compare=False)
    """First 8 bytes of every key in this namespace."""
    _chain_key: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "extra", _sorted_pairs(self.extra))
        root = self._root()
        tag = hashlib.blake2b(root, digest_size=TAG_BYTES, person=b"kvdepot-tag-v1")
        key = hashlib.blake2b(root, digest_size=CHAIN_KEY_BYTES, person=b"kvdepot-chain-v1")
        object.__setattr__(self, "tag", tag.digest())
        object.__setattr__(self, "_chain_key", key.digest())

    @property
    def dtype(self) -> str:
        return self.layout.dtype

    @property
    def block_tokens(self) -> int:
        return self.layout.block_tokens

    def keys(self, token_ids: TokenIds, *, parent: bytes | None = None) -> list[BlockKey]:
        """Compute a key for each full block of `token_ids`, in order; a partial tail has none.

        The keys of a prefix are a prefix of the keys. With `parent`, a key of this namespace, the
        chain continues after that block: `keys(a + b) == keys(a) + keys(b, parent=keys(a)[-1])`
        when `a` is whole blocks. Raises KeyFormatError for ids that are not integers in
        0 <= id < 2^32, and for a parent that is not a key of this namespace. No I/O.
        """
        before = None if parent is None else check_key(parent)
        if before is not None and tag_of(before) != self.tag:
            raise KeyFormatError("the parent key belongs to another namespace")
        return chain(self.tag, self._chain_key, token_bytes(token_ids), self.block_tokens, before)

    def hashed_key(self, engine_hash: bytes, parent_hash: bytes | None = None) -> BlockKey:
        """Compute the key of a block that an engine names by a chained hash instead of tokens.

        `parent_hash` names the block before it. These keys never equal those of `keys`.
        """
        return hashed_key(self.tag, self._chain_key, engine_hash, parent_hash)

    def description(self) -> dict[str, Any]:
        """Return the fields as values for JSON, without the secret."""
        return {
            "format": FORMAT_VERSION,
            "tag": self.tag.hex(),
            "model": self.model,
            "fingerprint": self.fingerprint,
            "layout": self.layout.description(),
            "shard_rank": self.shard_rank,
            "shard_size": self.shard_size,
            "adapter": self.adapter,
            "tenant": self.tenant,
            "keyed": bool(self.secret),
            "extra": dict(self.extra),
        }

    def describe(self) -> bytes:
        """`description` as JSON, equal for equal namespaces."""
        return json.dumps(self.description(), sort_keys=True).encode()

    @classmethod
    def from_description(cls, told: Mapping[str, Any], secret: bytes = b"") -> "Namespace":
        """Make a namespace from its `description`. ConfigError if that is malformed or the secret
        is wrong.
        """
        names = ("model", "fingerprint", "shard_rank", "shard_size", "adapter", "tenant")
        try:
            found = cls(
                layout=KVLayout.from_description(told["layout"]),
                secret=secret,
                extra=tuple(told["extra"].items()),
                **{name: told[name] for name in names},
            )
            tag = bytes.fromhex(told["tag"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError("namespace", "invalid description") from error
        if found.tag != tag:
            raise ConfigError("secret", "is not the secret of this namespace")
        return found

    def _root(self) -> bytes:
        secret = self.secret
        if len(secret) > hashlib.blake2b.MAX_KEY_SIZE:
            secret = hashlib.blake2b(secret, person=b"kvdepot-secret").digest()
        bytes_of = (FORMAT_VERSION, self.model, self.fingerprint, self.layout.canonical())
        owner = (self.shard_rank, self.shard_size, self.adapter, self.tenant, self.extra)
        fields = encode(bytes_of + owner)
        return hashlib.blake2b(fields, key=secret, person=b"kvdepot-space-v1").digest()

    def _check(self) -> None:
        for name in ("model", "fingerprint", "adapter", "tenant"):
            _check_text(name, getattr(self, name))
        if not self.model:
            raise ConfigError("model", "must not be empty")
        if not isinstance(self.layout, KVLayout):
            raise ConfigError("layout", f"must be a KVLayout, not {type(self.layout).__name__}")
        if not isinstance(self.secret, bytes):
            raise ConfigError("secret", f"must be bytes, not {type(self.secret).__name__}")
        if not 0 <= self.shard_rank < self.shard_size < 1 << 31:
            raise ConfigError(
                "shard_rank", f"{self.shard_rank} of {self.shard_size} is not a shard"
            )


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(name, f"must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(name, f"is not valid unicode: {error}") from error


def _sorted_pairs(extra: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(extra, tuple | list) or not all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in extra
    ):
        raise ConfigError("extra", "must be pairs of text")
    for name, value in extra:
        _check_text("extra", name)
        _check_text(f"extra.{name}", value)
    if len({name for name, _ in extra}) != len(extra):
        raise ConfigError("extra", "has the same name twice")
    return tuple(sorted((name, value) for name, value in extra))


def fingerprint(config: Mapping[str, Any], weights_revision: str = "") -> str:
    """The identity of a model, from the content of its config.json and the weights revision.

    Returns 64 hexadecimal digits. Covers all keys of `config` at every depth, except those that do
    not change what the model computes: transformers_version, _name_or_path, _commit_hash, use_cache
    and _attn_implementation_autoset. The weights' dtype counts, under either of its names
    (torch_dtype became dtype). Numbers count as written: 10000 and 10000.0 differ, which at worst
    costs a miss. `weights_revision` is any text that names the weights, such as a commit hash.
    Raises ConfigError for values that are not JSON.
    """
    _check_text("weights_revision", weights_revision)
    try:
        text = json.dumps(_stable(config), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError("config", f"cannot be fingerprinted: {error}") from error
    content = encode((text, weights_revision))
    return hashlib.blake2b(content, digest_size=32, person=b"kvdepot-model-v1").hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: _stable(item) for key, item in value.items() if key not in _VOLATILE}
        if "torch_dtype" in kept and "dtype" not in kept:
            kept["dtype"] = kept.pop("torch_dtype")
        return kept
    return [_stable(item) for item in value] if isinstance(value, list | tuple) else value
