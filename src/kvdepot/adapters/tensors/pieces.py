"""Where one block lies in an engine's tensors: equal pieces of memory, in payload order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvdepot import native
from kvdepot.errors import BadBufferError

Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The bytes of one block, or of some of its layers, as pieces of `piece_bytes` each."""

    addresses: Addresses
    """Shape (layers, pieces per layer); read row by row it is the order of the payload."""

    piece_bytes: int
    device: torch.device

    tensors: tuple[torch.Tensor, ...]
    """Whose memory it is; held so that the addresses stay good."""

    @property
    def layer_count(self) -> int:
        return int(self.addresses.shape[0])

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        return int(self.addresses.shape[1]) * self.piece_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the payload that these pieces make up."""
        return int(self.addresses.size) * self.piece_bytes

    def layers(self, start: int, stop: int) -> Pieces:
        """Only the layers start <= i < stop: their payload is that range of the block's."""
        if not 0 <= start < stop <= self.layer_count:
            raise BadBufferError(f"{start}:{stop} is no range of {self.layer_count} layers")
        return replace(self, addresses=self.addresses[start:stop])


def check_view(pieces: Pieces, view: Any, *, writable: bool) -> int:
    """The address of a payload that fits `pieces`; BadBufferError when it does not."""
    try:
        address, nbytes = native.address_of(view, writable)
    except (BufferError, TypeError, ValueError) as error:
        raise BadBufferError(f"no payload: {error}") from error
    if nbytes != pieces.nbytes:
        raise BadBufferError(f"the payload has {nbytes} bytes, the pieces {pieces.nbytes}")
    return address


def check_device(pieces: Pieces, device: torch.device) -> None:
    """BadBufferError when the pieces lie elsewhere: their addresses mean nothing here."""
    if pieces.device != device:
        raise BadBufferError(f"tensors on {pieces.device} cannot be moved by the mover of {device}")


def check_pairs(blocks: Sequence[Pieces], views: Sequence[Any]) -> None:
    """BadBufferError unless there is one view a block and all blocks are cut alike."""
    if len(blocks) != len(views):
        raise BadBufferError(f"{len(blocks)} blocks cannot go with {len(views)} payloads")
    cuts = {(block.addresses.shape, block.piece_bytes) for block in blocks}
    if len(cuts) > 1:
        raise BadBufferError("the blocks of one call must have the same layers and pieces")
