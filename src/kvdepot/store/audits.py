"""Audits, and namespaces in quarantine after a failed one.

The blocks of such a namespace are not served, and new ones are refused, until the quarantine ends.
A quarantine is an entry of the drives' metadata, so that it survives a restart. A store without
drives loses it together with its blocks.
"""

import json
import logging
import threading
from collections import Counter
from typing import Any, Final

from kvdepot.core.audit import PRODUCER_TEXT_MAX, AuditFinding, DepotAudits, producer_id
from kvdepot.core.block import TAG_BYTES, BlockKey
from kvdepot.core.clock import Clock
from kvdepot.core.json_object import parse_object
from kvdepot.core.keys import tag_from_hex
from kvdepot.core.metadata import MetaEntry, MetaKind
from kvdepot.errors import ConfigError
from kvdepot.format.record import producer_of
from kvdepot.store.engine import Caller, Engine
from kvdepot.store.read.token_ids import read_heads

_PRODUCERS_MAX: Final = 64
SYNC_S: Final = 10.0
_logger = logging.getLogger("kvdepot.audit")


class AuditService(DepotAudits):
    """The audits of one store. Thread-safe; tiers are written without the store's lock."""

    def __init__(self, engine: Engine, caller: Caller, wall: Clock) -> None:
        self._state = engine.state
        self._engine = engine
        self._caller = caller
        self._wall = wall
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._counts: Counter[str] = Counter({"compared": 0, "mismatched": 0})
        self._quarantined: dict[bytes, dict[str, Any]] = {}
        self._producers: dict[int, str] = {}
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
            self._write(MetaKind.PRODUCER, number.to_bytes(8, "big"), text.encode())
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
            if tag in self._quarantined:
                return
            self._quarantined[tag] = {
                "model": str(facts.get("model", "")),
                "tenant": str(facts.get("tenant", "")),
                "adapter": str(facts.get("adapter", "")),
                "since_s": round(self._wall.now(), 3),
                "made_by": made_by,
                "found_by": finding.producer,
                "error": round(finding.error, 6),
                "tolerance": finding.tolerance,
                "layer": finding.layer,
            }
            text = json.dumps(self._quarantined[tag], ensure_ascii=False).encode()
            self._publish()
        _logger.error(
            "kvdepot: namespace %s (model %s) is in quarantine: a block made by %s is not what %s "
            "computes, layer %d is off by %.3g (tolerance %.3g); its blocks are not served. "
            "kvdepot audit list shows it, kvdepot audit purge removes it",
            tag.hex(),
            facts.get("model", "?"),
            made_by,
            finding.producer,
            finding.layer,
            finding.error,
            finding.tolerance,
        )
        self._write(MetaKind.QUARANTINE, tag, text, SYNC_S)

    def list(self) -> dict[str, Any]:
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
        """The counts for `stats`, without names of models and tenants."""
        names = ("since_s", "layer", "error", "tolerance")
        known = self.list()
        return {
            **{name: known[name] for name in ("compared", "mismatched")},
            "quarantined": [
                {"namespace": one["namespace"], **{name: one.get(name) for name in names}}
                for one in known["quarantined"]
            ],
        }

    def producer_of(self, key: BlockKey) -> str:
        """Return the software that computed a block; empty if unknown."""
        (number,) = read_heads(self._state, [key], producer_of, 0)
        with self._lock:
            return self._producers.get(number, "")

    def lift(self, namespace: str) -> bool:
        tag = tag_from_hex(namespace)
        with self._lock:
            if self._quarantined.pop(tag, None) is None:
                return False
            self._publish()
        self._write(MetaKind.QUARANTINE, tag, None, SYNC_S)
        _logger.warning("kvdepot: namespace %s is no longer in quarantine", namespace)
        return True

    def purge(self, namespace: str) -> int:
        tag = tag_from_hex(namespace)
        with self._lock:
            if tag not in self._quarantined:
                raise ConfigError(
                    "namespace",
                    f"{namespace} is not in quarantine",
                    hint="kvdepot audit list names those that are",
                )
        removed = self._engine.remove(self._caller, tag=tag)
        self.lift(namespace)
        return removed

    def _write(
        self, kind: MetaKind, name: bytes, value: bytes | None, sync_s: float | None = None
    ) -> None:
        """Record an entry on every drive; with `sync_s`, durably within that time."""
        entry = MetaEntry(kind, name, self._state.stamps.next(), value)
        written = self._state.volumes.metadata.put([entry], sync_s)
        if written.should and not written.have:
            _logger.warning("kvdepot: the result of an audit could not be written to a drive")

    def _publish(self) -> None:
        self._engine.access.quarantine(self._quarantined)

    def _load(self) -> None:
        """Load the entries of the drives. A quarantine with a damaged value counts too."""
        volumes = self._state.volumes
        for name, text in volumes.metadata.values(MetaKind.PRODUCER).items():
            self._producers[int.from_bytes(name, "big")] = text.decode(errors="replace")
        for tag, text in volumes.metadata.values(MetaKind.QUARANTINE).items():
            try:
                self._quarantined[tag] = parse_object(text)
            except ValueError:
                self._quarantined[tag] = {}
        self._publish()
        for tag, facts in self._quarantined.items():
            _logger.error(
                "kvdepot: namespace %s (model %s) is in quarantine after an audit: its blocks are "
                "not served; see kvdepot audit list",
                tag.hex(),
                facts.get("model", "?"),
            )
