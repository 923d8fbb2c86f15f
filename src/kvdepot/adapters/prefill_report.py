"""Engines tell the depot's ledger how fast they compute prompts."""

import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from kvdepot.core.depot import Depot
from kvdepot.errors import KVDepotError

_TELL_AGAIN_S: Final = 3600.0
Warn = Callable[[str, BaseException], object]


class PrefillTeller:
    """Tells in a thread: the next step must not wait for a daemon. For one thread."""

    def __init__(self, store: Callable[[], Depot], warn: Warn) -> None:
        self._store = store
        self._warn = warn
        self._telling: threading.Thread | None = None
        self._tell_again_s = -inf

    def tell(self, tags: Sequence[bytes], token_s: float, pair_s: float) -> None:
        """Seconds for each token and for each pair that attends, of these namespaces."""
        if token_s <= 0.0 or (self._telling is not None and self._telling.is_alive()):
            return
        if time.monotonic() < self._tell_again_s:
            return

        def tell() -> None:
            try:
                for tag in tags:
                    self._store().sessions.tell_prefill(tag.hex(), token_s, pair_s)
            except KVDepotError as error:
                # A daemon from before the ledger ends the connection: not again and again.
                self._tell_again_s = time.monotonic() + _TELL_AGAIN_S
                self._warn("the depot's ledger cannot be told of prefill", error)

        self._telling = threading.Thread(target=tell, name="kvdepot-prefill", daemon=True)
        self._telling.start()

    def wait(self, timeout_s: float) -> None:
        """Until what was told last has arrived."""
        if self._telling is not None:
            self._telling.join(timeout_s)
