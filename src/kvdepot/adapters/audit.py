"""The audit of hits: which of them an engine computes again, and whether it gets what is kept.

A checksum proves bytes, not their meaning: layouts, kernels and weights change under the same
names. An adapter asks `HitChooser` at each hit. A chosen one is served one block short, as if the
depot did not have that block: the engine computes it, and when it comes to be saved `BlockAuditor`
compares it with what the depot has. No answer depends on the outcome; an audit costs the
computation of a block. A block that does not agree puts its namespace into quarantine.

Floating-point numbers never agree exactly: other batches, kernels and chunks of a prompt sum in
another order, and a token may even take another expert. So a layer is compared in parts of 64
numbers, and disagrees if more than a quarter of them is further off than the dtype's tolerance.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.config.settings import AUDIT_TOLERANCE, AuditConfig
from kvdepot.core.audit import AuditFinding
from kvdepot.core.block import KEY_BYTES, TAG_BYTES, BlockKey
from kvdepot.core.depot import Depot, Reservation
from kvdepot.core.keys import without_link
from kvdepot.core.layout import DTYPE_BYTES, KVLayout
from kvdepot.errors import KVDepotError

_PART: Final = 64
"""Numbers that are compared as one."""
_QUANTILE: Final = 0.75
"""Parts that have to agree, of each layer."""
_WAITING_MAX: Final = 64
"""Blocks that were chosen, and that the engine has not computed yet."""
Floats = npt.NDArray[np.float32]
Decode = Callable[[Any], Floats]
"""From a block's bytes to numbers, layer after layer, each with as many."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two versions of a block, by their worst layer."""

    error: float
    layer: int


def compare(kept: Any, computed: Any, layout: KVLayout, decode: Decode | None = None) -> Comparison:
    """How far apart two payloads are. ValueError where numbers of the dtype cannot be read."""
    read = decode or _decoder(layout)
    one, two = (_parts(read(each), layout.layers) for each in (kept, computed))
    with np.errstate(all="ignore"):
        distance = np.linalg.norm(one - two, axis=2)
        # Where one is zero and the other is not, they are as far apart as can be: 2.
        size = (np.linalg.norm(one, axis=2) + np.linalg.norm(two, axis=2)) / 2
        errors = np.divide(distance, size, out=np.zeros_like(size), where=size != 0)
    # What is not a number, in one of them or in both, agrees with nothing.
    errors = np.where(np.isfinite(errors), errors, 2.0)
    worst = np.quantile(errors, _QUANTILE, axis=1)
    layer = int(worst.argmax())
    return Comparison(float(worst[layer]), layer)


def _parts(numbers: Floats, layers: int) -> Floats:
    """By layer and part; the last part of a layer is filled up with zeros."""
    rows = numbers.reshape(layers, -1)
    rest = -rows.shape[1] % _PART
    return np.pad(rows, ((0, 0), (0, rest))).reshape(layers, -1, _PART)


def _decoder(layout: KVLayout) -> Decode:
    dtype = layout.dtype
    if dtype not in AUDIT_TOLERANCE or layout.layer_bytes % DTYPE_BYTES[dtype]:
        raise ValueError(f"numbers of type {dtype} cannot be compared")
    return _DECODERS[dtype]


def _of(dtype: Any) -> Decode:
    return lambda raw: np.frombuffer(raw, dtype).astype(np.float32)


