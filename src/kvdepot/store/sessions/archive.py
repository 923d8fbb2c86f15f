"""Archives: a session as one file, which any depot can import. docs/formats.md

    magic, version, length of the head     fixed
    head                                   JSON: the session, its namespaces and their blocks
    digest of all before                   32 bytes
    for each block: key, lengths, payload, token ids, digest of these

Archives are written and read block by block. A block that does not match its digest is not
imported, and neither are those after it in the prompt, which are useless without it.
"""

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from kvdepot.core.block import ANSWERS, KEY_BYTES, TAG_BYTES, BlockKey, PutResult
from kvdepot.core.json_object import parse_object
from kvdepot.core.keys import ROOT_LINK, as_words, tag_word
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import FORMAT_VERSION, Namespace
from kvdepot.core.private import open_private_file
from kvdepot.core.requests import BLOCK_DTYPE, Array, BlockSize, Offer
from kvdepot.core.sessions import SessionState, checked_name
from kvdepot.errors import ConfigError, FormatError
from kvdepot.format.record import token_ids as token_ids_of
from kvdepot.io.files import aligned
from kvdepot.native import address_of
from kvdepot.store.engine import Caller, Engine
from kvdepot.store.read.token_ids import read_heads
from kvdepot.store.sessions.session_table import Prompt, Sessions

MAGIC: Final = b"KVSESSN\n"
VERSION: Final = 1
_FIXED: Final = struct.Struct("<8sHHI")
_LENGTHS: Final = struct.Struct("<QI")
_TOKEN_BYTES_MAX: Final = 4 << 20
_DIGEST_BYTES: Final = 32
_HEAD_BYTES_MAX: Final = 4 << 20
_BLOCKS_MAX: Final = 1 << 20
_READ_S: Final = 60.0
_PUT_S: Final = 30.0


@dataclass(slots=True)
class ArchiveProgress:
    """The progress of an export or import."""

    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ArchivedPrompt:
    """The prompt of a session in one namespace."""

    tag: bytes
    description: bytes
    layout: KVLayout
    blocks: int
    named_s: float = 0.0
    """Time of day at which the session was last named; 0 in archives of older versions."""


class ByteSource(Protocol):
    """The source of an archive. A short read is its end."""

    def read(self, size: int, /) -> bytes: ...

    def readinto(self, into: memoryview, /) -> int: ...


