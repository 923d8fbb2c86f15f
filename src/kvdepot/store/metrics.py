"""The metrics of a store: one table, which makes the Prometheus text and docs/metrics.md.

Every metric is read from what `stats` answers, so that a store of this process and that of a daemon
have the same ones. A metric that a store has no values for is left out.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.core.depot import Depot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS: Final = range(4, 27, 2)
"""Powers of two of microseconds that end the buckets shown: 16 µs to 67 s."""
Stats = Mapping[str, Any]
Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the value."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    labels: tuple[str, ...]
    help: str
    read: Callable[[Stats], Any]
    """Its Samples; of a histogram (labels, counts by power of two of microseconds, sum)."""
    source: str
    """Where in `stats` it comes from."""

    @property
    def unit(self) -> str:
        """As the name says it."""
        name = self.name.removesuffix("_total")
        units = ("seconds", "bytes", "blocks", "tokens", "joules", "ratio")
        return next((unit for unit in units if name.endswith(f"_{unit}")), "")


def render(stats: Stats) -> str:
    """The Prometheus text for what `stats` has answered."""
    lines: list[str] = []
    for metric in METRICS:
        samples = list(_lines(metric, stats))
        if samples:
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
            lines += samples
    return "\n".join([*lines, ""])


def metrics(store: Depot) -> str:
    """The metrics of a store as Prometheus text: docs/metrics.md has the list."""
    return render(store.stats())


def values(stats: Stats) -> dict[str, float]:
    """All counters and gauges by name and labels, as in the text."""
    plain = (metric for metric in METRICS if metric.kind != "histogram")
    return {
        metric.name + _labels(metric.labels, found): value
        for metric in plain
        for found, value in metric.read(stats)
    }


def _lines(metric: Metric, stats: Stats) -> Iterator[str]:
    if metric.kind != "histogram":
        for found, value in metric.read(stats):
            yield f"{metric.name}{_labels(metric.labels, found)} {_number(value)}"
        return
    names = (*metric.labels, "le")
    for found, counts, total in metric.read(stats):
        for power in _BOUNDS:
            label = _labels(names, (*found, _number(2**power / 1e6)))
            yield f"{metric.name}_bucket{label} {sum(counts[: power + 1])}"
        yield f"{metric.name}_bucket{_labels(names, (*found, '+Inf'))} {sum(counts)}"
        yield f"{metric.name}_sum{_labels(metric.labels, found)} {_number(total)}"
        yield f"{metric.name}_count{_labels(metric.labels, found)} {sum(counts)}"


def _labels(names: Iterable[str], found: Iterable[str]) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in zip(names, found, strict=True)]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _one(*path: str) -> Callable[[Stats], Samples]:
    """The value at that path; nothing where it is not."""

    def read(stats: Stats) -> Samples:
        found: Any = stats
        for name in path:
            if name not in found:
                return
            found = found[name]
        yield (), float(found)

    return read


def _counted(*pairs: tuple[tuple[str, ...], str]) -> Callable[[Stats], Samples]:
    """Counters of the store, each with its labels."""

    def read(stats: Stats) -> Samples:
        counters = stats.get("counters", {})
        return [(labels, float(counters[name])) for labels, name in pairs if name in counters]

    return read


def _by_tier(*path: str) -> Callable[[Stats], Samples]:
    """A value of each tier that has it."""

    def read(stats: Stats) -> Samples:
        for tier, facts in stats.get("tiers", {}).items():
            found: Any = facts
            for name in path:
                found = found.get(name) if isinstance(found, Mapping) else None
            if found is not None:
                yield (tier,), float(found)

    return read


def _counted_by_tier(prefix: str) -> Callable[[Stats], Samples]:
    """The store's counters of that name, for the tiers that the store has."""

    def read(stats: Stats) -> Samples:
        counters, tiers = stats.get("counters", {}), stats.get("tiers", {})
        names = ((tier, f"{prefix}_{tier}") for tier in tiers)
        return [((tier,), float(counters[name])) for tier, name in names if name in counters]

    return read


def _traffic_by_tier(name: str) -> Callable[[Stats], Samples]:
    def read(stats: Stats) -> Samples:
        found = stats.get("traffic", {}).get(name, {})
        return [((tier,), float(found.get(tier, 0))) for tier in stats.get("tiers", {})]

    return read


