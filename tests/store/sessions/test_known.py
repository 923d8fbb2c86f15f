"""Sessions by name: what is remembered of them, and what the tiers do about their state."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.store_contract import LAYOUT, TOKENS, prompt, put, small, space_of, tiers
from tests.support.stores import settings

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.core.clock import SystemClock
from kvdepot.core.keys import as_words
from kvdepot.core.sessions import SessionState
from kvdepot.errors import ConfigError, KeyFormatError
from kvdepot.index.catalog import Catalog
from kvdepot.index.pinned_rows import PinnedRows
from kvdepot.store.sessions.session_table import Sessions
from kvdepot.store.store import Store
from kvdepot.testing.emulation import DriveModel, open_emulated

SLOW = DriveModel(read_bandwidth=10**8, write_bandwidth=10**8, seek=0.001)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with kvdepot.open(**small(tmp_path / "kv")) as opened:
        yield opened
        assert opened.admin.check()


class TestNames:
    def test_a_longer_prompt_replaces_the_one_before(self, store: Store) -> None:
        keys = prompt(space_of(store), 1, 6)
        put(store, keys)
        store.sessions.name("chat", keys[:2])
        store.sessions.name("chat", keys)
        assert store.sessions.name("chat") == 6

    def test_unknown_states_and_bad_names_are_refused(self, store: Store) -> None:
        keys = prompt(space_of(store), 1, 1)
        with pytest.raises(ConfigError, match="'asleep' is not one of alive, pending, closed"):
            store.sessions.name("chat", keys, "asleep")
        for name in ("", "x" * 201, None, 7):
            with pytest.raises(ConfigError, match="1 to 200 bytes"):
                store.sessions.name(name, keys)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="1 to 200 bytes"):
            store.sessions.prefetch("", 1.0)
        with pytest.raises(KeyFormatError):
            store.sessions.name("chat", [BlockKey(b"short")])
        with pytest.raises(KeyFormatError, match="not registered"):
            store.sessions.name("chat", [BlockKey(bytes(32))])

    def test_the_same_name_of_two_tenants_is_two_sessions(self, store: Store) -> None:
        ours = store.namespace(model="m", layout=LAYOUT, tenant="a", secret=b"1" * 16)
        theirs = store.namespace(model="m", layout=LAYOUT, tenant="b", secret=b"2" * 16)
        mine, other = prompt(ours, 1, 3), prompt(theirs, 1, 5)
        put(store, mine)
        put(store, other)
        store.sessions.name("chat", mine)
        store.sessions.name("chat", other)
        assert store.sessions.name("chat", tenant="a") == 3
        assert store.sessions.name("chat", state="closed", tenant="b") == 5
        assert store.sessions.name("chat", tenant="a") == 3
        assert store.sessions.name("chat", tenant="b") == store.sessions.name("chat") == 0

    def test_a_session_has_a_prompt_in_each_namespace_of_its_tenant(self, store: Store) -> None:
        shards = [
            store.namespace(model="m", layout=LAYOUT, shard_rank=rank, shard_size=2)
            for rank in range(2)
        ]
        both = [key for shard in shards for key in prompt(shard, 1, 4)]
        put(store, both)
        assert store.sessions.name("chat", both) == 8
        assert store.sessions.name("chat") == 8


class Books:
    """Sessions over a catalog without a store."""

    def __init__(self, **bounds: int) -> None:
        self.catalog = Catalog()
        self.sessions = Sessions(
            self.catalog,
            SystemClock(),
            PinnedRows(self.catalog.table),
            **bounds,
        )

    def tell(self, tag: str, name: str, blocks: int) -> None:
        words = np.arange(1, 4 * blocks + 1, dtype=np.uint64).reshape(-1, 4)
        self.sessions.tell(tag.encode().ljust(8), name, words, SessionState.ALIVE)

    def knows(self, tag: str, name: str) -> bool:
        return self.sessions.find(tag.encode().ljust(8), name) is not None


class TestBounds:
    def test_in_number_the_oldest_goes(self) -> None:
        books = Books(number_max=3)
        for name in "abc":
            books.tell("x", name, 1)
        books.tell("x", "a", 2)
        books.tell("x", "d", 1)
        assert [books.knows("x", name) for name in "abcd"] == [True, False, True, True]
        assert books.sessions.describe()["forgotten"] == 1

    def test_in_bytes_and_who_has_most_pays(self) -> None:
        books = Books(bytes_max=10_000)
        books.tell("small", "only", 10)
        for number in range(50):
            books.tell("large", str(number), 100)
        assert books.knows("small", "only")
        assert books.knows("large", "49") and not books.knows("large", "0")
        assert books.sessions.describe()["bytes"] <= 10_000

    def test_one_that_is_too_large_is_not_remembered(self) -> None:
        books = Books(bytes_max=10_000)
        books.tell("x", "a", 1)
        books.tell("x", "b", 300)
        assert books.knows("x", "a") and not books.knows("x", "b")

    def test_keys_come_back_as_they_were_also_in_parts(self) -> None:
        books = Books()
        keys = [BlockKey(b"tag-tag-" + bytes([n]) * 24) for n in range(1, 9)]
        words = as_words(keys)
        tag = keys[0][:8]
        books.sessions.tell(tag, "chat", words[:5], SessionState.ALIVE)
        books.sessions.tell(tag, "chat", words[5:], SessionState.PENDING, 5)
        prompt = books.sessions.find(tag, "chat")
        assert prompt and (prompt.keys(tag), prompt.state) == (keys, SessionState.PENDING)
        books.sessions.tell(tag, "chat", words[5:], SessionState.ALIVE, 3)
        assert books.sessions.find(tag, "chat") == prompt, "a gap"


class TestMemory:
    def test_closed_leaves_first_and_pending_last(self, store: Store) -> None:
        """Memory holds some fifty blocks; forty of four sessions, then twenty more."""
        space = space_of(store)
        chains = [prompt(space, number, 10) for number in range(4)]
        for keys in chains:
            put(store, keys)
        assert store.flush()
        store.sessions.name("pending", chains[0], "pending")
        store.sessions.name("closed", chains[3], "closed")
        for number in range(2):
            put(store, prompt(space, 100 + number, 10))
        found = [store.match(keys).tiers.count("dram") for keys in chains]
        assert found[0] == 10
        assert found[3] < 10
        assert min(found[1:3]) == 10 or found[3] == 0, "nobody else went before it"

    def test_what_another_session_shares_stays(self, store: Store) -> None:
        space = space_of(store)
        shared = prompt(space, 1, 5)
        more = [space.keys([n] * TOKENS * 5, parent=shared[-1]) for n in (1, 2)]
        for tail in more:
            put(store, shared + tail)
        assert store.flush()
        store.sessions.name("one", shared + more[0], "closed")
        catalog = store.inspect().catalog
        closed = [row in catalog.closed for row in catalog.rows(shared + more[0] + more[1])]
        assert closed == [False] * 5 + [True] * 5 + [False] * 5

    def test_what_another_session_ends_with_stays(self, store: Store) -> None:
        keys = prompt(space_of(store), 1, 6)
        put(store, keys)
        store.sessions.name("short", keys[:3])
        store.sessions.name("long", keys, "closed")
        catalog = store.inspect().catalog
        assert [row in catalog.closed for row in catalog.rows(keys)] == [False] * 3 + [True] * 3
        store.sessions.name("short", state="closed")
        assert [row in catalog.closed for row in catalog.rows(keys)] == [True] * 6

    def test_who_uses_it_again_opens_it(self, store: Store) -> None:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        catalog = store.inspect().catalog
        for again in (lambda: tiers(store, keys), lambda: store.sessions.name("chat", keys)):
            store.sessions.name("chat", keys, "closed")
            assert all(row in catalog.closed for row in catalog.rows(keys))
            again()
            assert not any(row in catalog.closed for row in catalog.rows(keys))


class TestDrives:
    def test_a_closed_session_is_neither_kept_nor_copied_down(self, tmp_path: Path) -> None:
        """All were asked for again, so all would be kept or copied to the hard drive."""
        with kvdepot.open(**settings(tmp_path, dram={"capacity": "1MiB"})) as store:
            space = space_of(store)
            chains = [prompt(space, number, 8) for number in range(6)]
            for number, keys in enumerate(chains):
                put(store, keys)
                assert store.flush()
                assert None not in tiers(store, keys)
                if number % 2:
                    store.sessions.name(f"chat {number}", keys, "closed")
            for number in range(25):
                put(store, prompt(space, 100 + number, 8))
                assert store.flush()
            left = [len(store.match(keys)) for keys in chains]
            assert left[0::2] == [8, 8, 8]
            assert max(left[1::2]) == 0
            assert store.admin.check()

    def test_the_segment_of_closed_sessions_goes_first(self, tmp_path: Path) -> None:
        tree = settings(tmp_path, dram={"capacity": "1MiB"})
        del tree["hdd"]
        with kvdepot.open(**tree) as store:
            space = space_of(store)
            chains = [prompt(space, number, 14) for number in range(5)]
            for keys in chains:
                put(store, keys)
                assert store.flush()
            store.sessions.name("third", chains[2], "closed")
            number = 100
            while not store.stats()["counters"]["evicted_ssd"]:
                put(store, prompt(space, number, 7))
                assert store.flush()
                number += 1
            left = [len(store.match(keys)) for keys in chains]
            assert left[0] == left[1] == left[3] == left[4] == 14
            assert left[2] < 14


class TestHints:
    @pytest.fixture
    def keys(self, tmp_path: Path) -> list[BlockKey]:
        """A prompt that lies on the hard drive only."""
        with kvdepot.open(**settings(tmp_path, hdd={"write_mode": "pass-through"})) as store:
            found = prompt(space_of(store), 1, 10)
            assert all(put(store, found))
        return found

    def test_a_session_is_hinted_at_by_its_name(self, tmp_path: Path, keys: list[BlockKey]) -> None:
        with open_emulated({"hdd": SLOW}, **settings(tmp_path)) as store:
            space_of(store)
            assert store.sessions.prefetch("chat", 20.0).wait(0.0), "nobody knows it"
            assert store.sessions.name("chat", keys) == 10
            hint = store.sessions.prefetch("chat", 20.0)
            assert hint.wait(60.0)
            assert (hint.wanted, hint.brought) == (10, 10)
            assert store.match(keys).tiers == ("dram",) * 10
            assert store.flush()
            assert store.stats()["tiers"]["ssd"]["blocks"] == 10, "one read brought it there too"

    def test_one_tenants_name_brings_nothing_of_another(
        self, tmp_path: Path, keys: list[BlockKey]
    ) -> None:
        with kvdepot.open(**settings(tmp_path)) as store:
            space_of(store)
            other = store.namespace(model="m", layout=LAYOUT, tenant="b", secret=b"2" * 16)
            store.sessions.name("chat", keys)
            assert store.sessions.prefetch("chat", namespace=other.tag.hex()).wanted == 0

    def test_the_shards_of_a_session_come_together(self, tmp_path: Path) -> None:
        """Three of eight blocks fit: two heads and one more, not three of one shard."""
        shards = []
        tree = settings(tmp_path, dram={"capacity": "512KiB"}, ssd={"promote": True})
        with kvdepot.open(**tree) as store:
            for rank in range(2):
                space = store.namespace(model="m", layout=LAYOUT, shard_rank=rank, shard_size=2)
                shards.append(prompt(space, 1, 4))
                put(store, shards[-1])
        with kvdepot.open(**tree) as store:
            for rank in range(2):
                store.namespace(model="m", layout=LAYOUT, shard_rank=rank, shard_size=2)
            store.sessions.name("chat", shards[0] + shards[1])
            hint = store.sessions.prefetch("chat", 20.0)
            assert hint.wait(60.0)
            brought = [store.match(keys).tiers.count("dram") for keys in shards]
            assert sorted(brought) == [1, 2]
