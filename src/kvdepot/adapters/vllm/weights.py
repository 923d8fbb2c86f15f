"""Who the weights are: a digest of every byte, of a model's files and of a LoRA as vLLM loaded it.

Files are read once, in a thread beside the engine, and remembered by what the file system says of
them (device, inode, size, times). Until a model's digest is known there is no namespace for it, so
nothing is served or saved. Files that changed after this process began may not be what vLLM has
loaded: they are refused.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from kvdepot.core.keys import encode
from kvdepot.core.private import make_private_folder, open_private_file
from kvdepot.errors import ModelError, UnsafePathError

_logger = logging.getLogger("vllm.kvdepot")
_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py")
"""Weights, and a model's own code."""
_CONFIG_FILES: Final = ("adapter_config.json", "config.json", "quantize_config.json")
_PART_BYTES: Final = 64 << 20
_THREADS: Final = 4
_SETTLED_NS: Final = 2 * 10**9
"""A file that was written to within this time may be written to again with the same times."""
FileFacts = tuple[int, int, int, int, int]
"""What a file system says of a file: device, inode, size, and the times of content and inode."""


class WeightsDigest:
    """The digest of a folder's weights, computed in a thread of its own; see `known`."""

    def __init__(self, folder: Path, memo: Path, began_ns: int | None = None) -> None:
        """`memo` is the file that remembers digests; `began_ns` when loading can have begun, by
        default when this process did."""
        self._folder = folder
        self._memo = memo
        self._began_ns = process_start_ns() if began_ns is None else began_ns
        self._digest = ""
        self.reason = "the weights are still being read"
        """Why there is no digest."""
        self._thread = threading.Thread(target=self._run, name="kvdepot-weights", daemon=True)
        self._thread.start()

    def known(self) -> str:
        """The digest; empty as long as, or if, there is none. Does not wait."""
        return self._digest

    def wait(self, timeout_s: float) -> str:
        self._thread.join(timeout_s)
        return self._digest

    def _run(self) -> None:
        started = time.monotonic()
        try:
            digest = folder_digest(self._folder, self._memo, not_after_ns=self._began_ns)
        except (OSError, ModelError) as error:
            self.reason = str(error)
            _logger.warning(
                "kvdepot: nothing of this model is served or saved: %s; hint: set `revision` in "
                "kv_connector_extra_config to whatever names the weights",
                error,
            )
            return
        self.reason = ""
        self._digest = digest
        seconds = time.monotonic() - started
        _logger.info("kvdepot: weights are %s, known after %.1f s", digest[:16], seconds)


@lru_cache(maxsize=8)
def digest_of(folder: Path, memo: Path) -> WeightsDigest:
    """One for each folder in this process: its scheduler and its worker may share it."""
    return WeightsDigest(folder, memo)


def weight_files(folder: Path) -> list[Path]:
    """What the weights in a folder depend on; empty if there are none."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    if not any(path.suffix != ".py" for path in files):
        return []
    return files + [folder / name for name in _CONFIG_FILES if (folder / name).is_file()]


def folder_digest(folder: Path, memo: Path | None = None, not_after_ns: int | None = None) -> str:
    """A digest of all bytes of the weights in a folder. The same for a copy elsewhere.

    ModelError where there are none, where files change meanwhile, or where one changed after
    `not_after_ns`. What `memo` has is not read again.
    """
    files = weight_files(folder)
    if not files:
        raise ModelError(f"there are no weights in {folder}")
    with _remembered(memo) as known:
        if not_after_ns is not None:
            _check_older(folder, files, not_after_ns)
        digest = hashlib.blake2b(digest_size=32, person=b"kvdepot-weights2")
        for path in files:
            digest.update(encode((path.name, _known_digest(path, known))))
        if not_after_ns is not None:
            _check_older(folder, files, not_after_ns)
    return digest.hexdigest()


def _check_older(folder: Path, files: Sequence[Path], limit_ns: int) -> None:
    """A file, a link to one, or the folder itself may have been exchanged."""
    for path in (folder, *files):
        times = (path.lstat().st_ctime_ns, path.stat().st_ctime_ns)
        if max(times) > limit_ns:
            raise ModelError(f"{path} has changed since vLLM was started")


def _known_digest(path: Path, known: dict[str, str]) -> str:
    facts = file_facts(path)
    name = " ".join(map(str, facts))
    if name in known:
        return known[name]
    digest = file_digest(path)
    if file_facts(path) != facts:
        raise ModelError(f"{path} is being written to")
    if time.time_ns() - max(facts[3:]) > _SETTLED_NS:
        known[name] = digest
    return digest


def file_facts(path: Path) -> FileFacts:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def file_digest(path: Path) -> str:
    """Of every byte of a file, by several threads."""
    size = path.stat().st_size

    def part(at: int) -> bytes:
        with path.open("rb") as file:
            file.seek(at)
            return hashlib.blake2b(file.read(_PART_BYTES), digest_size=32).digest()

    with ThreadPoolExecutor(_THREADS, "kvdepot-weights") as threads:
        parts = b"".join(threads.map(part, range(0, max(size, 1), _PART_BYTES)))
    return hashlib.blake2b(encode((size, parts)), digest_size=32).hexdigest()


@contextlib.contextmanager
def _remembered(memo: Path | None) -> Iterator[dict[str, str]]:
    """Digests by file facts, for one process at a time: the others then find what it has read.

    A memory that cannot be read or written is none. It is for its owner alone: who could write to
    it could give weights another identity.
    """
    if memo is None:
        yield {}
        return
    with contextlib.ExitStack() as stack:
        fd = -1
        with contextlib.suppress(OSError, UnsafePathError):
            make_private_folder(memo.parent)
            fd = open_private_file(memo, os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        known = _read_memo(fd) if fd >= 0 else {}
        before = dict(known)
        try:
            yield known
        finally:
            if fd >= 0 and known != before:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, json.dumps(known, indent=0).encode(), 0)


def _read_memo(fd: int) -> dict[str, str]:
    try:
        known = json.loads(os.pread(fd, os.fstat(fd).st_size, 0) or b"{}")
    except ValueError:
        return {}
    pairs = known.items() if isinstance(known, dict) else ()
    return {name: digest for name, digest in pairs if isinstance(digest, str)}


def process_start_ns() -> int:
    """When this process began, in nanoseconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot_ns = ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot_ns


