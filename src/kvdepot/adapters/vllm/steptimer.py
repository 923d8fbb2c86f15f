"""How long the model computes in a step, as the device sees it."""

import time
from typing import Any

import torch

from kvdepot.adapters.vllm.messages import StepTime


class StepTimer:
    """Times the steps of one worker. On CUDA results come some steps later."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._started: Any = None
        self._pending: list[tuple[Any, Any, int, float]] = []
        self._over: list[StepTime] = []

    def start(self) -> None:
        """The step's computation begins."""
        self._started = self._now()

    def stop(self, tokens: int, attention: float) -> None:
        """It ends, or has been handed to the device."""
        started, self._started = self._started, None
        if started is None or not tokens:
            return
        if self._cuda:
            self._pending.append((started, self._now(), tokens, attention))
        else:
            self._over.append(StepTime(tokens, attention, self._now() - started))

    def take(self) -> list[StepTime]:
        """The steps that are over."""
        while self._pending and self._pending[0][1].query():
            started, ended, tokens, attention = self._pending.pop(0)
            seconds = started.elapsed_time(ended) / 1e3
            self._over.append(StepTime(tokens, attention, seconds))
        over, self._over = self._over, []
        return over

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
