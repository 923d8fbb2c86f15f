"""The parts list: GPUs, servers and devices with their prices and speeds."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Final

from kvdepot.config.loader import Unit, load_tree
from kvdepot.errors import ConfigError


def check_numbers(value: object, *, may_be_zero: Collection[str], path: str = "") -> None:
    """ConfigError with the dotted name for a negative number, and for 0 unless it is allowed."""
    items: Mapping[str, object] = {}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    elif isinstance(value, dict):
        items = value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        zero_is_fine = path.rpartition(".")[2] in may_be_zero
        if value < 0 or (value == 0 and not zero_is_fine):
            least = "at least 0" if zero_is_fine else "more than 0"
            raise ConfigError(path, f"must be {least}, got {value}")
    for name, item in items.items():
        check_numbers(item, may_be_zero=may_be_zero, path=f"{path}.{name}" if path else name)


Bytes = Annotated[int, Unit.BYTES]
Seconds = Annotated[float, Unit.SECONDS]
_MAY_BE_ZERO: Final = {
    "counts",
    "electricity_per_kwh",
    "idle_power_w",
    "latency",
    "power_w",
    "price",
    "price_per_million_reads",
    "price_per_million_writes",
    "price_per_tb_month",
    "price_per_tb_read",
    "seek",
    "slot_price",
    "writes_per_day",
}


@dataclass(frozen=True, slots=True)
class GPU:
    memory: Bytes
    flops: float
    """Dense operations a second in the data type of prefill."""
    memory_bandwidth: Bytes
    link: Bytes
    """Bytes a second from the host into one GPU."""
    efficiency: float
    """The share of `flops` that prefill reaches."""
    power_w: float
    idle_power_w: float
    price: float
    source: str = ""

    def average_power_w(self, busy: float) -> float:
        return self.idle_power_w + (self.power_w - self.idle_power_w) * min(1.0, busy)


@dataclass(frozen=True, slots=True)
class Host:
    """A server without GPUs, memory for KV and drives."""

    price: float
    power_w: float
    network: Bytes
    """Bytes a second to devices outside the server."""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """One unit of a tier."""

    unit: Bytes
    """Capacity of one unit."""
    price: float
    read: Bytes
    """Bytes a second."""
    write: Bytes
    latency: Seconds
    power_w: float
    counts: tuple[int, ...]
    """Possible numbers of units of a node."""
    slot_price: float = 0.0
    """One unit's share of the price of its slot, such as an enclosure."""
    price_per_tb_month: float = 0.0
    price_per_million_reads: float = 0.0
    """A request moves at most `request` bytes."""
    price_per_million_writes: float = 0.0
    price_per_tb_read: float = 0.0
    """Bytes that leave the provider's network."""
    request: Bytes = 8 << 20
    """The most bytes of one request."""
    seek: Seconds = 0.0
    """Time before each contiguous read or write."""
    writes_per_day: float = 0.0
    """Full writes of the unit a day, for five years; 0: no limit."""
    remote: bool = False
    """Reached over the node's network."""
    source: str = ""

    def traffic_price(self, read_bytes: float, written_bytes: float) -> float:
        """The price of requests and traffic for these bytes."""
        requests = read_bytes * self.price_per_million_reads
        requests += written_bytes * self.price_per_million_writes
        return requests / self.request / 1e6 + read_bytes / 1e12 * self.price_per_tb_read


@dataclass(frozen=True, slots=True)
class Parts:
    currency: str
    years: float
    """Years over which prices are written off."""
    electricity_per_kwh: float
    pue: float
    """Watts at the meter for each watt in the rack."""
    node: Host
    gpus: dict[str, GPU]
    tiers: dict[str, Device]
    """The fastest first."""

    def gpu(self, name: str) -> GPU:
        """Raises ConfigError with the known names."""
        if name not in self.gpus:
            raise ConfigError("gpu", f"{name!r} is not in the parts list: {', '.join(self.gpus)}")
        return self.gpus[name]


def load_parts(path: Path | str | None = None) -> Parts:
    """The list in `path`, or the shipped one. ConfigError names the invalid value."""
    if path is not None:
        return _load(path)
    with resources.as_file(resources.files(__package__).joinpath("parts.toml")) as shipped:
        return _load(shipped)


def shipped_parts() -> str:
    return resources.files(__package__).joinpath("parts.toml").read_text("utf-8")


def _load(path: Path | str) -> Parts:
    parts = load_tree(Parts, path, prefix="", env={}, overrides={})
    check_numbers(parts, may_be_zero=_MAY_BE_ZERO)
    if not parts.gpus:
        raise ConfigError("gpus", "there is no GPU in the parts list")
    for name, gpu in parts.gpus.items():
        if gpu.efficiency > 1:
            raise ConfigError(f"gpus.{name}.efficiency", "is a share of flops: at most 1")
    for name, device in parts.tiers.items():
        if not device.counts or min(device.counts) < 0:
            raise ConfigError(f"tiers.{name}.counts", "must be numbers of units, 0 or more")
    return parts


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """A tier of one node."""

    name: str
    capacity_bytes: float
    read_bytes_per_s: float
    """All units together, limited by links and network."""
    write_bytes_per_s: float
    stream_bytes_per_s: float
    """The rate of a single request, limited by the links of its GPUs."""
    latency_s: float
    limited_by: str
    """The limit of the read rate: `units`, `network` or `GPU link`."""

    def fetch_s(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.stream_bytes_per_s

    def busy_s(self, nbytes: float) -> float:
        return nbytes / self.read_bytes_per_s


@dataclass(frozen=True, slots=True)
class DataPath:
    """The links between the tiers and the GPUs of a node."""

    contiguous_bytes: float
    """Contiguous bytes on a unit: a block."""
    links: float
    """Bytes a second into all GPUs of the node."""
    link: float
    """Bytes a second into the GPUs of one copy of the model."""
    network: float


def tier_speed(name: str, device: Device, units: int, path: DataPath) -> TierSpeed:
    """The speed of `units` of `device`, with blocks spread over all of them."""
    limits = {
        "units": units * _rate(device.read, device.seek, path.contiguous_bytes),
        "GPU link": path.links,
    }
    write = units * _rate(device.write, device.seek, path.contiguous_bytes)
    if device.remote:
        limits["network"] = path.network
        write = min(write, path.network)
    limited_by = min(limits, key=lambda limit: limits[limit])
    read = limits[limited_by]
    return TierSpeed(
        name=name,
        capacity_bytes=float(units * device.unit),
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        stream_bytes_per_s=min(read, path.link),
        latency_s=device.latency + device.seek,
        limited_by=limited_by,
    )


def _rate(bandwidth: float, seek_s: float, contiguous_bytes: float) -> float:
    """Bytes a second with a seek before each contiguous read."""
    return contiguous_bytes / (seek_s + contiguous_bytes / bandwidth)
