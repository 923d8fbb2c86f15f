"""Pages of a device pool in a depot, layer by layer. With a pool of our own; without SGLang."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.device_pool import PAGE, PAGES, DevicePool, indices
from tests.support.small_store import settings

import kvdepot
from kvdepot.adapters.sglang.config import read_linker
from kvdepot.adapters.sglang.device_pages import DevicePages
from kvdepot.adapters.tensors import HostMover
from kvdepot.config.settings import AuditConfig
from kvdepot.errors import ConfigError, ModelError

HASHES = [f"{number:064x}" for number in range(PAGES)]
LIMIT_S = 20.0
SHAPES: dict[str, dict[str, Any]] = {
    "K and V": {},
    "K and V of two sizes": {"widths": (32, 32, 24, 24)},
    "whole pages in a row": {"paged": True},
    "latents": {"widths": (64, 64, 64), "layers": {0: 0, 1: 1, 2: 2}},
    "a draft beside the first layer": {
        "widths": (64, 64, 48),
        "layers": {0: (0, 2), 1: 1},
    },
    "some layers": {"widths": (32, 32), "layers": {1: 0, 4: 1}},
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvdepot.Depot]:
    with kvdepot.open(**settings(tmp_path / "depot")) as opened:
        yield opened


def pages_of(store: kvdepot.Depot, pool: DevicePool) -> DevicePages:
    made = DevicePages(store, pool, HostMover())
    made.register({"model": "m", "extra": tuple(made.identity().items())})
    return made


def loaded(pages: DevicePages, count: int, at: list[int]) -> bool:
    """Lease pages and copy them layer by layer."""
    keys = pages.keys(HASHES[:count], None, chained=False)
    leased = pages.lease(keys, indices(at), LIMIT_S)
    if leased is None:
        return False
    for layer in range(6):
        for ticket in pages.onboard([layer], leased.rows, leased.views):
            ticket.synchronize()
    leased.release()
    return True


@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_trip_layer_by_layer(store: kvdepot.Depot, shape: str) -> None:
    source, target = DevicePool(1, **SHAPES[shape]), DevicePool(2, **SHAPES[shape])
    pages = pages_of(store, source)
    keys = pages.keys(HASHES[:5], None, chained=False)
    assert pages.store(keys, indices([7, 1, 3, 0, 9])) == [True] * 5
    assert pages.store(keys, indices([7, 1, 3, 0, 9])) == [True] * 5
    before = DevicePool(2, **SHAPES[shape])
    assert loaded(pages_of(store, target), 5, [2, 4, 6, 8, 10])
    for there, here in zip([7, 1, 3, 0, 9], [2, 4, 6, 8, 10], strict=True):
        assert target.has(here, source, there)
    assert all(target.has(at, before, at) for at in range(1, PAGES, 2)), "others are as they were"


def test_a_layer_is_copied_without_the_others(store: kvdepot.Depot) -> None:
    source, target, before = DevicePool(1), DevicePool(2), DevicePool(2)
    pages = pages_of(store, source)
    keys = pages.keys(HASHES[:2], None, chained=False)
    assert all(pages.store(keys, indices([0, 1])))
    other = pages_of(store, target)
    leased = other.lease(keys, indices([0, 1]), LIMIT_S)
    assert leased is not None
    other.onboard([1], leased.rows, leased.views)
    leased.release()
    for number, (now, was, wanted) in enumerate(
        zip(target.kv_buffer, before.kv_buffer, source.kv_buffer, strict=True)
    ):
        assert torch.equal(now[: 2 * PAGE], (wanted if number % 3 == 1 else was)[: 2 * PAGE])


@pytest.mark.parametrize("shape", SHAPES)
def test_an_audited_page_is_compared(store: kvdepot.Depot, shape: str) -> None:
    pages = pages_of(store, DevicePool(1, **SHAPES[shape]))
    pages.audit(AuditConfig(share=1, under_load=True), "SGLang 1")
    keys = pages.keys(HASHES[:4], None, chained=False)
    assert all(pages.store(keys, indices([7, 1, 3, 0])))
    assert pages.served_pages(keys) == 3
    assert all(pages.store(keys[3:], indices([0])))
    known = store.audits.list()
    assert (known["compared"], known["mismatched"]) == (1, 0)
    assert pages.served_pages(keys) == 3
    pages.store(keys[3:], indices([5]))
    (found,) = store.audits.list()["quarantined"]
    assert found["made_by"] == found["found_by"] == "SGLang 1"
    assert len(store.match(keys)) == 0


def test_a_pool_of_several_dtypes_is_not_audited(store: kvdepot.Depot) -> None:
    pool = DevicePool(1)
    pool.components[0][0] = pool.components[0][0].view(torch.int16)
    pages = pages_of(store, pool)
    pages.audit(AuditConfig(share=1), "SGLang 1")
    assert pages.served_pages(pages.keys(HASHES[:4], None, chained=False)) == 4


def test_nothing_is_leased_unless_every_page_is_there(store: kvdepot.Depot) -> None:
    pages = pages_of(store, DevicePool(1))
    keys = pages.keys(HASHES[:3], None, chained=False)
    assert all(pages.store(keys, indices([0, 1, 2])))
    assert (
        pages.lease(
            [*keys, *pages.keys(HASHES[8:9], None, chained=False)], indices([0, 1, 2, 3]), LIMIT_S
        )
        is None
    )
    store.remove(keys[1])
    assert pages.lease(keys, indices([0, 1, 2]), LIMIT_S) is None
    assert store.admin.check(), "no lease is left"


def test_pages_that_memory_has_no_room_for_are_copied_at_once(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"widths": (12800,) * 2}
    source, target = DevicePool(1, **shape), DevicePool(2, **shape)
    with kvdepot.open(**settings(tmp_path / "depot")) as opened:
        pages = pages_of(opened, source)
        keys = pages.keys(HASHES, None, chained=False)
        for at, key in enumerate(keys):
            assert pages.store([key], indices([at])) == [True]
            assert opened.flush(LIMIT_S)
        other = pages_of(opened, target)
        leased = other.lease(keys, indices(range(PAGES)), LIMIT_S)
        assert leased is not None
        assert len(leased.views) < PAGES, "more than memory holds"
        other.onboard([0], leased.rows, leased.views)
        leased.release()
    assert all(target.has(at, source, at) for at in range(PAGES))


def test_a_page_that_was_damaged_on_its_drive_is_not_leased(tmp_path: Path) -> None:
    folder = tmp_path / "depot"
    pool = DevicePool(1)
    with kvdepot.open(**settings(folder)) as opened:
        pages = pages_of(opened, pool)
        keys = pages.keys(HASHES[:3], None, chained=False)
        assert all(pages.store(keys, indices([0, 1, 2])))
        assert opened.flush(LIMIT_S)
    wanted = pool.page(1)[0].numpy().tobytes()
    (segment,) = (path for path in folder.glob("segment-*") if wanted in path.read_bytes())
    content = segment.read_bytes()
    at = content.index(wanted)
    segment.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with kvdepot.open(**settings(folder)) as opened:
        assert not loaded(pages_of(opened, DevicePool(2)), 3, [0, 1, 2])


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.bfloat16},
        {"widths": (16,) * 6},
        {"layers": {0: (0, 3), 1: (2, 5), 2: (1, 4)}},
    ],
)
def test_pools_whose_pages_differ_are_kept_apart(
    store: kvdepot.Depot, other: dict[str, Any]
) -> None:
    assert (
        pages_of(store, DevicePool(1)).space.tag
        != pages_of(store, DevicePool(1, **other)).space.tag
    )


def test_a_page_in_several_pieces_is_refused(store: kvdepot.Depot) -> None:
    pool = DevicePool(1)
    pool.kv_buffer[0] = torch.zeros(PAGES * PAGE, 64, dtype=torch.float16)[:, ::2]
    with pytest.raises(ModelError, match="is not contiguous"):
        DevicePages(store, pool, HostMover())


def test_a_buffer_that_belongs_to_no_layer_is_refused(store: kvdepot.Depot) -> None:
    with pytest.raises(ModelError, match="no layer"):
        DevicePages(store, DevicePool(1, layers={0: (0, 3)}), HostMover())


@pytest.mark.parametrize(
    ("extra", "name"),
    [({"interface_v1": 1}, "interface_v1"), ({"prefix_chain": True}, "prefix_chain")],
)
def test_settings_that_a_linker_has_not_are_named(extra: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_linker(extra)
    where = "unified-cache-external-linker-config.linker_extra_config"
    assert str(caught.value).startswith(f"{where}.{name}: ")
