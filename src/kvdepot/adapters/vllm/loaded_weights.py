"""The weights that vLLM has loaded: the model's, which may change while it runs, and LoRAs.

At the start the model's weights are named by their files (`weights`). Later every call of vLLM to
its workers is watched: all but those of `LEAVE_WEIGHTS` may have changed weights, also a function
that a user sends. The next step begins with a digest of what the workers have loaded, and nothing
is served or saved before. Weights that come back have their old name again. A LoRA is digested in
the worker when vLLM loads it.
"""

import functools
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from kvdepot.core.keys import encode
from kvdepot.errors import ModelError

_logger = logging.getLogger("vllm.kvdepot")
_THREADS: Final = 4
_ROWS: Final = 256
_HARMLESS_CALLS: Final = """
add_lora annotate_profile check_health compile_or_warm_up_model compute_weight_checksums
determine_available_memory execute_dummy_batch execute_model get_cache_block_size_bytes
get_compilation_match_table get_encoder_timing_stats get_kv_cache_spec
get_kv_connector_handshake_metadata get_model_inspection get_simple_cpu_offload_num_cpu_blocks
get_supported_kv_cache_layouts get_supported_tasks init_weight_transfer_engine
initialize_from_config list_loras pin_lora profile release_late_interaction_query_cache
remove_lora reset_encoder_cache reset_mm_cache sample_tokens save_sharded_state
save_tensorized_model set_kv_cache_layout shutdown shutdown_weight_transfer_engine
supports_draft_weight_updates synchronize_device take_draft_token_ids update_max_model_len
"""
LEAVE_WEIGHTS: Final = frozenset(_HARMLESS_CALLS.split())
"""Calls of vLLM 0.29 to 0.33 to its workers that do not change the model's weights."""
_UPDATE_BEGINS: Final = ("start_weight_update", "start_draft_weight_update", "begin_weight_update")
_UPDATE_ENDS: Final = ("finish_weight_update", "reload_weights", "end_weight_update")
"""Of vLLM, and of SGLang, which begins and ends."""

AskWorkers = Callable[[Callable[[Any], str]], Sequence[str]]
"""Has every worker call a function with itself, and returns the answers."""
NamedTensor = tuple[tuple[str, ...], torch.Tensor, bool]
"""Names of a tensor, the tensor, and true if it is a copy."""


def digest_in_worker(worker: Any) -> str:
    """A digest of the weights that a vLLM worker has, its draft model's too. Empty if they cannot
    be read."""
    draft = getattr(worker, "get_draft_model", None)
    models = [worker.get_model(), draft() if draft is not None else None]
    try:
        return loaded_digest([model for model in models if model is not None])
    except (ModelError, RuntimeError) as error:
        _logger.warning("kvdepot: the loaded weights cannot be read: %s", str(error))
        return ""


@torch.inference_mode()
def loaded_digest(models: Sequence[torch.nn.Module]) -> str:
    """A digest of every byte of every parameter and buffer. ModelError if a layer hides them."""

    def tensors() -> Iterator[NamedTensor]:
        for number, model in enumerate(models):
            for name, module in model.named_modules():
                parameters = module.named_parameters(recurse=False)
                for field, tensor in (*parameters, *module.named_buffers(recurse=False)):
                    hidden = isinstance(tensor, torch.nn.Parameter) and not tensor.numel()
                    shown = _unpacked(module) if hidden else tensor
                    yield (str(number), f"{name}.{field}"), shown, hidden

    return _digest(tensors(), b"kvdepot-loaded")


def lora_digest(lora: Any) -> str:
    """A digest of a LoRA as vLLM has loaded it (its LoRAModel): names, scalings, and every byte."""

    def tensors() -> Iterator[NamedTensor]:
        modules = {"lora": lora.loras, "saved": getattr(lora, "modules_to_save", {})}
        for kind, by_name in modules.items():
            for name, module in sorted(by_name.items()):
                fields = sorted(vars(module).items())
                plain = {key: item for key, item in fields if isinstance(item, int | float | str)}
                for key, item in fields:
                    items = item if isinstance(item, list | tuple) else [item]
                    for number, tensor in enumerate(items):
                        if isinstance(tensor, torch.Tensor):
                            yield (kind, name, f"{key} {number}", f"{plain}"), tensor, False

    return _digest(tensors(), b"kvdepot-lora")


def _digest(tensors: Iterator[NamedTensor], person: bytes) -> str:
    described, contents = [], []
    with ThreadPoolExecutor(_THREADS, "kvdepot-weights") as threads:
        for names, tensor, is_copy in tensors:
            content = threads.submit(_content, tensor)
            if is_copy:
                content.result()  # only one copy is in memory at a time
            described.append((*names, str(tensor.dtype), str(tuple(tensor.shape))))
            contents.append(content)
    digest = hashlib.blake2b(digest_size=32, person=person)
    for names, content in zip(described, contents, strict=True):
        digest.update(encode((*names, content.result())))
    return digest.hexdigest()


def _content(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().data, digest_size=32).digest()


