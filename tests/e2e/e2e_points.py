"""What an end-to-end command finds, told as it is found, and where it works."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Points:
    """One line for each point of what must hold; with `as_json` each is an object."""

    as_json: bool
    found: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.found) and all(one["ok"] for one in self.found)

    def add(self, name: str, ok: bool, **figures: Any) -> None:
        self.found.append({"point": name, "ok": bool(ok), **figures})
        if self.as_json:
            print(json.dumps(self.found[-1]), flush=True)
        else:
            shown = ", ".join(f"{what} {value}" for what, value in figures.items())
            print(f"{'ok  ' if ok else 'FAIL'} {name}: {shown}", flush=True)


@contextmanager
def scratch(kept: Path | None, prefix: str, within: Path | None = None) -> Iterator[Path]:
    """The folder that is to be kept, or a temporary one."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory("", prefix, within, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
