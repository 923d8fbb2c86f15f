"""What a worker waits for, with a mover whose copies take as long as the test wants."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import (
    FULL_PAGES,
    PROMPT,
    ToyEngine,
    ToyRequest,
    Toys,
    ask,
    forget_local,
)

from kvdepot.adapters.tensors import HostMover
from kvdepot.adapters.vllm import page_transfer
from kvdepot.adapters.vllm.messages import StepPlan


class SlowTicket:
    """An offload that ends when `go` is set, and counts who orders work behind it."""

    def __init__(self, go: threading.Event) -> None:
        self._go = go
        self.read_waits = 0

    def wait(self) -> None:
        assert self._go.wait(60.0)

    def wait_read(self) -> None:
        self.read_waits += 1


class SlowMover(HostMover):
    """Copies at once, but reports it late. `on_device`: its stream has marks."""

    def __init__(self, *, on_device: bool = False) -> None:
        self.go = threading.Event()
        self.tickets: list[SlowTicket] = []
        self.onboarded: list[int] = []
        self.marks: list[Any] = []
        self.closed = 0
        self.made = 0
        self._on_device = on_device

    def mark(self) -> Any:
        self.made += 1
        return self.made if self._on_device else None

    def offload(self, pieces: Sequence[Any], views: Sequence[Any], *, after: Any = None) -> Any:
        self.marks.append(after)
        super().offload(pieces, views)
        self.tickets.append(SlowTicket(self.go))
        return self.tickets[-1]

    def onboard(self, views: Sequence[Any], pieces: Sequence[Any], **more: Any) -> Any:
        self.onboarded.append(len(views))
        return super().onboard(views, pieces, **more)

    def close(self) -> None:
        self.closed += 1


def engine_with(mover: SlowMover, engine: ToyEngine) -> ToyEngine:
    (worker,) = engine.workers
    worker.caches[0] = replace(worker.caches[0], mover=mover)
    worker.mover = mover
    return engine


def begin(engine: ToyEngine) -> None:
    engine.add(ToyRequest("one", list(PROMPT), 3))
    engine.step()
    engine.step()


def test_a_step_is_ordered_behind_saves_only_if_pages_were_taken_back(toys: Toys) -> None:
    mover = SlowMover()
    engine = engine_with(mover, toys.engine())
    (worker,) = engine.workers
    begin(engine)
    assert mover.tickets and not any(ticket.read_waits for ticket in mover.tickets)
    for preempted in (True, False):
        worker.preempt(StepPlan(preempted=preempted))
        assert [ticket.read_waits for ticket in mover.tickets] == [1] * len(mover.tickets)
    mover.go.set()
    engine.run()
    worker.finished(StepPlan())
    worker.preempt(StepPlan(preempted=True))
    assert mover.tickets[0].read_waits == 1, "its pages are not read any more"


def test_a_save_on_a_device_is_started_while_the_engine_goes_on(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that are taken back wait until the copies are started."""
    store, mover, room = toys.store(), SlowMover(on_device=True), threading.Event()
    engine = engine_with(mover, toys.engine(store))
    reserve = store.reserve

    def slowly(*given: Any, **more: Any) -> Any:
        assert room.wait(60.0)
        return reserve(*given, **more)

    monkeypatch.setattr(store, "reserve", slowly)
    begin(engine)
    assert mover.made and not mover.tickets
    plan = StepPlan(preempted=True)
    taken_back = threading.Thread(target=engine.workers[0].preempt, args=(plan,))
    taken_back.start()
    taken_back.join(0.1)
    assert taken_back.is_alive(), "the copies are not started"
    room.set()
    taken_back.join(60.0)
    assert mover.marks == [*range(1, mover.made + 1)]
    assert [ticket.read_waits for ticket in mover.tickets] == [1] * mover.made
    mover.go.set()
    engine.run()


def test_every_step_is_ordered_behind_saves_of_windows(toys: Toys) -> None:
    """Their pages may fall out of the window."""
    mover = SlowMover()
    engine = engine_with(mover, toys.engine())
    engine.workers[0]._drops_pages = True
    begin(engine)
    assert mover.tickets[0].read_waits == 1
    mover.go.set()
    engine.run()


def test_large_loads_are_handed_over_in_parts(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    mover = SlowMover()
    engine = engine_with(mover, toys.engine())
    mover.go.set()
    ask(engine, "cold", PROMPT)
    forget_local(engine)
    block_bytes = engine.workers[0].caches[0].facts.layout.block_bytes
    monkeypatch.setattr(page_transfer, "_ONBOARD_BYTES", 3 * block_bytes)
    ask(engine, "warm", PROMPT)
    assert sum(mover.onboarded) == FULL_PAGES
    assert mover.onboarded == [3] * (FULL_PAGES // 3) + [FULL_PAGES % 3] * (FULL_PAGES % 3 > 0)


def test_closing_releases_the_memory(toys: Toys) -> None:
    mover = SlowMover()
    engine_with(mover, toys.engine()).workers[0].close()
    assert mover.closed == 1
