"""All exceptions of the package, as one tree.

KVDepotError
  ConfigError            the caller's configuration is wrong; nothing was started
  DriveError             a ConfigError: a drive cannot be used as it is; others may be
  FormatError            a store on disk cannot be used: newer format, or not a store
  UnsafePathError        a file or folder that other users own, or may change
  StoreBusyError         another process has the store open for writing
  DaemonError            no daemon can be used, or started, on a socket
  WireError              what came over a daemon's socket makes no sense
  StoreClosedError       the store was used after close()
  BadBufferError         a buffer has the wrong size, is read-only or not contiguous
  KeyFormatError         a key is not one of ours, or its namespace is not registered here
  ExtraMissingError      an optional package is not installed; the hint names the extra
  ModelError             a model, or a call of it, cannot be served; it was left as it was
  TraceError             a line of a trace file makes no sense; says which
  LeaseError             programmer error: use after release, double release
  StateError             an illegal transition of a block; always a bug in kvdepot

Expected outcomes (miss, refused, throttled) are values, never exceptions.
"""


class KVDepotError(Exception):
    """Base of every error this package raises on purpose. `hint` says what to do about it."""

    hint: str = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        if hint:
            self.hint = hint


class ConfigError(KVDepotError, ValueError):
    """The configuration is invalid. `path` names the offending key."""

    def __init__(self, path: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {reason}", hint=hint)
        self.path = path


class DriveError(ConfigError):
    """A drive cannot be used: gone, read-only, or something else lies in its place."""


class FormatError(KVDepotError):
    """What lies at `path` is not a store this version can use."""

    def __init__(self, path: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {reason}", hint=hint)
        self.path = path


class UnsafePathError(KVDepotError):
    """What lies at `path` is, or could be, under the control of another user."""

    def __init__(self, path: object, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {reason}", hint=hint)
        self.path = str(path)


class StoreBusyError(KVDepotError):
    """Another process has `path` open for writing."""

    def __init__(self, path: str, holder: str) -> None:
        super().__init__(
            f"{path} is open for writing by {holder}",
            hint="stop that process, choose another path, or open read-only with mode='r'",
        )
        self.path = path


class DaemonError(KVDepotError):
    """No daemon can be used, or started, on the socket at `path`."""

    def __init__(self, path: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {reason}", hint=hint)
        self.path = path


class WireError(KVDepotError):
    """What came over a daemon's socket makes no sense. The connection is given up."""


class StoreClosedError(KVDepotError):
    """The store was used after close()."""


class BadBufferError(KVDepotError, ValueError):
    """A caller's buffer has the wrong size, is read-only or is not contiguous."""


class KeyFormatError(KVDepotError, ValueError):
    """A key is malformed, or its namespace is not registered with this store."""


class LeaseError(KVDepotError, RuntimeError):
    """A lease was used after release."""


class StateError(KVDepotError, RuntimeError):
    """A block made an illegal transition. Always a bug in kvdepot."""


class TraceError(KVDepotError, ValueError):
    """A trace at `path` cannot be used; `line` is where, or 0 for all of it."""

    def __init__(self, path: str, line: int, reason: str, *, hint: str = "") -> None:
        where = f"{path}, line {line}" if line else path
        super().__init__(f"{where}: {reason}", hint=hint or ("--bad-lines skip" if line else ""))
        self.path = path
        self.line = line


class ExtraMissingError(KVDepotError, ImportError):
    """A feature needs packages that are not installed. `extra` is what brings them."""

    def __init__(self, extra: str, missing: str) -> None:
        super().__init__(f"{missing} is not installed", hint=f"pip install 'kvdepot[{extra}]'")
        self.extra = extra


class ModelError(KVDepotError, ValueError):
    """A model, or one call of it, cannot be served from a depot. Nothing was changed."""
