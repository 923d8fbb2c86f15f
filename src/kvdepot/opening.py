"""What `kvdepot.open` opens: a store of this process, or that of a daemon."""

import os
from typing import Any, cast

from kvdepot.core.config import Config
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

_SCHEME = "unix:"


def open_depot(config: str | os.PathLike[str] | Config | None = None, **settings: Any) -> Store:
    """Open a store: with `unix:/path/of/socket` that of a daemon, see client.opening.open_remote,
    which has the same methods; else one of this process, see store.opening.open_store.
    """
    if isinstance(config, str) and config.startswith(_SCHEME):
        from kvdepot.client.open import open_remote

        return cast(Store, open_remote(config, **settings))
    return open_store(config, **settings)
