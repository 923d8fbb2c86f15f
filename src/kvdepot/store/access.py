"""Who may use which namespace, and the size of its blocks: the one place that decides this."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.core.keys import Keys, tag_word
from kvdepot.core.requests import Array, BlockSize
from kvdepot.core.units import format_bytes
from kvdepot.errors import ConfigError
from kvdepot.format.record import chunk_count, record_bytes
from kvdepot.format.requests import check_block_bytes
from kvdepot.index.table import Bools
from kvdepot.store.state.state import StoreState

_UNKNOWN: Final = BlockSize(0, 0)


@dataclass(eq=False, slots=True)
class Caller:
    """Who makes a call: the program that has opened the store, or one client of the daemon."""

    label: str
    spaces: dict[int, BlockSize] = field(default_factory=dict)
    """The namespaces that it has registered: the first word of their keys, and the size of a
    block."""

    def size_of(self, tag: int) -> BlockSize:
        """The size of blocks of a namespace; zeros if the caller may not use it."""
        return self.spaces.get(tag, _UNKNOWN)


@dataclass(eq=False, slots=True)
class DescribedCaller(Caller):
    """Reads namespaces on behalf of other nodes and users: all that are described on the drives."""

    described: Callable[[int], BlockSize | None] = lambda _: None

    def size_of(self, tag: int) -> BlockSize:
        return self.spaces.get(tag) or self.described(tag) or _UNKNOWN


class Access:
    """The namespaces that callers have registered, and those in quarantine. Thread-safe."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._sizes: dict[int, BlockSize] = {}
        """Of all namespaces that a caller has registered."""
        self._lock = threading.Lock()
        """Over `_sizes` and the namespaces of callers; held while a description is written."""
        self._quarantined = np.zeros(0, np.uint64)

    def register(self, caller: Caller, tag: bytes, size: BlockSize, description: bytes) -> None:
        """See Engine.register."""
        if size.block_bytes <= 0 or size.chunk_bytes <= 0:
            raise ConfigError("layout", "a block without bytes")
        chunk_count(*size)
        check_block_bytes(size.block_bytes)
        self._check_fits(record_bytes(size.block_bytes))
        word = tag_word(tag)
        with self._lock:
            known = self._sizes.get(word, size)
            if known != size:
                raise ConfigError(
                    "layout", f"the namespace is known with {known.block_bytes} bytes"
                )
            if word in caller.spaces:
                return
            self._state.descriptions.register(tag, description)
            self._sizes[word] = caller.spaces[word] = size

    def unregister(self, caller: Caller) -> None:
        """A caller is gone."""
        with self._lock:
            tags = [word.to_bytes(8, "little") for word in caller.spaces]
            caller.spaces.clear()
            for tag in self._state.descriptions.unregister(tags):
                self._sizes.pop(tag_word(tag), None)

    def is_registered(self, tag: bytes) -> bool:
        """Whether a caller uses the namespace now."""
        return tag_word(tag) in self._sizes

    def quarantine(self, tags: Iterable[bytes]) -> None:
        """Serve and take nothing of these namespaces from now on, and of no others."""
        self._quarantined = np.array([tag_word(tag) for tag in tags], np.uint64)

    def quarantined(self, keys: Keys) -> Bools | None:
        """Which keys are of a namespace in quarantine; None if no namespace is."""
        tags = self._quarantined
        return np.isin(keys[:, 0], tags) if len(tags) else None

    def allowed(self, caller: Caller, blocks: Array) -> tuple[Array, Array]:
        """The blocks with the sizes that are registered, and the indices of those that the caller
        may have.
        """
        sizes, chunks = self.sizes_for(caller, blocks["key"])
        stop = np.where(blocks["stop"] == 0, sizes, blocks["stop"])
        blocks = blocks.copy()
        blocks["payload_bytes"], blocks["chunk_bytes"], blocks["stop"] = sizes, chunks, stop
        return blocks, np.flatnonzero((sizes > 0) & (stop <= sizes))

    def sizes_for(self, caller: Caller, keys: Keys) -> tuple[Array, Array]:
        """Bytes of a block and of a chunk for each key; zeros for keys that the caller may not
        use.
        """
        if not len(keys):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        tags = keys[:, 0]
        if (tags == tags[0]).all():
            size = self._size(caller, int(tags[0]))
            return np.full(len(keys), size.block_bytes), np.full(len(keys), size.chunk_bytes)
        kinds, which = np.unique(tags, return_inverse=True)
        sizes = np.array([self._size(caller, int(tag)) for tag in kinds], np.int64)[which]
        return sizes[:, 0], sizes[:, 1]

    def _size(self, caller: Caller, tag: int) -> BlockSize:
        return _UNKNOWN if tag in self._quarantined else caller.size_of(tag)

    def _check_fits(self, nbytes: int) -> None:
        """Raise ConfigError for blocks that a tier could never hold."""
        state = self._state
        if not state.arena.chunks_for(nbytes):
            raise ConfigError(
                "dram.capacity", f"a block takes {format_bytes(nbytes)}, more than the tier has"
            )
        if not state.lower_tiers:
            return
        if not state.staging.chunks_for(nbytes):
            raise ConfigError(
                "writeback.staging", f"a block takes {format_bytes(nbytes)}, more than there is"
            )
        for lower in state.lower_tiers:
            facts = (one for _, one in lower.volumes.all_facts() if not one.lost)
            room = min((one.record_bytes_max for one in facts), default=nbytes)
            if nbytes > room:
                segment = f"{lower.name}.segment"
                raise ConfigError(
                    segment,
                    f"a block takes {format_bytes(nbytes)}, a segment of this store holds "
                    f"{format_bytes(room)}",
                    hint=f"make a new store with a larger {segment} or {lower.name}.capacity",
                )
