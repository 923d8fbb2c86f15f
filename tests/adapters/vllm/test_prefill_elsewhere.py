"""A decode engine waits for the blocks that a prefill engine on another machine commits."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("obstore", reason="the extra s3 is not installed")

from tests.support.toy_engine import (
    FULL_PAGES,
    PAGE_TOKENS,
    PROMPT,
    OpenEngine,
    ToyEngine,
    ToyRequest,
    answer_of,
    ask,
)
from tests.support.waiting import until

from kvdepot.config.settings import load
from kvdepot.store.open import assemble
from kvdepot.store.store import Store

OpenNode = Callable[[], Store]


@pytest.fixture
def open_node(tmp_path: Path) -> Iterator[OpenNode]:
    """Opens the store of one more machine over a shared folder."""
    opened: list[Store] = []

    def open_it() -> Store:
        parts = {
            "dram": {"capacity": 8 << 20, "huge_pages": "never", "prefault": False},
            "writeback": {"staging": 4 << 20},
            "object": {"url": f"file://{tmp_path}/shared", "capacity": "64MiB", "refresh": "1h"},
        }
        opened.append(assemble(load(overrides=parts)))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def finish(engine: ToyEngine, name: str) -> None:
    """Step until a request is over, however long its blocks take."""

    def stepped() -> bool:
        engine.step()
        return name in engine.done

    until(stepped)
    engine.settle()


def test_decode_computes_what_is_no_whole_block(
    open_node: OpenNode, open_engine: OpenEngine
) -> None:
    there, here = open_node(), open_node()
    prefill = open_engine(there, roles="producer")
    decode = open_engine(here, roles="consumer", settings={"wait": 120.0})
    decode.add(ToyRequest("decoded", list(PROMPT), 3))
    for _ in range(3):
        decode.step()
    assert decode.computed_tokens == 0
    assert decode.requests["decoded"].status == "waiting"
    ask(prefill, "prefilled", PROMPT, 1)
    assert there.flush()
    finish(decode, "decoded")
    assert decode.done["decoded"].answer == answer_of(PROMPT, 3)
    assert decode.computed_tokens == len(PROMPT) - FULL_PAGES * PAGE_TOKENS + 2


def test_what_does_not_come_in_time_is_computed(
    open_node: OpenNode, open_engine: OpenEngine
) -> None:
    decode = open_engine(open_node(), roles="consumer", settings={"wait": 0.05})
    decode.add(ToyRequest("alone", list(PROMPT), 3))
    finish(decode, "alone")
    assert decode.done["alone"].answer == answer_of(PROMPT, 3)
    assert decode.computed_tokens == len(PROMPT) + 2
