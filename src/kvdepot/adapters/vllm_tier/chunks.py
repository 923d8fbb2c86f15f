"""vLLM's chunks in a depot: their keys, and the transfers under way.

vLLM names a chunk by a hash of all tokens up to its end, and by its KV group. A request tells where
each of its chunks ends, so the chunk before it is known: its key is the parent's, and heads outlive
tails. Transfers run in threads of their own, between the depot and rows of vLLM's CPU tier; the
scheduler's thread only hands them over and asks which are over.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any, Final

from kvdepot.adapters.vllm.shared_depot import use_all_cores
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Depot, NamespaceHandle
from kvdepot.errors import KVDepotError

GROUP_BYTES: Final = 4
"""At the end of vLLM's key: the number of the KV group, big-endian."""


def group_of(chunk: bytes) -> int:
    return int.from_bytes(chunk[-GROUP_BYTES:], "big")


class RequestChunks:
    """One request's chunks by their place, as far as vLLM has told them."""

    def __init__(self, chunk_tokens: Mapping[int, int]) -> None:
        """`chunk_tokens`: tokens of a whole chunk, by group."""
        self._chunk_tokens = chunk_tokens
        self._seen = 0
        self._at: dict[tuple[int, int], bytes] = {}

    def parent(self, chunk: bytes, ends: Mapping[bytes, int]) -> bytes | None:
        """The chunk before one; None for the first, and where its place is not known.

        `ends` has the token after each chunk, in the order in which vLLM told them.
        """
        for one, end in islice(ends.items(), self._seen, None):
            self._at[group_of(one), end] = one
        self._seen = len(ends)
        group = group_of(chunk)
        tokens = self._chunk_tokens.get(group)
        after = ends.get(chunk)
        if after is None or tokens is None:
            return None
        return self._at.get((group, (after - 1) // tokens * tokens))


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """A transfer of chunks between the depot and rows of vLLM's CPU tier."""

    number: int
    request: str
    chunks: Sequence[bytes]
    keys: Sequence[BlockKey]
    """Those of the chunks; empty where there is no namespace."""
    rows: Sequence[Any]
    """Where each chunk lies, or is to be."""
    is_load: bool = False


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """How a transfer has ended."""

    job: ChunkJob
    done: Sequence[bytes]
    """The chunks that were stored or loaded."""
    nbytes: int
    seconds: float

    @property
    def complete(self) -> bool:
        return len(self.done) == len(self.job.chunks)


@dataclass
class ChunkTransfers:
    """Stores and loads under way. All calls belong to the scheduler's thread."""

    depot: Depot
    load_timeout_s: float
    threads: int
    _ended: deque[FinishedJob] = field(default_factory=deque)
    _under_way: set[Future[None]] = field(default_factory=set)
    loads: int = 0
    """Under way, or over and not taken yet."""

    def __post_init__(self) -> None:
        # One thread stores, so that the chunks of a prompt arrive head first.
        self._storing = ThreadPoolExecutor(1, "kvdepot-tier-store", initializer=use_all_cores)
        self._loading = ThreadPoolExecutor(
            self.threads, "kvdepot-tier-load", initializer=use_all_cores
        )

    def store(self, job: ChunkJob) -> None:
        self._submit(self._storing, self._store, job)

    def load(self, job: ChunkJob) -> None:
        """Its time runs from now on, also while it waits for a thread."""
        deadline = time.monotonic() + self.load_timeout_s
        self.loads += job.is_load
        self._submit(self._loading, self._load, job, deadline)

    def take(self) -> list[FinishedJob]:
        """The transfers that are over since the last call."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        self.loads -= sum(one.job.is_load for one in ended)
        return ended

    def drain(self) -> None:
        """Return when nothing touches vLLM's memory; each transfer has a deadline."""
        wait(self._under_way)

    def close(self) -> None:
        """End what is under way; what has not begun is left out. May be called twice."""
        for pool in (self._storing, self._loading):
            pool.shutdown(cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, what: Any, job: ChunkJob, *more: Any) -> None:
        self._under_way = {future for future in self._under_way if not future.done()}
        self._under_way.add(pool.submit(self._run, what, job, *more))

    def _run(self, what: Any, job: ChunkJob, *more: Any) -> None:
        started = time.monotonic()
        answers: Sequence[Any] = ()
        try:
            # An error is an outcome like any other: the job has failed, the request is computed.
            with suppress(KVDepotError):
                answers = what(job, *more) if job.keys else ()
        finally:
            done = leading(job.chunks, answers)
            nbytes = len(done) * len(job.rows[0]) if done else 0
            self._ended.append(FinishedJob(job, done, nbytes, time.monotonic() - started))

    def _store(self, job: ChunkJob) -> Sequence[Any]:
        return self.depot.put_many(job.keys, job.rows)

    def _load(self, job: ChunkJob, deadline: float) -> Sequence[Any]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return ()
        return self.depot.get_many(job.keys, job.rows, timeout_s=left_s)


def leading(chunks: Sequence[bytes], answers: Sequence[Any]) -> list[bytes]:
    """Those of each group that come before its first failure: what is behind it is of no use."""
    broken: set[int] = set()
    found = []
    for chunk, answer in zip_longest(chunks, answers):
        if answer and group_of(chunk) not in broken:
            found.append(chunk)
        else:
            broken.add(group_of(chunk))
    return found


def keys_of(
    spaces: Mapping[int, NamespaceHandle],
    chunks: Sequence[bytes],
    parents: Sequence[bytes | None],
) -> list[BlockKey]:
    """One key for each chunk, in the namespace of its group; none where that is not known."""
    if any(group_of(chunk) not in spaces for chunk in chunks):
        return []
    return [
        spaces[group_of(chunk)].hashed_key(chunk, parent)
        for chunk, parent in zip(chunks, parents, strict=True)
    ]
