"""A namespace, as one store knows it: its layout, and the keys of its prompts."""

from dataclasses import dataclass

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import TokenIds
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace


@dataclass(frozen=True, slots=True)
class Space:
    """Handle to one namespace of a store. Made by `Store.namespace`."""

    namespace: Namespace

    @property
    def layout(self) -> KVLayout:
        return self.namespace.layout

    @property
    def block_bytes(self) -> int:
        """Size of the buffer that one block fills."""
        return self.namespace.layout.block_bytes

    @property
    def tag(self) -> bytes:
        """First bytes of every key in this namespace."""
        return self.namespace.tag

    def keys(self, token_ids: TokenIds, *, parent: BlockKey | None = None) -> list[BlockKey]:
        """One key for each full block of a prompt. See Namespace.keys."""
        return self.namespace.keys(token_ids, parent=parent)
