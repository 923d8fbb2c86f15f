"""The weights that SGLang has loaded, which may change while it runs.

SGLang updates weights in place: from disk, from tensors, from other processes. It informs neither a
storage nor a linker. So the methods that update weights are wrapped: before the first one, and
after each, all parameters and buffers are digested on every rank. Between the parts of an update
nothing is served or saved, nor until SGLang has flushed its own cache, if that may have KV of other
weights. A flush waits for everything that is being stored.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch

from kvdepot.adapters.vllm.loaded_weights import WatchedWeights

LOG: Final = logging.getLogger("sglang.kvdepot")
_RUNNER: Final = ("sglang.srt.model_executor.model_runner", "ModelRunner")
_OWNERS: Final = (
    ("sglang.srt.managers.tp_worker", "BaseTpWorker"),
    ("sglang.srt.managers.tp_worker", "TpModelWorker"),
    _RUNNER,
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater"),
)
"""The classes that update weights in one version of SGLang or another. Their methods are called by
name, so wrapped methods are seen by all callers."""
_UPDATES: Final = (
    *(f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")),
    "load_weights_from_distributed",
    "begin_weight_update",
    "end_weight_update",
)
_TREES: Final = (
    ("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache"),
    ("sglang.srt.mem_cache.hiradix_cache", "HiRadixCache"),
)
"""SGLang's own cache. Each request that is computed is looked up in it first."""


class LoadedWeights(WatchedWeights):
    """The weights of this process. A scheduler of SGLang has one model, and perhaps a draft model.
    Belongs to the scheduler's thread; other threads read `name_of`."""

    def __init__(self) -> None:
        super().__init__()
        self.cache_used = True  # until a flush is seen
        self._calls = 0
        """Updates that are being made; an update may call another."""
        self._models: list[Any] = []
        """The models that were updated."""

    def name_of(self, start: str) -> str:
        """The name of the loaded weights; `start` is that of the weights at the start. Empty while
        nothing may be served or saved."""
        if self._calls or self.name is None or self.cache_stale:
            return ""
        return self.name or start

    def begin(self) -> None:
        """Wrap the methods of the classes that SGLang has loaded. May be called again."""
        updates = [self._wrap(owner, each, self._updated) for owner in _OWNERS for each in _UPDATES]
        if not any(updates) and _RUNNER[0] in sys.modules:
            LOG.warning(
                "kvdepot: this SGLang does not show when it updates weights; restart it after an "
                "update, or KV of the old weights is served"
            )
        for tree in _TREES:
            self._wrap(tree, "reset", self._flushed)
            self._wrap(tree, "match_prefix", self._used)

    def _wrap(self, place: tuple[str, str], name: str, watch: Callable[..., Any]) -> bool:
        """Have a method of a class called by `watch`. False if there is none."""
        owner = getattr(sys.modules.get(place[0]), place[1], None)
        method = vars(owner).get(name) if owner is not None else None
        if method is None:
            return False
        if getattr(method, "kvdepot_watch", None) is not self:

            @functools.wraps(method)
            def watched(this: Any, *args: Any, **kwargs: Any) -> Any:
                return watch(this, functools.partial(method, this, *args, **kwargs), name)

            watched.kvdepot_watch = self  # type: ignore[attr-defined]
            setattr(owner, name, watched)
        return True

    def _used(self, _: Any, call: Callable[[], Any], name: str) -> Any:
        self.cache_used = True
        return call()

    def _flushed(self, _: Any, call: Callable[[], Any], name: str) -> Any:
        result = call()
        self.cache_was_emptied()
        return result

    def _updated(self, owner: Any, call: Callable[[], Any], name: str) -> Any:
        self._calls += 1
        try:
            if self._calls == 1:
                model = next(_models(owner), None)
                if not any(model is each for each in self._models):
                    self._models.append(model)
                worker = SimpleNamespace(get_model=lambda: model)
                self.about_to_call(name, None, lambda digest: _of_all_ranks(digest(worker)))
            return call()
        finally:
            if self._calls == 1 and self.settle() and self.cache_stale:
                LOG.info(
                    "kvdepot: nothing is served or saved until SGLang flushes its own cache, which "
                    "may have KV that other weights have computed"
                )
            self._calls -= 1

    def _digest(self) -> str:
        # With a draft model, each change has a name of its own: the models change one by one.
        return super()._digest() if len(self._models) == 1 and self._models[0] is not None else ""


def _models(owner: Any) -> Iterator[Any]:
    """The model that an object updates."""
    if hasattr(owner, "get_model"):
        yield owner.get_model()
    for holder in (owner, getattr(owner, "model_runner", None)):
        model = getattr(holder, "model", None)
        if isinstance(model, torch.nn.Module):
            yield model


def _of_all_ranks(digest: str) -> Sequence[str]:
    """The digests of all ranks of this model, which update it at the same time."""
    context = sys.modules.get("sglang.srt.runtime_context")
    if context is None or not torch.distributed.is_initialized():
        return [digest]
    group = context.get_parallel().tp_group.cpu_group
    digests = [""] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(digests, digest, group=group)
    return digests


WEIGHTS: Final = LoadedWeights()
"""The weights of this process."""
