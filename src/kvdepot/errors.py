"""All exceptions of the package, as one tree.

KVDepotError
  ConfigError            the caller's configuration is wrong; nothing was started
  DriveError             a ConfigError: a drive cannot be used; the store may go on without it
  FormatError            the data at a path is not a store, or of another format
  UnsafePathError        another user owns or may change a file or folder
  StoreBusyError         another process has the store open for writing
  DaemonError            a daemon cannot be reached, or started, on a socket
  WireError              a malformed frame was received on a daemon's socket
  StoreClosedError       the store was used after close()
  BadBufferError         a buffer has the wrong size, is read-only or not contiguous
  KeyFormatError         a key is not one of ours, or its namespace is not registered here
  ExtraMissingError      an optional package is not installed; the hint names the extra
  ModelError             a model, or a call of it, is not supported; it was not changed
  TraceError             a trace file is malformed; names the line
  LeaseError             programmer error: use after release, double release
  StateError             illegal state transition of a block; always a bug in kvdepot

Expected outcomes (miss, refused, throttled) are return values, never exceptions.
"""


class KVDepotError(Exception):
    """Base class of the errors of this package. `hint` is an action that may help, or empty."""

    hint: str = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        if hint:
            self.hint = hint


class ConfigError(KVDepotError, ValueError):
    """The configuration or an argument is invalid. `path` names it."""

    def __init__(self, path: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {reason}", hint=hint)
        self.path = path


class DriveError(ConfigError):
    """A drive cannot be used: it is missing, read-only, or not a drive of a store."""


class FormatError(KVDepotError):
    """The data at `path` is not a store, or of a format that this version does not read."""

    def __init__(self, path: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {reason}", hint=hint)
        self.path = path


class UnsafePathError(KVDepotError):
    """The file or folder at `path` belongs to another user, or can be changed by one."""

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
    """A daemon cannot be reached, or started, on the socket at `path`."""

    def __init__(self, path: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {reason}", hint=hint)
        self.path = path
        self.reason = reason


class WireError(KVDepotError):
    """A malformed frame was received on a daemon's socket. The connection is closed."""


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
    """The trace at `path` is malformed at `line`, or as a whole if that is 0."""

    def __init__(self, path: str, line: int, reason: str, *, hint: str = "") -> None:
        where = f"{path}, line {line}" if line else path
        super().__init__(f"{where}: {reason}", hint=hint or ("--bad-lines skip" if line else ""))
        self.path = path
        self.line = line


class ExtraMissingError(KVDepotError, ImportError):
    """A feature needs packages that are not installed. `extra` names the extra with them."""

    def __init__(self, extra: str, missing: str) -> None:
        super().__init__(f"{missing} is not installed", hint=f"pip install 'kvdepot[{extra}]'")
        self.extra = extra


class ModelError(KVDepotError, ValueError):
    """A model, or one call of it, cannot be used with a depot. Nothing was changed."""
