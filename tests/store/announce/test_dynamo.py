"""Dynamo's real indexer, fed by our events, says of every prompt what the depots say themselves."""

import importlib.util
import random
from pathlib import Path

import pytest

pytest.importorskip("zmq")
if importlib.util.find_spec("dynamo") is None:
    pytest.skip("ai-dynamo-runtime is not installed", allow_module_level=True)

from tests.support.routers import DynamoIndexer, told_by
from tests.support.s3_servers import free_ports
from tests.support.small_store import BLOCK, LAYOUT, TOKENS, settings
from tests.support.waiting import until

import kvdepot
from kvdepot.core.depot import NamespaceHandle
from kvdepot.store.announce.publisher import EventPublisher
from kvdepot.store.open import open_store
from kvdepot.testing.images import payload_for

DEPOTS = 2
PROMPTS = 200
"""Compared after each of five phases."""
WAIT_S = 60.0


class Site:
    """Depots that an indexer follows, and prompts for them."""

    def __init__(self, folder: Path, indexer: DynamoIndexer, rng: random.Random) -> None:
        self._folder, self._indexer, self._rng = folder, indexer, rng
        self._addresses = [
            (f"tcp://127.0.0.1:{one}", f"tcp://127.0.0.1:{other}")
            for one, other in (free_ports(2) for _ in range(DEPOTS))
        ]
        self.stores = [self.open(number) for number in range(DEPOTS)]
        for number, addresses in enumerate(self._addresses):
            indexer.register(number, addresses, TOKENS)
        self.prompts: list[list[int]] = []

    def open(self, number: int) -> kvdepot.Store:
        endpoint, replay = self._addresses[number]
        events = {"endpoint": endpoint, "replay": replay, "interval": 0.02, "resync_interval": 0.5}
        return open_store(**settings(self._folder / f"kv{number}"), events=events)

    def space(self, store: kvdepot.Store) -> NamespaceHandle:
        return store.namespace(model="m", layout=LAYOUT)

    def made(self) -> list[int]:
        """A prompt; most share the beginning of another one."""
        start: list[int] = []
        if self.prompts and self._rng.random() < 0.6:
            other = self._rng.choice(self.prompts)
            start = other[: TOKENS * self._rng.randrange(1, len(other) // TOKENS + 1)]
        more = TOKENS * self._rng.randrange(1, 6)
        self.prompts.append(start + [self._rng.randrange(50_000) for _ in range(more)])
        return self.prompts[-1]

    def put(self, count: int) -> None:
        for _ in range(count):
            ids, store = self.made(), self._rng.choice(self.stores)
            keys = self.space(store).keys(ids)
            payloads = [payload_for(key, BLOCK) for key in keys]
            assert all(store.put_many(keys, payloads, timeout_s=WAIT_S, token_ids=ids))
        assert all(store.flush(WAIT_S) for store in self.stores)

    def compare(self) -> int:
        """Ask for random prompts once the indexer has heard of the last change. Returns hits."""
        asked = [self._asked() for _ in range(PROMPTS)]

        def differing() -> list[list[int]]:
            return [ids for ids in asked if self._indexer.query(ids) != self._expected(ids)]

        until(lambda: not differing())
        return sum(bool(self._expected(ids)) for ids in asked)

    def _asked(self) -> list[int]:
        ids = self._rng.choice(self.prompts)
        cut = TOKENS * self._rng.randrange(1, len(ids) // TOKENS + 1)
        return ids[:cut] + [self._rng.randrange(50_000) for _ in range(2 * TOKENS)]

    def _expected(self, ids: list[int]) -> dict[int, tuple[int, int]]:
        told = [
            told_by(store.routing.match(self.space(store).keys(ids)), TOKENS)
            for store in self.stores
        ]
        return {number: one for number, one in enumerate(told) if one[1]}


@pytest.mark.slow
def test_dynamos_indexer_agrees_with_the_depots(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    with DynamoIndexer(tmp_path) as indexer:
        site = Site(tmp_path, indexer, rng)
        site.put(60)
        assert site.compare() > PROMPTS / 2
        site.put(150)  # more than fits: memory and drives evict
        assert all(store.stats()["events"]["removed"] for store in site.stores)
        assert site.compare() > PROMPTS / 4
        site.stores[0].close()
        site.stores[0] = site.open(0)
        assert site.compare() > PROMPTS / 4
        with monkeypatch.context() as patch:
            patch.setattr(EventPublisher, "_send", lambda *_: None)
            site.put(20)
        site.put(4)
        assert site.compare() > PROMPTS / 4
        assert sum(store.stats()["events"]["replays"] for store in site.stores) >= 2
        for store in site.stores:
            for ids in rng.sample(site.prompts, 20):
                store.remove(site.space(store).keys(ids)[-1:])
        assert site.compare() > PROMPTS / 4
        for store in site.stores:
            store.close()
