"""A linker that can be told to say of pages that they were loaded, and to copy none: the control of
a hit that is compared. SGLang loads it by this module's name."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvdepot.adapters.sglang import KVDepotLinker as Linker

FLAG = "KVDEPOT_FORGETFUL"
"""The environment names a file: as long as it exists nothing reaches the device."""


class KVDepotLinker(Linker):  # type: ignore[misc, unused-ignore]
    """Ours, until it is told to forget."""

    def _copy_layers(self, index: int, held: Sequence[Any], events: Sequence[Any]) -> None:
        if Path(os.environ[FLAG]).exists():
            for one in held:
                one.rows, one.views = [], []
        super()._copy_layers(index, held, events)
