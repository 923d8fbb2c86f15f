"""Clients of a daemon that keep it busy, each in a process of its own, and one with a clock."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Final

from kvdepot.bench.prompts import prompts_for
from kvdepot.bench.raw import MIB, filled, pieces
from kvdepot.client.open import open_remote
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Depot
from kvdepot.errors import StateError

MATCH, MOVE = "match", "get and put"
BUSY: Final = (MATCH, MOVE)
HIT_BLOCKS: Final = 512
_PAYLOAD_BYTES: Final = 4096
_START_S: Final = 60.0
_BATCH_BYTES: Final = 32 * MIB


def round_trips(store: Depot, keys: list[BlockKey], calls: int) -> list[float]:
    """How long a match of resident blocks takes, each time."""
    taken = []
    for _ in range(calls):
        started = time.perf_counter()
        found = len(store.match(keys))
        taken.append(time.perf_counter() - started)
        if found != len(keys):
            raise StateError("a prompt that was put is not matched")
    return taken


def resident(store: Depot, seed: int = 0) -> list[BlockKey]:
    """A prompt of 512 blocks that the store has; of another seed another prompt."""
    prompts = prompts_for(store, _PAYLOAD_BYTES, HIT_BLOCKS * _PAYLOAD_BYTES)
    prompts.reseed(seed)
    (keys,) = prompts.fresh(1)
    if not all(store.put_many(keys, prompts.sources, timeout_s=_START_S)):
        raise StateError("a put was refused although there is room")
    return keys


@contextmanager
def busy_clients(address: str, count: int, what: str) -> Iterator[None]:
    """`count` processes that do one thing without end. They are at it when the scope begins."""
    fresh = multiprocessing.get_context("spawn")
    ended = fresh.Event()
    begun = [fresh.Event() for _ in range(count)]
    work = _match if what == MATCH else _move
    clients = [
        fresh.Process(target=work, args=(address, number, ready, ended), daemon=True)
        for number, ready in enumerate(begun)
    ]
    for client in clients:
        client.start()
    try:
        if not all(ready.wait(_START_S) for ready in begun):
            raise StateError("a client does not start")
        yield
    finally:
        ended.set()
        for client in clients:
            client.join(_START_S)


def _match(address: str, number: int, ready: Event, ended: Event) -> None:
    with open_remote(address) as store:
        keys = resident(store, number + 1)
        while not ended.is_set():
            round_trips(store, keys, 20)
            ready.set()


def _move(address: str, number: int, ready: Event, ended: Event) -> None:
    """New prompts in, out again, and away: as engines do, but without computing anything."""
    with open_remote(address) as store:
        prompts = prompts_for(store, MIB, _BATCH_BYTES)
        prompts.reseed(number + 1)
        targets = pieces(filled(_BATCH_BYTES, seed=number), MIB)
        while not ended.is_set():
            (keys,) = prompts.fresh(1)
            store.put_many(keys, prompts.sources)
            store.get_many(keys, targets)
            ready.set()