def _by_drive(*path: str) -> Callable[[Stats], Samples]:
    """A value of each drive that has it."""

    def read(stats: Stats) -> Samples:
        for tier, facts in stats.get("tiers", {}).items():
            for drive in facts.get("drives", ()):
                found: Any = drive
                for name in path:
                    found = found.get(name) if isinstance(found, Mapping) else None
                if found is not None:
                    yield (tier, str(drive.get("path", ""))), float(found)

    return read


def _lookups(stats: Stats) -> Samples:
    for call, found in stats.get("traffic", {}).get("lookups", {}).items():
        for outcome in ("full", "partial", "none"):
            yield (call, outcome), float(found[outcome])


def _looked_up(stats: Stats) -> Samples:
    for call, found in stats.get("traffic", {}).get("lookups", {}).items():
        yield (call, "found"), float(found["found_blocks"])
        yield (call, "absent"), float(found["asked_blocks"] - found["found_blocks"])


def _evicted(stats: Stats) -> Samples:
    counters, drained = stats.get("counters", {}), stats.get("traffic", {}).get("drained_away", {})
    for tier, facts in stats.get("tiers", {}).items():
        total, away = counters.get(f"evicted_{tier}", 0), drained.get(tier, 0)
        yield (tier, "room"), float(total - away)
        if "drives" in facts:
            yield (tier, "drain"), float(away)


def _latency(stage: str) -> Callable[[Stats], Any]:
    """Histograms of one stage; the label is the tier or the request, if it has one."""

    def read(stats: Stats) -> Iterator[tuple[tuple[str, ...], list[int], float]]:
        for one in stats.get("traffic", {}).get("latencies", ()):
            if one["stage"] == stage:
                yield ((one["what"],) if one["what"] else ()), one["counts"], one["total_s"]

    return read


def served_tokens(stats: Stats) -> float:
    """Tokens of the blocks that were served: prefill that was not needed."""
    return float(sum(stats.get("traffic", {}).get("served_tokens", {}).values()))


def hit_ratio(stats: Stats) -> float | None:
    """Of the blocks looked up, how many were there: by matches or, where there were none, leases;
    None before the first.
    """
    lookups = stats.get("traffic", {}).get("lookups", {})
    for call in ("match", "lease"):
        found = lookups.get(call, {})
        if found.get("asked_blocks"):
            return float(found["found_blocks"] / found["asked_blocks"])
    return None


def gpu_seconds_saved(stats: Stats) -> float | None:
    """Since the start, by the prefill speed that engines report or that is assumed; None where
    none is known.
    """
    found: float | None = stats.get("ledger", {}).get("gpu_s")
    return found


def joules_saved(stats: Stats) -> float | None:
    """By the power of the GPUs that is assumed besides."""
    watts = stats.get("ledger", {}).get("assumed", {}).get("gpu_watts")
    seconds = gpu_seconds_saved(stats)
    return seconds * watts if seconds is not None and watts else None


def _by_tenant(name: str) -> Callable[[Stats], Samples]:
    def read(stats: Stats) -> Samples:
        tenants = stats.get("ledger", {}).get("tenants", {})
        return [((tenant,), float(account[name])) for tenant, account in tenants.items()]

    return read


def _first_tokens(name: str) -> Callable[[Stats], Samples]:
    """A sum over compared first tokens; none where no engine told of any."""

    def read(stats: Stats) -> Samples:
        told = stats.get("first_tokens", {})
        return [((), float(told[name]))] if told.get("compared") else []

    return read


def _each(counts: Mapping[str, float]) -> Samples:
    """Every count, by its name as the label."""
    return [((name,), float(count)) for name, count in counts.items()]


def _derived(value: Callable[[Stats], float | None]) -> Callable[[Stats], Samples]:
    def read(stats: Stats) -> Samples:
        found = value(stats)
        return [] if found is None else [((), found)]

    return read


def _audited(stats: Stats) -> Samples:
    audit = stats.get("audit")
    if audit is not None:
        yield ("matched",), float(audit["compared"] - audit["mismatched"])
        yield ("mismatched",), float(audit["mismatched"])


def _counter(name: str, labels: str, text: str, read: Any, source: str) -> Metric:
    return Metric(f"kvdepot_{name}_total", "counter", tuple(labels.split()), text, read, source)


def _gauge(name: str, labels: str, text: str, read: Any, source: str) -> Metric:
    return Metric(f"kvdepot_{name}", "gauge", tuple(labels.split()), text, read, source)


