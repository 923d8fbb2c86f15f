"""Which weights vLLM has loaded, as they are changed in place while it runs.

At the start the weights are named by their files (`weights`). From then on every call of vLLM to
its workers is watched: all but those of `LEAVE_WEIGHTS` may have changed weights, also a function
that a user sends. The next step then begins with a digest of what the workers have, and nothing is
served or saved before. Weights that come back have their old name again.
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
LEAVE_WEIGHTS: Final = frozenset(
    (
        "add_lora",
        "annotate_profile",
        "check_health",
        "compile_or_warm_up_model",
        "compute_weight_checksums",
        "determine_available_memory",
        "execute_dummy_batch",
        "execute_model",
        "get_cache_block_size_bytes",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_simple_cpu_offload_num_cpu_blocks",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "initialize_from_config",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "save_sharded_state",
        "save_tensorized_model",
        "set_kv_cache_layout",
        "shutdown",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "take_draft_token_ids",
        "update_max_model_len",
    )
)
"""Calls of vLLM 0.29 to 0.33 to its workers after which the model's weights are what they were.
LoRAs are watched for themselves."""
_UPDATE_BEGINS: Final = ("start_weight_update", "start_draft_weight_update")
_UPDATE_ENDS: Final = ("finish_weight_update", "reload_weights")

Ask = Callable[[Callable[[Any], str]], Sequence[str]]
"""Has every worker call a function with itself; what each returned."""


def digest_in_worker(worker: Any) -> str:
    """Of the weights that one of vLLM's workers has, its draft model's too; empty where they cannot
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
    """Of every byte of every parameter and buffer. ModelError where a layer does not show them."""
    described, contents = [], []
    with ThreadPoolExecutor(_THREADS, "kvdepot-weights") as threads:
        for number, model in enumerate(models):
            for name, module, tensor in _tensors(model):
                hidden = isinstance(tensor, torch.nn.Parameter) and not tensor.numel()
                shown = _unpacked(module) if hidden else tensor
                content = threads.submit(_content, shown)
                if hidden:
                    content.result()  # one at a time: it is a copy
                described.append((str(number), name, str(tensor.dtype), str(tuple(tensor.shape))))
                contents.append(content)
    digest = hashlib.blake2b(digest_size=32, person=b"kvdepot-loaded")
    for words, content in zip(described, contents, strict=True):
        digest.update(encode((*words, content.result())))
    return digest.hexdigest()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
    """Parameters and buffers with their names and the modules that have them."""
    for name, module in model.named_modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for field, tensor in own:
            yield f"{name}.{field}", module, tensor


def _content(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().data, digest_size=32).digest()


def _unpacked(module: torch.nn.Module) -> torch.Tensor:
    """The weight of a linear layer that vLLM's CPU backend has packed out of sight, as the layer's
    answer to the unit vectors: these are its columns, exactly."""
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
    """The name of the weights that all workers have, in the scheduler's process and thread."""

    def __init__(self) -> None:
        self.name: str | None = ""
        """Empty: those of the start. None: it is not known, as during an update."""
        self.in_question = False
        """A call may have changed them since `settle`."""
        self._start: str | None = None
        self._updating = False
        self._executor: Any = None
        self._ask: Ask = lambda _: ()

    def watch(self, executors: Any, parallel: Any) -> None:
        """Have a class of vLLM's executors tell of the calls that it makes for one engine, which
        `parallel`, its parallel_config, stands for: a connector below MultiConnector has it too."""
        call: Callable[..., Any] = executors.collective_rpc

        @functools.wraps(call)
        def tell_and_call(executor: Any, method: Any, *rest: Any, **more: Any) -> Any:
            if method not in LEAVE_WEIGHTS and executor.vllm_config.parallel_config is parallel:
                self.about_to_call(method, executor, functools.partial(call, executor))
            return call(executor, method, *rest, **more)

        executors.collective_rpc = tell_and_call

    def about_to_call(self, method: Any, executor: Any, ask: Ask) -> None:
        """A call that may change weights comes next. Before the first one the digest of those of
        the start is taken, so that they are known when they come back."""
        self._executor, self._ask = executor, ask
        if self._start is None:
            self._start = self._digest()
        self.in_question = True
        if method in _UPDATE_BEGINS:
            self._updating = True
        elif method in _UPDATE_ENDS:
            self._updating = False

    def settle(self) -> str | None:
        """The name of the weights that the next step computes with; asks the workers if it is in
        question. To be called between steps, when vLLM is about to compute."""
        if not self.in_question:
            return self.name
        if self._updating or getattr(self._executor, "is_sleeping", False):
            self.name = None
            return None
        started = time.monotonic()
        found = self._digest()
        if not found:
            self.name = f"update {uuid.uuid4().hex}"
        else:
            self.name = "" if found == self._start else f"loaded {found}"
        self.in_question = False
        seconds = time.monotonic() - started
        told = self.name[:24] or "those of the start"
        _logger.info("kvdepot: the loaded weights are %s, known after %.1f s", told, seconds)
        return self.name

    def _digest(self) -> str:
        """Of all workers together; empty where one cannot tell."""
        found = list(self._ask(digest_in_worker))
        if not all(found):
            return ""
        return hashlib.blake2b(encode(tuple(found)), digest_size=32).hexdigest()
