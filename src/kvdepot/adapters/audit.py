"""The audit of hits: an engine computes a few of them again and compares the blocks.

A checksum proves bytes, not their meaning: layouts, kernels and weights change under the same
names. An adapter asks `HitChooser` at each hit. A chosen hit is served one block short, so the
engine computes that block, and `BlockAuditor` compares the result with the depot's block. No answer
depends on the outcome; an audit costs the computation of one block. A block that differs puts its
namespace into quarantine.

Floating-point results never agree exactly: other batches, kernels and chunks of a prompt sum in
another order, and a token may even take another expert. So a layer is compared in groups of 64
numbers. It differs if more than a quarter of them are further apart than the dtype's tolerance.
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
from kvdepot.core.depot import Reservation
from kvdepot.core.keys import without_link
from kvdepot.core.layout import DTYPE_BYTES, KVLayout
from kvdepot.depot import Depot
from kvdepot.errors import KVDepotError

_GROUP: Final = 64
"""Numbers that are compared as one vector."""
_QUANTILE: Final = 0.75
"""The share of the groups of a layer that must agree."""
_EXPECTED_MAX: Final = 64
Floats = npt.NDArray[np.float32]
Decode = Callable[[Any], Floats]
"""Converts the bytes of a block to numbers, layer after layer."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The relative error between two versions of a block, and the layer with that error."""

    error: float
    layer: int


def compare(kept: Any, computed: Any, layout: KVLayout, decode: Decode | None = None) -> Comparison:
    """Compare two payloads. ValueError if numbers of the dtype cannot be compared."""
    dtype = layout.dtype
    if decode is None:
        if dtype not in AUDIT_TOLERANCE or layout.layer_bytes % DTYPE_BYTES[dtype]:
            raise ValueError(f"numbers of type {dtype} cannot be compared")
        decode = DECODERS[dtype]
    old, new = (_groups(decode(payload), layout.layers) for payload in (kept, computed))
    with np.errstate(all="ignore"):
        distance = np.linalg.norm(old - new, axis=2)
        # If one is zero and the other is not, they have the greatest distance: 2.
        size = (np.linalg.norm(old, axis=2) + np.linalg.norm(new, axis=2)) / 2
        errors = np.divide(distance, size, out=np.zeros_like(size), where=size != 0)
    # NaN and infinity, in one or in both, agree with nothing.
    errors = np.where(np.isfinite(errors), errors, 2.0)
    worst = np.quantile(errors, _QUANTILE, axis=1)
    layer = int(worst.argmax())
    return Comparison(float(worst[layer]), layer)


def _groups(numbers: Floats, layers: int) -> Floats:
    """The numbers by layer and group; the last group of a layer is padded with zeros."""
    rows = numbers.reshape(layers, -1)
    rest = -rows.shape[1] % _GROUP
    return np.pad(rows, ((0, 0), (0, rest))).reshape(layers, -1, _GROUP)


def _plain(dtype: Any) -> Decode:
    return lambda raw: np.frombuffer(raw, dtype).astype(np.float32)


