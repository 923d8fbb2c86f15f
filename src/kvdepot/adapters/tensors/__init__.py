"""KV tensors of any engine on one side, block payloads on the other.

`KVTensors` says where a block's bytes lie in an engine's tensors; a mover copies them to and from
the memory of a store. Importing this needs torch, but neither CUDA nor triton.
"""

from typing import TYPE_CHECKING

from kvdepot.adapters.tensors.kvtensors import KVTensors, Pieces
from kvdepot.adapters.tensors.mover import (
    HostMover,
    OffloadTicket,
    OnboardTicket,
    TensorMover,
    open_mover,
)

if TYPE_CHECKING:
    from kvdepot.adapters.tensors.cuda import Mover

__all__ = [
    "HostMover",
    "KVTensors",
    "Mover",
    "OffloadTicket",
    "OnboardTicket",
    "Pieces",
    "TensorMover",
    "open_mover",
]


def __getattr__(name: str) -> object:
    if name != "Mover":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvdepot.adapters.tensors.cuda import Mover

    return Mover
