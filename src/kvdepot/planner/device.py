"""How fast a tier's units are together: striped, behind a link and perhaps a network. Pure."""

from dataclasses import dataclass

from kvdepot.planner.parts import Device


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """A tier of one node."""

    name: str
    capacity_bytes: float
    read_bytes_per_s: float
    """All units together, behind what they are reached through."""

    write_bytes_per_s: float
    stream_bytes_per_s: float
    """What one request sees when it is alone: no more than its GPUs' links take."""

    latency_s: float
    limited_by: str
    """What sets the read rate: `units`, `network` or `GPU link`."""

    def fetch_s(self, nbytes: float) -> float:
        """One request's KV, alone."""
        return self.latency_s + nbytes / self.stream_bytes_per_s

    def busy_s(self, nbytes: float) -> float:
        """How long the tier is busy with it."""
        return nbytes / self.read_bytes_per_s


@dataclass(frozen=True, slots=True)
class Path:
    """What stands between a node's tiers and its GPUs."""

    run_bytes: float
    """Bytes that lie together on a unit: a block."""

    links: float
    """Bytes a second into all GPUs of the node."""

    link: float
    """Bytes a second into the GPUs of one copy of the model."""

    network: float


def tier_speed(name: str, device: Device, units: int, path: Path) -> TierSpeed:
    """`units` of `device` with blocks spread over all of them."""
    limits = {
        "units": units * _rate(device.read, device.seek, path.run_bytes),
        "GPU link": path.links,
    }
    write = units * _rate(device.write, device.seek, path.run_bytes)
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


def _rate(bandwidth: float, seek_s: float, run_bytes: float) -> float:
    """Bytes a second when each run of bytes costs a seek first."""
    return run_bytes / (seek_s + run_bytes / bandwidth)
