"""Keys depend on everything that KV depends on, and on nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import full_attention

from kvdepot.adapters.vllm.messages import BlockOrigin
from kvdepot.adapters.vllm.requests import RequestKeys
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace

TOKENS = list(range(100, 164))
SIZE = 16
BLOCKS = len(TOKENS) // SIZE


def space(**fields: Any) -> NamespaceHandle:
    layout = KVLayout.opaque(4096, SIZE)
    return NamespaceHandle(Namespace(model="m", layout=layout, **fields))


def image(identifier: str, offset: int, length: int) -> Any:
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=place)


def chain(spaces: list[NamespaceHandle], salt: str | None, *images: Any) -> RequestKeys:
    request: Any = SimpleNamespace(cache_salt=salt, mm_features=images, all_token_ids=TOKENS)
    return RequestKeys(request, full_attention(SIZE), [spaces], BlockOrigin())


def keys(salt: str | None = None, *images: Any) -> list[bytes]:
    made = chain([space()], salt, *images)
    made.grow(BLOCKS)
    return list(made.of(0, 0, BLOCKS)[0])


def test_plain_keys_are_those_of_the_namespace() -> None:
    assert keys() == space().keys(TOKENS)


def test_growing_in_steps_gives_the_same_keys() -> None:
    images = image("cat", 20, 1), image("dog", 50, 1)
    in_steps = chain([space()], "s", *images)
    for blocks in (1, 1, 2, BLOCKS):
        in_steps.grow(blocks)
    assert list(in_steps.of(0, 0, BLOCKS)[0]) == keys("s", *images)


def test_shards_have_keys_of_their_own() -> None:
    shards = chain([space(), space(shard_rank=1, shard_size=2)], None)
    shards.grow(BLOCKS)
    first, second = shards.of(0, 1, 3)
    assert len(first) == len(second) == 2
    assert not set(first) & set(second)


def test_a_salt_changes_every_key() -> None:
    assert not set(keys()) & set(keys("s"))
    assert not set(keys("t")) & set(keys("s"))
    assert keys("s") == keys("s")
    assert keys("") == keys()


def test_an_image_changes_the_keys_from_its_block_on() -> None:
    plain, cat, dog = keys(), keys(None, image("cat", 20, 5)), keys(None, image("dog", 20, 5))
    assert plain[0] == cat[0] == dog[0]
    assert len({plain[1], cat[1], dog[1]}) == 3
    assert len({plain[3], cat[3], dog[3]}) == 3


def test_the_position_of_an_image_counts() -> None:
    assert keys(None, image("cat", 20, 5))[1] != keys(None, image("cat", 21, 5))[1]
    over_the_border = keys(None, image("cat", 14, 4))
    assert over_the_border[0] != keys()[0]
    two = (image("cat", 20, 3), image("dog", 24, 3))
    assert keys(None, *two)[1] != keys(None, two[0])[1]


def test_an_image_that_reaches_on_marks_every_block() -> None:
    long, short = keys(None, image("cat", 0, 40)), keys(None, image("cat", 0, 16))
    assert long[0] == short[0]
    assert long[1] != short[1]
