"""vLLM's chunks in a depot: their keys, and the transfers in progress.

vLLM names a chunk by a hash of all tokens up to its end, and by its KV group. A request says where
each of its chunks ends, so the chunk before it is known: its key is the parent's, and when room is
made the beginnings of prompts outlive their ends. Transfers between the depot and rows of vLLM's
CPU tier run in threads; the scheduler's thread only submits them and asks which have ended.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, Final

from kvdepot.adapters.vllm.shared_depot import use_all_cores
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import NamespaceHandle
from kvdepot.depot import Depot
from kvdepot.errors import KVDepotError

GROUP_BYTES: Final = 4
"""Bytes at the end of vLLM's key with the number of the KV group, big-endian."""


def group_of(chunk: bytes) -> int:
    return int.from_bytes(chunk[-GROUP_BYTES:], "big")


class RequestChunks:
    """The chunks of one request by their place, as far as vLLM has reported them."""

    def __init__(self, chunk_tokens: Mapping[int, int]) -> None:
        """`chunk_tokens`: tokens of a whole chunk, by group."""
        self._chunk_tokens = chunk_tokens
        self._seen = 0
        self._by_end: dict[tuple[int, int], bytes] = {}

    def parent(self, chunk: bytes, ends: Mapping[bytes, int]) -> bytes | None:
        """The chunk before one; None for the first, and if its place is not known. `ends` has the
        token after each chunk, in the order in which vLLM reported them."""
        for other, end in islice(ends.items(), self._seen, None):
            self._by_end[group_of(other), end] = other
        self._seen = len(ends)
        group = group_of(chunk)
        tokens, end_token = self._chunk_tokens.get(group), ends.get(chunk)
        if end_token is None or tokens is None:
            return None
        return self._by_end.get((group, (end_token - 1) // tokens * tokens))


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """A transfer of chunks between the depot and rows of vLLM's CPU tier."""

    number: int
    request: str
    chunks: Sequence[bytes]
    keys: Sequence[BlockKey]
    """The keys of the chunks; empty if there is no namespace: the job fails."""
    rows: Sequence[Any]
    """The memory of each chunk."""
    is_load: bool = False


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A transfer that has ended."""

    job: ChunkJob
    done: Sequence[bytes]
    """The chunks that were stored or loaded."""
    nbytes: int
    seconds: float

    @property
    def complete(self) -> bool:
        return len(self.done) == len(self.job.chunks)


class ChunkTransfers:
    """Stores and loads in progress. All calls belong to the scheduler's thread."""

    def __init__(self, depot: Depot, load_timeout_s: float, threads: int) -> None:
        self._depot = depot
        self._load_timeout_s = load_timeout_s
        # One thread stores, so that the chunks of a prompt arrive in order.
        self._storing = ThreadPoolExecutor(1, "kvdepot-tier-store", initializer=use_all_cores)
        self._loading = ThreadPoolExecutor(threads, "kvdepot-tier-load", initializer=use_all_cores)
        self._ended: deque[FinishedJob] = deque()
        self._under_way: set[Future[None]] = set()
        self.loads = 0
        """Loads that were submitted and not taken."""

    def submit(self, job: ChunkJob) -> None:
        """Begin a transfer. A load's time runs from now on, also while it waits for a thread."""
        deadline = time.monotonic() + self._load_timeout_s
        self.loads += job.is_load
        pool = self._loading if job.is_load else self._storing
        self._under_way = {future for future in self._under_way if not future.done()}
        self._under_way.add(pool.submit(self._run, job, deadline))

    def take(self) -> list[FinishedJob]:
        """The transfers that have ended since the last call."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        self.loads -= sum(finished.job.is_load for finished in ended)
        return ended

    def drain(self) -> None:
        """Return when nothing uses vLLM's memory; each transfer has a deadline."""
        wait(self._under_way)

    def close(self) -> None:
        """Wait for the transfers that have begun, and drop the others. May be called twice."""
        for pool in (self._storing, self._loading):
            pool.shutdown(cancel_futures=True)

    def _run(self, job: ChunkJob, deadline: float) -> None:
        started = time.monotonic()
        left_s = deadline - started
        answers: Sequence[Any] = ()
        try:
            # After an error the job has failed, and vLLM computes the request.
            with suppress(KVDepotError):
                if job.keys and not job.is_load:
                    answers = self._depot.put_many(job.keys, job.rows)
                elif job.keys and left_s > 0:
                    answers = self._depot.get_many(job.keys, job.rows, timeout_s=left_s)
        finally:
            done = leading(job.chunks, answers)
            nbytes = len(done) * len(job.rows[0]) if done else 0
            self._ended.append(FinishedJob(job, done, nbytes, time.monotonic() - started))


def leading(chunks: Sequence[bytes], answers: Sequence[Any]) -> list[bytes]:
    """The chunks of each group before its first failure; those after it cannot be used."""
    failed: set[int] = set()
    good = []
    for chunk, answer in zip_longest(chunks, answers):
        if answer and group_of(chunk) not in failed:
            good.append(chunk)
        else:
            failed.add(group_of(chunk))
    return good


def keys_of(
    spaces: Mapping[int, NamespaceHandle],
    chunks: Sequence[bytes],
    parents: Sequence[bytes | None],
) -> list[BlockKey]:
    """The key of each chunk, in the namespace of its group; none if a namespace is not known."""
    if any(group_of(chunk) not in spaces for chunk in chunks):
        return []
    return [
        spaces[group_of(chunk)].hashed_key(chunk, parent)
        for chunk, parent in zip(chunks, parents, strict=True)
    ]
