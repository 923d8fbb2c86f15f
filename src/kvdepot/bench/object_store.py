"""`bench object`: put and get of stores that share a bucket, compared with obstore alone.

The limit moves the same bytes in objects and ranges of the same sizes, with as many requests at
once. Blocks are read by another store than the one that put them, as on another machine.
"""

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import numpy as np

from kvdepot.bench.prompts import BLOCK_TOKENS, WAIT_S, FlushedStore, check_tier
from kvdepot.bench.raw import MIB
from kvdepot.bench.rounds import BenchPart, BenchPlan, Figure, Result, compare, spread, stopwatch
from kvdepot.config.settings import ObjectConfig, load
from kvdepot.errors import ConfigError, StateError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store
from kvdepot.volumes.object.bucket import Bucket, BucketError, open_bucket

OBJECT: Final = 0.90
"""The promised speed of put and get through a bucket, relative to obstore alone."""
OBJECT_PROMPT: Final = 1.06
"""The promised time to read the KV of a prompt from a bucket, relative to obstore alone."""
METADATA_REQUESTS: Final = 8.0
"""The promised requests to find a prefix of 512 blocks that another machine has uploaded."""
_PREFIX_BLOCKS: Final = 512
_PREFIX_BLOCK_BYTES: Final = 128 << 10
_PREFIX_OBJECT_BYTES: Final = 4 * MIB
_NEVER_S: Final = 86400.0
_PIECES: Final = (4 * MIB, 8 * MIB, 16 * MIB)
"""Sizes of ranges for obstore alone."""


Settings = dict[str, Any]
"""An `object` section without a capacity."""


def parts(plan: BenchPlan, settings: Settings) -> Iterator[BenchPart]:
    for size in plan.blocks_bytes:
        run = partial(measure_objects, settings, size, plan.total_bytes, plan.rounds)
        yield BenchPart(f"object, {size >> 10} KiB blocks", run)
    yield BenchPart("object, metadata", partial(measure_metadata, settings))


def measure_objects(
    settings: Settings, block_bytes: int, total_bytes: int, rounds: int
) -> list[Result]:
    set_bytes = max(total_bytes, block_bytes)
    with new_prefix(settings, 32 * (set_bytes + MIB)) as section:
        config = config_of(section)
        with ExitStack() as scope:
            enter = scope.enter_context
            dram = 3 * set_bytes + 64 * MIB
            store = enter(open_store(dram=dram, object=section))
            writer = NodePair.of(store, block_bytes, set_bytes, set_bytes)
            reader = enter(
                open_store(
                    dram=dram,
                    object={**section, "promote": False},
                    writeback={"staging": set_bytes + 64 * MIB},
                )
            )
            for one in (store, reader):
                one.inspect().wait_for_prefault()
            writer.join(reader)
            raw = RawBucket(open_bucket(config), config, set_bytes)
            speeds = compare(raw.puts(), {"put": writer.put_set}, rounds)
            writer.wait_for_reader()
            speeds |= compare(raw.gets(), {"get": writer.get_set}, rounds)
            writer.verify()
        tokens = writer.count * writer.prompts.blocks * BLOCK_TOKENS
        return [
            *(
                speed.row("object", op, block_bytes, writer.set_bytes, OBJECT)
                for op, speed in speeds.items()
            ),
            spread(
                f"KV of {tokens:,} tokens from object, times what obstore alone takes",
                [1 / ratio for ratio in speeds["get"].ratios()],
                "times",
                OBJECT_PROMPT,
            ),
        ]


def measure_metadata(settings: Settings) -> list[Result]:
    """Requests for manifests and listings that a node needs to find a prefix, and once more."""
    set_bytes = _PREFIX_BLOCKS * _PREFIX_BLOCK_BYTES
    with new_prefix(settings, 4 * set_bytes) as section:
        section = {**section, "object_size": _PREFIX_OBJECT_BYTES}
        memory = {"capacity": 3 * set_bytes, "prefault": False}
        with open_store(dram=memory, object=section) as store:
            writer = NodePair.of(store, _PREFIX_BLOCK_BYTES, set_bytes, set_bytes)
            writer.put_set()
            (keys,) = writer.current
            with open_store(dram=memory, object={**section, "refresh": _NEVER_S}) as other:
                other.namespace(writer.prompts.space.namespace)
                if len(other.match(keys)) != _PREFIX_BLOCKS:
                    raise StateError("another store does not find what was uploaded")
                first = metadata_requests(other)
                if not all(other.get_many(keys, writer.targets, timeout_s=WAIT_S)):
                    raise StateError("a block that was uploaded did not come")
                other.match(keys)
                again = metadata_requests(other) - first
    what = f"metadata requests, a prefix of {_PREFIX_BLOCKS} blocks"
    return [
        Figure(f"{what}, opening included", first, "requests", first, first, METADATA_REQUESTS),
        Figure(f"{what} that was seen", again, "requests", again, again, 0.0),
    ]


