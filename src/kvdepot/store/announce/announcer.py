"""Publishes a store's blocks to routers: all at the start, then all changes."""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from kvdepot.config.settings import EventsConfig
from kvdepot.core.block import BlockKey
from kvdepot.core.log import RateLimitedLog
from kvdepot.errors import KVDepotError
from kvdepot.format.record import token_ids as token_ids_of
from kvdepot.store.announce.kv_events import (
    AnnouncedSpace,
    Event,
    StoredBlock,
    cleared,
    removed,
    space_of,
    stored,
)
from kvdepot.store.announce.publisher import EventPublisher
from kvdepot.store.announce.residency_watch import (
    BELOW,
    IN_MEMORY,
    ResidencyChange,
    ResidencyWatch,
)
from kvdepot.store.read.token_ids import read_heads
from kvdepot.store.state.state import StoreState

_MEDIA: Final = ((IN_MEMORY, "CPU"), (BELOW, "STORAGE"))
"""The names of memory, and of all tiers below it, that routers know."""
_PART: Final = 256
"""Most blocks in a batch."""
_log: Final = RateLimitedLog("kvdepot.events")


class Announcer:
    """Publishes in a thread of its own, from `start` until `close`."""

    def __init__(self, state: StoreState, config: EventsConfig) -> None:
        self._state = state
        self._config = config
        self._watch = ResidencyWatch(state)
        self._publisher = EventPublisher(config)
        self._spaces: dict[bytes, AnnouncedSpace | None] = {}
        self._topics: dict[str, None] = {}
        self._told_all_s = -config.resync_interval
        self._counts = dict.fromkeys(("stored", "removed", "cleared", "silent", "failed"), 0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdepot-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def describe(self) -> dict[str, Any]:
        """The counts for `stats`."""
        publisher = self._publisher
        return {
            **publisher.addresses,
            "batches": publisher.batches,
            "replays": publisher.replays,
            "subscriptions": publisher.subscriptions,
            "blocks": self._watch.told,
            **self._counts,
        }

    def close(self, timeout_s: float) -> bool:
        """Stop publishing. False: the thread is still busy."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._publisher.close()
        return True

    def _run(self) -> None:
        self._clear()
        while not self._stopping.is_set():
            try:
                self._publisher.serve_peers(self._config.interval)
                if self._publisher.missed:
                    self._tell_again()
                self._tell_changes()
                if self._publisher.quiet_s() > self._config.resync_interval:
                    self._publisher.publish(self._topic(""), [])
            except (KVDepotError, OSError) as error:
                self._counts["failed"] += 1
                _log.warning("events were not published: %s", error)

    def _tell_again(self) -> None:
        """Publish everything again: a router is new, or has missed batches that are not kept."""
        now_s = time.monotonic()
        if now_s - self._told_all_s < self._config.resync_interval:
            return
        self._told_all_s = now_s
        self._publisher.missed = False
        self._clear()
        self._watch.reset()

    def _clear(self) -> None:
        for topic in self._topics or {self._topic(""): None}:
            self._publisher.publish(topic, [cleared()])
        self._counts["cleared"] += 1

    def _tell_changes(self) -> None:
        while not self._stopping.is_set():
            change = self._watch.take(_PART)
            if not change.seen:
                return
            if len(change.gone):
                self._tell_gone(change)
            if len(change.come):
                self._tell_come(change)

    def _tell_gone(self, change: ResidencyChange) -> None:
        by_topic: dict[str, list[Event]] = {}
        tags = [words.tobytes()[:8] for words in change.gone]
        for bit, medium in _MEDIA:
            here = (change.gone_from & bit) != 0
            for topic, rows in self._by_topic([tags[at] for at in np.flatnonzero(here)]):
                digests = change.gone[here][rows, 2].tolist()
                by_topic.setdefault(topic, []).append(removed(digests, medium))
                self._counts["removed"] += len(digests)
        for topic, events in by_topic.items():
            self._publisher.publish(topic, events)

    def _by_topic(self, tags: Sequence[bytes]) -> Iterator[tuple[str, list[int]]]:
        """Indices of the tags, by the topic of their namespace."""
        found: dict[str, list[int]] = {}
        for at, tag in enumerate(tags):
            space = self._space(tag)
            found.setdefault(self._topic(space.model if space else ""), []).append(at)
        yield from found.items()

    def _tell_come(self, change: ResidencyChange) -> None:
        keys = [BlockKey(words.tobytes()) for words in change.come]
        spaces = [self._space(key[:8]) for key in keys]
        wanted = [at for at, space in enumerate(spaces) if space is not None]
        tokens = read_heads(self._state, [keys[at] for at in wanted], token_ids_of, b"")
        blocks: dict[int, StoredBlock] = {}
        for at, ids in zip(wanted, tokens, strict=True):
            space = spaces[at]
            if space is not None and len(ids) == 4 * space.block_tokens:
                _, parent, digest, _ = change.come[at].tolist()
                blocks[at] = StoredBlock(digest, parent, ids, space)
        by_topic: dict[str, list[Event]] = {}
        for bit, medium in _MEDIA:
            here = [at for at in blocks if change.come_to[at] & bit]
            for topic, some in self._by_topic([keys[at][:8] for at in here]):
                events = stored([blocks[here[number]] for number in some], medium)
                by_topic.setdefault(topic, []).extend(events)
        for topic, events in by_topic.items():
            self._publisher.publish(topic, events)
        self._counts["stored"] += len(blocks)
        silent = np.array([at for at in range(len(keys)) if at not in blocks], np.int64)
        if len(silent):
            self._counts["silent"] += len(silent)
            self._watch.silence(change.come_rows[silent], change.come_to[silent])

    def _topic(self, model: str) -> str:
        topic = self._config.topic.replace("{model}", model)
        self._topics[topic] = None
        return topic

    def _space(self, tag: bytes) -> AnnouncedSpace | None:
        """The published form of a namespace; None if it is not published."""
        if tag not in self._spaces:
            facts = self._state.descriptions.facts(tag)
            if not facts:
                return None
            theirs = facts.get("tenant", "") in self._config.tenants
            self._spaces[tag] = space_of(facts) if theirs else None
        return self._spaces[tag]
