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
    OpenEngine,
    OpenStore,
    ToyEngine,
    ToyRequest,
    ask,
    forget_local,
)

from kvdepot.adapters.tensors import HostMover
from kvdepot.adapters.vllm import page_transfer
from kvdepot.adapters.vllm.messages import StepPlan


class SlowTicket:
    """An offload that is over when `go` is set, and counts who orders work behind it."""

    def __init__(self, go: threading.Event) -> None:
        self._go = go
        self.read_waits = 0

    def wait(self) -> None:
        assert self._go.wait(60.0)

    def wait_read(self) -> None:
        self.read_waits += 1


class SlowMover(HostMover):
    """Copies at once, but says so late."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.tickets: list[SlowTicket] = []
        self.onboarded: list[int] = []
        self.marks: list[Any] = []
        self.closed = 0

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


@pytest.fixture
def mover() -> SlowMover:
    return SlowMover()


def engine_with(mover: Any, engine: ToyEngine) -> ToyEngine:
    worker = engine.workers[0]
    assert worker._saver is not None and worker._loader is not None
    caches = [replace(worker._saver._caches[0], mover=mover)]
    worker._saver._caches = worker._loader._caches = caches
    worker._mover = mover
    return engine


def test_a_step_is_ordered_behind_saves_only_when_pages_were_taken_back(
    open_store: OpenStore, open_engine: OpenEngine, mover: SlowMover
) -> None:
    engine = engine_with(mover, open_engine(open_store()))
    worker = engine.workers[0]
    engine.add(ToyRequest("one", list(PROMPT), 3))
    engine.step()
    engine.step()
    assert mover.tickets and not any(ticket.read_waits for ticket in mover.tickets)
    worker.preempt(StepPlan(preempted=True))
    assert [ticket.read_waits for ticket in mover.tickets] == [1] * len(mover.tickets)
    worker.preempt(StepPlan())
    assert [ticket.read_waits for ticket in mover.tickets] == [1] * len(mover.tickets)
    mover.go.set()
    engine.run()
    worker.preempt(StepPlan(preempted=True))
    assert mover.tickets[0].read_waits == 1, "its pages are not read any more"


class DeviceMover(SlowMover):
    """As on a device: a save is started in a thread, at a mark of the engine's stream."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def mark(self) -> Any:
        self.made += 1
        return self.made


def test_a_save_on_a_device_is_started_beside_the_engine(
    open_store: OpenStore, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on while room is looked for; pages that are taken back wait until the copies
    are started."""
    store, mover, room = open_store(), DeviceMover(), threading.Event()
    engine = engine_with(mover, open_engine(store))
    worker, reserve = engine.workers[0], store.reserve

    def slowly(*given: Any, **more: Any) -> Any:
        assert room.wait(60.0)
        return reserve(*given, **more)

    monkeypatch.setattr(store, "reserve", slowly)
    engine.add(ToyRequest("one", list(PROMPT), 3))
    engine.step()
    engine.step()
    assert mover.made and not mover.tickets
    taken_back = threading.Thread(target=worker.preempt, args=(StepPlan(preempted=True),))
    taken_back.start()
    taken_back.join(0.1)
    assert taken_back.is_alive(), "the copies are not started"
    room.set()
    taken_back.join(60.0)
    assert mover.marks == [*range(1, mover.made + 1)]
    assert [ticket.read_waits for ticket in mover.tickets] == [1] * mover.made
    mover.go.set()
    engine.run()


def test_pages_that_fall_out_of_a_window_are_yielded_at_every_step(
    open_store: OpenStore, open_engine: OpenEngine, mover: SlowMover
) -> None:
    engine = engine_with(mover, open_engine(open_store()))
    engine.workers[0]._drops_pages = True
    engine.add(ToyRequest("one", list(PROMPT), 3))
    engine.step()
    engine.step()
    assert mover.tickets[0].read_waits == 1
    mover.go.set()
    engine.run()


def test_large_loads_are_handed_over_in_groups(
    open_store: OpenStore,
    open_engine: OpenEngine,
    mover: SlowMover,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_with(mover, open_engine(open_store()))
    mover.go.set()
    ask(engine, "cold", PROMPT)
    forget_local(engine)
    worker = engine.workers[0]
    assert worker._loader is not None
    monkeypatch.setattr(page_transfer, "_GROUP_BYTES", 3 * worker._loader._caches[0].block_bytes)
    ask(engine, "warm", PROMPT)
    assert sum(mover.onboarded) == FULL_PAGES
    assert mover.onboarded == [3] * (FULL_PAGES // 3) + [FULL_PAGES % 3] * (FULL_PAGES % 3 > 0)


def test_closing_lets_go_of_the_memory(
    open_store: OpenStore, open_engine: OpenEngine, mover: SlowMover
) -> None:
    engine = engine_with(mover, open_engine(open_store()))
    engine.workers[0].close()
    assert mover.closed == 1
