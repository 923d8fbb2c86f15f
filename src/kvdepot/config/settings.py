"""The whole configuration, as one tree of frozen dataclasses.

Sources, lowest to highest: the defaults here, a TOML file, an environment mapping (KVDEPOT_*, `__`
between levels), overrides. Unknown keys are errors, and so are sizes that cannot work. The caller
passes the environment in; nothing here reads it.

Options named in DEVELOPER are for tests and experiments. They are accepted like settings, may
change in any release, and are shown only if they differ from their default.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

from kvdepot.config.loader import Secret, Unit, load_tree
from kvdepot.core.units import format_bytes
from kvdepot.core.volume import VOLUMES_MAX
from kvdepot.errors import ConfigError

ENV_PREFIX: Final = "KVDEPOT_"
SOCKET_ENV: Final = "KVDEPOT_SOCKET"
"""The daemon's socket, for `kvdepot serve` and the commands that connect to it."""
DAEMON_USER_ENV: Final = "KVDEPOT_DAEMON_USER"
"""A user whose daemon commands trust, besides those of their own user and of root."""
_NOT_SETTINGS: Final = (SOCKET_ENV, DAEMON_USER_ENV, "KVDEPOT_PLAN_", "KVDEPOT_PARTS_")
"""Variables and prefixes of variables that are not settings."""

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
PAGE_BYTES: Final = 4 * KIB
SEGMENT_BYTES_MIN: Final = 64 * KIB
SEGMENTS_AUTOMATIC: Final = 16
SEGMENTS_AUTOMATIC_MAX: Final = 4096
"""Every segment is an open file, so large stores get larger segments."""
SEGMENTS_MIN: Final = 3
"""One is being written, one is kept free, one holds blocks."""
_SIZE_LIMIT: Final = 1 << 63
_NAME_MAX: Final = 100

