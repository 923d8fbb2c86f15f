"""What must hold for all prompts and all namespaces."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvdepot.core.keys import encode, tag_of
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace

tokens = st.lists(st.integers(0, (1 << 32) - 1), max_size=40)
texts = st.text(max_size=8)
counts = st.integers(1, 40)
layouts = st.one_of(
    st.builds(
        KVLayout.gqa,
        layers=counts,
        kv_heads=counts,
        head_dim=counts,
        dtype=st.sampled_from(["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"]),
        block_tokens=st.integers(1, 5),
        value_head_dim=st.none() | counts,
        sliding_window=st.none() | counts,
    ),
    st.builds(
        KVLayout.mla,
        layers=counts,
        kv_lora_rank=counts,
        qk_rope_head_dim=counts,
        dtype=st.sampled_from(["float16", "bfloat16"]),
        block_tokens=st.integers(1, 5),
    ),
    st.builds(lambda size, count: KVLayout.opaque(size, count), counts, st.integers(1, 5)),
)
spaces = st.builds(
    Namespace,
    model=st.text(min_size=1, max_size=8),
    layout=layouts,
    fingerprint=texts,
    adapter=texts,
    tenant=texts,
    secret=st.binary(max_size=70),
    extra=st.dictionaries(texts, texts, max_size=3).map(lambda pairs: tuple(pairs.items())),
)
nested = st.recursive(
    st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | texts | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)

CHANGES: dict[str, Callable[[Namespace], Any]] = {
    "model": lambda space: space.model + "x",
    "layout": lambda space: (
        replace(space.layout, block_tokens=space.block_tokens, dtype="float32")
        if space.dtype != "float32"
        else replace(space.layout, dtype="float16")
    ),
    "fingerprint": lambda space: space.fingerprint + "\0",
    "shard_rank": lambda space: space.shard_rank + 1,
    "shard_size": lambda space: space.shard_size + 1,
    "adapter": lambda space: space.adapter + "x",
    "tenant": lambda space: space.tenant + " ",
    "secret": lambda space: space.secret + b"\0",
    "extra": lambda space: (*space.extra, ("a name that is long", "")),
}


@given(spaces, tokens)
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(space: Namespace, ids: list[int]) -> None:
    keys = space.keys(ids)
    assert len(keys) == len(ids) // space.block_tokens
    for cut in range(len(ids)):
        assert space.keys(ids[:cut]) == keys[: cut // space.block_tokens]


@given(spaces, tokens, st.integers(0, 40))
def test_a_chain_can_be_continued_anywhere(space: Namespace, ids: list[int], block: int) -> None:
    keys = space.keys(ids)
    if 0 < block <= len(keys):
        rest = ids[block * space.block_tokens :]
        assert space.keys(rest, parent=keys[block - 1]) == keys[block:]


@given(spaces, st.lists(st.integers(0, (1 << 32) - 1), min_size=5, max_size=40), st.data())
def test_one_other_token_changes_its_key_and_all_after(
    space: Namespace, ids: list[int], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(ids) - 1))
    changed = ids.copy()
    changed[place] = data.draw(st.integers(0, (1 << 32) - 1).filter(lambda i: i != ids[place]))
    before, after = space.keys(ids), space.keys(changed)
    block = place // space.block_tokens
    assert before[:block] == after[:block]
    assert not set(before[block:]) & set(after[block:])


@given(spaces)
def test_every_field_changes_the_tag_and_all_keys(space: Namespace) -> None:
    assert set(CHANGES) == {item.name for item in fields(Namespace) if item.init}
    base = replace(space, shard_size=5)
    ids = list(range(20))
    for name, change in CHANGES.items():
        other = replace(base, **{name: change(base)})
        assert other.tag != base.tag, name
        assert not {key[8:] for key in base.keys(ids)} & {key[8:] for key in other.keys(ids)}, name


@given(layouts, layouts)
def test_layouts_are_equal_exactly_when_their_canonical_bytes_are(
    left: KVLayout, right: KVLayout
) -> None:
    assert (left == right) == (left.canonical() == right.canonical())
    assert KVLayout.from_description(left.description()) == left


@given(spaces, st.binary(min_size=1, max_size=70))
def test_keys_need_the_secret(space: Namespace, secret: bytes) -> None:
    owner, guesser = replace(space, secret=secret), replace(space, secret=b"")
    ids = list(range(20))
    assert tag_of(owner.keys(ids)[0]) != tag_of(guesser.keys(ids)[0])
    assert not {key[-16:] for key in owner.keys(ids)} & {key[-16:] for key in guesser.keys(ids)}


@given(nested, nested)
def test_encoding_is_injective(left: Any, right: Any) -> None:
    assert (left == right) == (encode(left) == encode(right))
    assert encode((left,)) != encode((left, right))


@given(st.lists(nested, max_size=3), st.lists(nested, max_size=3))
def test_encodings_can_be_concatenated(left: list[Any], right: list[Any]) -> None:
    together = [b"".join(map(encode, part)) for part in (left, right)]
    assert (left == right) == (together[0] == together[1])