class SessionExporter:
    """Exports and imports archives of one store."""

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
    ) -> None:
        self._engine = engine
        self._state = engine.state
        self._sessions = sessions
        self.transfer = ArchiveProgress()

    def export(self, name: str, prompts: Mapping[bytes, Prompt], path: Path) -> dict[str, Any]:
        """Write a session to a new file. ConfigError if the file exists or a block is missing.
        After an error the file is deleted.
        """
        pieces = self.pieces(name, prompts)
        try:
            fd = open_private_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError as error:
            raise ConfigError("file", f"{path} exists already") from error
        except OSError as error:
            raise ConfigError(
                "file", f"{path} cannot be written: {error.strerror}", hint="name another place"
            ) from error
        try:
            with os.fdopen(fd, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        blocks = sum(map(len, prompts.values()))
        return {"session": name, "path": str(path), "blocks": blocks, "bytes": size}

    def pieces(self, name: str, prompts: Mapping[bytes, Prompt]) -> Iterator[bytes | memoryview]:
        """Yield an archive in pieces: the head, then those of each block. A piece is valid until
        the next one is requested. ConfigError if a block is missing.
        """
        parts = [
            (replace(self._described(tag), named_s=prompt.named_s), prompt.keys(tag))
            for tag, prompt in prompts.items()
        ]
        turns = max(prompt.turns for prompt in prompts.values())
        total = sum(one.layout.block_bytes * len(keys) for one, keys in parts)
        return self._pieces(_head(name, turns, parts), parts, ArchiveProgress(0, total))

    def _pieces(
        self,
        head: bytes,
        parts: Sequence[tuple[ArchivedPrompt, Sequence[BlockKey]]],
        transfer: ArchiveProgress,
    ) -> Iterator[bytes | memoryview]:
        self.transfer = transfer
        yield head
        for one, keys in parts:
            buffer = aligned(one.layout.block_bytes)
            for at, key in enumerate(keys):
                yield from self._block(one, key, f"block {at} of {len(keys)}", buffer)
                transfer.done_bytes += one.layout.block_bytes

    def import_file(self, path: Path) -> dict[str, Any]:
        """Import a session from a file."""
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            return {"path": str(path), **self.import_from(file, str(path), size)}

    def import_from(self, source: ByteSource, label: str, size: int = 0) -> dict[str, Any]:
        """Import a session. Blocks before the first damaged or missing one are imported, and the
        result reports the damage. A session that is newer than the archive keeps its prompt.
        FormatError if the head is damaged, or a tag is not that of its description.
        """
        head, parts = _read_head(source, label)
        self.transfer = transfer = ArchiveProgress(0, size)
        name, taken, damage = checked_name(head["session"]), 0, ""
        kept_newer = False
        for part in parts:
            self._check_same(part)
            keys, damage = self._take_in(source, part, transfer)
            taken += len(keys)
            if keys:
                kept_newer |= not self._name(part, name, keys)
            if damage:
                break
        wanted = sum(part.blocks for part in parts)
        if not damage and source.read(1):
            damage = "there is data after the last block"
        return {
            "session": name,
            "blocks": taken,
            "of_blocks": wanted,
            "complete": taken == wanted,
            "damage": damage,
            "kept_newer": kept_newer,
        }

    def _name(self, part: ArchivedPrompt, name: str, keys: Sequence[BlockKey]) -> bool:
        """Name the imported prompt. False: the store has a newer one with this name."""
        words = as_words(keys)
        with self._state.lock:
            known = self._sessions.find(part.tag, name)
            if known is not None and _is_newer(known, part, keys):
                return False
            self._sessions.tell(part.tag, name, words, SessionState.ALIVE)
            told = self._sessions.find(part.tag, name)
            if told is not None and part.named_s:  # as old as it is, for later imports
                self._sessions.enter(part.tag, name, replace(told, named_s=part.named_s))
        return True

    def _described(self, tag: bytes) -> ArchivedPrompt:
        facts = self._state.descriptions.facts(tag)
        try:
            layout = KVLayout.from_description(facts["layout"])
        except (KeyError, ConfigError) as error:
            raise ConfigError("session", f"namespace {tag.hex()} has no description") from error
        return ArchivedPrompt(tag, json.dumps(facts, sort_keys=True).encode(), layout, 0)

    def _block(
        self, one: ArchivedPrompt, key: BlockKey, label: str, buffer: memoryview
    ) -> Iterator[bytes | memoryview]:
        caller, size = self._caller_of(one), one.layout.block_bytes
        with self._state.using:
            (code,) = self._engine.read(caller, _block(key, buffer), _READ_S)
            got = ANSWERS[code]
            if not got:
                raise ConfigError(
                    "session",
                    f"{label} cannot be read: {got.reason}",
                    hint="kvdepot session show says where its blocks are",
                )
            (tokens,) = read_heads(self._state, [key], token_ids_of, b"")
        start = key + _LENGTHS.pack(size, len(tokens))
        yield start
        yield buffer[:size]
        yield tokens + _digest(start, buffer[:size], tokens)

    def _caller_of(self, one: ArchivedPrompt) -> Caller:
        """A caller that may use one namespace."""
        size = BlockSize(one.layout.block_bytes, one.layout.chunk_bytes)
        return Caller("export", {tag_word(one.tag): size})

    def _check_same(self, part: ArchivedPrompt) -> None:
        """Raise ConfigError if the store has the namespace with another description."""
        known = self._state.descriptions.facts(part.tag)
        if known and known != json.loads(part.description):
            raise ConfigError("archive", "this store has the namespace with another description")

    def _take_in(
        self, source: ByteSource, part: ArchivedPrompt, transfer: ArchiveProgress
    ) -> tuple[list[BlockKey], str]:
        """Store the intact blocks of one namespace. Returns their keys, and the
        first fault or "".
        """
        size, taken, chain = part.layout.block_bytes, list[BlockKey](), b""
        caller = Caller("import")
        block_size = BlockSize(size, part.layout.chunk_bytes)
        self._engine.register(caller, part.tag, block_size, part.description)
        try:
            buffer = aligned(size)
            for number in range(part.blocks):
                key, tokens = _read_block(source, part.tag, buffer[:size])
                if key is None or (
                    chain and key[TAG_BYTES : 2 * TAG_BYTES] not in (chain, ROOT_LINK)
                ):
                    return taken, f"block {number} is damaged or missing"
                offer = Offer(_block(key, buffer), [tokens])
                (put,) = self._engine.put(caller, offer, _PUT_S)
                if put is PutResult.REFUSED or put is PutResult.THROTTLED:
                    return taken, f"block {number} found no room ({put.value})"
                chain = key[2 * TAG_BYTES : 3 * TAG_BYTES]
                taken.append(key)
                transfer.done_bytes += size
        finally:
            self._engine.unregister(caller)
        return taken, ""


def _is_newer(known: Prompt, part: ArchivedPrompt, keys: Sequence[BlockKey]) -> bool:
    """True if a session continues the prompt of an archive, or was named later with another."""
    ours, theirs = known.keys(part.tag), list(keys)
    if ours == theirs[: len(ours)]:
        return False
    return ours[: len(theirs)] == theirs or part.named_s < known.named_s


def _block(key: BlockKey, buffer: memoryview) -> Array:
    """A row of BLOCK_DTYPE for a block and its buffer."""
    row = np.zeros(1, BLOCK_DTYPE)
    row["key"], row["address"] = as_words([key]), address_of(buffer, True)[0]
    return row


def _head(
    name: str, turns: int, parts: Sequence[tuple[ArchivedPrompt, Sequence[BlockKey]]]
) -> bytes:
    namespaces = [
        {
            "description": json.loads(one.description),
            "blocks": len(keys),
            "tag": one.tag.hex(),
            "named_s": one.named_s,
        }
        for one, keys in parts
    ]
    said = {"session": name, "turns": turns, "format": FORMAT_VERSION, "namespaces": namespaces}
    head = json.dumps(said, ensure_ascii=False).encode()
    fixed = _FIXED.pack(MAGIC, VERSION, 0, len(head))
    return fixed + head + _digest(fixed, head)


def _read_head(source: ByteSource, label: str) -> tuple[dict[str, Any], list[ArchivedPrompt]]:
    """Read the head of an archive. Raises FormatError."""
    fixed = source.read(_FIXED.size)
    if len(fixed) < _FIXED.size or not fixed.startswith(MAGIC):
        raise FormatError(label, "is not an archive of a session")
    _, version, _, length = _FIXED.unpack(fixed)
    if version > VERSION:
        raise FormatError(
            label, f"is an archive of version {version}", hint="import it with a newer kvdepot"
        )
    head = source.read(min(length, _HEAD_BYTES_MAX))
    if source.read(_DIGEST_BYTES) != _digest(fixed, head):
        raise FormatError(label, "the head of the archive is damaged")
    try:
        said = parse_object(head)
        checked_name(said["session"])
        if said["format"] != FORMAT_VERSION:
            raise FormatError(label, f"has blocks of format {said['format']!r:.40}")
        return said, [_parsed_part(part) for part in said["namespaces"]]
    except ConfigError as error:
        raise FormatError(label, f"a namespace of the archive is invalid: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(label, "the head of the archive has invalid fields") from error


def _parsed_part(said: dict[str, Any]) -> ArchivedPrompt:
    """Parse one namespace. ConfigError if the tag is that of another one. With a secret, which an
    archive does not have, only a store that knows the namespace can tell.
    """
    tag, facts, blocks = bytes.fromhex(said["tag"]), said["description"], said["blocks"]
    if len(tag) != TAG_BYTES or facts["tag"] != tag.hex() or not 0 <= int(blocks) <= _BLOCKS_MAX:
        raise ValueError("an invalid namespace")
    if not facts.get("keyed"):
        Namespace.from_description(facts)
    layout = KVLayout.from_description(facts["layout"])
    named_s = float(said.get("named_s", 0.0))
    if not math.isfinite(named_s):
        raise ValueError("an invalid time")
    description = json.dumps(facts, sort_keys=True).encode()
    return ArchivedPrompt(tag, description, layout, int(blocks), named_s)


def _read_block(
    source: ByteSource, tag: bytes, payload: memoryview
) -> tuple[BlockKey | None, bytes]:
    """Read a block into `payload`. Returns its key and token ids; None if it is damaged."""
    start = source.read(KEY_BYTES + _LENGTHS.size)
    if len(start) < KEY_BYTES + _LENGTHS.size:
        return None, b""
    length, token_bytes = _LENGTHS.unpack(start[KEY_BYTES:])
    if length != len(payload) or not start.startswith(tag) or token_bytes > _TOKEN_BYTES_MAX:
        return None, b""
    if source.readinto(payload) != length:
        return None, b""
    tokens = source.read(token_bytes)
    if source.read(_DIGEST_BYTES) != _digest(start, payload, tokens):
        return None, b""
    return BlockKey(start[:KEY_BYTES]), tokens


def _digest(*pieces: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"kvdepot-archive")
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _opened(path: Path) -> BufferedReader:
    """Open a regular file for reading. ConfigError if it cannot be opened, FormatError if it is of
    another kind.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError("file", f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError(str(path), "is not a regular file")
    return os.fdopen(fd, "rb")
