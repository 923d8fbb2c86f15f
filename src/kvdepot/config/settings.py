"""The whole configuration, as one tree of frozen dataclasses.

Sources, lowest to highest: the defaults here, a TOML file, an environment mapping (KVDEPOT_*, `__`
between levels), overrides. Unknown keys are errors, and so are sizes that cannot work. The caller
passes the environment in; nothing here reads it.
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
"""Where commands look for a daemon, and where `kvdepot serve` listens."""
DAEMON_USER_ENV: Final = "KVDEPOT_DAEMON_USER"
"""Whose daemon commands trust beside their own user's and root's."""
_NOT_SETTINGS: Final = (SOCKET_ENV, DAEMON_USER_ENV, "KVDEPOT_PLAN_", "KVDEPOT_PARTS_")
"""Variables, and beginnings of variables, that are read elsewhere."""

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
PAGE_BYTES: Final = 4 * KIB
SEGMENT_BYTES_MIN: Final = 64 * KIB
SEGMENTS_AUTOMATIC: Final = 16
SEGMENTS_AUTOMATIC_MAX: Final = 4096
"""Every segment is an open file, so large stores get larger segments."""
SEGMENTS_MIN: Final = 3
"""One that grows, one that is kept free, one that holds something."""
_SIZE_LIMIT: Final = 1 << 63
_NAME_MAX: Final = 100

Bytes = Annotated[int, Unit.BYTES]
Seconds = Annotated[float, Unit.SECONDS]


@dataclass(frozen=True, slots=True, kw_only=True)
class DramConfig:
    """The memory tier. `dram = "2GiB"` alone means its capacity."""

    SHORTHAND: ClassVar[str] = "capacity"

    capacity: Bytes = GIB
    """Memory for blocks."""

    huge_pages: Literal["auto", "always", "never"] = "auto"
    """Huge pages for that memory: used when the machine has them, insisted on, or left alone."""

    verify: bool = True
    """Check the checksum of every block read from memory."""

    eviction: Literal["default", "lru", "fifo", "lfu", "s3fifo", "value"] = "default"
    """Which block leaves first when there is no room; `kvdepot sim` compares them on a trace.
    `value` is the default order, with reuses weighed by the GPU time that they save."""

    shared: bool = False
    """Back the memory by a descriptor that other processes can map. As fast as private memory where
    the kernel makes huge pages of it: 6.1 or newer while it is prefaulted, or reserved ones."""

    lock: bool = False
    """Lock the memory so that it is never swapped out; needs a sufficient memlock limit."""

    prefault: bool = True
    """Touch all the memory when the store opens, so that no first use is slow."""

    def __post_init__(self) -> None:
        _check_size("dram.capacity", self.capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class CxlConfig:
    """Byte-addressable memory below the memory tier. `cxl = "256GiB"` alone means its capacity.

    Without `node` and `path` ordinary memory stands in, and is said to do so.
    """

    SHORTHAND: ClassVar[str] = "capacity"

    capacity: Bytes
    """Memory for blocks that will be wanted later than those in `dram`."""

    node: int | None = None
    """The NUMA node whose memory it is."""

    path: Path | None = None
    """The device it is mapped from, such as /dev/dax0.0, or a file of at least its capacity."""

    lock: bool = False
    """Lock the memory so that it is never swapped out; needs a sufficient memlock limit."""

    prefault: bool = True
    """Touch all the memory when the store opens, so that no first use is slow."""

    def __post_init__(self) -> None:
        _check_size("cxl.capacity", self.capacity)
        if self.node is not None and self.path is not None:
            raise ConfigError("cxl.path", "is given beside cxl.node", hint="give one of the two")
        if self.node is not None and self.node < 0:
            raise ConfigError("cxl.node", f"must not be negative, got {self.node}")

    @property
    def source(self) -> str:
        """Where the memory comes from, for people."""
        if self.node is not None:
            return f"NUMA node {self.node}"
        return "ordinary memory" if self.path is None else str(self.path)

    @property
    def emulated(self) -> bool:
        return self.node is None and self.path is None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTierConfig:
    """A tier of append-only segments in one or many directories or block devices."""

    TIER: ClassVar[str] = ""
    SEGMENT_BYTES_AUTOMATIC: ClassVar[int] = 256 * MIB

    path: tuple[Path, ...]
    """Where the segments live: a directory or block device, or a list of them used together."""

    capacity: Bytes
    """Space for segments, over all paths together."""

    segment: Bytes = 0
    """Size of a segment. 0 means automatic: 256MiB (on hard drives 1GiB), but at least 16 and at
    most 4096 of them."""

    direct_io: Literal["auto", "always", "never"] = "auto"
    """Bypass the page cache: where the filesystem can, always or fail, or never."""

    io_depth: int = 32
    """Reads and writes under way at once, for each path."""

    fsync: Literal["never", "flush", "always"] = "flush"
    """When written data is forced to the device: never, on flush() and close(), or every batch.
    What each promises after a power cut is in docs/tiers.md."""

    promote: bool = True
    """Copy a block that was read from here into memory."""

    write_mode: Literal[
        "write-back", "write-through", "write-through-selective", "pass-through"
    ] = "write-back"
    """When blocks come here: as the tier above makes room (or, below memory, soon), at once, when
    they are asked for a second time or are likely to be, or at once past the file tiers above."""

    eviction: Literal["default", "lru", "fifo", "lfu", "s3fifo"] = "default"
    """Which segment makes room first, and what of it is written again."""

    read_timeout: Seconds = 2.0
    """A read that takes longer is a miss."""

    write_timeout: Seconds = 10.0
    """A write that takes longer marks the path as failing."""

    retry_initial: Seconds = 0.1
    """Wait before a failing path is tried again, the first time; doubles with each failure."""

    retry_max: Seconds = 30.0
    """The longest wait before a failing path is tried again."""

    profile: Literal["auto", "always", "never"] = "auto"
    """Measure how fast each path is: once, if it has 1GiB or more, at every opening, or never."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(self._name("path"), "needs at least one path")
        if len(self.path) > VOLUMES_MAX:
            reason = f"{len(self.path)} paths are too many: there may be {VOLUMES_MAX}"
            raise ConfigError(self._name("path"), reason, hint="join drives in a RAID or a volume")
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
        """Bytes of the capacity that fall to each path."""
        return self.capacity // len(self.path)

    @property
    def daily_bytes(self) -> int:
        """What may be written to each path in a day; 0: no limit."""
        return 0

    @property
    def contiguous_bytes(self) -> int:
        """How much of a prompt should lie in one piece on a path; 0: seeks cost nothing."""
        return 0

    @property
    def segment_bytes(self) -> int:
        """The size of a segment in force."""
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
    """The disk tier: flash, where every place is equally near."""

    TIER: ClassVar[str] = "ssd"

    writes_per_day: float = 0.0
    """How often each path may be written in full in a day, of its share of `capacity`; 0 is no
    limit. A drive rated for one write a day of which the store uses half has 2. Blocks that are
    least likely to be read again then go to hard drives, or stay in memory."""

    def __post_init__(self) -> None:
        super(SsdConfig, self).__post_init__()
        if not 0 <= self.writes_per_day < float("inf"):
            raise ConfigError("ssd.writes_per_day", "must be 0 or more")

    @property
    def daily_bytes(self) -> int:
        """What may be written to each path in a day; 0: no limit."""
        return int(self.path_capacity * self.writes_per_day)