def _histogram(name: str, labels: str, text: str, stage: str) -> Metric:
    source = f"traffic.latencies, stage {stage}"
    told = tuple(labels.split())
    return Metric(f"kvdepot_{name}_seconds", "histogram", told, text, _latency(stage), source)


METRICS: Final = (
    _counter(
        "lookups",
        "call outcome",
        "Lookups of prompts: every block was there, the first ones, or none.",
        _lookups,
        "traffic.lookups",
    ),
    _counter(
        "lookup_blocks",
        "call outcome",
        "Blocks that lookups asked for: found or absent.",
        _looked_up,
        "traffic.lookups",
    ),
    _counter(
        "matched_blocks",
        "tier",
        "Blocks found by matches, by the fastest tier that has them.",
        _traffic_by_tier("matched"),
        "traffic.matched",
    ),
    _gauge(
        "hit_ratio",
        "",
        "Share of the blocks looked up that were there, since the start.",
        _derived(hit_ratio),
        "traffic.lookups",
    ),
    _counter(
        "get_blocks",
        "tier",
        "Blocks given back, by the tier that they came from.",
        _counted_by_tier("get"),
        "counters.get_TIER",
    ),
    _counter(
        "get_missed_blocks",
        "",
        "Blocks that were asked for and not given back.",
        _one("counters", "get_miss"),
        "counters.get_miss",
    ),
    _counter(
        "get_bytes",
        "tier",
        "Bytes given back, by the tier that they came from.",
        _traffic_by_tier("served_bytes"),
        "traffic.served_bytes",
    ),
    _counter(
        "get_tokens",
        "tier",
        "Tokens of the blocks given back; each of N shards of a model counts as one Nth.",
        _traffic_by_tier("served_tokens"),
        "traffic.served_tokens",
    ),
    _counter(
        "put_blocks",
        "outcome",
        "Blocks offered to the store, by what became of them.",
        _counted(
            (("stored",), "put_stored"),
            (("present",), "put_present"),
            (("throttled",), "put_throttled"),
            (("refused",), "put_refused"),
        ),
        "counters.put_OUTCOME",
    ),
    _counter(
        "deferred_blocks",
        "",
        "Of the blocks stored: taken while too much waited to be written.",
        _one("counters", "put_deferred"),
        "counters.put_deferred",
    ),
    _counter(
        "put_bytes",
        "",
        "Bytes of the blocks that were stored.",
        _one("counters", "put_bytes"),
        "counters.put_bytes",
    ),
    _counter(
        "written_blocks",
        "",
        "Blocks written from memory to drives.",
        _one("counters", "written"),
        "counters.written",
    ),
    _counter(
        "written_bytes",
        "",
        "Bytes of these blocks, as they lie on drives.",
        _one("counters", "written_bytes"),
        "counters.written_bytes",
    ),
    _counter(
        "write_failed_blocks",
        "",
        "Blocks that could not be written to a drive.",
        _one("counters", "write_failed"),
        "counters.write_failed",
    ),
    _counter(
        "moved_blocks",
        "move",
        "Blocks copied between tiers and drives.",
        _counted(
            (("promote",), "promoted"),
            (("demote",), "demoted"),
            (("mirror",), "mirrored"),
            (("prefetch",), "hinted"),
        ),
        "counters.promoted, demoted, mirrored, hinted",
    ),
    _counter(
        "rewritten_blocks",
        "tier",
        "Blocks written again because their segment was reclaimed or their drive drained.",
        _counted_by_tier("moved"),
        "counters.moved_TIER",
    ),
    _counter(
        "reclaimed_segments",
        "",
        "Segments of drives that were made free.",
        _one("counters", "reclaimed_segments"),
        "counters.reclaimed_segments",
    ),
    _counter(
        "evicted_blocks",
        "tier reason",
        "Copies dropped from a tier: to make room, or with a drained drive.",
        _evicted,
        "counters.evicted_TIER, traffic.drained_away",
    ),
    _counter(
        "removed_blocks",
        "",
        "Blocks that callers removed.",
        _one("counters", "removed"),
        "counters.removed",
    ),
    _counter(
        "removals_unrecorded",
        "",
        "Removals that could not be written down: the blocks may come back after a restart.",
        _one("counters", "removal_unrecorded"),
        "counters.removal_unrecorded",
    ),
    _counter(
        "corrupt_blocks",
        "",
        "Copies dropped because their checksum or identity did not match; none was served.",
        _one("counters", "quarantined"),
        "counters.quarantined",
    ),
    _counter(
        "read_problem_blocks",
        "problem",
        "Reads of blocks that failed, were late, or were saved by a second drive.",
        _counted(
            (("failed",), "read_failed"), (("late",), "read_late"), (("mirror",), "get_mirror")
        ),
        "counters.read_failed, read_late, get_mirror",
    ),
    _counter(
        "admission_refused_blocks",
        "reason",
        "Blocks kept off the fastest drives: not worth the wear, or the tier thrashes.",
        _counted((("wear",), "bypassed"), (("thrashing",), "held_below")),
        "counters.bypassed, held_below",
    ),
    _histogram("get_duration", "", "Time of a call that gets blocks.", "get"),
    _histogram("put_duration", "", "Time of a call that puts blocks.", "put"),
    _histogram("reserve_duration", "", "Time of a call that reserves memory.", "reserve"),
    _histogram("read_duration", "tier", "Time to read one wave of blocks from a drive.", "read"),
    _histogram("write_duration", "tier", "Time to append one run of blocks to a drive.", "write"),
    _histogram("request_duration", "request", "Time of a client's request.", "request"),
    _gauge("blocks", "", "Blocks that the store knows.", _one("blocks"), "blocks"),
    _gauge(
        "tier_blocks",
        "tier",
        "Blocks that a tier has.",
        _by_tier("blocks"),
        "tiers.TIER.blocks",
    ),
    _gauge(
        "tier_used_bytes",
        "tier",
        "Room that blocks take.",
        _by_tier("used_bytes"),
        "tiers.TIER.used_bytes",
    ),
    _gauge(
        "tier_capacity_bytes",
        "tier",
        "Room that there is.",
        _by_tier("capacity_bytes"),
        "tiers.TIER.capacity_bytes",
    ),
    _gauge(
        "tier_mirrored_blocks",
        "tier",
        "Blocks that are on two drives.",
        _by_tier("mirrored"),
        "tiers.TIER.mirrored",
    ),
    _gauge(
        "tier_healthy",
        "tier",
        "1: all drives of the tier work.",
        _by_tier("healthy"),
        "tiers.TIER.healthy",
    ),
    _gauge(
        "tier_thrashing",
        "tier",
        "1: promotion to the tier is held back, since it only pushes out what is in use.",
        _by_tier("thrashing"),
        "tiers.TIER.thrashing",
    ),
    _gauge(
        "write_queue_blocks",
        "tier",
        "Blocks that wait to be written.",
        _by_tier("write_queue", "blocks"),
        "tiers.TIER.write_queue",
    ),
    _gauge(
        "write_queue_bytes",
        "tier",
        "Bytes that wait to be written.",
        _by_tier("write_queue", "bytes"),
        "tiers.TIER.write_queue",
    ),
    _gauge(
        "write_queue_oldest_seconds",
        "tier",
        "How long the oldest of them has waited.",
        _by_tier("write_queue", "oldest_s"),
        "tiers.TIER.write_queue",
    ),
    _gauge(
        "write_queue_limit_bytes",
        "",
        "When this much waits in all, new blocks are written later.",
        _one("dirty_limit_bytes"),
        "dirty_limit_bytes",
    ),
    _gauge(
        "drive_healthy",
        "tier drive",
        "1: the drive takes part.",
        _by_drive("healthy"),
        "tiers.TIER.drives.healthy",
    ),
    _gauge(
        "drive_full",
        "tier drive",
        "1: its file system has no room left, although the store may use more of it.",
        _by_drive("full"),
        "tiers.TIER.drives.full",
    ),
    _counter(
        "drive_errors",
        "tier drive",
        "Errors of the drive.",
        _by_drive("errors"),
        "tiers.TIER.drives.errors",
    ),
    _gauge(
        "drive_used_bytes",
        "tier drive",
        "Room that blocks take on the drive.",
        _by_drive("used_bytes"),
        "tiers.TIER.drives.used_bytes",
    ),
    _gauge(
        "drive_capacity_bytes",
        "tier drive",
        "Room that the store may use on the drive.",
        _by_drive("capacity_bytes"),
        "tiers.TIER.drives.capacity_bytes",
    ),
    _gauge(
        "drive_draining",
        "tier drive",
        "1: the drive is being emptied.",
        _by_drive("draining"),
        "tiers.TIER.drives.draining",
    ),
    _gauge(
        "drive_read_bytes_per_second",
        "tier drive",
        "Speed of the drive, as measured last.",
        _by_drive("read_bytes_per_s"),
        "tiers.TIER.drives.read_bytes_per_s",
    ),
    _counter(
        "drive_written_bytes",
        "tier drive",
        "Bytes written to the drive since the start: its wear.",
        _by_drive("written", "bytes"),
        "tiers.TIER.drives.written.bytes",
    ),
    _gauge(
        "endurance_daily_bytes",
        "tier drive",
        "Bytes that may be written to the drive in a day.",
        _by_drive("written", "daily_bytes"),
        "tiers.TIER.drives.written.daily_bytes",
    ),
    _gauge(
        "endurance_left_bytes",
        "tier drive",
        "Bytes that may be written to the drive now.",
        _by_drive("written", "level_bytes"),
        "tiers.TIER.drives.written.level_bytes",
    ),
    _gauge(
        "leased_blocks",
        "",
        "Blocks that callers hold a lease on.",
        _one("leased"),
        "leased",
    ),
    _gauge(
        "staging_used_bytes",
        "",
        "Memory of blocks on their way between tiers.",
        _one("staging_bytes"),
        "staging_bytes",
    ),
    _gauge("index_bytes", "", "Memory of the index.", _one("index_bytes"), "index_bytes"),
    _gauge(
        "sessions",
        "",
        "Sessions that are remembered.",
        _one("sessions", "remembered"),
        "sessions.remembered",
    ),
    _counter(
        "sessions_forgotten",
        "",
        "Sessions forgotten because there were too many.",
        _one("sessions", "forgotten"),
        "sessions.forgotten",
    ),
    _gauge(
        "contracts",
        "",
        "Contracts of retention in force.",
        _one("sessions", "contracts"),
        "sessions.contracts",
    ),
    _counter(
        "contract_events",
        "event",
        "Contracts granted, requests refused, and contracts ended.",
        lambda stats: [
            ((event,), float(stats["sessions"][f"contracts_{event}"]))
            for event in ("granted", "refused", "ended")
            if f"contracts_{event}" in stats.get("sessions", {})
        ],
        "sessions.contracts_EVENT",
    ),
    _gauge(
        "contract_blocks",
        "",
        "Blocks under contract, as counted some seconds ago.",
        _one("sessions", "contract_blocks"),
        "sessions.contract_blocks",
    ),
    _gauge(
        "contract_bytes",
        "",
        "Bytes of their records.",
        _one("sessions", "contract_bytes"),
        "sessions.contract_bytes",
    ),
    _gauge(
        "contract_missing_blocks",
        "",
        "Blocks under contract that no durable tier has any more; above 0 is a broken promise.",
        _one("sessions", "contract_missing_blocks"),
        "sessions.contract_missing_blocks",
    ),
    _counter(
        "audited_blocks",
        "outcome",
        "Blocks that an engine has computed again: as they are kept, or not (mismatched).",
        _audited,
        "audit.compared, audit.mismatched",
    ),
    _gauge(
        "quarantined_namespaces",
        "",
        "Namespaces of which nothing is served, since an audit failed.",
        lambda stats: [((), float(len(stats["audit"]["quarantined"])))] if "audit" in stats else [],
        "audit.quarantined",
    ),
    _counter(
        "events",
        "event",
        "What routers were told: blocks stored, removed, not told (silent), all cleared; batches, "
        "replays, subscriptions, failures.",
        lambda stats: [
            ((name,), float(count))
            for name, count in stats.get("events", {}).items()
            if name not in ("endpoint", "replay", "blocks")
        ],
        "events",
    ),
    _gauge(
        "events_announced_blocks",
        "",
        "Blocks that routers know of.",
        _one("events", "blocks"),
        "events.blocks",
    ),
    _histogram(
        "first_token_duration",
        "",
        "Time to the first token of prompts of which the depot had something, as engines tell it.",
        "first_token",
    ),
    _counter(
        "decisions",
        "decision",
        "What engines decided for these prompts: to fetch, to recompute, or parts of both.",
        lambda stats: _each(stats.get("first_tokens", {}).get("decisions", {})),
        "first_tokens.decisions",
    ),
    _counter(
        "first_tokens_compared",
        "",
        "First tokens of which engines had predicted the time; the next three are about these.",
        _first_tokens("compared"),
        "first_tokens.compared",
    ),
    _counter(
        "first_token_measured_seconds",
        "",
        "Sum of their times, as measured: with kvdepot.",
        _first_tokens("seconds"),
        "first_tokens.seconds",
    ),
    _counter(
        "first_token_predicted_seconds",
        "",
        "Sum of their times, as predicted when it was decided.",
        _first_tokens("predicted_seconds"),
        "first_tokens.predicted_seconds",
    ),
    _counter(
        "first_token_recompute_seconds",
        "",
        "Sum of the times predicted for computing the whole prompts: without kvdepot.",
        _first_tokens("recompute_seconds"),
        "first_tokens.recompute_seconds",
    ),
    _counter(
        "gpu_saved_seconds",
        "",
        "Prefill that was not needed: tokens given back, by the prefill speed that engines report, "
        "else by the assumed one.",
        _derived(gpu_seconds_saved),
        "ledger.gpu_s",
    ),
    _counter(
        "gpu_saved_joules",
        "",
        "The same, by the assumed power of the GPUs.",
        _derived(joules_saved),
        "ledger.gpu_s, ledger.assumed",
    ),
    _gauge(
        "assumed_prefill_tokens_per_second",
        "",
        "The prefill speed that savings are computed with where engines report none.",
        _one("ledger", "assumed", "prefill_tokens_per_s"),
        "ledger.assumed",
    ),
    _counter(
        "tenant_gpu_saved_seconds",
        "tenant",
        "GPU seconds saved for a tenant since the store was made; tenants beyond 64 are one.",
        _by_tenant("gpu_s"),
        "ledger.tenants.TENANT.gpu_s",
    ),
    _counter(
        "tenant_saved_tokens",
        "tenant",
        "Tokens given back to a tenant since the store was made.",
        _by_tenant("tokens"),
        "ledger.tenants.TENANT.tokens",
    ),
    _counter(
        "tenant_held_byte_hours",
        "tenant tier",
        "Bytes times hours that a tenant's blocks took on a tier, counted every minute.",
        lambda stats: [
            ((tenant, tier), float(hours))
            for tenant, account in stats.get("ledger", {}).get("tenants", {}).items()
            for tier, hours in account["byte_hours"].items()
        ],
        "ledger.tenants.TENANT.byte_hours",
    ),
    _gauge(
        "site_connected",
        "",
        "Whether the NATS server of the site is reached.",
        _one("site", "connected"),
        "site.connected",
    ),
    _counter(
        "site_messages",
        "event",
        "Messages between the stores of a site: sent, received, refused as nonsense, dropped; and "
        "connections made.",
        lambda stats: _each(stats.get("site", {}).get("messages", {})),
        "site.messages",
    ),
    _counter(
        "site_hints",
        "event",
        "Hints of the site: prompts followed, sessions passed on to another node, unknown here.",
        lambda stats: _each(
            {
                name: count
                for name, count in stats.get("site", {}).get("hints", {}).items()
                if name != "open"
            }
        ),
        "site.hints",
    ),
    _gauge(
        "site_open_hints",
        "",
        "Prompts hinted at of which not all has come to the shared tier yet.",
        _one("site", "hints", "open"),
        "site.hints.open",
    ),
    _gauge(
        "clients",
        "",
        "Processes attached to the daemon.",
        lambda stats: [((), float(len(found)))] if (found := _clients(stats)) is not None else [],
        "daemon.sessions",
    ),
    _counter(
        "client_events",
        "event",
        "What clients did: attached, connected, asked, were refused, sent nonsense, hit a limit.",
        lambda stats: [
            ((name,), float(count))
            for name, count in stats.get("daemon", {}).get("counters", {}).items()
        ],
        "daemon.counters",
    ),
    _gauge(
        "uptime_seconds",
        "",
        "How long the daemon has been running.",
        _one("daemon", "uptime_s"),
        "daemon.uptime_s",
    ),
    _gauge(
        "build_info",
        "version",
        "Always 1; the label is the version of the daemon.",
        lambda stats: [
            ((stats["daemon"]["version"],), 1.0) for _ in range(bool(stats.get("daemon")))
        ],
        "daemon.version",
    ),
)


def _clients(stats: Stats) -> list[Any] | None:
    found: list[Any] | None = stats.get("daemon", {}).get("sessions")
    return found
