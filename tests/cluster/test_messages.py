"""Messages between stores of a site: what was packed comes back, all else is refused."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.cluster.messages import (
    KEYS_MAX,
    MESSAGE_BYTES_MAX,
    TOKENS_MAX,
    ChangedMessage,
    HintMessage,
    MalformedMessageError,
)
from kvdepot.testing.images import make_key

KEYS = tuple(map(make_key, range(3)))


@pytest.mark.parametrize(
    "what",
    [
        {"session": "chat 7", "tenant": "acme"},
        {"keys": KEYS},
        {"tokens": (0, 5, (1 << 32) - 1), "model": "m"},
    ],
)
def test_a_hint_comes_back_as_it_was(what: dict[str, Any]) -> None:
    hint = HintMessage("b", 2.5, **what)
    assert HintMessage.parse(hint.pack()) == hint


def test_a_change_comes_back_as_it_was() -> None:
    assert ChangedMessage.parse(ChangedMessage("abc").pack()) == ChangedMessage("abc")


def test_the_longest_prompts_fit_in_a_message() -> None:
    keys = HintMessage("b", 1.0, keys=tuple(map(make_key, range(KEYS_MAX))))
    tokens = HintMessage("b", 1.0, tokens=tuple(range(100_000, 100_000 + TOKENS_MAX)))
    for hint in (keys, tokens):
        assert len(hint.pack()) <= MESSAGE_BYTES_MAX


GOOD: dict[str, Any] = {"v": 1, "node": "b", "within_s": 2, "tokens": [1, 2]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"v": 2},
        {"v": None},
        {"node": 7},
        {"node": "b\n"},
        {"node": "b" * 500},
        {"within_s": -1},
        {"within_s": True},
        {"within_s": "soon"},
        {"within_s": 1e9},
        {"within_s": float("nan")},
        {"tokens": []},
        {"tokens": [-1]},
        {"tokens": [1 << 32]},
        {"tokens": [1.5]},
        {"tokens": [True]},
        {"tokens": {"a": 1}},
        {"session": "both"},
        {"keys": ["00" * 32]},
        {"keys": ["00"], "tokens": []},
        {"keys": ["zz" * 32], "tokens": []},
        {"keys": [7], "tokens": []},
        {"keys": ["00" * 32] * (KEYS_MAX + 1), "tokens": []},
    ],
)
def test_what_is_no_hint_is_refused(wrong: dict[str, Any]) -> None:
    HintMessage.parse(json.dumps(GOOD).encode())
    with pytest.raises(MalformedMessageError):
        HintMessage.parse(json.dumps({**GOOD, **wrong}).encode())


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b"7", b"{", b"[" * 5000, b" " * 1_000_001])
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    for kind in (ChangedMessage, HintMessage):
        with pytest.raises(MalformedMessageError):
            kind.parse(raw)


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
    lambda some: st.lists(some) | st.dictionaries(
        st.sampled_from(["v", "node", "within_s", "keys", "tokens", "session", "x"]), some
    ),
))  # fmt: skip
def test_anything_is_a_message_or_refused(told: Any) -> None:
    raw = told if isinstance(told, bytes) else json.dumps(told).encode()
    for kind in (ChangedMessage, HintMessage):
        with contextlib.suppress(MalformedMessageError):
            kind.parse(raw)
