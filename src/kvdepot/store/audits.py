"""Namespaces in quarantine: one of their blocks was computed again, and is not what is kept.

Nothing of them is served or taken until the quarantine is lifted. What is known is a page of JSON
beside the pages of sessions, on every drive, so that it outlives the process. Of drives that were
used apart every quarantine counts that none of them has lifted. A store without drives forgets it
with its blocks.
"""

import contextlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvdepot.codec.notes import parse_object
from kvdepot.codec.record import HEAD_BYTES, producer_of
from kvdepot.core.audit import PRODUCER_TEXT_MAX, AuditFinding, DepotAudits, producer_id
from kvdepot.core.block import TAG_BYTES, BlockKey
from kvdepot.core.clock import Clock
from kvdepot.core.tier import KeepsPages, KeepsProducers
from kvdepot.errors import ConfigError, KVDepotError
from kvdepot.index.table import NONE
from kvdepot.store.state.state import StoreState

PAGE_NUMBER: Final = (1 << 24) - 1
"""Of the page, beside those of sessions; these are counted from 0."""
VERSION: Final = 1
_PRODUCERS_MAX: Final = 64
_QUARANTINED_MAX: Final = 256
SYNC_S: Final = 10.0
_logger = logging.getLogger("kvdepot.audit")


class AuditDesk(DepotAudits):
    """The audits of one store. Thread-safe; tiers are written without the store's lock."""

    def __init__(self, state: StoreState, wall: Clock, remove_tag: Callable[[bytes], int]) -> None:
        self._state = state
        self._wall = wall
        self._remove_tag = remove_tag
        self._tiers = [
            (lower, lower.tier) for lower in state.lower_tiers if isinstance(lower.tier, KeepsPages)
        ]
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        """Over all below."""
        self._counts: Counter[str] = Counter({"compared": 0, "mismatched": 0})
        self._quarantined: dict[bytes, dict[str, Any]] = {}
        self._lifted: dict[bytes, float] = {}
        """Since when the last quarantine of a namespace was that was lifted."""
        self._producers: dict[int, str] = {}
        self._generation = 0
        self._load()

    def producer(self, text: str) -> int:
        text = text[:PRODUCER_TEXT_MAX]
        number = producer_id(text)
        with self._lock:
            known = self._producers.pop(number, None)
            self._producers[number] = text
            while len(self._producers) > _PRODUCERS_MAX:
                del self._producers[next(iter(self._producers))]
        if known is None:
            self.write()
        return number

    def report(self, finding: AuditFinding) -> None:
        tag = finding.key[:TAG_BYTES]
        with self._lock:
            self._counts["compared"] += 1
            self._counts["mismatched"] += not finding.matches
        if finding.matches:
            return
        made_by = self.producer_of(finding.key) or "unknown"
        facts = self._state.descriptions.facts(tag)
        with self._lock:
            if tag in self._quarantined or len(self._quarantined) >= _QUARANTINED_MAX:
                return
            self._quarantined[tag] = {
                "model": str(facts.get("model", "")),
                "tenant": str(facts.get("tenant", "")),
                "adapter": str(facts.get("adapter", "")),
                "since_s": max(round(self._wall.now(), 3), self._lifted.get(tag, 0.0) + 0.001),
                "made_by": made_by,
                "found_by": finding.producer,
                "error": round(finding.error, 6),
                "tolerance": finding.tolerance,
                "layer": finding.layer,
            }
            self._publish()
        _logger.error(
            "kvdepot: namespace %s (model %s) is in quarantine: a block made by %s is not what %s "
            "computes, layer %d is off by %.3g (tolerance %.3g); nothing of it is served. "
            "kvdepot audit list shows it, kvdepot audit purge removes it",
            tag.hex(),
            facts.get("model", "?"),
            made_by,
            finding.producer,
            finding.layer,
            finding.error,
            finding.tolerance,
        )
        self.write(SYNC_S)

    def known(self) -> dict[str, Any]:
        with self._lock:
            return {
                **self._counts,
                "quarantined": [
                    {"namespace": tag.hex(), **facts} for tag, facts in self._quarantined.items()
                ],
                "producers": [
                    {"id": f"{number:016x}", "text": text}
                    for number, text in self._producers.items()
                ],
            }

    def describe(self) -> dict[str, Any]:
        """For `stats`: without the names of models and tenants."""
        names = ("since_s", "layer", "error", "tolerance")
        known = self.known()
        return {
            **{name: known[name] for name in ("compared", "mismatched")},
            "quarantined": [
                {"namespace": one["namespace"], **{name: one.get(name) for name in names}}
                for one in known["quarantined"]
            ],
        }

    def producer_of(self, key: BlockKey) -> str:
        """What has computed a block; empty: not known."""
        number = self._read_producer(key)
        with self._lock:
            return self._producers.get(number, "")

    def lift(self, namespace: str) -> bool:
        tag = _tag(namespace)
        with self._lock:
            facts = self._quarantined.pop(tag, None)
            if facts is None:
                return False
            self._lifted.pop(tag, None)
            self._lifted[tag] = _since_s(facts)
            while len(self._lifted) > _QUARANTINED_MAX:
                del self._lifted[next(iter(self._lifted))]
            self._publish()
        self.write(SYNC_S)
        _logger.warning("kvdepot: namespace %s is no longer in quarantine", namespace)
        return True

    def purge(self, namespace: str) -> int:
        tag = _tag(namespace)
        with self._lock:
            if tag not in self._quarantined:
                raise ConfigError(
                    "namespace",
                    f"{namespace} is not in quarantine",
                    hint="kvdepot audit list names those that are",
                )
        removed = self._remove_tag(tag)
        self.lift(namespace)
        return removed

    def write(self, sync_s: float | None = None) -> bool:
        """Write down what is known, on every drive; with `sync_s`, durably within that time. False:
        no drive that stays took it.
        """
        if not (self._quarantined or self._lifted or self._producers or self._generation):
            return True
        have, tiers = 0, [tier for lower, tier in self._tiers if lower.tier.writable]
        with self._writing:
            text = self._page()
            for tier in tiers:
                with contextlib.suppress(KVDepotError):
                    have += tier.keep_page(PAGE_NUMBER, text, sync_s)[0]
        if tiers and not have:
            _logger.warning("kvdepot: no drive took what is known of audits; it ends with this run")
        return bool(have) or not tiers

    def _publish(self) -> None:
        self._state.quarantined = frozenset(self._quarantined)

    def _read_producer(self, key: BlockKey) -> int:
        """Of a block that is kept; 0: not known."""
        state = self._state
        with state.lock:
            row = state.catalog.row(key)
            if row == NONE:
                return 0
            memory = state.memory_of(row)
            if memory is not None:
                return producer_of(memory.image(row)[:HEAD_BYTES], key)
            lower = state.source(row)
            place = lower.best_place(row) if lower is not None else 0
        if lower is None or not isinstance(lower.tier, KeepsProducers):
            return 0
        return lower.tier.read_producers([key], [place])[0]

    def _load(self) -> None:
        """Know what the drives have."""
        texts = [text for _, tier in self._tiers for text in tier.pages()]
        pages = [page for page in map(_parsed, texts) if page is not None]
        for page in sorted(pages, key=lambda page: int(page["generation"])):
            self._generation = page["generation"]
            self._producers.update(_named(page.get("producers")))
            for tag, facts in _entries(page.get("lifted")):
                self._lifted[tag] = max(self._lifted.get(tag, 0.0), _since_s(facts))
            for tag, facts in _entries(page.get("quarantined")):
                if _since_s(facts) >= _since_s(self._quarantined.get(tag, {})):
                    self._quarantined[tag] = facts
        for tag, since_s in self._lifted.items():
            if _since_s(self._quarantined.get(tag, {})) <= since_s:
                self._quarantined.pop(tag, None)
        self._publish()
        for tag, facts in self._quarantined.items():
            _logger.error(
                "kvdepot: namespace %s (model %s) is in quarantine since an audit: nothing of it "
                "is served; see kvdepot audit list",
                tag.hex(),
                facts.get("model", "?"),
            )

    def _page(self) -> bytes:
        with self._lock:
            self._generation += 1
            page = {
                "v": VERSION,
                "page": PAGE_NUMBER,
                "generation": self._generation,
                "audit": True,
                "quarantined": {tag.hex(): facts for tag, facts in self._quarantined.items()},
                "lifted": {tag.hex(): {"since_s": at} for tag, at in self._lifted.items()},
                "producers": {f"{number:016x}": text for number, text in self._producers.items()},
            }
        return json.dumps(page, ensure_ascii=False, separators=(",", ":")).encode()


