"""`bench store`, two memories: get from the slower one beside get from the faster, in turn.

Ordinary memory stands in for the slower one, so the ratio is what the store itself adds.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvdepot.bench.memory import BATCH_BYTES
from kvdepot.bench.prompts import Prompts, prompts_for
from kvdepot.bench.raw import Bytes, filled, pieces
from kvdepot.bench.rounds import Result, Work, compare
from kvdepot.core.block import BlockKey
from kvdepot.errors import StateError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

_PATIENCE_S = 30.0


def measure_cxl(block_bytes: int, set_bytes: int, rounds: int) -> list[Result]:
    """Batches and single calls, of as many bytes out of either memory."""
    batch_bytes = max(block_bytes, min(BATCH_BYTES, set_bytes // 4))
    memory = {"capacity": int(1.75 * set_bytes), "eviction": "lru"}
    with ExitStack() as scope:
        store = scope.enter_context(open_store(dram=memory, cxl=4 * set_bytes))
        store.inspect().wait_for_prefault()
        prompts = prompts_for(store, block_bytes, batch_bytes)
        made = _filled(store, prompts, set_bytes)
        for keys in made:
            scope.enter_context(store.lease(keys))  # so that nothing changes places
        count = max(1, set_bytes // batch_bytes)
        below, above = made[:count], made[-count:]
        targets = pieces(filled(len(above[0]) * block_bytes, seed=1), block_bytes)
        rows: list[Result] = []
        for op, get in (("get_many", _get_many), ("get", _get_each)):
            fast = _work(store, get, above, targets, "dram")
            slow = _work(store, get, below, targets, "cxl")
            speed = compare({f"{op} from dram": fast}, {op: slow}, rounds)[op]
            nbytes = sum(map(len, below)) * block_bytes
            rows.append(speed.row("cxl", f"{op} (stand-in memory)", block_bytes, nbytes))
    return rows


def _filled(store: Store, prompts: Prompts, set_bytes: int) -> list[list[BlockKey]]:
    """Prompts, oldest first, until `set_bytes` of them are in the slower memory."""
    made: list[list[BlockKey]] = []
    deadline = time.monotonic() + _PATIENCE_S
    count = max(1, set_bytes // (prompts.blocks * prompts.space.block_bytes))
    while time.monotonic() < deadline:
        made += prompts.fresh(1)
        if not all(store.put_many(made[-1], prompts.sources)):
            raise StateError("a put was refused although there is room")
        lowest = made[:count]
        if all(store.match(keys).tiers == ("cxl",) * len(keys) for keys in lowest):
            return made
    raise StateError("blocks do not go down to the slower memory")


Get = Callable[[Store, Sequence[BlockKey], Sequence[Bytes]], list[str | None]]


def _get_many(store: Store, keys: Sequence[BlockKey], into: Sequence[Bytes]) -> list[str | None]:
    return [answer.tier for answer in store.get_many(keys, into)]


def _get_each(store: Store, keys: Sequence[BlockKey], into: Sequence[Bytes]) -> list[str | None]:
    return [store.get(key, target).tier for key, target in zip(keys, into, strict=True)]


def _work(
    store: Store, get: Get, prompts: list[list[BlockKey]], targets: Sequence[Bytes], tier: str
) -> Work:
    """Get all prompts, which must come from `tier`."""

    def timed() -> float:
        started = time.perf_counter()
        found = [get(store, keys, targets) for keys in prompts]
        taken = time.perf_counter() - started
        if any(one != tier for answers in found for one in answers):
            raise StateError(f"a block did not come from {tier}")
        return taken

    return timed
