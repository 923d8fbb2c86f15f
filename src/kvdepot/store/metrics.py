"""The metrics of a store, as one table. docs/metrics.md is made from it.

Each metric has a source: the place in `stats` that its values come from. A store in this process
and a daemon have the same `stats`, and so the same metrics. A metric without values is left out.
`kvdepot.daemon.http.exposition` writes the values as Prometheus text.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Stats = Mapping[str, Any]
Samples = Iterable[tuple[tuple[str, ...], float]]
"""Samples: the values of the labels, and the value."""
_LABEL: Final = re.compile(r"(?P<prefix>\w*)\{(?P<name>\w+)(?::(?P<choices>[^}]+))?\}")


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    `source` is a path in `stats`, with its parts separated by dots. A part in braces is a label:

    - `{tier}` stands for each tier of the store, and counts 0 where a tier has no entry;
    - `get_{tier}` stands for the entries `get_dram`, `get_ssd` and so on, as far as they exist;
    - `{drive}` stands for each item of a list, and its value is the item's `path`;
    - `put_{outcome:stored,present}` stands for the entries `put_stored` and `put_present`;
    - `{reason:wear=bypassed}` stands for the entry `bypassed`, with the value `wear`;
    - any other label stands for each entry.

    A list or a table at the end of the path counts its items.
    """

    name: str
    kind: str
    """counter, gauge or histogram."""
    source: str
    help: str
    labels: tuple[str, ...] = ()
    reader: Callable[[Stats], Any] | None = None
    """Computes values that have no path. For a histogram it yields (labels, counts by power of two
    of microseconds, sum).
    """

    def read(self, stats: Stats) -> Any:
        """The samples of this metric."""
        if self.reader is not None:
            return self.reader(stats)
        return _samples(stats, self.source.split("."), stats.get("tiers", {}))


def values(stats: Stats) -> dict[str, float]:
    """All counters and gauges by name and labels, as in the Prometheus text."""
    return {
        metric.name + _labels(metric.labels, found): value
        for metric in METRICS
        if metric.kind != "histogram"
        for found, value in metric.read(stats)
    }


def _labels(names: Iterable[str], found: Iterable[str]) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in zip(names, found, strict=True)]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _samples(found: Any, path: Sequence[str], tiers: Iterable[str]) -> Samples:
    if path:
        for labels, child in _children(found, path[0], tiers):
            for more, value in _samples(child, path[1:], tiers):
                yield (*labels, *more), value
    elif isinstance(found, list | dict):
        yield (), float(len(found))
    elif found is not None:
        yield (), float(found)


