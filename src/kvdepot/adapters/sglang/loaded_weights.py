"""Notices that SGLang has changed its weights.

SGLang updates weights in place: from disk, from tensors, from other processes. It flushes its own
cache then, but informs neither a storage nor a linker. So the methods of its workers that update
weights are wrapped. After the first such call the weights have no known identity: nothing is served
or saved until SGLang is restarted.
"""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, Final

LOG: Final = logging.getLogger("sglang.kvdepot")
_RUNNER: Final = ("sglang.srt.model_executor.model_runner", "ModelRunner")
_CLASSES: Final = (
    ("sglang.srt.managers.tp_worker", "BaseTpWorker"),
    ("sglang.srt.managers.tp_worker", "TpModelWorker"),
    _RUNNER,
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater"),
)
"""The classes that have these methods in one version of SGLang or another. They are called by name,
so wrapped methods are seen by all callers."""
_METHODS: Final = tuple(
    f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")
)


class WeightsWatch:
    """Watches the weights of this process. A scheduler of SGLang has one model."""

    def __init__(self) -> None:
        self.changed_by = ""
        """The method that changed them; empty if none has."""

    def begin(self) -> None:
        """Wrap the methods of the classes that SGLang has loaded. May be called again."""
        found = False
        for module, name in _CLASSES:
            owner = getattr(sys.modules.get(module), name, None)
            for method in _METHODS:
                update = vars(owner).get(method) if owner is not None else None
                if update is not None:
                    found = True
                    setattr(owner, method, self._watched(update))
        if not found and _RUNNER[0] in sys.modules:
            LOG.warning(
                "kvdepot: this SGLang does not show when it updates weights; restart it after an "
                "update, or KV of the old weights is served"
            )

    def _watched(self, update: Callable[..., Any]) -> Callable[..., Any]:
        if getattr(update, "kvdepot_watch", None) is self:
            return update

        @functools.wraps(update)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if not self.changed_by:
                self.changed_by = update.__name__
                LOG.warning(
                    "kvdepot: %s changes SGLang's weights: nothing is served or saved until "
                    "SGLang is restarted",
                    update.__name__,
                )
            return update(*args, **kwargs)

        noted.kvdepot_watch = self  # type: ignore[attr-defined]
        return noted


WEIGHTS: Final = WeightsWatch()
"""The watch of this process."""