@dataclass(frozen=True, slots=True, kw_only=True)
class HddConfig(FileTierConfig):
    """The hard-drive tier: large, and fast only along a path that lies in one piece."""

    TIER: ClassVar[str] = "hdd"
    SEGMENT_BYTES_AUTOMATIC: ClassVar[int] = GIB

    read_timeout: Seconds = 30.0
    """A read that takes longer is a miss."""

    write_timeout: Seconds = 60.0
    """A write that takes longer marks the path as failing."""

    run: Bytes = 32 * MIB
    """How much of one prompt lies on one drive before the next drive goes on with it."""

    def __post_init__(self) -> None:
        super(HddConfig, self).__post_init__()
        _check_size("hdd.run", self.run)

    @property
    def contiguous_bytes(self) -> int:
        """How much of a prompt should lie in one piece on a path."""
        return self.run


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """A tier of another package, below all others."""

    TIER: ClassVar[str] = "plugin"

    name: str
    """Which tier: the name of an entry point in the group kvdepot.volumes, or module:factory."""

    capacity: Bytes
    """Space for blocks."""

    path: Path | None = None
    """Where the blocks live, if the tier has use for a path."""

    options: dict[str, str] = field(default_factory=dict)
    """Settings of the tier's own."""

    promote: bool = True
    """Copy a block that was read from here into memory."""

    write_mode: Literal[
        "write-back", "write-through", "write-through-selective", "pass-through"
    ] = "write-back"
    """When blocks come here, as for ssd and hdd."""

    eviction: Literal["default", "lru", "fifo", "lfu", "s3fifo"] = "default"
    """Which segment makes room first, and what of it is written again."""

    read_timeout: Seconds = 30.0
    """A read that takes longer is a miss."""

    write_timeout: Seconds = 60.0
    """The longest that draining waits for writes under way."""

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
    """A bucket, or a folder that several machines mount, which several stores share."""

    TIER: ClassVar[str] = "object"

    url: str
    """`s3://bucket/prefix`, or `file:///folder` for a mounted filesystem."""

    capacity: Bytes
    """Space below the prefix, for all stores that share it."""

    endpoint: str = ""
    """Address of the server, such as http://minio:9000; left out, Amazon's."""

    region: str = ""
    """Region of the bucket; left out, what the environment says."""

    profile: str = ""
    """Take the credentials of this profile instead of the environment's."""

    credentials_file: Path | None = None
    """Where profiles are; left out, ~/.aws/credentials."""

    max_age: Seconds = 7 * 86400.0
    """Objects older than this are deleted; 0 for no limit."""

    object_size: Bytes = 64 * MIB
    """How much one object holds at most; a block that is larger has one of its own."""

    parallel: int = 8
    """Requests under way at once, to read and to write."""

    measure: bool = True
    """Measure latency and bandwidth when the store is opened, with a probe object of 1 MiB; not in
    a folder, where the probe would come out of the page cache."""

    refresh: Annotated[float | None, Unit.SECONDS] = None
    """How often to look what other stores have written; left out, 2s, and 500ms in a folder."""

    grace: Seconds = 60.0
    """A store that gives no sign of life for so long is dead; what is deleted stays readable for so
    long. The same for all stores of a bucket."""

    promote: bool = True
    """Copy a block that was read from here into memory."""

    write_mode: Literal[
        "write-back", "write-through", "write-through-selective", "pass-through"
    ] = "write-through"
    """When blocks come here, as for ssd and hdd; a put never waits for it."""

    eviction: Literal["default", "lru", "fifo", "lfu", "s3fifo"] = "default"
    """Which object makes room first, and what of it is written again."""

    read_timeout: Seconds = 10.0
    """A read that takes longer is a miss."""

    write_timeout: Seconds = 60.0
    """A write that takes longer has failed."""

    retry_initial: Seconds = 0.5
    """Wait before a failing server is tried again, the first time; doubles with each failure."""

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
        """A look costs money in a bucket, and none in a folder."""
        if self.refresh is not None:
            return self.refresh
        return _FOLDER_REFRESH_S if self.is_folder else _BUCKET_REFRESH_S

    def _check_url(self) -> None:
        scheme, _, rest = self.url.partition("://")
        if scheme not in ("s3", "file") or not rest.strip("/"):
            raise ConfigError(
                "object.url",
                "is not the address of a bucket or of a folder",
                hint="s3://bucket/prefix, or file:///folder",
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
        """How much one object holds at most: in a small tier less than is asked for."""
        return max(
            PAGE_BYTES, min(self.object_size, self.capacity // 16 // PAGE_BYTES * PAGE_BYTES)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsConfig:
    """A NATS server through which the stores of a site tell each other what they do."""

    servers: tuple[str, ...]
    """Addresses such as nats://broker:4222, or tls://…; one that answers is enough."""

    site: str = "default"
    """Stores with the same name here hear each other; they share a bucket or a folder."""

    node: str = ""
    """What this store is called in hints; left out, the machine's name."""

    credentials_file: Path | None = None
    """A user's .creds file."""

    token_file: Path | None = None
    """File whose content, less a line end, is the server's token."""

    tls_ca: Path | None = None
    """Certificates that the server's is checked against; left out, the system's."""

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
                    "nats.servers", "is not the address of a server", hint="nats://broker:4222"
                )
        plain = self.site.replace("-", "").replace("_", "")
        if not (plain.isascii() and plain.isalnum() and len(self.site) <= _NAME_MAX):
            raise ConfigError("nats.site", "must be letters, digits, - and _", hint="paris-1")
        if len(self.node) > _NAME_MAX or not self.node.isprintable():
            raise ConfigError("nats.node", f"must be at most {_NAME_MAX} printable characters")
        if self.credentials_file is not None and self.token_file is not None:
            raise ConfigError("nats.token_file", "is given beside nats.credentials_file")

    def token(self) -> str:
        """The server's token, empty when none is set. Reads the file; else ConfigError."""
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
    """How blocks get from memory to disk in the background."""

    dirty_limit: float = 0.5
    """Share of the memory tier that may wait to be written; beyond it puts are throttled. Puts that
    wait for nothing (timeout 0, vLLM's) are taken, and written later unless evicted before."""

    staging: Bytes = 64 * MIB
    """Memory besides the memory tier, for reads from disk and for reclaiming segments."""

    prefault: bool = False
    """Touch `staging` at opening also where `dram.prefault` is off: else the first reads do."""

    put_timeout: Seconds = 0.25
    """The longest a put waits for room before it is throttled; 0 never waits."""

    batch: Bytes = 32 * MIB
    """Bytes handed to the disk in one go."""

    def __post_init__(self) -> None:
        if not 0 < self.dirty_limit <= 1:
            raise ConfigError("writeback.dirty_limit", f"must be in 0 to 1, got {self.dirty_limit}")
        _check_size("writeback.staging", self.staging)
        _check_size("writeback.batch", self.batch)
        if not self.put_timeout >= 0:
            raise ConfigError("writeback.put_timeout", "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsConfig:
    """KV events for routers. `events = "tcp://127.0.0.1:5557"` alone means its endpoint."""

    SHORTHAND: ClassVar[str] = "endpoint"

    endpoint: str
    """Where routers subscribe, by ZMQ: tcp://HOST:PORT or ipc://PATH."""

    replay: str = ""
    """Where they ask for batches that they have missed; empty: they cannot."""

    topic: str = "kv@kvdepot@{model}"
    """The topic of each batch; `{model}` is the model's name."""

    buffer: Bytes = 64 * MIB
    """Batches kept for `replay`. A router that has missed more makes everything be told again."""

    interval: Seconds = 0.1
    """How often changes are looked for."""

    resync_interval: Seconds = 5.0
    """All that is here is told again, for routers that are new or have lost track, this often at
    most. When nothing happens for so long an empty batch is sent: its number shows what was lost.
    """

    memory_medium: str = "CPU"
    """What routers call memory."""

    storage_medium: str = "STORAGE"
    """What routers call the tiers below memory."""

    tenants: tuple[str, ...] = ("",)
    """Whose blocks are told of; the empty name is that of blocks without a tenant."""

    allow_remote: bool = False
    """Let other machines subscribe: token ids, which are as private as prompts, travel in clear."""

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
                path, f"{address!r} is no address", hint="as tcp://127.0.0.1:5557, or ipc:///PATH"
            )
        if host is not None and not self.allow_remote and not _is_loopback(host[1]):
            raise ConfigError(
                path,
                f"{host[1]} can be reached from other machines, and token ids are private",
                hint="listen on 127.0.0.1, or set events.allow_remote = true",
            )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsConfig:
    """What is remembered of sessions, and what contracts of retention may take."""

    ttl: Seconds = 30 * 86400.0
    """A session that is not heard of for so long is forgotten, unless it is under contract."""

    keep_max: Seconds = 366 * 86400.0
    """The longest that a contract may last."""

    pinned_share: float = 0.25
    """Of each tier of drives that the contracts of one tenant may take; those of all take half."""

    def __post_init__(self) -> None:
        _check_positive("sessions.ttl", self.ttl)
        _check_positive("sessions.keep_max", self.keep_max)
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
"""By dtype: how far a part of a block, computed again, may be from what is kept, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Which hits an engine computes again, and how exactly they must agree (docs/audit.md)."""

    share: float = 0.0
    """Of the hits of each namespace: the first one, then one in 1/share; 0: none. 0.02 finds what
    is wrong within 50 hits."""

    under_load: bool = False
    """Also while the engine has other requests."""

    tolerance: dict[str, float] = field(default_factory=dict)
    """By dtype, in the place of what is built in: float32 0.01, float16 0.05, bfloat16 0.1,
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
    """The speed and the price that the ledger multiplies tokens by."""

    prefill_tokens_per_s: float | None = None
    """What the GPUs compute without kvdepot, for engines that do not report it."""

    gpu_watts: float | None = None
    """Of these GPUs while they compute, for the joules saved."""

    gpu_price_per_hour: float = 0.89
    """The price of an hour of all GPUs of one copy of the model. The default is that of one H100
    without its server, in US dollars, over four years and with electricity."""

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "gpu_watts"):
            if getattr(self, name) is not None:
                _check_positive(f"ledger.{name}", getattr(self, name))
        if not 0 <= self.gpu_price_per_hour < 1e12:
            raise ConfigError("ledger.gpu_price_per_hour", "must be a price, at least 0")

    def assumed(self) -> dict[str, float]:
        """What savings are computed with, as far as it is set."""
        names = ("prefill_tokens_per_s", "gpu_watts")
        found = {name: getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """One tenant. Without a secret it is kept apart from others by its name only."""

    secret_file: Path | None = None
    """File whose content, less a line end, is the secret that seeds the tenant's keys."""

    secret_hex: Annotated[str, Secret.HIDDEN] = field(default="", repr=False)
    """The secret itself, in hexadecimal; for tests and for secrets injected by environment."""

    def secret(self) -> bytes:
        """The tenant's secret, empty when none is set. Reads the file; else ConfigError."""
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
    """Everything that can be set."""

    block_tokens: int = 256
    """Tokens in one block; a multiple of the engine's page."""

    dram: DramConfig = field(default_factory=DramConfig)
    """The memory tier."""

    cxl: CxlConfig | None = None
    """The tier of slower memory, below the memory tier."""

    ssd: SsdConfig | None = None
    """The disk tier; without it and `hdd` the store lives in memory only."""

    hdd: HddConfig | None = None
    """The hard-drive tier, below the disk tier."""

    plugin: PluginConfig | None = None
    """A tier of another package, below those of drives."""

    object: ObjectConfig | None = None
    """A bucket or a shared folder, below all others; shared with other stores."""

    nats: NatsConfig | None = None
    """The server through which stores of a site tell each other what they do."""

    writeback: WritebackConfig = field(default_factory=WritebackConfig)
    """How blocks get from memory to disk."""

    events: EventsConfig | None = None
    """Tell routers what is here (docs/routers.md)."""

    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    """How long sessions are remembered, and what contracts of retention may take."""

    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    """What savings are computed with (docs/ledger.md)."""

    tenants: dict[str, TenantConfig] = field(default_factory=dict)
    """Tenants that have a secret, by name."""

    def __post_init__(self) -> None:
        _check_range("block_tokens", self.block_tokens, 1, 1 << 20)
        for name, tenant in self.tenants.items():
            _check_tenant(name, tenant)
        paths = [path for tier in self.file_tiers for path in tier.path]
        if len(set(paths)) != len(paths):
            raise ConfigError("hdd.path", "names a path that ssd.path has too")

    @property
    def file_tiers(self) -> tuple[FileTierConfig, ...]:
        """The file tiers there are, fastest first."""
        return tuple(tier for tier in (self.ssd, self.hdd) if tier is not None)

    @property
    def lower_tiers(self) -> tuple[LowerTierConfig, ...]:
        """The tiers below memory, fastest first."""
        remote = tuple(tier for tier in (self.plugin, self.object) if tier is not None)
        return (*self.file_tiers, *remote)

    @property
    def read_timeout(self) -> float:
        """How long a read may take: as long as the slowest tier may."""
        return max((tier.read_timeout for tier in self.lower_tiers), default=0.0)


def load(
    path: Path | str | None = None,
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """The configuration from all sources. Raises ConfigError that names the offending key.

    `overrides` is nested (`{"ssd": {"path": ...}}`), dotted (`{"ssd.path": ...}`) or both.
    """
    ours = {name: value for name, value in env.items() if not name.startswith(_NOT_SETTINGS)}
    return load_tree(Config, path, prefix=ENV_PREFIX, env=ours, overrides=overrides)


def names_outside_file(env: Mapping[str, str], overrides: Mapping[str, Any]) -> list[str]:
    """The settings, as dotted names, that `env` and `overrides` take out of a file's hands."""
    found = [
        name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        for name in env
        if name.startswith(ENV_PREFIX) and not name.startswith(_NOT_SETTINGS)
    ]
    return sorted({*found, *overrides})


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
