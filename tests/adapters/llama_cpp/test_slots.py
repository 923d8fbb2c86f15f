"""Which slot a request gets."""

import threading

import numpy as np
from tests.support.waiting import until

from kvdepot.adapters.llama_cpp.slots import Owner, Slot, Slots


def tokens(*numbers: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(numbers, np.int32)


def test_the_slot_with_most_of_the_prompt_else_the_oldest() -> None:
    slots = Slots([0, 1, 2])
    first = slots.take(tokens(1, 2, 3), Owner())
    first.tokens = tokens(1, 2, 3)
    slots.free(first)
    assert slots.take(tokens(9), Owner()).number != first.number
    assert slots.take(tokens(1, 2, 4), Owner()) is first


def test_a_slot_whose_save_takes_long_is_passed_over() -> None:
    slots = Slots([0, 1], saved_s=0.01)
    slot = slots.take(tokens(1, 2), Owner())
    slot.tokens = tokens(1, 2)
    slots.hold(slot)
    slots.free(slot)
    assert slots.take(tokens(1, 2, 3), Owner()) is not slot


def test_a_slot_that_is_being_saved_is_waited_for() -> None:
    slots = Slots([0, 1], saved_s=600.0)
    slot = slots.take(tokens(1, 2), Owner())
    slot.tokens = tokens(1, 2)
    slots.hold(slot)
    slots.free(slot)
    taken: list[Slot] = []
    thread = threading.Thread(target=lambda: taken.append(slots.take(tokens(1, 2, 3), Owner())))
    thread.start()
    assert slots.take(tokens(7), Owner()) is not slot
    assert not taken
    slots.free(slot)
    thread.join()
    assert taken == [slot]


def test_shared_slots_begin_one_after_the_other() -> None:
    slots = Slots([0, 1], shared=True)
    one, other = slots.take(tokens(1), Owner()), slots.take(tokens(2), Owner())
    slots.begin_launch(one)
    began = threading.Event()

    def begin() -> None:
        slots.begin_launch(other)
        began.set()

    thread = threading.Thread(target=begin)
    thread.start()
    assert not began.is_set()
    slots.end_launch(one)
    slots.end_launch(one)
    until(began.is_set)
    thread.join()
    assert slots.is_launching(other)


def test_a_launch_makes_idle_shared_slots_empty() -> None:
    slots = Slots([0, 1], shared=True)
    idle = slots.take(tokens(1, 2), Owner())
    idle.tokens = tokens(1, 2)
    slots.free(idle)
    slots.begin_launch(slots.take(tokens(5), Owner()))
    assert not len(idle.tokens)