def lora_digest(lora: Any) -> str:
    """Of a LoRA as vLLM has loaded it (its LoRAModel): names, scalings, and every byte."""
    parts: list[tuple[tuple[Any, ...], torch.Tensor]] = []
    for kind, modules in (("lora", lora.loras), ("saved", getattr(lora, "modules_to_save", {}))):
        for name in sorted(modules):
            facts = _plain_fields(modules[name])
            for field, tensor in _tensors_of(modules[name]):
                described = (kind, name, field, str(tensor.dtype), str(tuple(tensor.shape)))
                parts.append(((*described, *facts), tensor))
    with ThreadPoolExecutor(_THREADS, "kvdepot-lora") as threads:
        contents = threads.map(_tensor_digest, [tensor for _, tensor in parts])
        digest = hashlib.blake2b(digest_size=32, person=b"kvdepot-lora")
        for (described, _), content in zip(parts, contents, strict=True):
            digest.update(encode((*described, content)))
    return digest.hexdigest()


def _plain_fields(module: Any) -> list[str]:
    fields: Mapping[str, Any] = vars(module)
    plain = {name: value for name, value in fields.items() if isinstance(value, int | float | str)}
    return [f"{name}={plain[name]}" for name in sorted(plain)]


def _tensors_of(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for field, value in sorted(vars(module).items()):
        values = value if isinstance(value, list | tuple) else [value]
        for at, one in enumerate(values):
            if isinstance(one, torch.Tensor):
                yield f"{field} {at}", one


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().data, digest_size=32).digest()


class LoadedAdapters:
    """The LoRAs that vLLM has loaded in this worker, by its number for them."""

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}
        self._fresh: dict[int, str] = {}

    def watch(self, manager: Any) -> None:
        """Have a class of vLLM's LoRA managers tell of everything it loads, from now on."""
        load: Callable[..., Any] | None = getattr(manager, "_load_adapter", None)
        if load is None:
            _logger.warning("kvdepot: LoRAs are not served: this vLLM does not tell what it loads")
            return

        def load_and_tell(this: Any, request: Any) -> Any:
            lora = load(this, request)
            self.loaded(request.lora_int_id, lora)
            return lora

        manager._load_adapter = load_and_tell

    def loaded(self, number: int, lora: Any) -> None:
        try:
            digest = lora_digest(lora)
        except (AttributeError, TypeError, RuntimeError) as error:
            _logger.warning("kvdepot: a LoRA is not served: %s", error)
            digest = ""
        self._digests[number] = self._fresh[number] = digest

    def has(self, digest: str) -> bool:
        """Whether a LoRA with this digest is what vLLM has loaded."""
        return digest in self._digests.values()

    def take_fresh(self) -> dict[int, str]:
        """Those that were loaded since the last call."""
        fresh, self._fresh = self._fresh, {}
        return fresh
