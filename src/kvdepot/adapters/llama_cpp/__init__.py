"""llama.cpp: sequences through its C interface, and a proxy for an unmodified llama-server."""

from kvdepot.adapters.llama_cpp.sequences import SequenceCache

__all__ = ["SequenceCache"]
