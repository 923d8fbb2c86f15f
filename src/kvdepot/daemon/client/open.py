"""Opens the store of a daemon."""

import pwd
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from kvdepot.config.settings import load
from kvdepot.core.clock import SystemClock
from kvdepot.core.units import parse_duration
from kvdepot.daemon.client.connections import ROOT, Reconnector
from kvdepot.daemon.client.remote import RemoteStore
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

    The settings are the daemon's, except for three that may be given here: `tenants`, as in the
    configuration; `call_timeout` ("5s"), the time that an answer may take beyond the timeout of the
    call before the daemon counts as lost; `daemon_user`, the name or number of a further user whose
    daemon is trusted (this process's user and root always are). Raises DaemonError if no daemon
    answers, or one of another version or of an untrusted user.
    """
    path = address.removeprefix(SCHEME)
    if not path:
        raise ConfigError("config", f"{address!r} names no socket", hint="unix:/run/kvdepot.sock")
    if mode != "rw":
        raise ConfigError("mode", f"{mode!r}: a daemon's store is opened 'rw'")
    call_s = _seconds(settings.pop("call_timeout", _CALL_S))
    daemon_uid = user_id(settings.pop("daemon_user", ROOT))
    unknown = [name for name in settings if name != "tenants"]
    if unknown:
        raise ConfigError(unknown[0], "is set where the daemon is started: kvdepot serve --set …")
    del env  # it sets only what the daemon decides
    tenants = load(overrides=settings).tenants
    return RemoteStore(Reconnector(path, SystemClock(), call_s, daemon_uid), tenants)


def user_id(user: str | int) -> int:
    """The number of a user given by name or number; root if empty."""
    if isinstance(user, int) or user.isdigit():
        return int(user)
    if not user:
        return ROOT
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ConfigError("daemon_user", f"there is no user {user!r}") from None


def _seconds(value: Any) -> float:
    try:
        found = parse_duration(value)
    except (TypeError, ValueError) as error:
        raise ConfigError("call_timeout", str(error)) from error
    if not 0 < found < float("inf"):
        raise ConfigError("call_timeout", f"must be more than zero, got {value}")
    return found
