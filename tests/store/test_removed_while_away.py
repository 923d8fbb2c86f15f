"""Removals while the bucket is away reach the other nodes, and spare what was put after them."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_store import prompt, put, space_of, tiers
from tests.support.waiting import until

from kvdepot.config.settings import load
from kvdepot.store.drives.watchdog import VolumeWatchdog
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.store.volume_set import VolumeSet
from kvdepot.testing.torture.shared_bucket import BucketLink, FolderObjects

OpenNode = Callable[[str, BucketLink], Store]


@pytest.fixture
def link(tmp_path: Path) -> Callable[[], BucketLink]:
    return lambda: BucketLink(FolderObjects(tmp_path / "shared"), random.Random(1))


@pytest.fixture
def open_node(tmp_path: Path) -> Iterator[OpenNode]:
    opened: list[Store] = []

    def open_one(name: str, link: BucketLink) -> Store:
        tree: dict[str, Any] = {
            "dram": {"capacity": "2MiB", "prefault": False, "huge_pages": "never"},
            "writeback": {"staging": "2MiB"},
            "ssd": {"path": tmp_path / name, "capacity": "8MiB", "segment": "1MiB"},
            "object": {
                "url": f"file://{tmp_path}/shared",
                "capacity": "32MiB",
                "refresh": "50ms",
                "retry_initial": "50ms",
                "retry_max": "100ms",
            },
        }
        opened.append(assemble(load(overrides=tree), bucket=link))
        space_of(opened[-1])
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def shared_prompt(first: Store, second: Store) -> list[Any]:
    """Keys of blocks that both nodes have."""
    keys = prompt(space_of(first), 1, 4)
    put(first, keys)
    assert first.flush()
    until(lambda: len(second.match(keys)) == 4)
    assert None not in tiers(second, keys)
    return keys


def test_a_removal_reaches_the_others_when_the_bucket_is_back(
    open_node: OpenNode, link: Callable[[], BucketLink]
) -> None:
    way = link()
    first, second = open_node("a", way), open_node("b", link())
    keys = shared_prompt(first, second)
    way.become("away")
    assert first.remove(keys[:2]) == 2
    assert len(second.match(keys)) == 4
    way.become("up")
    until(lambda: not second.match(keys[:1]))
    assert tiers(second, keys[:2]) == [None, None]


def test_a_removal_reaches_the_others_after_a_restart(
    open_node: OpenNode, link: Callable[[], BucketLink]
) -> None:
    way = link()
    first, second = open_node("a", way), open_node("b", link())
    keys = shared_prompt(first, second)
    way.become("away")
    assert first.remove(keys[:2]) == 2
    first.close()
    first = open_node("a", link())
    until(lambda: not second.match(keys[:1]))
    assert tiers(second, keys[:2]) == tiers(first, keys[:2]) == [None, None]


def test_a_block_that_was_put_after_its_removal_stays(
    open_node: OpenNode, link: Callable[[], BucketLink]
) -> None:
    """The node opens without the bucket, and reads the removal there when it is back."""
    way = link()
    first = open_node("a", way)
    keys = prompt(space_of(first), 1, 4)
    put(first, keys)
    assert first.flush()
    assert first.remove(keys) == 4
    way.become("away")
    put(first, keys)
    first.close()
    second = open_node("b", link())
    marks = prompt(space_of(second), 2, 1)
    put(second, marks)
    assert second.flush()
    way = link()
    way.become("away")
    first = open_node("a", way)
    assert tiers(first, keys) == ["ssd"] * 4
    way.become("up")
    until(lambda: bool(first.match(marks)))
    assert None not in tiers(first, keys)


def test_a_removal_of_another_node_spares_what_was_put_after_it(
    open_node: OpenNode, link: Callable[[], BucketLink]
) -> None:
    way = link()
    first, second = open_node("a", link()), open_node("b", way)
    keys = shared_prompt(first, second)
    marks = prompt(space_of(first), 2, 1)
    put(second, marks)
    way.become("away")
    assert second.remove(keys) == 4
    first.remove([*keys, *marks])
    put(second, keys)
    way.become("up")
    until(lambda: not second.match(marks))
    assert None not in tiers(second, keys)


def test_a_removal_while_the_same_block_arrives_counts(
    open_node: OpenNode, link: Callable[[], BucketLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node has read what another one wrote, and has not entered it, when it is removed."""
    first, second = open_node("a", link()), open_node("b", link())
    keys = prompt(space_of(first), 1, 4)
    removed: list[int] = []
    matched: list[int] = []
    look, take_news = VolumeSet._alive, VolumeWatchdog.take_news

    def then_remove(volumes: VolumeSet, *args: Any) -> Any:
        blocks = look(volumes, *args)
        if volumes is second.inspect().volumes and len(blocks.words) and not removed:
            removed.append(second.remove(keys))
        return blocks

    def then_match(watchdog: VolumeWatchdog, *args: Any) -> None:
        take_news(watchdog, *args)
        if removed:
            matched.append(len(second.match(keys)))

    monkeypatch.setattr(VolumeSet, "_alive", then_remove)
    monkeypatch.setattr(VolumeWatchdog, "take_news", then_match)
    put(first, keys)
    assert first.flush()
    until(lambda: bool(matched))
    assert matched[0] == 0