def _tag(namespace: str) -> bytes:
    with contextlib.suppress(ValueError):
        tag = bytes.fromhex(namespace)
        if len(tag) == TAG_BYTES:
            return tag
    raise ConfigError(
        "namespace", f"{namespace!r} is not a namespace's tag", hint="16 hexadecimal digits"
    )


def _parsed(text: bytes) -> dict[str, Any] | None:
    """A page of audits; None where it is another one, makes no sense, or is of a later version."""
    try:
        page = parse_object(text)
    except ValueError:
        return None
    generation = page.get("generation")
    known = page.get("v") == VERSION and page.get("audit") is True
    return page if known and isinstance(generation, int) and 0 < generation < 1 << 62 else None


def _entries(found: Any) -> list[tuple[bytes, dict[str, Any]]]:
    entries = []
    for name, facts in found.items() if isinstance(found, Mapping) else ():
        with contextlib.suppress(ConfigError):
            entries.append((_tag(name), facts if isinstance(facts, dict) else {}))
    return entries


def _since_s(facts: Mapping[str, Any]) -> float:
    since_s = facts.get("since_s", 0.0)
    return float(since_s) if isinstance(since_s, int | float) else 0.0


def _named(found: Any) -> list[tuple[int, str]]:
    named = []
    for name, text in found.items() if isinstance(found, Mapping) else ():
        with contextlib.suppress(ValueError):
            named.append((int(name, 16), str(text)[:PRODUCER_TEXT_MAX]))
    return named
