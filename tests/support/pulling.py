"""Taking a drive's folder away under a store that is using it."""

import shutil
from pathlib import Path


def pull(path: Path) -> None:
    """At once, as a disk goes: what the store makes there meanwhile goes with it."""
    gone = path.with_name(f"{path.name}-gone")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
