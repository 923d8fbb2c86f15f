"""llama.cpp's C interface, from the wheel xllamacpp: a model and a context, driven by ctypes."""

import ctypes
import importlib.util
from pathlib import Path
from typing import Any, Self

from kvdepot.adapters.llama_cpp.sequences import LlamaBatch

ADDRESS = ctypes.c_void_p


class Parameters(ctypes.Structure):
    """A structure of parameters that is passed by value, with room for any version's."""

    _fields_ = (("words", ctypes.c_uint32 * 256),)


def library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None and spec.origin is not None
    return ctypes.CDLL(str(next(Path(spec.origin).parent.glob("*.so"))))


class LlamaContext:
    """A context of two sequences and one for the cache; each token is computed by itself, so that
    what was restored and what was computed agree to the last bit."""

    def __init__(self, model: Path, *, unified: bool) -> None:
        self.library = library()
        calls: dict[str, tuple[Any, list[Any]]] = {
            "llama_model_default_params": (Parameters, []),
            "llama_context_default_params": (Parameters, []),
            "llama_model_load_from_file": (ADDRESS, [ctypes.c_char_p, Parameters]),
            "llama_init_from_model": (ADDRESS, [ADDRESS, Parameters]),
            "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [ADDRESS, ctypes.c_int32]),
            "llama_decode": (ctypes.c_int32, [ADDRESS, LlamaBatch]),
            "llama_get_memory": (ADDRESS, [ADDRESS]),
            "llama_memory_seq_rm": (
                ctypes.c_bool,
                [ADDRESS, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32],
            ),
            "llama_free": (None, [ADDRESS]),
            "llama_model_free": (None, [ADDRESS]),
        }
        for name, (result, arguments) in calls.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        self.library.llama_backend_init()
        given = self.library.llama_model_default_params()
        self.model = self.library.llama_model_load_from_file(str(model).encode(), given)
        settings = self.library.llama_context_default_params()
        # n_ctx, n_batch, n_ubatch, n_seq_max as the defaults of this version have them.
        assert list(settings.words[:4]) == [512, 2048, 512, 1], "another layout of parameters"
        settings.words[0:4] = [1024, 64, 1, 3]
        settings.words[7:9] = [1, 1]
        settings.words[35] = 0x0101 if unified else 0x0001
        self.context = self.library.llama_init_from_model(self.model, settings)
        assert self.context

    def decode(self, tokens: list[int], start: int, sequence: int) -> list[float]:
        """The logits behind the last token."""
        numbers = ctypes.c_int32 * len(tokens)
        pointer = ctypes.POINTER(ctypes.c_int32)
        owner = ctypes.cast((ctypes.c_int32 * 1)(sequence), pointer)
        count = len(tokens)
        batch = LlamaBatch(
            count,
            numbers(*tokens),
            None,
            numbers(*range(start, start + count)),
            numbers(*[1] * count),
            (pointer * count)(*[owner] * count),
            (ctypes.c_int8 * count)(*[0] * (count - 1), 1),
        )
        assert self.library.llama_decode(self.context, batch) == 0
        return list(self.library.llama_get_logits_ith(self.context, count - 1)[:1000])

    def forget(self, sequence: int) -> None:
        memory = self.library.llama_get_memory(self.context)
        assert self.library.llama_memory_seq_rm(memory, sequence, -1, -1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.library.llama_free(self.context)
        self.library.llama_model_free(self.model)
