"""Telling weights apart without reading all of them: names, sizes, and samples of each file."""

import hashlib
from pathlib import Path
from typing import Final

from kvdepot.core.keys import encode

_HEAD_BYTES: Final = 1 << 20
"""Enough for the header of a safetensors file, which names every tensor."""
_SAMPLE_BYTES: Final = 1 << 14
_SAMPLES: Final = 64
_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SMALL: Final = ("adapter_config.json", "config.json", "quantize_config.json")


def folder_digest(folder: Path) -> str:
    """A digest of the weights in a folder; empty if there are none.

    The same for a copy elsewhere. Reads at most 2 MiB of a file: a change that touches none of the
    samples and keeps the size goes unnoticed, which no training or conversion does.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    if not files:
        return ""
    digest = hashlib.blake2b(digest_size=32, person=b"kvdepot-weights")
    for path in files:
        digest.update(encode((path.name, path.stat().st_size, _sample(path))))
    for path in (folder / name for name in _SMALL):
        if path.is_file():
            digest.update(encode((path.name, path.read_bytes())))
    return digest.hexdigest()


def _sample(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        step = max(1, (size - _SAMPLE_BYTES) // _SAMPLES)
        for at in range(_HEAD_BYTES, max(size - _SAMPLE_BYTES, 0) + 1, step):
            file.seek(at)
            digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
