"""The name of a model's weights: a given name, or a digest of every byte of its files.

Files are read once, in a thread, and remembered by what the file system says of them (device,
inode, size, times). Until the digest is known the model has no namespace, so nothing is served or
saved. Files that changed after this process began may not be what vLLM has loaded: they are
refused.
"""

import logging
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Thread
from typing import Final

from kvdepot.adapters.file_digests import digest_of_files, process_start_ns
from kvdepot.errors import ModelError

_logger = logging.getLogger("vllm.kvdepot")
_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py")
"""Weights, and a model's own code."""
_CONFIG_FILES: Final = ("adapter_config.json", "config.json", "quantize_config.json")


class WeightsDigest:
    """The digest of a folder's weights, computed in a thread."""

    def __init__(self, folder: Path, memo: Path, began_ns: int | None = None) -> None:
        """`memo`: the file that remembers digests. `began_ns`: the earliest time at which the
        weights were loaded, by default the start of this process."""
        self._result: Future[str] = Future()
        began_ns = process_start_ns() if began_ns is None else began_ns
        arguments = (folder, memo, began_ns)
        Thread(target=self._run, args=arguments, name="kvdepot-weights", daemon=True).start()

    def known(self) -> str:
        """The digest. Empty while the files are read, or if they are refused. Does not block."""
        return "" if self.reason else self._result.result()

    @property
    def reason(self) -> str:
        """The reason why there is no digest; empty if there is one."""
        if not self._result.done():
            return "the weights are still being read"
        return str(self._result.exception() or "")

    def wait(self, timeout_s: float) -> str:
        wait([self._result], timeout_s)
        return self.known()

    def _run(self, folder: Path, memo: Path, began_ns: int) -> None:
        started = time.monotonic()
        try:
            digest = folder_digest(folder, memo, not_after_ns=began_ns)
        except (OSError, ModelError) as error:
            _logger.warning(
                "kvdepot: nothing of this model is served or saved: %s; hint: set `revision` in "
                "kv_connector_extra_config to a name for the weights",
                error,
            )
            self._result.set_exception(error)
            return
        seconds = time.monotonic() - started
        _logger.info("kvdepot: digest of the weights: %s, after %.1f s", digest[:16], seconds)
        self._result.set_result(digest)


@lru_cache(maxsize=8)
def digest_of(folder: Path, memo: Path) -> WeightsDigest:
    """One for each folder in this process: its scheduler and its worker share it."""
    return WeightsDigest(folder, memo)


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """The source of the name of weights: `name`, or else the files in `folder`."""

    name: str = ""
    folder: str = ""

    def known(self, memo: Path) -> str:
        """The name, or the digest of the files; empty as `WeightsDigest.known`. Does not block."""
        return self.name or digest_of(Path(self.folder), memo.expanduser()).known()

    def reason(self, memo: Path) -> str:
        """The reason why the name is not known; empty if it is."""
        return "" if self.name else digest_of(Path(self.folder), memo.expanduser()).reason


def weight_files(folder: Path) -> list[Path]:
    """The files that the weights in a folder depend on. Empty if there are no weights."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    if not any(path.suffix != ".py" for path in files):
        return []
    return files + [folder / name for name in _CONFIG_FILES if (folder / name).is_file()]


def folder_digest(folder: Path, memo: Path | None = None, not_after_ns: int | None = None) -> str:
    """A digest of all bytes of the weights in a folder. A copy elsewhere has the same digest.
    ModelError if there are none, if files change meanwhile, or if one changed after `not_after_ns`.
    Files that `memo` has are not read again."""
    files = weight_files(folder)
    if not files:
        raise ModelError(f"there are no weights in {folder}")
    return digest_of_files(folder, files, memo, not_after_ns, "vLLM")
