"""Prefixes that sessions share, from the tree of their prompts."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.core.order import SessionState
from kvdepot.errors import ConfigError
from kvdepot.store.sessions import service
from kvdepot.store.sessions.session_table import PACKED_BYTES, Prompt
from kvdepot.store.sessions.shared_prefixes import shared_prefixes
from kvdepot.testing.store_contract import BLOCK_BYTES, TOKENS, put, small, space_of

TAG = b"t" * 8


def chained(path: tuple[int, ...]) -> bytes:
    """Keys of blocks of which each stands for all before it, as those of prompts do."""
    known = [Random(str(path[: end + 1])).randbytes(PACKED_BYTES) for end in range(len(path))]
    return b"".join(known)


def test_they_are_those_of_the_tree(seed: int) -> None:
    chance = Random(seed)
    paths = [
        tuple(chance.randrange(2) for _ in range(chance.randrange(1, 7)))
        for _ in range(chance.randrange(1, 40))
    ]
    prompts = [
        Prompt(chained(path), SessionState.ALIVE, told_s=at) for at, path in enumerate(paths)
    ]
    having = Counter(path[:end] for path in paths for end in range(1, len(path) + 1))
    expected = {
        chained(one): count
        for one, count in having.items()
        # The longest that its sessions have in common: the next block is not that of all.
        if count > 1 and count not in (having[*one, 0], having[*one, 1])
    }
    found = shared_prefixes(TAG, prompts)
    assert {one.packed: one.sessions for one in found} == expected
    for one in found:
        heads = [path for path in paths if chained(path).startswith(one.packed)]
        assert one.told_s == max(at for at, path in enumerate(paths) if path in heads)


def test_a_store_tells_of_them(tmp_path: Path) -> None:
    with kvdepot.open(**small(tmp_path)) as store:
        space = space_of(store)

        def told(name: str, ids: list[int]) -> list[BlockKey]:
            keys = space.keys(ids)
            put(store, keys)
            store.session(name, keys)
            return keys

        system = list(range(3 * TOKENS))
        tools = [*system, *range(1000, 1000 + TOKENS)]
        for number in range(3):
            told(f"plain {number}", [*system, *[5000 + number] * TOKENS])
        for number in range(2):
            keys = told(f"tools {number}", [*tools, *[6000 + number] * TOKENS])
        told("alone", [9000] * TOKENS)
        most, behind = store.sessions.shared_prefixes()
        assert (most["sessions"], most["blocks"], most["tokens"]) == (5, 3, 3 * TOKENS)
        assert most["tiers"] == {"dram": 3} and most["bytes"]["dram"] == 3 * BLOCK_BYTES
        assert most["model"] == "contract" and most["namespace"] == space.tag.hex()
        assert (behind["sessions"], behind["blocks"]) == (2, 4)
        assert behind["prefix"] == bytes(keys[3])[16:24].hex()
        assert [one["sessions"] for one in store.sessions.shared_prefixes("cold", 1)]
        store.remove(keys[:4])
        assert store.sessions.shared_prefixes()[0]["tiers"] == {}
        with pytest.raises(ConfigError, match="is not one of busy, cold"):
            store.sessions.shared_prefixes("best")


def test_what_took_long_to_find_is_good_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvdepot.open(**small(tmp_path)) as store:
        keys = space_of(store).keys(range(2 * TOKENS))
        store.session("a", keys)
        monkeypatch.setattr(service, "_QUICK_S", -1.0)
        monkeypatch.setattr(service, "backoff_s", lambda _: 3600.0)
        assert store.sessions.shared_prefixes() == []
        store.session("b", keys)
        assert store.sessions.shared_prefixes() == []
