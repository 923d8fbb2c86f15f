"""A step in which nothing is to be loaded or saved costs the engine nothing of the depot."""

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import PROMPT, ToyEngine, ToyRequest, Toys

from kvdepot.store.store import Store

STEPS = 5
TRIES = 16
"""A thread that is late with what it had to do before is none that a step has woken."""
BLOCK_TOKENS = 128
"""No block is complete while the steps run."""
ON_THEIR_OWN = ("kvdepot-watchdog", "kvdepot-sessions")
"""Look at the drives and at the sessions again and again."""


@pytest.fixture
def decoding(toys: Toys) -> ToyEngine:
    """An engine whose only request is in the middle of its answer; nothing is under way."""
    store = toys.store()
    engine = toys.engine(store, settings={"block_tokens": BLOCK_TOKENS, "decide": True})
    engine.add(ToyRequest("r", list(PROMPT), BLOCK_TOKENS))
    while not engine.requests["r"].answer:
        engine.step()
    assert store.flush()
    return engine


def test_an_idle_step_does_not_call_the_store(
    decoding: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in [name for name in dir(Store) if not name.startswith("_")]:
        if callable(getattr(Store, name)):

            def spy(*_: Any, _name: str = name, **__: Any) -> None:
                called.append(_name)

            monkeypatch.setattr(Store, name, spy)
    for _ in range(STEPS):
        decoding.step()
    monkeypatch.undo()
    assert len(decoding.requests["r"].answer) > STEPS
    assert called == []


def switches() -> dict[str, int]:
    """How often each of our threads has gone to sleep."""
    found = {}
    for thread in threading.enumerate():
        if thread.name.startswith("kvdepot") and thread.name not in ON_THEIR_OWN:
            status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            found[thread.name] = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return found


def test_an_idle_step_wakes_no_thread(decoding: ToyEngine) -> None:
    def calm(pause_s: float) -> bool:
        before = switches()
        for _ in range(STEPS):
            decoding.step()
        threading.Event().wait(pause_s)  # for a thread that was woken to go to sleep again
        return switches() == before

    assert any(calm(0.05 * number) for number in range(1, TRIES))