def _unpacked(module: torch.nn.Module) -> torch.Tensor:
    """The weight of a linear layer that vLLM's CPU backend has packed and hidden. The layer's
    answers to the unit vectors are its columns, exactly."""
    linear: Any = getattr(module, "cpu_linear", None)
    inputs = getattr(module, "input_size_per_partition", 0)
    if linear is None or not inputs:
        raise ModelError(f"a {type(module).__name__} does not show its weights")
    weight: Any = module.weight
    columns = []
    for first in range(0, inputs, _ROWS):
        units = torch.zeros(min(_ROWS, inputs - first), inputs, dtype=weight.dtype)
        units[:, first:].fill_diagonal_(1)
        columns.append(linear(units, weight, None))
    return torch.cat(columns)


class WatchedWeights:
    """The name of the weights that all workers have loaded, and whether vLLM's own cache fits them.
    Belongs to the scheduler's process and thread."""

    def __init__(self) -> None:
        self.name: str | None = ""
        """Empty: the weights of the start. None: it is not known, as during an update."""
        self.in_question = False
        """True if a call may have changed them since `settle`."""
        self.cache_used = False
        """True if vLLM's own cache may have KV of these weights. Set by the user of this class."""
        self.cache_stale = False
        """True if vLLM's own cache may have KV of other weights."""
        self._start: str | None = None
        self._updating = False
        self._executor: Any = None
        self._ask: AskWorkers = lambda _: ()

    def watch(self, executors: Any, parallel: Any) -> None:
        """Watch the calls that a class of vLLM's executors makes for one engine. `parallel` is the
        engine's parallel_config, which a connector below MultiConnector has too."""
        call: Callable[..., Any] = executors.collective_rpc

        @functools.wraps(call)
        def watch_and_call(executor: Any, method: Any, *rest: Any, **more: Any) -> Any:
            if method not in LEAVE_WEIGHTS and executor.vllm_config.parallel_config is parallel:
                self.about_to_call(method, executor, functools.partial(call, executor))
            return call(executor, method, *rest, **more)

        executors.collective_rpc = watch_and_call

    def about_to_call(self, method: Any, executor: Any, ask: AskWorkers) -> None:
        """A call that may change weights comes next. Before the first one the digest of the
        weights of the start is taken, so that they are recognised when they come back."""
        self._executor, self._ask = executor, ask
        if self._start is None:
            self._start = self._digest()
        self.in_question = True
        if method in _UPDATE_BEGINS:
            self._updating = True
        elif method in _UPDATE_ENDS:
            self._updating = False

    def settle(self) -> bool:
        """Find the name of the weights that the next step computes with: asks the workers, if the
        weights are in question. Returns whether the name has changed. To be called between steps,
        before vLLM computes."""
        if not self.in_question:
            return False
        before = self.name
        if self._updating or getattr(self._executor, "is_sleeping", False):
            self.name = None
        else:
            started = time.monotonic()
            digest = self._digest()
            if not digest:
                self.name = f"update {uuid.uuid4().hex}"
            else:
                self.name = "" if digest == self._start else f"loaded {digest}"
            self.in_question = False
            _logger.info(
                "kvdepot: the loaded weights are %s, known after %.1f s",
                self.name[:24] or "those of the start",
                time.monotonic() - started,
            )
        if self.name == before:
            return False
        self.cache_stale = self.cache_used
        return True

    def cache_was_emptied(self) -> None:
        """Record that vLLM's own cache is empty."""
        self.cache_used = self.cache_stale = False

    def _digest(self) -> str:
        """The digest of all workers together. Empty if one cannot read its weights."""
        digests = list(self._ask(digest_in_worker))
        if not all(digests):
            return ""
        return hashlib.blake2b(encode(tuple(digests)), digest_size=32).hexdigest()


class LoadedAdapters:
    """The LoRAs that vLLM has loaded in this worker, by its number for them."""

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}
        self._fresh: dict[int, str] = {}

    def watch(self, manager: Any) -> None:
        """Digest everything that a class of vLLM's LoRA managers loads from now on."""
        load: Callable[..., Any] | None = getattr(manager, "_load_adapter", None)
        if load is None:
            _logger.warning("kvdepot: LoRAs are not served: vLLM's LoRA manager is not known")
            return

        def load_and_digest(this: Any, request: Any) -> Any:
            lora = load(this, request)
            self.loaded(request.lora_int_id, lora)
            return lora

        manager._load_adapter = load_and_digest

    def loaded(self, number: int, lora: Any) -> None:
        try:
            digest = lora_digest(lora)
        except (AttributeError, TypeError, RuntimeError) as error:
            _logger.warning("kvdepot: a LoRA is not served: %s", error)
            digest = ""
        self._digests[number] = self._fresh[number] = digest

    def has(self, digest: str) -> bool:
        """True if vLLM has loaded a LoRA with this digest."""
        return digest in self._digests.values()

    def take_fresh(self) -> dict[int, str]:
        """The LoRAs that were loaded since the last call."""
        fresh, self._fresh = self._fresh, {}
        return fresh
