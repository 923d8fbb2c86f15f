"""Waiting until what was put is on disk."""

from collections.abc import Iterable

from kvdepot.core.depot import FlushReport
from kvdepot.policy.placing.write_mode import WriteMode
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.state import Stock


class Flusher:
    """Serves `flush`, and puts where the first file tier is written through."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._given_up_seen = 0

    def write_through(self, timeout_s: float) -> None:
        """Where the first file tier is written through, wait until it has what was put."""
        stock = self._stock
        with stock.changed:
            first = stock.levels[0] if stock.levels else None
            if first is None or first.mode is not WriteMode.THROUGH:
                return
            last = stock.tickets
            self._hurry(last)
            stock.changed.wait_for(
                lambda: next(iter(first.tickets.values()), last + 1) > last, timeout_s
            )

    def flush(self, timeout_s: float, written_to: Iterable[Level]) -> FlushReport:
        """Wait until everything put before is written, then until the tiers have it for good."""
        stock = self._stock
        deadline = stock.clock.now() + timeout_s
        with stock.changed:
            last = stock.tickets
            self._hurry(last)

            def written() -> bool:
                oldest = [next(iter(level.tickets.values()), last + 1) for level in stock.levels]
                return all(ticket > last for ticket in oldest)

            done = stock.changed.wait_for(written, timeout_s)
            tickets = [ticket for level in stock.levels for ticket in level.tickets.values()]
            waiting = sum(ticket <= last for ticket in tickets)
            given_up = stock.counters.write_failed - self._given_up_seen
            self._given_up_seen = stock.counters.write_failed
        if done:
            synced = [
                level.tier.flush(max(0.0, deadline - stock.clock.now())) for level in written_to
            ]
            done = all(synced)
        return FlushReport(done and not given_up, waiting, given_up)

    def _hurry(self, ticket: int) -> None:
        """What waits to be written waits no longer for company. Lock held."""
        for level in self._stock.levels:
            level.hurry = max(level.hurry, ticket)
        self._stock.work.notify_all()