def _bfloat16(raw: Any) -> Floats:
    return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _fp8(exponent_bits: int, mantissa_bits: int, bias: int) -> Decode:
    """By a table of all 256 values. The largest exponent of e5m2 is no number, of e4m3 the last
    value alone.
    """
    codes = np.arange(256)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = (codes & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    scale = 2.0 ** (np.maximum(exponent, 1) - bias)
    table = np.where(exponent > 0, 1 + mantissa, mantissa) * scale
    table[(codes & 0x7F) >= (0x7F if mantissa_bits == 3 else 0x7C)] = np.nan
    signed = (table * np.where(codes & 0x80, -1.0, 1.0)).astype(np.float32)
    return lambda raw: signed[np.frombuffer(raw, np.uint8)]


_DECODERS: Final[dict[str, Decode]] = {
    "float32": _of(np.float32),
    "float16": _of(np.float16),
    "bfloat16": _bfloat16,
    "fp8_e4m3": _fp8(4, 3, 7),
    "fp8_e5m2": _fp8(5, 2, 15),
    "int8": _of(np.int8),
}


class HitChooser:
    """Chooses the hits to be audited: the first of each namespace, then one in `1 / share`.

    One that comes due while the engine is busy waits for an idle moment. Thread-safe.
    """

    def __init__(self, config: AuditConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._due: dict[bytes, float] = {}
        """By the tag of the namespace; 1 and more: the next hit."""

    def choose(self, key: BlockKey, *, busy: bool) -> bool:
        """Whether this hit is to be audited. `key`: any of its blocks'."""
        if not self._config.share:
            return False
        tag = key[:TAG_BYTES]
        with self._lock:
            due = self._due.get(tag, 1.0 - self._config.share) + self._config.share
            chosen = due >= 1.0 - 1e-9 and (not busy or self._config.under_load)
            self._due[tag] = due - 1.0 if chosen else min(due, 1.0)
        return chosen


class BlockAuditor:
    """Compares blocks that were computed again with those that the depot has. Thread-safe."""

    def __init__(
        self, depot: Depot, config: AuditConfig, producer: str, log: logging.Logger
    ) -> None:
        """`producer`: engine and version, adapter, kernels, dtype, weights, as far as known. `log`:
        one that the engine prints.
        """
        self._log = log
        self._depot = depot
        self._config = config
        self._producer = producer
        self._lock = threading.Lock()
        self._waiting: dict[BlockKey, None] = {}

    def expect(self, keys: list[BlockKey]) -> None:
        """Hits without these blocks: they come to be saved, or their request ends before."""
        with self._lock:
            for key in keys:
                self._waiting.pop(key, None)
                self._waiting[key] = None
            while len(self._waiting) > _WAITING_MAX:
                del self._waiting[next(iter(self._waiting))]

    def expected(self, key: BlockKey) -> bool:
        """Whether a block that was computed is to be compared; asked once."""
        if not self._waiting:
            return False
        with self._lock:
            return self._waiting.pop(key, self) is None

    def is_waiting(self, key: BlockKey) -> bool:
        """`expected`, to be asked again."""
        return key in self._waiting

    def scratch(self, key: BlockKey) -> Reservation:
        """Memory of the depot for a block that is computed again, where an engine's device can
        write to it; given back by `close`. Its slot has no view where there is no room.
        """
        digest = hashlib.blake2b(key, digest_size=KEY_BYTES - TAG_BYTES, person=b"kvdepot-audit")
        stand_in = without_link(BlockKey(key[:TAG_BYTES] + digest.digest()))
        return self._depot.reserve([stand_in], timeout_s=0.0)

    def check(
        self, key: BlockKey, computed: Any, layout: KVLayout, decode: Decode | None = None
    ) -> bool | None:
        """Compare a block, and tell the depot. None: it was not possible. Never raises."""
        kept = np.empty(layout.block_bytes, np.uint8)
        try:
            if not self._depot.get(key, kept):
                return None
            found = compare(kept, computed, layout, decode)
            tolerance = self._config.tolerance.get(layout.dtype)
            tolerance = tolerance or AUDIT_TOLERANCE.get(layout.dtype, 0.25)
            matches = found.error <= tolerance
            told = (matches, found.error, tolerance, found.layer, self._producer)
            if not matches:
                self._log.error(
                    "kvdepot: AUDIT FAILED: layer %d of a block in namespace %s is off by %.3g "
                    "(tolerance %.3g) from what is computed now; the namespace goes into "
                    "quarantine, and its prompts are computed. See kvdepot audit list",
                    found.layer,
                    key[:TAG_BYTES].hex(),
                    found.error,
                    tolerance,
                )
            self._depot.audits.report(AuditFinding(key, *told))
        except (KVDepotError, ValueError) as error:
            self._log.warning("kvdepot: a block could not be audited: %s", error)
            return None
        return matches


class AuditedHits:
    """Both, for an adapter that knows a hit by the keys of its blocks."""

    def __init__(
        self, depot: Depot, config: AuditConfig, producer: str, log: logging.Logger
    ) -> None:
        self._chooser = HitChooser(config)
        self.auditor = BlockAuditor(depot, config, producer, log)

    def served(self, keys: Sequence[BlockKey], *, busy: bool) -> int:
        """How many of a hit's blocks to serve: all, or all but the last, which is computed."""
        if not keys or not self._chooser.choose(keys[-1], busy=busy):
            return len(keys)
        self.auditor.expect([keys[-1]])
        return len(keys) - 1