@contextmanager
def new_prefix(settings: Settings, capacity: int) -> Iterator[dict[str, Any]]:
    """A section for a new prefix below the given one; its objects are deleted afterwards."""
    url = f"{str(settings['url']).rstrip('/')}/bench-{secrets.token_hex(4)}"
    section = {**settings, "url": url, "capacity": capacity}
    bucket = open_bucket(config_of(section))
    try:
        bucket.list_all("")
    except BucketError as error:
        hint = "the bucket must exist; credentials come from object.profile or the environment"
        raise ConfigError("object.url", f"{bucket.label}: {error.reason}", hint=hint) from None
    try:
        yield section
    finally:
        paths = [one.path for one in bucket.list_all("")]
        if paths:
            bucket.delete(paths)


def config_of(section: dict[str, Any]) -> ObjectConfig:
    config = load(overrides={"object": section}).object
    if config is None:
        raise ConfigError("object.url", "is missing", hint="add --url s3://BUCKET/PREFIX")
    return config


def metadata_requests(store: Store) -> int:
    requests = store.stats()["tiers"]["object"]["drives"][0]["requests"]
    return int(requests["meta_gets"] + requests["lists"])


class NodePair(FlushedStore):
    """A store that puts, and another one that gets."""

    reader: Store

    def join(self, reader: Store) -> None:
        reader.namespace(self.prompts.space.namespace)
        self.reader = reader

    def wait_for_reader(self) -> None:
        deadline = time.monotonic() + WAIT_S
        for keys in self.current:
            while len(self.reader.match(keys)) < len(keys):
                if time.monotonic() > deadline:
                    raise StateError("another store does not find what was uploaded")
                time.sleep(0.05)

    def get_set(self) -> float:
        started = time.perf_counter()
        answers = [
            one
            for keys in self.current
            if self.reader.match(keys)
            for one in self.reader.get_many(keys, self.targets, timeout_s=WAIT_S)
        ]
        taken = time.perf_counter() - started
        check_tier(answers, "object")
        return taken


class RawBucket:
    """The same bytes through obstore alone."""

    def __init__(self, bucket: Bucket, config: ObjectConfig, set_bytes: int) -> None:
        self._bucket = bucket
        self._parallel = config.parallel
        self._object_bytes = config.object_bytes
        self._set_bytes = set_bytes
        self._body = np.random.default_rng(7).integers(0, 256, config.object_bytes, np.uint8)
        self._paths: list[tuple[str, int]] = []

    def puts(self) -> dict[str, Any]:
        name = f"obstore, {self._parallel} puts at once"
        return {name: stopwatch(self._put)}

    def gets(self) -> dict[str, Any]:
        return {
            f"obstore, ranges of {piece >> 20} MiB": stopwatch(partial(self._get, piece))
            for piece in _PIECES
        }

    def _put(self) -> None:
        whole, rest = divmod(self._set_bytes, self._object_bytes)
        sizes = [self._object_bytes] * whole + ([rest] if rest else [])
        paths = [(f"raw/{secrets.token_hex(8)}", size) for size in sizes]
        self._each(lambda one: self._bucket.create(one[0], [self._body[: one[1]].data]), paths)
        self._paths = paths

    def _get(self, piece: int) -> None:
        ranges = [
            (path, start, min(start + piece, size))
            for path, size in self._paths
            for start in range(0, size, piece)
        ]
        self._each(lambda one: self._bucket.get_range(*one), ranges)

    def _each(self, work: Any, items: list[Any]) -> None:
        with ThreadPoolExecutor(self._parallel) as pool:
            for _ in pool.map(work, items):
                pass