def _children(found: Any, part: str, tiers: Iterable[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Values below one part of a path, each with the value of its label."""
    label = _LABEL.fullmatch(part)
    if isinstance(found, list):
        for one in found:
            yield (str(one.get("path", "")),), one
    elif not isinstance(found, Mapping):
        return
    elif label is None:
        if part in found:
            yield (), found[part]
    elif label["choices"]:
        for choice in label["choices"].split(","):
            value, _, key = choice.partition("=")
            yield (value,), found.get(key or label["prefix"] + value)
    elif label["name"] == "tier":
        for tier in tiers:
            yield (tier,), found.get(label["prefix"] + tier, None if label["prefix"] else 0)
    else:
        for value, child in found.items():
            yield (value,), child


def _looked_up(stats: Stats) -> Samples:
    for call, found in stats.get("traffic", {}).get("lookups", {}).items():
        yield (call, "found"), float(found["found_blocks"])
        yield (call, "absent"), float(found["asked_blocks"] - found["found_blocks"])


def _evicted(stats: Stats) -> Samples:
    counters = stats.get("counters", {})
    for tier, facts in stats.get("tiers", {}).items():
        total, away = counters.get(f"evicted_{tier}", 0), counters.get(f"drained_{tier}", 0)
        yield (tier, "room"), float(total - away)
        if "drives" in facts:
            yield (tier, "drain"), float(away)


def _latency(stage: str) -> Callable[[Stats], Any]:
    """A reader of the histograms of one stage. The label is the tier or the request, if any."""

    def read(stats: Stats) -> Iterator[tuple[tuple[str, ...], list[int], float]]:
        for one in stats.get("traffic", {}).get("latencies", ()):
            if one["stage"] == stage:
                yield ((one["what"],) if one["what"] else ()), one["counts"], one["total_s"]

    return read


def _audited(stats: Stats) -> Samples:
    audit = stats.get("audit")
    if audit is not None:
        yield ("matched",), float(audit["compared"] - audit["mismatched"])
        yield ("mismatched",), float(audit["mismatched"])


def _build(stats: Stats) -> Samples:
    if "daemon" in stats:
        yield (stats["daemon"]["version"],), 1.0


def served_tokens(stats: Stats) -> float:
    """Tokens of served blocks, which the engine did not compute."""
    return float(stats.get("ledger", {}).get("tokens", 0.0))


def hit_ratio(stats: Stats) -> float | None:
    """The share of looked-up blocks that were found. Counts matches or, if there are none, leases;
    None before the first lookup.
    """
    lookups = stats.get("traffic", {}).get("lookups", {})
    for call in ("match", "lease"):
        found = lookups.get(call, {})
        if found.get("asked_blocks"):
            return float(found["found_blocks"] / found["asked_blocks"])
    return None


def gpu_seconds_saved(stats: Stats) -> float | None:
    """Seconds of prefill saved since the start; None while no prefill speed is known."""
    found: float | None = stats.get("ledger", {}).get("gpu_s")
    return found


def joules_saved(stats: Stats) -> float | None:
    """Energy saved, by `ledger.gpu_watts`; None while the power or the speed is not known."""
    watts = stats.get("ledger", {}).get("assumed", {}).get("gpu_watts")
    seconds = gpu_seconds_saved(stats)
    return seconds * watts if seconds is not None and watts else None


def derived(stats: Stats) -> dict[str, float | None]:
    """The most important figures."""
    return {
        "hit_ratio": hit_ratio(stats),
        "tokens": served_tokens(stats),
        "gpu_seconds": gpu_seconds_saved(stats),
        "joules": joules_saved(stats),
    }


def _one(value: Callable[[Stats], float | None]) -> Callable[[Stats], Samples]:
    def read(stats: Stats) -> Samples:
        found = value(stats)
        return [] if found is None else [((), found)]

    return read


def _row(name: str, kind: str, source: str, text: str) -> Metric:
    parts = (_LABEL.fullmatch(part) for part in source.split("."))
    labels = tuple(part["name"] for part in parts if part is not None)
    return Metric(name, kind, source, text, labels)


def _counter(name: str, source: str, text: str) -> Metric:
    return _row(f"kvdepot_{name}_total", "counter", source, text)


def _gauge(name: str, source: str, text: str) -> Metric:
    return _row(f"kvdepot_{name}", "gauge", source, text)


def _histogram(name: str, labels: tuple[str, ...], text: str, stage: str) -> Metric:
    source = f"traffic.latencies, stage {stage}"
    return Metric(f"kvdepot_{name}_seconds", "histogram", source, text, labels, _latency(stage))


METRICS: Final = (
    _counter(
        "lookups",
        "traffic.lookups.{call}.{outcome:full,partial,none}",
        "Lookups of prompts: every block was there, the first ones, or none.",
    ),
    Metric(
        "kvdepot_lookup_blocks_total",
        "counter",
        "traffic.lookups",
        "Blocks that lookups asked for: found or absent.",
        ("call", "outcome"),
        _looked_up,
    ),
    _counter(
        "matched_blocks",
        "traffic.matched.{tier}",
        "Blocks found by matches, by the fastest tier that has them.",
    ),
    Metric(
        "kvdepot_hit_ratio",
        "gauge",
        "traffic.lookups",
        "Share of looked-up blocks that were found, since the start.",
        (),
        _one(hit_ratio),
    ),
    _counter(
        "get_blocks", "counters.get_{tier}", "Blocks served, by the tier that they were read from."
    ),
    _counter(
        "get_missed_blocks", "counters.get_miss", "Blocks that were requested and not served."
    ),
    _counter(
        "get_bytes",
        "traffic.served_bytes.{tier}",
        "Bytes served, by the tier that they were read from.",
    ),
    _counter(
        "get_tokens",
        "ledger.tiers.{tier}",
        "Tokens of the blocks served; each of N shards of a model counts as one Nth.",
    ),
    _counter(
        "put_blocks",
        "counters.put_{outcome:stored,present,throttled,refused}",
        "Blocks offered to the store, by result.",
    ),
    _counter(
        "deferred_blocks",
        "counters.put_deferred",
        "Stored blocks that were accepted while the write queue was full.",
    ),
    _counter("put_bytes", "counters.put_bytes", "Bytes of the blocks that were stored."),
    _counter("written_blocks", "counters.written", "Blocks written from memory to drives."),
    _counter("written_bytes", "counters.written_bytes", "Bytes of the records of these blocks."),
    _counter(
        "write_failed_blocks",
        "counters.write_failed",
        "Blocks that could not be written to a drive.",
    ),
    _counter(
        "moved_blocks",
        "counters.{move:promote=promoted,demote=demoted,prefetch=hinted}",
        "Blocks copied between tiers and drives.",
    ),
    _counter(
        "rewritten_blocks",
        "counters.moved_{tier}",
        "Blocks written again because their segment was reclaimed or their drive drained.",
    ),
    _counter(
        "reclaimed_segments",
        "counters.reclaimed_segments",
        "Segments of drives that were freed.",
    ),
    Metric(
        "kvdepot_evicted_blocks_total",
        "counter",
        "counters.evicted_{tier}, counters.drained_{tier}",
        "Copies dropped from a tier: evicted, or lost with a drained drive.",
        ("tier", "reason"),
        _evicted,
    ),
    _counter("removed_blocks", "counters.removed", "Blocks that callers removed."),
    _counter(
        "lost_events",
        "counters.events_lost",
        "Events that were dropped and not counted, because too many waited.",
    ),
    _counter(
        "removals_unrecorded",
        "counters.removal_unrecorded",
        "Removals that could not be recorded: the blocks may come back after a restart.",
    ),
    _counter(
        "corrupt_blocks",
        "counters.quarantined",
        "Copies dropped because their checksum or identity did not match; none was served.",
    ),
    _counter(
        "read_problem_blocks",
        "counters.read_{problem:failed,late}",
        "Reads of blocks that failed or were late.",
    ),
    _counter(
        "admission_refused_blocks",
        "counters.{reason:wear=bypassed,thrashing=held_below}",
        "Blocks not written to the fastest drives: not worth the wear, or the tier thrashes.",
    ),
    _histogram("get_duration", (), "Time of a call that gets blocks.", "get"),
    _histogram("put_duration", (), "Time of a call that puts blocks.", "put"),
    _histogram("reserve_duration", (), "Time of a call that reserves memory.", "reserve"),
    _histogram("read_duration", ("tier",), "Time to read one wave of blocks from a drive.", "read"),
    _histogram(
        "write_duration", ("tier",), "Time to append one batch of blocks to a drive.", "write"
    ),
    _histogram("request_duration", ("request",), "Time of a client's request.", "request"),
    _gauge("blocks", "blocks", "Blocks that the store knows."),
    _gauge("tier_blocks", "tiers.{tier}.blocks", "Blocks that a tier has."),
    _gauge("tier_used_bytes", "tiers.{tier}.used_bytes", "Bytes of the blocks of a tier."),
    _gauge("tier_capacity_bytes", "tiers.{tier}.capacity_bytes", "Capacity of a tier."),
    _gauge("tier_healthy", "tiers.{tier}.healthy", "1: all drives of the tier work."),
    _gauge(
        "tier_thrashing",
        "tiers.{tier}.thrashing",
        "1: promotion to the tier is limited, because it would evict blocks that are hit.",
    ),
    _gauge(
        "write_queue_blocks", "tiers.{tier}.write_queue.blocks", "Blocks that wait to be written."
    ),
    _gauge("write_queue_bytes", "tiers.{tier}.write_queue.bytes", "Bytes that wait to be written."),
    _gauge(
        "write_queue_oldest_seconds",
        "tiers.{tier}.write_queue.oldest_s",
        "Waiting time of the oldest of them.",
    ),
    _gauge(
        "write_queue_limit_bytes",
        "dirty_limit_bytes",
        "Size of the write queues above which new blocks are written later.",
    ),
    _gauge(
        "owed_blocks",
        "tiers.{tier}.owed",
        "Blocks that wait on drives of this node until a tier that is away works again.",
    ),
    _counter(
        "owed_settled_blocks",
        "counters.owed_{outcome:written,given_up}",
        "Blocks that were owed to a tier: written when it worked again, or given up.",
    ),
    _gauge("drive_healthy", "tiers.{tier}.drives.{drive}.healthy", "1: the drive works."),
    _gauge(
        "drive_full",
        "tiers.{tier}.drives.{drive}.full",
        "1: its file system is full, although the store has not reached its capacity.",
    ),
    _counter("drive_errors", "tiers.{tier}.drives.{drive}.errors", "Errors of the drive."),
    _counter(
        "refused_manifests",
        "tiers.{tier}.drives.{drive}.refused_manifests",
        "Manifests in a bucket that are damaged or make no sense, and are ignored.",
    ),
    _gauge(
        "drive_used_bytes",
        "tiers.{tier}.drives.{drive}.used_bytes",
        "Bytes of the blocks on the drive.",
    ),
    _gauge(
        "drive_capacity_bytes",
        "tiers.{tier}.drives.{drive}.capacity_bytes",
        "Bytes that the store may use on the drive.",
    ),
    _gauge(
        "drive_draining", "tiers.{tier}.drives.{drive}.draining", "1: the drive is being emptied."
    ),
    _gauge(
        "drive_read_bytes_per_second",
        "tiers.{tier}.drives.{drive}.read_bytes_per_s",
        "Last measured speed of the drive.",
    ),
    _counter(
        "drive_written_bytes",
        "tiers.{tier}.drives.{drive}.written.bytes",
        "Bytes written to the drive since the start: its wear.",
    ),
    _gauge(
        "endurance_daily_bytes",
        "tiers.{tier}.drives.{drive}.written.daily_bytes",
        "Bytes that may be written to the drive in a day.",
    ),
    _gauge(
        "endurance_left_bytes",
        "tiers.{tier}.drives.{drive}.written.level_bytes",
        "Bytes that may be written to the drive now.",
    ),
    _gauge("leased_blocks", "leased", "Blocks that callers hold a lease on."),
    _gauge("staging_used_bytes", "staging_bytes", "Memory of blocks being copied between tiers."),
    _gauge("index_bytes", "index_bytes", "Memory of the index."),
    _gauge("sessions", "sessions.remembered", "Known sessions."),
    _counter(
        "sessions_forgotten",
        "sessions.forgotten",
        "Sessions forgotten because there were too many.",
    ),
    _gauge("pins", "sessions.pins", "Pins in force."),
    _counter(
        "pin_events",
        "sessions.pins_{event:granted,refused,ended}",
        "Pins granted, requests refused, and pins ended.",
    ),
    _gauge(
        "pinned_blocks",
        "sessions.pinned_blocks",
        "Pinned blocks, counted every few seconds.",
    ),
    _gauge("pinned_bytes", "sessions.pinned_bytes", "Bytes of their records."),
    _gauge(
        "pinned_missing_blocks",
        "sessions.pinned_missing_blocks",
        "Pinned blocks that no durable tier has any more; above 0 is an error.",
    ),
    Metric(
        "kvdepot_audited_blocks_total",
        "counter",
        "audit.compared, audit.mismatched",
        "Blocks that an engine has computed again: equal to the stored ones, or not (mismatched).",
        ("outcome",),
        _audited,
    ),
    _gauge(
        "quarantined_namespaces",
        "audit.quarantined",
        "Namespaces that are not served because an audit failed.",
    ),
    _counter(
        "events",
        "events.{event:batches,replays,subscriptions,stored,removed,cleared,silent,failed}",
        "Events published to routers: blocks stored, removed, not published (silent), all cleared; "
        "batches, replays, subscriptions, failures.",
    ),
    _gauge("events_announced_blocks", "events.blocks", "Blocks that are published to routers."),
    _histogram(
        "first_token_duration",
        (),
        "Time to the first token of prompts with blocks in the depot, as reported by engines.",
        "first_token",
    ),
    _counter(
        "decisions",
        "first_tokens.decisions.{decision}",
        "Decisions of engines for these prompts: to fetch, to recompute, or both in parts.",
    ),
    _counter(
        "first_tokens_compared",
        "first_tokens.compared",
        "First tokens with a predicted time; the next three metrics are about these.",
    ),
    _counter(
        "first_token_measured_seconds",
        "first_tokens.seconds",
        "Sum of their measured times: with kvdepot.",
    ),
    _counter(
        "first_token_predicted_seconds",
        "first_tokens.predicted_seconds",
        "Sum of their predicted times.",
    ),
    _counter(
        "first_token_recompute_seconds",
        "first_tokens.recompute_seconds",
        "Sum of the times predicted for computing the whole prompts: without kvdepot.",
    ),
    _counter(
        "gpu_saved_seconds",
        "ledger.gpu_s",
        "Prefill time saved: tokens served, by the prefill speed that engines report, else by the "
        "assumed one.",
    ),
    Metric(
        "kvdepot_gpu_saved_joules_total",
        "counter",
        "ledger.gpu_s, ledger.assumed",
        "The same, by the assumed power of the GPUs.",
        (),
        _one(joules_saved),
    ),
    _gauge(
        "assumed_prefill_tokens_per_second",
        "ledger.assumed.prefill_tokens_per_s",
        "Assumed prefill speed, used if engines report none.",
    ),
    _counter(
        "tenant_gpu_saved_seconds",
        "ledger.tenants.{tenant}.gpu_s",
        "GPU seconds saved for a tenant since the start; tenants after the first 64 are summed.",
    ),
    _counter(
        "tenant_saved_tokens",
        "ledger.tenants.{tenant}.tiers.{tier}",
        "Tokens served to a tenant since the start, by the tier that they were read from.",
    ),
    _gauge("site_connected", "site.connected", "1: a NATS server of the site is connected."),
    _counter(
        "site_messages",
        "site.messages.{event}",
        "Messages between the stores of a site: sent, received, refused as malformed, dropped; and "
        "connections made.",
    ),
    _counter(
        "site_hints",
        "site.hints.{event:followed,passed_on,unknown}",
        "Hints of the site: prompts prefetched, sessions forwarded to another node, unknown here.",
    ),
    _gauge(
        "site_open_hints",
        "site.hints.open",
        "Hinted prompts with blocks that are not in the shared tier yet.",
    ),
    _gauge("clients", "daemon.sessions", "Processes attached to the daemon."),
    _counter(
        "client_events",
        "daemon.counters.{event}",
        "Events of clients: attached, connected, requests, refused, malformed frames, at a limit.",
    ),
    _gauge("uptime_seconds", "daemon.uptime_s", "Seconds since the start of the daemon."),
    Metric(
        "kvdepot_build_info",
        "gauge",
        "daemon.version",
        "Always 1; the label is the version of the daemon.",
        ("version",),
        _build,
    ),
)
