"""Opening the store of a daemon."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from kvdepot.client.connections import Reconnector
from kvdepot.client.remote import RemoteStore
from kvdepot.core.clock import SystemClock
from kvdepot.core.config import load
from kvdepot.core.units import parse_duration
from kvdepot.errors import ConfigError

SCHEME: Final = "unix:"
_CALL_S: Final = 5.0


def open_remote(
    address: str,
    *,
    mode: str = "rw",
    env: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> RemoteStore:
    """Attach to the daemon at `unix:/path/of/socket`.

    Its settings are the daemon's, but for two that may be given here: `tenants`, as in the
    configuration, and `call_timeout` ("5s"), how much longer than asked for an answer may take
    before the daemon counts as gone. Raises DaemonError when no daemon answers, or one of another
    version.
    """
    path = address.removeprefix(SCHEME)
    if not path:
        raise ConfigError("config", f"{address!r} names no socket", hint="unix:/run/kvdepot.sock")
    if mode != "rw":
        raise ConfigError("mode", f"{mode!r}: a daemon's store is opened 'rw'")
    call_s = _seconds(settings.pop("call_timeout", _CALL_S))
    unknown = [name for name in settings if name != "tenants"]
    if unknown:
        raise ConfigError(unknown[0], "is set where the daemon is started: kvdepot serve --set …")
    del env  # what it could set is the daemon's
    tenants = load(overrides=settings).tenants
    return RemoteStore(Reconnector(path, SystemClock(), call_s), tenants)


def _seconds(value: Any) -> float:
    try:
        found = parse_duration(value)
    except (TypeError, ValueError) as error:
        raise ConfigError("call_timeout", str(error)) from error
    if not 0 < found < float("inf"):
        raise ConfigError("call_timeout", f"must be more than zero, got {value}")
    return found
