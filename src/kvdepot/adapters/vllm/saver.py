"""Offloading: complete blocks from vLLM's pages into slots of the depot.

The engine's thread reserves slots and has the pages copied; checksums and bookkeeping are done by
a thread of our own. It never waits for room: what does not fit now is offered again later.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from kvdepot.adapters.tensors import OffloadTicket
from kvdepot.adapters.tensors.cores import use_all_cores
from kvdepot.adapters.vllm.complaints import Complaints
from kvdepot.adapters.vllm.loader import Target
from kvdepot.adapters.vllm.messages import Save
from kvdepot.adapters.vllm.stats import Tally
from kvdepot.core.block import BlockKey, Put
from kvdepot.errors import KVDepotError
from kvdepot.store.store import Store
from kvdepot.store.write.reservation import Reservation

_NO_WAIT_S: Final = 0.0


class Saver:
    """Saves under way. All methods belong to the engine's thread."""

    def __init__(self, store: Store, target: Target, tally: Tally) -> None:
        self._store = store
        self._target = target
        self._tally = tally
        self._complaints = Complaints()
        self._thread = ThreadPoolExecutor(1, "kvdepot-save", initializer=use_all_cores)
        self._reading: dict[Future[None], tuple[str, OffloadTicket]] = {}
        """Saves that may still read pages, and whose they are."""

    def save(self, save: Save, keys: Sequence[BlockKey]) -> int | None:
        """Take the blocks over; the first one of the request that found no room, if any did not.

        `keys` are this shard's.
        """
        try:
            slots = self._store.reserve(keys, timeout_s=_NO_WAIT_S)
        except KVDepotError as error:
            self._complaints.say("the depot takes nothing", error)
            self._tally.add("depot_errors", 1, "reserve")
            return save.first_block
        fits = next((at for at, put in enumerate(slots.outcomes) if not put), len(slots.outcomes))
        self._count(slots.outcomes, fits)
        mine = [at for at in range(fits) if slots.outcomes[at] is Put.STORED]
        if mine:
            self._gather(save, slots, mine)
        else:
            slots.close()
        return save.first_block + fits if fits < len(keys) else None

    def busy(self) -> Counter[str]:
        """For each request how many saves may still read its pages."""
        for future in [future for future in self._reading if future.done()]:
            self._note(future)
        return Counter(request_id for request_id, _ in self._reading.values())

    def yield_pages(self) -> None:
        """What the current stream does next comes after all saves so far have read their pages."""
        for _, ticket in self._reading.values():
            ticket.wait_read()

    def wait(self) -> None:
        """Return when no page is read any more."""
        for future in list(self._reading):
            self._note(future)

    def close(self) -> None:
        """Finish what is under way."""
        self.wait()
        self._thread.shutdown()

    def _gather(self, save: Save, slots: Reservation, mine: list[int]) -> None:
        ratio, tensors = self._target.pages_per_block, self._target.tensors
        pieces = [tensors.pages(save.pages[at * ratio : (at + 1) * ratio]) for at in mine]
        views = [slots.view(at) for at in mine]
        ticket = self._target.mover.offload(pieces, views)
        future = self._thread.submit(self._finish, ticket, slots, mine)
        self._reading[future] = save.request_id, ticket

    def _finish(self, ticket: OffloadTicket, slots: Reservation, mine: list[int]) -> None:
        with slots:
            ticket.wait()
            slots.seal(mine)

    def _note(self, future: "Future[None]") -> None:
        del self._reading[future]
        error = future.exception()
        if error is not None:
            self._complaints.say("a save failed", error)
            self._tally.add("failed_saves")

    def _count(self, outcomes: Sequence[Put], fits: int) -> None:
        for put in outcomes[:fits]:
            self._tally.add("saved_blocks", 1, put.value)
        if fits < len(outcomes):
            self._tally.add("saved_blocks", len(outcomes) - fits, outcomes[fits].value)
