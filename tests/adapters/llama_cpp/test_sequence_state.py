"""States of llama.cpp are cut by tokens and joined byte for byte; odd states are refused."""

import random
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.llama_states import MadeState

from kvdepot.adapters.llama_cpp.sequence_state import (
    read_slot_file,
    read_state,
    slot_file_head,
    write_state,
)
from kvdepot.errors import ModelError

STATES = st.builds(
    MadeState,
    seed=st.integers(0, 99),
    version=st.sampled_from([2, 4]),
    layers=st.integers(1, 3),
    cells=st.integers(1, 20),
    k_row=st.sampled_from([1, 12, 34]),
    v_row=st.sampled_from([0, 8, 18]),
    transposed=st.booleans(),
    streams=st.sampled_from([1, 3]),
)


@given(made=STATES, cut=st.integers(1, 8))
def test_cut_then_join_gives_the_same_bytes(made: MadeState, cut: int) -> None:
    state = read_state(made.state(), made.version)
    layout = state.layout
    joined = bytearray(layout.state_bytes(made.cells, made.streams))
    target = write_state(joined, layout, made.streams, made.cells)
    for start in range(0, made.cells, cut):
        stop = min(made.cells, start + cut)
        payload = np.zeros(layout.cell_bytes * (stop - start), np.uint8)
        state.take(start, stop, payload)
        assert payload.tobytes() == made.payload(start, stop)
        target.give(start, stop, payload)
    # The sequence's number is the reader's business; it is 0 in what we write.
    made.stream = 0
    assert bytes(joined) == made.state()


@given(made=STATES, order=st.randoms(use_true_random=False))
def test_cells_may_lie_in_any_order(made: MadeState, order: random.Random) -> None:
    order.shuffle(made.positions)
    state = read_state(made.state(), made.version)
    payload = np.zeros(state.layout.cell_bytes * made.cells, np.uint8)
    state.take(0, made.cells, payload)
    assert payload.tobytes() == made.payload(0, made.cells)


@given(made=STATES, data=st.data())
def test_a_state_that_ends_too_early_is_refused(made: MadeState, data: st.DataObject) -> None:
    """But for one that ends behind K, which is that of a model without V: a layout of its own, and
    so another namespace.
    """
    content = made.file(list(range(made.cells)))
    length = data.draw(st.integers(0, len(content) - 1))
    only_keys = len(replace(made, v_row=0).file(list(range(made.cells))))
    if made.streams == 1 and length == only_keys:
        (_, whole), (_, cut) = read_slot_file(content), read_slot_file(content[:length])
        assert cut.layout != whole.layout
        return
    with pytest.raises(ModelError):
        read_slot_file(content[:length])


def test_a_state_that_ends_behind_its_keys_has_another_layout() -> None:
    made = MadeState(layers=3, cells=1, k_row=34, v_row=8)
    content, only_keys = made.file([0]), len(replace(made, v_row=0).file([0]))
    assert read_slot_file(content[:only_keys])[1].layout != read_slot_file(content)[1].layout


@given(made=STATES, data=st.data())
def test_a_changed_number_is_refused_or_read(made: MadeState, data: st.DataObject) -> None:
    content = bytearray(made.file(list(range(made.cells))))
    at = data.draw(st.integers(0, len(content) // 4 - 1)) * 4
    struct.pack_into("<I", content, at, data.draw(st.integers(0, 2**32 - 1)))
    try:
        read_slot_file(bytes(content))
    except ModelError as error:
        assert str(error)


@pytest.mark.parametrize("packed", [True, False])
def test_a_slot_file_has_tokens_and_a_state(packed: bool) -> None:
    made = MadeState(cells=5)
    tokens, state = read_slot_file(made.file([5, 6, 7, 8, 9], packed=packed))
    assert tokens.tolist() == [5, 6, 7, 8, 9]
    assert state.cells == 5
    assert slot_file_head(state.layout, tokens) == made.file([5, 6, 7, 8, 9], packed=False)[:32]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no slot file at all, but long enough to be one", "not a slot file"),
        (MadeState(version=3).file(list(range(40))), "version 3"),
        (MadeState().file(list(range(39))), "39 tokens and 40 cells"),
        (MadeState().file(list(range(40))) + MadeState().state(), "sliding windows or recurrent"),
        (MadeState(first=3).file(list(range(40))), "it cannot be cut"),
        (MadeState(cells=2, positions=[0, 7]).file([1, 2]), "not consecutive"),
        (MadeState(cells=2).file([1, -5]), "below 0"),
    ],
)
def test_odd_states_are_refused_with_the_reason(content: bytes, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_slot_file(content)


def test_media_are_refused() -> None:
    made = MadeState(cells=2)
    words = [-1, 1, 2, 5, 6, 1, 99]
    head = struct.pack(f"<III{len(words)}i", 0x67677371, 4, len(words), *words)
    with pytest.raises(ModelError, match="images"):
        read_slot_file(head + made.state())


def test_layouts_that_differ_have_other_digests() -> None:
    made = [MadeState(), MadeState(transposed=True), MadeState(version=2), MadeState(k_row=13)]
    layouts = [read_state(one.state(), one.version).layout for one in made]
    assert len({layout.digest() for layout in layouts}) == len(layouts)
