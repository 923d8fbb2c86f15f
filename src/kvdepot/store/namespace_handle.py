"""A namespace, as one store knows it: its layout, and the keys of its prompts."""

from dataclasses import dataclass, field

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import TokenIds
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace


@dataclass(frozen=True, slots=True)
class Space:
    """Handle to one namespace of a store. Made by `Store.namespace`."""

    namespace: Namespace
    layout: KVLayout = field(init=False)
    block_bytes: int = field(init=False)
    """Size of the buffer that one block fills."""
    chunk_bytes: int = field(init=False)
    """The payload is checksummed in pieces of this size."""

    def __post_init__(self) -> None:
        layout = self.namespace.layout
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "block_bytes", layout.block_bytes)
        object.__setattr__(self, "chunk_bytes", layout.chunk_bytes)

    @property
    def tag(self) -> bytes:
        """First bytes of every key in this namespace."""
        return self.namespace.tag

    def keys(self, token_ids: TokenIds, *, parent: BlockKey | None = None) -> list[BlockKey]:
        """One key for each full block of a prompt. See Namespace.keys."""
        return self.namespace.keys(token_ids, parent=parent)
