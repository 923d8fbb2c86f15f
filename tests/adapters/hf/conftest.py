"""What the tests of the transformers adapter share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvdepot  # noqa: E402
from kvdepot.config.settings import load  # noqa: E402
from kvdepot.io.files import Files  # noqa: E402
from kvdepot.store.open import assemble  # noqa: E402
from kvdepot.store.store import Store  # noqa: E402

OpenDepot = Callable[..., Store]


@pytest.fixture(autouse=True, scope="session")
def one_thread_is_fastest_for_tiny_models() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def memory() -> Iterator[Store]:
    """A depot in memory alone."""
    dram = {"capacity": "16MiB", "huge_pages": "never", "prefault": False}
    with kvdepot.open(dram=dram) as store:
        yield store


@pytest.fixture
def open_depot(tmp_path: Path) -> Iterator[OpenDepot]:
    """Opens the depot on disk; it can be closed and opened again."""
    opened: list[Store] = []

    def open_it(files: Files | None = None, **ssd: Any) -> Store:
        parts = {
            "dram": {"capacity": 8 << 20, "huge_pages": "never", "prefault": False},
            "writeback": {"staging": 4 << 20},
            "ssd": {"path": str(tmp_path / "kv"), "capacity": "64MiB", "segment": "1MiB", **ssd},
        }
        opened.append(assemble(load(overrides=parts), files=files))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()
