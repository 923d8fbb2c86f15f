"""A daemon whose store has two memories: its clients map both, and see them as one."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.daemon_store import DaemonStore, open_daemon
from tests.support.store_contract import (
    BLOCK_BYTES,
    LAYERS,
    InPlaceContract,
    OpenDepot,
    StoreContract,
    prompt,
    put,
    small,
    space_of,
    tiers,
)

import kvdepot
from kvdepot.core.depot import Arrival
from kvdepot.depot import Depot
from kvdepot.testing.images import payload_for

MIB = 1 << 20
LAYER_BYTES = BLOCK_BYTES // LAYERS


@pytest.fixture(params=["memory", "device"])
def depot(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OpenDepot]:
    device = tmp_path / "device"
    device.write_bytes(bytes(2 * MIB))
    cxl: dict[str, Any] = {"capacity": MIB}
    if request.param == "device":
        cxl["path"] = str(device)
    stores: list[Any] = []

    def opened(**settings: Any) -> Depot:
        folder = tmp_path / f"daemon-{len(stores)}"
        folder.mkdir()
        store = open_daemon(folder, {**small(tmp_path / "kv"), "cxl": cxl, **settings})
        stores.append(store)
        return store

    yield opened
    for store in stores:
        assert isinstance(store, DaemonStore)
        with store.daemon:
            pass


@pytest.fixture
def store(depot: OpenDepot) -> Iterator[Depot]:
    with depot() as opened:
        yield opened
        assert opened.admin.check().findings == []


def fill(store: Depot) -> dict[str, list[Any]]:
    """Put until some blocks are below; for each memory the keys of blocks that are there."""
    space = space_of(store)
    everything = [prompt(space, number, 10) for number in range(12)]
    for keys in everything:
        assert all(put(store, keys))
        assert store.flush()
    before: Any = None
    while before != (
        before := {name: one["blocks"] for name, one in store.stats()["tiers"].items()}
    ):
        time.sleep(0.05)
    there: dict[str, list[Any]] = {"dram": [], "cxl": [], "ssd": []}
    for keys in everything:
        for key in keys:
            there[store.match([key]).tiers[0]].append(key)
    assert len(there["cxl"]) > 10 and len(there["dram"]) > 10
    return there


def test_blocks_of_both_memories_come_together(store: Depot) -> None:
    there = fill(store)
    keys = [key for pair in zip(there["cxl"][:4], there["dram"][:4], strict=True) for key in pair]
    assert tiers(store, keys) == ["cxl", "dram"] * 4
    counters = store.stats()["counters"]
    assert (counters["get_cxl"], counters["get_dram"]) == (4, 4)


def test_what_is_below_says_so(store: Depot) -> None:
    keys = fill(store)["cxl"][:1]
    assert tiers(store, keys) == ["cxl"]
    assert store.stats()["tiers"]["cxl"]["blocks"] > 10


def test_layers_come_from_below(store: Depot) -> None:
    for key in fill(store)["cxl"][:8]:
        target = bytearray(LAYER_BYTES)
        assert store.get_many([key], [target], layers=range(1, 2))[0]
        assert target == payload_for(key, BLOCK_BYTES)[LAYER_BYTES : 2 * LAYER_BYTES]


def test_leased_blocks_are_seen_in_place(store: Depot) -> None:
    there = fill(store)
    for key in [*there["cxl"][:8], *there["dram"][:8]]:
        with store.lease([key]) as lease:
            view = lease.view(0)
            assert view is not None and view == payload_for(key, BLOCK_BYTES)
            view.release()
            seen: list[Arrival] = []
            (answer,) = lease.deliver(seen.extend)
            assert answer.tier in ("dram", "cxl")
            assert seen[0].lasting and seen[0].view == payload_for(key, BLOCK_BYTES)
            seen[0].view.release()


def test_two_clients_see_the_same(store: Depot) -> None:
    keys = fill(store)["cxl"][:8]
    with kvdepot.open(cast(Any, store).daemon.address) as other:
        space_of(other)
        assert None not in tiers(other, keys)


@pytest.mark.slow
class TestContract(StoreContract):
    """Through a socket."""

    test_touching_keeps_a_prompt_longer = None  # type: ignore[assignment]


@pytest.mark.slow
class TestContractInPlace(InPlaceContract):
    """The same, in place."""
