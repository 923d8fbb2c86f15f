"""Checks, recordings and reports of a store in this process, and the counts of its observers."""

import os
import threading
from pathlib import Path
from typing import Any, Final

from kvdepot.core.admin import DepotAdmin
from kvdepot.core.depot import CheckReport
from kvdepot.core.first_token import FirstToken
from kvdepot.core.keys import tag_from_hex
from kvdepot.errors import ConfigError
from kvdepot.store.check.online import check_store
from kvdepot.store.engine import Engine
from kvdepot.store.events import FirstTokenReported, PrefillReported
from kvdepot.store.observers.activity import Activity
from kvdepot.store.observers.ledger import SavingsLedger
from kvdepot.store.observers.trace_recorder import TraceRecorder

_STEP_S_MAX: Final = 3600.0
"""Largest accepted prefill time of a token."""


class StoreAdmin(DepotAdmin):
    """See core.admin.DepotAdmin."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._state = state = engine.state
        self._activity = Activity()
        self._ledger = SavingsLedger(state.config.ledger)
        self._recorder: TraceRecorder | None = None
        self._recording = threading.Lock()
        state.events.subscribe(self._activity)
        state.events.subscribe(self._ledger)
        state.events.start()

    def check(self, *, deep: bool = True) -> CheckReport:
        with self._state.using:
            return check_store(self._state, deep=deep)

    def record(self, path: str | os.PathLike[str]) -> None:
        state = self._state
        with state.using, self._recording:
            if self._recorder is not None:
                raise ConfigError("record", f"{self._recorder.path} is already being recorded")
            self._recorder = TraceRecorder(Path(path), state.config.block_tokens, state.clock)
            state.events.subscribe(self._recorder)

    def stop_recording(self) -> int:
        with self._recording:
            recorder, self._recorder = self._recorder, None
        if recorder is None:
            return 0
        self._state.events.unsubscribe(recorder)
        return recorder.close()

    def ledger(self) -> dict[str, Any]:
        self._state.check_open()
        self._state.events.deliver()
        return self._ledger.page()

    def report_prefill_speed(self, namespace: str, token_s: float, pair_s: float = 0.0) -> bool:
        self._state.check_open()
        if not (0.0 < token_s < _STEP_S_MAX and 0.0 <= pair_s < _STEP_S_MAX):
            raise ConfigError("token_s", "seconds of prefill for a token must be above 0")
        tag = tag_from_hex(namespace)
        self._state.events.emit(PrefillReported(tag, token_s, pair_s))
        return self._engine.access.is_registered(tag)

    def report_first_token(self, first: FirstToken) -> None:
        """Kept until the store is closed. Does not block."""
        self._state.check_open()
        first.check()
        self._state.events.emit(FirstTokenReported(self._state.clock.now(), first))

    def describe(self) -> dict[str, Any]:
        """The counts of all observers, for `stats`."""
        self._state.events.deliver()
        recorder = self._recorder
        recording = recorder and {"path": str(recorder.path), "requests": recorder.requests}
        counted = self._activity.describe(self._state.clock.now())
        return {**counted, "ledger": self._ledger.describe(), "recording": recording}
