"""KV tensors of an engine, and movers that copy blocks between them and the memory of a depot.

Importing this package needs torch, but neither CUDA nor triton.
"""

from kvdepot.adapters.tensors.kvtensors import KVTensors, Pieces
from kvdepot.adapters.tensors.mover import (
    HostMover,
    OffloadTicket,
    OnboardTicket,
    TensorMover,
    open_mover,
)

__all__ = ["HostMover", "KVTensors", "OffloadTicket", "OnboardTicket", "Pieces", "TensorMover"]
__all__ += ["open_mover"]