def _bfloat16(raw: Any) -> Floats:
    return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _fp8(exponent_bits: int, mantissa_bits: int, bias: int) -> Decode:
    """A table of all 256 values. Codes for NaN and infinity: in e5m2 the largest exponent, in e4m3
    the last value alone."""
    codes = np.arange(256)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = (codes & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    scale = 2.0 ** (np.maximum(exponent, 1) - bias)
    table = np.where(exponent > 0, 1 + mantissa, mantissa) * scale
    table[(codes & 0x7F) >= (0x7F if mantissa_bits == 3 else 0x7C)] = np.nan
    signed = (table * np.where(codes & 0x80, -1.0, 1.0)).astype(np.float32)
    return lambda raw: signed[np.frombuffer(raw, np.uint8)]


DECODERS: Final[dict[str, Decode]] = {
    "float32": _plain(np.float32),
    "float16": _plain(np.float16),
    "bfloat16": _bfloat16,
    "fp8_e4m3": _fp8(4, 3, 7),
    "fp8_e5m2": _fp8(5, 2, 15),
    "int8": _plain(np.int8),
}


class HitChooser:
    """Chooses the hits to audit: the first of each namespace, then one in `1 / share`.

    A hit that is due while the engine is busy waits for an idle moment, unless `under_load` is set.
    Thread-safe.
    """

    def __init__(self, config: AuditConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._due: dict[bytes, float] = {}
        """Audits due by namespace tag; at 1.0 the next hit is audited."""

    def choose(self, key: BlockKey, *, busy: bool) -> bool:
        """Returns True if this hit is to be audited. `key` is the key of any of its blocks."""
        if not self._config.share:
            return False
        tag = key[:TAG_BYTES]
        with self._lock:
            due = self._due.get(tag, 1.0 - self._config.share) + self._config.share
            chosen = due >= 1.0 - 1e-9 and (not busy or self._config.under_load)
            self._due[tag] = due - 1.0 if chosen else min(due, 1.0)
        return chosen


class BlockAuditor:
    """Compares blocks that were computed again with those of the depot. Thread-safe."""

    def __init__(
        self, depot: Depot, config: AuditConfig, producer: str, log: logging.Logger
    ) -> None:
        """`producer` names the engine, its version, kernels, dtype and weights. `log` must be one
        that the engine prints."""
        self._log = log
        self._depot = depot
        self._config = config
        self._producer = producer

    def scratch(self, key: BlockKey) -> Reservation:
        """Memory of the depot for a block that is computed again, which an engine's device can
        write to. `close` gives it back. Its slot has no view if the depot has no room."""
        digest = hashlib.blake2b(key, digest_size=KEY_BYTES - TAG_BYTES, person=b"kvdepot-audit")
        stand_in = without_link(BlockKey(key[:TAG_BYTES] + digest.digest()))
        return self._depot.reserve([stand_in], timeout_s=0.0)

    def check(
        self, key: BlockKey, computed: Any, layout: KVLayout, decode: Decode | None = None
    ) -> bool | None:
        """Compare a block and report the result to the depot. None if it was not possible. Never
        raises."""
        kept = np.empty(layout.block_bytes, np.uint8)
        try:
            if not self._depot.get_many([key], [kept])[0]:
                return None
            found = compare(kept, computed, layout, decode)
            tolerance = self._config.tolerance.get(layout.dtype)
            tolerance = tolerance or AUDIT_TOLERANCE.get(layout.dtype, 0.25)
            matches = found.error <= tolerance
            if not matches:
                self._log.error(
                    "kvdepot: AUDIT FAILED: layer %d of a block in namespace %s differs by %.3g "
                    "(tolerance %.3g) from a new computation; the namespace is in quarantine and "
                    "its prompts are computed. See kvdepot audit list",
                    found.layer,
                    key[:TAG_BYTES].hex(),
                    found.error,
                    tolerance,
                )
            finding = AuditFinding(
                key, matches, found.error, tolerance, found.layer, self._producer
            )
            self._depot.audits.report(finding)
        except (KVDepotError, ValueError) as error:
            self._log.warning("kvdepot: a block could not be audited: %s", error)
            return None
        return matches


class AuditedHits(BlockAuditor):
    """A chooser and an auditor, and the blocks that the engine is about to compute again.

    For adapters in which one process serves hits and saves blocks. Thread-safe.
    """

    def __init__(
        self, depot: Depot, config: AuditConfig, producer: str, log: logging.Logger
    ) -> None:
        super().__init__(depot, config, producer, log)
        self.choose = HitChooser(config).choose
        self._lock = threading.Lock()
        self._expected: dict[BlockKey, None] = {}

    def served_blocks(self, keys: Sequence[BlockKey], *, busy: bool) -> int:
        """The number of a hit's blocks to serve: all, or all but the last one to audit that."""
        if not keys or not self.choose(keys[-1], busy=busy):
            return len(keys)
        self.expect(keys[-1:])
        return len(keys) - 1

    def expect(self, keys: Sequence[BlockKey]) -> None:
        """The engine is about to compute these blocks again. The last 64 are remembered."""
        with self._lock:
            for key in keys:
                self._expected.pop(key, None)
                self._expected[key] = None
            while len(self._expected) > _EXPECTED_MAX:
                del self._expected[next(iter(self._expected))]

    def is_expected(self, key: BlockKey) -> bool:
        return key in self._expected

    def take_expected(self, key: BlockKey) -> bool:
        """Returns True, once per expected block, if a computed block is to be compared."""
        if not self._expected:
            return False
        with self._lock:
            return self._expected.pop(key, self) is None
