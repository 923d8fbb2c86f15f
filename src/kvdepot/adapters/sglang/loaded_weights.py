"""Whether SGLang still has the weights that it was started with.

SGLang updates weights in place: from disk, from tensors, from other processes. It flushes its own
cache then, and tells neither a storage nor a linker. So the methods of its workers that do it are
watched. After the first such call it is not known who the weights are: nothing is served or saved
until SGLang is restarted.
"""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, Final

_logger = logging.getLogger("sglang.kvdepot")
_CLASSES: Final = (
    ("sglang.srt.managers.tp_worker", "BaseTpWorker"),
    ("sglang.srt.managers.tp_worker", "TpModelWorker"),
    ("sglang.srt.model_executor.model_runner", "ModelRunner"),
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater"),
)
"""Where SGLang has had these methods; all are called by name, so that watching them suffices."""
_METHODS: Final = tuple(
    f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")
)


class WeightsWatch:
    """The weights of this process: a scheduler of SGLang has one model."""

    def __init__(self) -> None:
        self.changed_by = ""
        """The method that has changed them; empty as long as none has."""

    def begin(self) -> None:
        """Watch the classes that SGLang has loaded. May be called again."""
        found = False
        for module, name in _CLASSES:
            owner = getattr(sys.modules.get(module), name, None)
            for method in _METHODS:
                update = vars(owner).get(method) if owner is not None else None
                if update is not None:
                    found = True
                    setattr(owner, method, self._watched(update))
        if not found and _CLASSES[2][0] in sys.modules:
            _logger.warning(
                "kvdepot: this SGLang does not show when it updates weights; restart it after an "
                "update, or its old KV is served"
            )

    def _watched(self, update: Callable[..., Any]) -> Callable[..., Any]:
        if getattr(update, "kvdepot_watch", None) is self:
            return update

        @functools.wraps(update)
        def update_and_tell(*args: Any, **kwargs: Any) -> Any:
            if not self.changed_by:
                self.changed_by = update.__name__
                _logger.warning(
                    "kvdepot: SGLang's weights are changed by %s: nothing is served or saved "
                    "until it is restarted",
                    update.__name__,
                )
            return update(*args, **kwargs)

        update_and_tell.kvdepot_watch = self  # type: ignore[attr-defined]
        return update_and_tell


WEIGHTS: Final = WeightsWatch()
"""Of this process."""
