"""A decode engine waits for the blocks that a prefill engine on another machine commits."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("obstore", reason="the extra s3 is not installed")

from tests.support.toy_engine import ALL, PROMPT, REST, ToyEngine, ToyRequest, Toys, answer_of, ask
from tests.support.waiting import until

from kvdepot.store.store import Store


def node(toys: Toys) -> Store:
    """The store of one more machine over a shared folder."""
    url = f"file://{toys.folder}/shared"
    return toys.depot(object={"url": url, "capacity": "64MiB", "refresh": "1h"})


def assert_answers(engine: ToyEngine, *, computed: int) -> None:
    """Step until the request "decoded" has ended, however long its blocks take."""

    def has_ended() -> bool:
        engine.step()
        return "decoded" in engine.done

    until(has_ended)
    engine.settle()
    assert engine.done["decoded"].answer == answer_of(PROMPT, 3)
    assert engine.computed_tokens == computed


def test_decode_computes_only_what_is_no_whole_block(toys: Toys) -> None:
    there, here = node(toys), node(toys)
    prefill = toys.engine(there, roles="producer")
    decode = toys.engine(here, roles="consumer", settings={"wait": 120.0, "wait_idle": 120.0})
    decode.add(ToyRequest("decoded", list(PROMPT), 3))
    for _ in range(3):
        decode.step()
    assert decode.computed_tokens == 0
    assert decode.requests["decoded"].status == "waiting"
    ask(prefill, "prefilled", PROMPT, 1)
    assert there.flush()
    assert_answers(decode, computed=REST)


def test_nothing_is_waited_for_without_a_sign(toys: Toys) -> None:
    """The other machine computes nothing: the request does not lose its whole wait."""
    decode = toys.engine(node(toys), roles="consumer", settings={"wait": 1e6, "wait_idle": 0.05})
    decode.add(ToyRequest("decoded", list(PROMPT), 3))
    assert_answers(decode, computed=ALL)


def test_a_step_rests_while_only_waiting_requests_are_left(toys: Toys) -> None:
    decode = toys.engine(node(toys), roles="consumer", settings={"wait": 1e6, "wait_idle": 0.5})
    decode.add(ToyRequest("decoded", list(PROMPT), 3))
    steps = 0
    while decode.requests["decoded"].status == "waiting" and steps < 100_000:
        decode.step()
        steps += 1
    assert steps < 500, "it does not ask as fast as it can"


def test_blocks_that_do_not_come_in_time_are_computed(toys: Toys) -> None:
    decode = toys.engine(node(toys), roles="consumer", settings={"wait": 0.05})
    decode.add(ToyRequest("decoded", list(PROMPT), 3))
    assert_answers(decode, computed=ALL)
