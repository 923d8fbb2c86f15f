"""What SGLang's storage answers, with stand-ins for the modules of SGLang."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.support.store_contract import prompt, put, small, space_of

import kvdepot
from kvdepot.testing.daemons import DaemonProcess

pytest.importorskip("torch")

MODULES = {
    "mem_cache.hicache_storage": "HiCacheStorage PoolHitPolicy PoolName PoolTransferResult",
    "observability.metrics_collector": "StorageMetrics",
    "runtime_context": "get_server_args",
}
STORAGE = "kvdepot.adapters.sglang.storage"


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The storage before its pools are known."""
    for name, members in MODULES.items():
        made = ModuleType(name)
        vars(made).update({member: type(member, (), {}) for member in members.split()})
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", made)
    version = ModuleType("sglang.version")
    vars(version)["__version__"] = "0"
    monkeypatch.setitem(sys.modules, "sglang.version", version)
    monkeypatch.delitem(sys.modules, STORAGE, raising=False)
    made = importlib.import_module(STORAGE).KVDepotStorage
    monkeypatch.delitem(sys.modules, STORAGE)
    return object.__new__(made)


def test_clear_says_if_pages_may_be_left(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        DaemonProcess(tmp_path, small(tmp_path / "kv")) as daemon,
        kvdepot.open(daemon.address) as depot,
    ):
        space = space_of(depot)
        pages = {"kv": SimpleNamespace(space=space), "not known": None}
        storage._depot, storage._pools = depot, {"kv": None}
        monkeypatch.setattr(storage, "_ready", pages.get)
        keys = prompt(space, 1, 3)
        assert all(put(depot, keys))
        assert storage.clear() is True
        assert not len(depot.match(keys))
        storage._pools["not known"] = None
        assert storage.clear() is False
        del storage._pools["not known"]
        daemon.kill()
        assert storage.clear() is False