Bytes = Annotated[int, Unit.BYTES]
Seconds = Annotated[float, Unit.SECONDS]
WriteModeName = Literal["write-back", "write-through", "write-through-selective", "pass-through"]
EvictionName = Literal["default", "lru", "fifo", "lfu", "s3fifo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DramConfig:
    """The memory tier. `dram = "2GiB"` alone means its capacity."""

    DEVELOPER: ClassVar[str] = "shared client_share client_time"

    SHORTHAND: ClassVar[str] = "capacity"

    capacity: Bytes = GIB
    """Memory for blocks."""

    huge_pages: Literal["auto", "always", "never"] = "auto"
    """Huge pages for that memory: used if the machine has them, required, or not used."""

    verify: bool = True
    """Check the checksum of every block read from memory."""

    eviction: Literal["default", "lru", "fifo", "lfu", "s3fifo", "value"] = "default"
    """The eviction order; `kvdepot sim` compares them on a trace. `value` is the default order
    with reuses weighted by the GPU time that they save."""

    shared: bool = False
    """Back the memory by a descriptor that other processes can map. As fast as private memory if
    the kernel uses huge pages for it: Linux 6.1 or newer with `prefault`, or reserved ones."""

    lock: bool = False
    """Lock the memory, and that of `cxl`, so that it is never swapped out; needs a sufficient
    memlock limit."""

    prefault: bool = True
    """Touch all the memory, and that of `cxl`, when the store opens, so that no first use is slow.
    """

    client_share: float = 0.25
    """Share of `dram.capacity` that the leases and reserved slots of one client of a daemon may
    take. Further leased blocks are delivered, but not protected from eviction; further slots are
    throttled."""

    client_time: Seconds = 600.0
    """The longest a client of a daemon may hold a lease or slots; then it is disconnected."""

    def __post_init__(self) -> None:
        _check_size("dram.capacity", self.capacity)
        if not 0 < self.client_share <= 1:
            reason = f"must be more than 0 and at most 1, got {self.client_share}"
            raise ConfigError("dram.client_share", reason)
        _check_positive("dram.client_time", self.client_time)


@dataclass(frozen=True, slots=True, kw_only=True)
class CxlConfig:
    """Byte-addressable memory below the memory tier. `cxl = "256GiB"` alone means its capacity.

    Without `node` or `path`, ordinary DRAM is used and reported as emulated.
    """

    SHORTHAND: ClassVar[str] = "capacity"

    capacity: Bytes
    """Memory for blocks that are expected to be reused later than those in `dram`."""

    node: int | None = None
    """The NUMA node whose memory it is."""

    path: Path | None = None
    """The device to map, such as /dev/dax0.0, or a file of at least `capacity`."""

    def __post_init__(self) -> None:
        _check_size("cxl.capacity", self.capacity)
        if self.node is not None and self.path is not None:
            reason = "cannot be set together with cxl.node"
            raise ConfigError("cxl.path", reason, hint="set one of the two")
        if self.node is not None and self.node < 0:
            raise ConfigError("cxl.node", f"must not be negative, got {self.node}")

    @property
    def source(self) -> str:
        """The origin of the memory, for display."""
        if self.node is not None:
            return f"NUMA node {self.node}"
        return "ordinary memory" if self.path is None else str(self.path)

    @property
    def emulated(self) -> bool:
        return self.node is None and self.path is None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTierConfig:
    """A tier of append-only segments in one or many directories or block devices."""

    DEVELOPER: ClassVar[str] = (
        "io_depth promote eviction retry_initial retry_max write_timeout profile"
    )

    TIER: ClassVar[str] = ""
    SEGMENT_BYTES_AUTOMATIC: ClassVar[int] = 256 * MIB

    path: tuple[Path, ...]
    """A directory or block device for the segments, or a list of them."""

    capacity: Bytes
    """Space for segments on all paths together."""

    segment: Bytes = 0
    """Size of a segment. 0 means automatic: 256MiB (1GiB on hard drives), adjusted so that each
    path has 16 to 4096 segments."""

    direct_io: Literal["auto", "always", "never"] = "auto"
    """Bypass the page cache: auto if the filesystem supports it; always fails if it does not."""

    io_depth: int = 32
    """Reads and writes in flight at once, for each path."""

    fsync: Literal["never", "flush", "always"] = "flush"
    """When written data is synced to the device: never, at flush() and close(), or after every
    batch. docs/tiers.md says what survives a power cut with each."""

    promote: bool = True
    """Copy a block that was read from this tier into memory."""

    write_mode: WriteModeName = "write-back"
    """When blocks are written here. write-back: when the tier above evicts them; directly below
    memory, soon after the put. write-through: as soon as the tier above has them; directly below
    memory, before the put returns. write-through-selective: at the second request, or at once if a
    reuse is likely. pass-through: directly from memory, without the file tiers above."""

    eviction: EvictionName = "default"
    """Which segment is reclaimed first, and which of its blocks are kept by rewriting them."""

    read_timeout: Seconds = 2.0
    """A read that takes longer is a miss."""

    write_timeout: Seconds = 10.0
    """A write that takes longer marks the path as failing."""

    retry_initial: Seconds = 0.1
    """The first wait before a failing path is tried again; doubles with each failure."""

    retry_max: Seconds = 30.0
    """The longest wait before a failing path is tried again."""

    profile: Literal["auto", "always", "never"] = "auto"
    """Measure the speed of each path: auto measures once if the path has 1GiB or more, always at
    every opening."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(self._name("path"), "needs at least one path")
        if len(self.path) > VOLUMES_MAX:
            reason = f"{len(self.path)} paths are too many: the limit is {VOLUMES_MAX}"
            raise ConfigError(self._name("path"), reason, hint="combine drives with RAID or LVM")
        if len(set(self.path)) != len(self.path):
            raise ConfigError(self._name("path"), "names the same path twice")
        _check_size(self._name("capacity"), self.capacity)
        self._check_segment()
        _check_range(self._name("io_depth"), self.io_depth, 1, 4096)
        for name in ("read_timeout", "write_timeout", "retry_initial", "retry_max"):
            _check_positive(self._name(name), getattr(self, name))
        if self.retry_max < self.retry_initial:
            reason = f"must not be less than {self._name('retry_initial')}"
            raise ConfigError(self._name("retry_max"), reason)

    @property
    def path_capacity(self) -> int:
        """The share of the capacity of one path, in bytes."""
        return self.capacity // len(self.path)

    @property
    def daily_bytes(self) -> int:
        """Bytes that may be written to each path in a day; 0: no limit."""
        return 0

    @property
    def contiguous_bytes(self) -> int:
        """Bytes of a prompt that are stored contiguously on a path; 0: seeks cost nothing."""
        return 0

    @property
    def segment_bytes(self) -> int:
        """The size of a segment: the configured or the automatic one."""
        if self.segment:
            return self.segment
        most = self.path_capacity // SEGMENTS_AUTOMATIC // MIB * MIB
        least = -(-self.path_capacity // SEGMENTS_AUTOMATIC_MAX // MIB) * MIB
        return max(MIB, least, min(self.SEGMENT_BYTES_AUTOMATIC, most))

    def _name(self, field_name: str) -> str:
        return f"{self.TIER}.{field_name}"

    def _check_segment(self) -> None:
        if self.segment:
            _check_size(self._name("segment"), self.segment, least=SEGMENT_BYTES_MIN)
            if self.segment % PAGE_BYTES:
                raise ConfigError(
                    self._name("segment"), f"must be a multiple of {PAGE_BYTES} bytes"
                )
        if self.path_capacity < SEGMENTS_MIN * self.segment_bytes:
            smaller = f" or a smaller {self._name('segment')}" if self.segment else ""
            raise ConfigError(
                self._name("capacity"),
                f"{format_bytes(self.path_capacity)} for each path is less than {SEGMENTS_MIN} "
                f"segments of {format_bytes(self.segment_bytes)}",
                hint=f"give more capacity{smaller}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdConfig(FileTierConfig):
    """The SSD tier: drives on which a random read is as fast as a sequential one."""

    TIER: ClassVar[str] = "ssd"

    writes_per_day: float = 0.0
    """Full writes of each path's share of `capacity` allowed in a day; 0 is no limit. If the store
    uses half of a drive that is rated for one write a day, set 2. Beyond the limit, blocks that are
    least likely to be reused go to hard drives or stay in memory."""

    def __post_init__(self) -> None:
        super(SsdConfig, self).__post_init__()
        if not 0 <= self.writes_per_day < float("inf"):
            raise ConfigError("ssd.writes_per_day", "must be 0 or more")

    @property
    def daily_bytes(self) -> int:
        """Bytes that may be written to each path in a day; 0: no limit."""
        return int(self.path_capacity * self.writes_per_day)


@dataclass(frozen=True, slots=True, kw_only=True)
class HddConfig(FileTierConfig):
    """The hard-drive tier: large, and fast only for sequential reads."""

    TIER: ClassVar[str] = "hdd"
    SEGMENT_BYTES_AUTOMATIC: ClassVar[int] = GIB

    read_timeout: Seconds = 30.0
    """A read that takes longer is a miss."""

    write_timeout: Seconds = 60.0
    """A write that takes longer marks the path as failing."""

    run: Bytes = 32 * MIB
    """Bytes of one prompt that are written to one drive before the next drive is used."""

    def __post_init__(self) -> None:
        super(HddConfig, self).__post_init__()
        _check_size("hdd.run", self.run)

    @property
    def contiguous_bytes(self) -> int:
        return self.run


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """A tier of another package, below those of drives."""

    DEVELOPER: ClassVar[str] = "read_timeout write_timeout"

    TIER: ClassVar[str] = "plugin"
    promote: ClassVar[bool] = True
    eviction: ClassVar[EvictionName] = "default"

    name: str
    """The name of an entry point in the group kvdepot.volumes, or module:factory."""

    capacity: Bytes
    """Space for blocks."""

    path: Path | None = None
    """The path of the blocks, if the tier uses one."""

    options: dict[str, str] = field(default_factory=dict)
    """Settings that are passed to the tier."""

    write_mode: WriteModeName = "write-back"
    """When blocks are written here, as for ssd and hdd."""

    read_timeout: Seconds = 30.0
    """A read that takes longer is a miss."""

    write_timeout: Seconds = 60.0
    """The longest that a drain waits for writes in flight."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("plugin.name", "must not be empty")
        _check_size("plugin.capacity", self.capacity)
        _check_positive("plugin.read_timeout", self.read_timeout)
        _check_positive("plugin.write_timeout", self.write_timeout)


_BUCKET_REFRESH_S: Final = 2.0
_FOLDER_REFRESH_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectConfig:
    """A bucket, or a folder that several machines mount; several stores can share it."""

    DEVELOPER: ClassVar[str] = (
        "promote eviction retry_initial retry_max measure refresh parallel object_size "
        "write_timeout grace"
    )

    TIER: ClassVar[str] = "object"

    url: str
    """`s3://bucket/prefix`, or `file:///folder` for a mounted filesystem."""

    capacity: Bytes
    """Space below the prefix, for all stores together."""

    endpoint: str = ""
    """Address of the server, such as http://minio:9000; default: Amazon S3."""

    region: str = ""
    """Region of the bucket; default: from the environment."""

    profile: str = ""
    """Use the credentials of this profile instead of those of the environment."""

    credentials_file: Path | None = None
    """The file of profiles; default: ~/.aws/credentials."""

    max_age: Seconds = 7 * 86400.0
    """Objects older than this are deleted; 0 for no limit."""

    object_size: Bytes = 64 * MIB
    """Maximum size of an object, 64MiB at most; a larger block has an object of its own."""

    parallel: int = 8
    """Requests in flight at once, reads and writes each."""

    measure: bool = True
    """Measure latency and bandwidth with an object of 1 MiB when the store opens. Not done in a
    folder, because the object would be read from the page cache."""

    refresh: Annotated[float | None, Unit.SECONDS] = None
    """Interval between listings of what other stores have written; default: 2s, and 500ms in a
    folder."""

    grace: Seconds = 60.0
    """A store without a sign of life for this time is taken for dead; deleted objects stay readable
    for this time. Must be the same for all stores of a bucket."""

    promote: bool = True
    """Copy a block that was read from this tier into memory."""

    write_mode: WriteModeName = "write-through"
    """When blocks are written here, as for ssd and hdd; a put never waits for it."""

    eviction: EvictionName = "default"
    """Which object is reclaimed first, and which of its blocks are kept by rewriting them."""

    read_timeout: Seconds = 10.0
    """A read that takes longer is a miss."""

    write_timeout: Seconds = 60.0
    """A write that takes longer has failed."""

    retry_initial: Seconds = 0.5
    """The first wait before a failing server is tried again; doubles with each failure."""

    retry_max: Seconds = 30.0
    """The longest wait before a failing server is tried again."""

    def __post_init__(self) -> None:
        self._check_url()
        _check_size("object.capacity", self.capacity, least=MIB)
        _check_size("object.object_size", self.object_size)
        if self.object_size > 64 * MIB:
            raise ConfigError("object.object_size", "must not be more than 64MiB")
        _check_range("object.parallel", self.parallel, 1, 256)
        if self.max_age < 0:
            raise ConfigError("object.max_age", "must not be negative")
        for name in ("grace", "read_timeout", "write_timeout", "retry_initial", "retry_max"):
            _check_positive(f"object.{name}", getattr(self, name))
        _check_positive("object.refresh", self.refresh_s)

    @property
    def is_folder(self) -> bool:
        return self.url.startswith("file://")

    @property
    def is_measured(self) -> bool:
        return self.measure and not self.is_folder

    @property
    def refresh_s(self) -> float:
        """Longer for a bucket, because each listing costs money there."""
        if self.refresh is not None:
            return self.refresh
        return _FOLDER_REFRESH_S if self.is_folder else _BUCKET_REFRESH_S

    def _check_url(self) -> None:
        scheme, _, rest = self.url.partition("://")
        if scheme not in ("s3", "file") or not rest.strip("/"):
            raise ConfigError(
                "object.url",
                "is not the address of a bucket or of a folder",
                hint="write s3://BUCKET/PREFIX or file:///FOLDER",
            )
        if "@" in self.url or "@" in self.endpoint:
            raise ConfigError(
                "object.url",
                "an address must not hold credentials",
                hint="use the environment, object.profile or object.credentials_file",
            )
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError("object.endpoint", "must begin with http:// or https://")

    @property
    def object_bytes(self) -> int:
        """Maximum size of an object: `object_size`, but at most 1/16 of the capacity."""
        return max(
            PAGE_BYTES, min(self.object_size, self.capacity // 16 // PAGE_BYTES * PAGE_BYTES)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsConfig:
    """A NATS server through which the stores of a site exchange hints."""

    servers: tuple[str, ...]
    """Addresses such as nats://broker:4222 or tls://…; one that answers is enough."""

    site: str = "default"
    """Stores with the same site exchange messages; they share a bucket or a folder."""

    node: str = ""
    """The name of this store in hints; default: the machine's name."""

    credentials_file: Path | None = None
    """A user's .creds file."""

    token_file: Path | None = None
    """File that contains the server's token; a line end is ignored."""

    tls_ca: Path | None = None
    """CA certificates for the server's certificate; default: those of the system."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("nats.servers", "needs at least one address")
        for server in self.servers:
            scheme, _, rest = server.partition("://")
            if "@" in server:
                raise ConfigError(
                    "nats.servers",
                    "an address must not hold credentials",
                    hint="use nats.credentials_file or nats.token_file",
                )
            if scheme not in ("nats", "tls") or not rest.strip("/"):
                raise ConfigError(
                    "nats.servers",
                    f"{server!r} is not the address of a server",
                    hint="write nats://HOST:PORT, such as nats://broker:4222",
                )
        plain = self.site.replace("-", "").replace("_", "")
        if not (plain.isascii() and plain.isalnum() and len(self.site) <= _NAME_MAX):
            raise ConfigError("nats.site", "must be letters, digits, - and _", hint="paris-1")
        if len(self.node) > _NAME_MAX or not self.node.isprintable():
            raise ConfigError("nats.node", f"must be at most {_NAME_MAX} printable characters")
        if self.credentials_file is not None and self.token_file is not None:
            reason = "cannot be set together with nats.credentials_file"
            raise ConfigError("nats.token_file", reason)

    def token(self) -> str:
        """The server's token; empty if none is set. ConfigError if the file cannot be read."""
        if self.token_file is None:
            return ""
        try:
            return self.token_file.read_text().removesuffix("\n").removesuffix("\r")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ConfigError("nats.token_file", f"cannot be read: {reason}") from error


LowerTierConfig = FileTierConfig | PluginConfig | ObjectConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WritebackConfig:
    """Writing of blocks from memory to disk in the background."""

    DEVELOPER: ClassVar[str] = "prefault"

    dirty_limit: float = 0.5
    """Share of the memory tier that may wait to be written; beyond it puts are throttled. Puts with
    timeout 0, such as those of vLLM, are accepted, and written later unless evicted before."""

    staging: Bytes = 64 * MIB
    """Memory for reads from disk and for reclaiming segments, in addition to the memory tier."""

    prefault: bool = False
    """Touch `staging` when the store opens even if `dram.prefault` is off, so that the first reads
    are not slow."""

    put_timeout: Seconds = 0.25
    """The longest a put waits for room before it is throttled; 0 never waits."""

    def __post_init__(self) -> None:
        if not 0 < self.dirty_limit <= 1:
            raise ConfigError("writeback.dirty_limit", f"must be in 0 to 1, got {self.dirty_limit}")
        _check_size("writeback.staging", self.staging)
        if not self.put_timeout >= 0:
            raise ConfigError("writeback.put_timeout", "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsConfig:
    """KV events for routers. `events = "tcp://127.0.0.1:5557"` alone means its endpoint."""

    DEVELOPER: ClassVar[str] = "buffer interval resync_interval"

    SHORTHAND: ClassVar[str] = "endpoint"

    endpoint: str
    """The ZMQ address that routers subscribe to: tcp://HOST:PORT or ipc://PATH."""

    replay: str = ""
    """The ZMQ address at which routers request missed batches; empty: no replay."""

    topic: str = "kv@kvdepot@{model}"
    """The topic of each batch; `{model}` is the model's name."""

    buffer: Bytes = 64 * MIB
    """Size of the batches that are kept for `replay`. If a router has missed more, all blocks are
    announced again."""

    interval: Seconds = 0.1
    """The interval at which changes are collected and published."""

    resync_interval: Seconds = 5.0
    """The shortest interval between full announcements, which new routers need and those that have
    missed batches. After this time without changes an empty batch is sent, whose number shows
    routers what they have missed."""

    tenants: tuple[str, ...] = ("",)
    """The tenants whose blocks are announced; the empty name means blocks without a tenant."""

    allow_remote: bool = False
    """Let other machines subscribe. Events contain token ids, as private as prompts, unencrypted.
    """

    def __post_init__(self) -> None:
        _check_positive("events.interval", self.interval)
        _check_positive("events.resync_interval", self.resync_interval)
        _check_size("events.buffer", self.buffer)
        for name in ("endpoint", "replay"):
            address = getattr(self, name)
            if address or name == "endpoint":
                self._check_address(f"events.{name}", address)

    def _check_address(self, path: str, address: str) -> None:
        host = re.fullmatch(r"tcp://(\S+):[0-9]{1,5}", address)
        if host is None and not re.fullmatch(r"ipc://\S+", address):
            raise ConfigError(
                path,
                f"{address!r} is not an address",
                hint="write tcp://HOST:PORT, such as tcp://127.0.0.1:5557, or ipc:///PATH",
            )
        if host is not None and not self.allow_remote and not is_loopback(host[1]):
            raise ConfigError(
                path,
                f"{host[1]} can be reached from other machines, and token ids are private",
                hint="listen on 127.0.0.1, or set events.allow_remote = true",
            )


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsConfig:
    """Limits of session records and of pins."""

    ttl: Seconds = 30 * 86400.0
    """A session that is not named for this time is forgotten, unless it is pinned."""

    pinned_share: float = 0.25
    """Share of each drive tier that the pins of one user of the machine may take, 0.5 at most; the
    pins of all together may take half."""

    def __post_init__(self) -> None:
        _check_positive("sessions.ttl", self.ttl)
        if not 0 <= self.pinned_share <= 0.5:
            raise ConfigError("sessions.pinned_share", "must be in 0 to 0.5")


AUDIT_TOLERANCE: Final = MappingProxyType(
    {
        "float32": 0.01,
        "float16": 0.05,
        "bfloat16": 0.1,
        "fp8_e4m3": 0.25,
        "fp8_e5m2": 0.4,
        "int8": 0.25,
    }
)
"""The largest relative error of a recomputed part of a block, by dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Audits: an engine recomputes some hits and compares them with the store (docs/audit.md)."""

    DEVELOPER: ClassVar[str] = "tolerance"

    share: float = 0.0
    """Share of the hits of each namespace that are audited, the first hit included; 0: none. With
    0.02, a mismatch is found within 50 hits."""

    under_load: bool = False
    """Audit also while the engine has other requests."""

    tolerance: dict[str, float] = field(default_factory=dict)
    """The largest relative error by dtype. Defaults: float32 0.01, float16 0.05, bfloat16 0.1,
    fp8_e4m3 0.25, fp8_e5m2 0.4, int8 0.25."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError("audit.share", f"must be in 0 to 1, got {self.share}")
        for dtype, value in self.tolerance.items():
            if dtype not in AUDIT_TOLERANCE:
                raise ConfigError(
                    f"audit.tolerance.{dtype}", f"is not one of {', '.join(AUDIT_TOLERANCE)}"
                )
            if not 0 < value < 1:
                raise ConfigError(f"audit.tolerance.{dtype}", f"must be in 0 to 1, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """The speed and the prices from which the ledger computes savings."""

    prefill_tokens_per_s: float | None = None
    """Prefill speed of the GPUs without kvdepot, for engines that do not report it."""

    gpu_watts: float | None = None
    """Power of these GPUs while they compute, for the joules saved."""

    gpu_price_per_hour: float = 0.89
    """Price of one hour of all GPUs of one copy of the model. Default: one H100 without its server,
    in US dollars, over four years, with electricity."""

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "gpu_watts"):
            if getattr(self, name) is not None:
                _check_positive(f"ledger.{name}", getattr(self, name))
        if not 0 <= self.gpu_price_per_hour < 1e12:
            raise ConfigError("ledger.gpu_price_per_hour", "must be a price, at least 0")

    def assumed(self) -> dict[str, float]:
        """The settings that savings are computed from, without those that are not set."""
        names = ("prefill_tokens_per_s", "gpu_watts")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """One tenant. Without a secret, only its name separates it from others."""

    DEVELOPER: ClassVar[str] = "secret_hex"

    secret_file: Path | None = None
    """File that contains the secret that seeds the tenant's keys; a line end is ignored."""

    secret_hex: Annotated[str, Secret.HIDDEN] = field(default="", repr=False)
    """The secret in hexadecimal; for tests and for secrets from the environment."""

    def secret(self) -> bytes:
        """The tenant's secret; empty if none is set. ConfigError if the file cannot be read."""
        if self.secret_file is None:
            return bytes.fromhex(self.secret_hex)
        try:
            content = self.secret_file.read_bytes()
        except OSError as error:
            reason = f"{self.secret_file} cannot be read: {error.strerror or error}"
            raise ConfigError("secret_file", reason) from error
        secret = content.removesuffix(b"\n").removesuffix(b"\r")
        if not secret:
            raise ConfigError("secret_file", f"{self.secret_file} is empty")
        return secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings."""

    block_tokens: int = 256
    """Tokens in one block; a multiple of the engine's page."""

    dram: DramConfig = field(default_factory=DramConfig)
    """The memory tier."""

    cxl: CxlConfig | None = None
    """The tier of slower memory, below the memory tier."""

    ssd: SsdConfig | None = None
    """The SSD tier."""

    hdd: HddConfig | None = None
    """The hard-drive tier, below the SSD tier."""

    plugin: PluginConfig | None = None
    """A tier of another package, below those of drives."""

    object: ObjectConfig | None = None
    """A bucket or a shared folder, below all others; shared with other stores."""

    nats: NatsConfig | None = None
    """The NATS server through which the stores of a site exchange hints."""

    writeback: WritebackConfig = field(default_factory=WritebackConfig)
    """Writing of blocks from memory to disk in the background."""

    events: EventsConfig | None = None
    """KV events for routers (docs/routers.md)."""

    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    """Limits of session records and of pins."""

    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    """The speed and the prices from which savings are computed (docs/ledger.md)."""

    tenants: dict[str, TenantConfig] = field(default_factory=dict)
    """Tenants that have a secret, by name."""

    def __post_init__(self) -> None:
        _check_range("block_tokens", self.block_tokens, 1, 1 << 20)
        for name, tenant in self.tenants.items():
            _check_tenant(name, tenant)
        paths = [path for tier in self.file_tiers for path in tier.path]
        if len(set(paths)) != len(paths):
            raise ConfigError("hdd.path", "names a path that is also in ssd.path")

    @property
    def file_tiers(self) -> tuple[FileTierConfig, ...]:
        """The configured file tiers, fastest first."""
        return tuple(tier for tier in (self.ssd, self.hdd) if tier is not None)

    @property
    def lower_tiers(self) -> tuple[LowerTierConfig, ...]:
        """The tiers below memory, fastest first."""
        remote = tuple(tier for tier in (self.plugin, self.object) if tier is not None)
        return (*self.file_tiers, *remote)

    @property
    def read_timeout(self) -> float:
        """The longest read timeout of the lower tiers; 0 without one."""
        return max((tier.read_timeout for tier in self.lower_tiers), default=0.0)


def load(
    path: Path | str | None = None,
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """Returns the configuration from all sources. ConfigError names the invalid key.

    `overrides` is nested (`{"ssd": {"path": ...}}`), dotted (`{"ssd.path": ...}`) or both.
    """
    ours = {name: value for name, value in env.items() if not name.startswith(_NOT_SETTINGS)}
    return load_tree(Config, path, prefix=ENV_PREFIX, env=ours, overrides=overrides)


def names_outside_file(env: Mapping[str, str], overrides: Mapping[str, Any]) -> list[str]:
    """The dotted names of the settings that `env` and `overrides` set and a file cannot."""
    names = [
        name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        for name in env
        if name.startswith(ENV_PREFIX) and not name.startswith(_NOT_SETTINGS)
    ]
    return sorted({*names, *overrides})


def _check_size(path: str, value: int, least: int = PAGE_BYTES) -> None:
    if value >= _SIZE_LIMIT:
        raise ConfigError(path, f"{format_bytes(value)} is more than any machine has")
    if value < least:
        raise ConfigError(
            path,
            f"must be at least {format_bytes(least)}, got {format_bytes(value)}",
            hint='sizes are written with a unit, such as "64GiB"',
        )


def _check_range(path: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(path, f"must be between {least} and {most}, got {value}")


def _check_positive(path: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(path, f"must be more than zero, got {value}")


def _check_tenant(name: str, tenant: TenantConfig) -> None:
    if not name:
        raise ConfigError("tenants", "a tenant's name must not be empty")
    if tenant.secret_file is not None and tenant.secret_hex:
        raise ConfigError(f"tenants.{name}", "has both secret_file and secret_hex")
    try:
        bytes.fromhex(tenant.secret_hex)
    except ValueError:
        raise ConfigError(f"tenants.{name}.secret_hex", "is not hexadecimal") from None
