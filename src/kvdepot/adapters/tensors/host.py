"""Tensors in host memory: pieces are copied by the native code, without the interpreter lock."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvdepot import native
from kvdepot.adapters.tensors.pieces import Pieces, check_device, check_pairs, check_view

_CPU: Final = torch.device("cpu")


def gather(pieces: Pieces, view: Any) -> None:
    """Copy the block into `view`. BadBufferError, and nothing copied, when they do not fit."""
    check_device(pieces, _CPU)
    check_view(pieces, view, writable=True)
    native.gather(view, _records(pieces))


def scatter(pieces: Pieces, view: Any) -> None:
    """Copy `view` into the block's place. BadBufferError, and nothing copied, when they do not
    fit."""
    check_device(pieces, _CPU)
    check_view(pieces, view, writable=False)
    native.scatter(_records(pieces), view)


def _records(pieces: Pieces) -> npt.NDArray[np.void]:
    records = np.zeros(pieces.addresses.size, native.STRIDED_DTYPE)
    records["address"] = pieces.addresses.ravel()
    records["rows"] = 1
    records["row_bytes"] = pieces.piece_bytes
    return records


class Done:
    """The ticket, and the arrivals, of copies that are over when the call returns."""

    def wait(self) -> None:
        """Nothing is left to wait for."""

    def wait_read(self) -> None:
        """Every block was read."""

    def wait_layer(self, layer: int) -> None:
        """Every layer has arrived."""

    def synchronize(self) -> None:
        """Everything has arrived."""


class HostMover:
    """Moves blocks between tensors in host memory and payloads; every call is synchronous."""

    device: Final = _CPU

    def offload(self, pieces: Sequence[Pieces], views: Sequence[Any]) -> Done:
        """See `BlockMover.offload`."""
        _check(pieces, views, writable=True)
        for block, view in zip(pieces, views, strict=True):
            gather(block, view)
        return Done()

    def onboard(
        self, views: Sequence[Any], pieces: Sequence[Pieces], *, layers_per_step: int | None = None
    ) -> Done:
        """See `BlockMover.onboard`; all layers are there on return."""
        _check(pieces, views, writable=False)
        for block, view in zip(pieces, views, strict=True):
            scatter(block, view)
        return Done()

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> HostMover:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check(blocks: Sequence[Pieces], views: Sequence[Any], *, writable: bool) -> None:
    """Find every mistake of the caller before anything is copied."""
    check_pairs(blocks, views)
    for block, view in zip(blocks, views, strict=True):
        check_device(block, _CPU)
        check_view(block, view, writable=writable)
