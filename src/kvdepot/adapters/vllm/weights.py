"""Who the weights are: a digest of every byte, of a model's files and of a LoRA as vLLM loaded it.

Files are read once, in a thread beside the engine, and remembered by what the file system says of
them (device, inode, size, times). Until a model's digest is known there is no namespace for it, so
nothing is served or saved. Files that changed after this process began may not be what vLLM has
loaded: they are refused.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from kvdepot.adapters.file_digests import digest_of_files, process_start_ns
from kvdepot.core.keys import encode
from kvdepot.errors import ModelError

_logger = logging.getLogger("vllm.kvdepot")
_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py")
"""Weights, and a model's own code."""
_CONFIG_FILES: Final = ("adapter_config.json", "config.json", "quantize_config.json")
_THREADS: Final = 4


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
    return digest_of_files(folder, files, memo, not_after_ns, "vLLM")


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
