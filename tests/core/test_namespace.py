"""A namespace separates, hides its secret, and says what it is."""

import json
import pickle
from typing import Any

import pytest

from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import FORMAT_VERSION, Namespace, fingerprint
from kvdepot.errors import ConfigError

LAYOUT = KVLayout.gqa(layers=2, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16)
SECRET = b"do not show me"


def test_secret_is_never_shown() -> None:
    space = Namespace(model="m", layout=LAYOUT, tenant="t", secret=SECRET)
    for text in (repr(space), str(space), json.dumps(space.description())):
        assert "do not show" not in text
        assert SECRET.hex() not in text
        assert space._chain_key.hex() not in text
        assert repr(space._chain_key) not in text


def test_description_is_json_and_complete() -> None:
    space = Namespace(model="m", layout=LAYOUT, secret=SECRET, extra=(("isa", "vec"),))
    told = json.loads(json.dumps(space.description()))
    assert told.pop("tag") == space.tag.hex()
    assert KVLayout.from_description(told.pop("layout")) == LAYOUT
    assert told == {
        "format": FORMAT_VERSION,
        "model": "m",
        "fingerprint": "",
        "shard_rank": 0,
        "shard_size": 1,
        "adapter": "",
        "tenant": "",
        "keyed": True,
        "extra": {"isa": "vec"},
    }


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_a_description_gives_the_namespace_back(secret: bytes) -> None:
    space = Namespace(model="m", layout=LAYOUT, secret=secret, extra=(("isa", "vec"),))
    told = json.loads(json.dumps(space.description()))
    assert Namespace.from_description(told, secret) == space
    for wrong in (b"another", SECRET[:-1]):
        with pytest.raises(ConfigError, match="secret"):
            Namespace.from_description(told, wrong)


@pytest.mark.parametrize("field", ["tag", "layout", "model", "extra", "shard_rank"])
@pytest.mark.parametrize("value", [None, 7, "no", [1], {"a": 1}])
def test_what_describes_nothing_is_refused(field: str, value: object) -> None:
    told = Namespace(model="m", layout=LAYOUT).description()
    with pytest.raises(ConfigError):
        Namespace.from_description({**told, field: value})
    del told[field]
    with pytest.raises(ConfigError):
        Namespace.from_description(told)


def test_equal_fields_are_one_namespace() -> None:
    one = Namespace(model="m", layout=LAYOUT, extra=(("b", "2"), ("a", "1")))
    two = Namespace(model="m", layout=LAYOUT, extra=(("a", "1"), ("b", "2")))
    assert one == two
    assert hash(one) == hash(two)
    assert one.keys(range(64)) == two.keys(range(64))
    assert one.extra == (("a", "1"), ("b", "2"))


def test_dtype_and_block_tokens_come_from_the_layout() -> None:
    space = Namespace(model="m", layout=LAYOUT)
    assert (space.dtype, space.block_tokens) == ("bfloat16", 16)


def test_pickle_keeps_the_keys() -> None:
    space = Namespace(model="m", layout=LAYOUT, secret=SECRET)
    space.keys(range(64))
    assert pickle.loads(pickle.dumps(space)).keys(range(64)) == space.keys(range(64))


def test_fields_cannot_run_into_each_other() -> None:
    one = Namespace(model="m", layout=LAYOUT, adapter="ab", tenant="c")
    two = Namespace(model="m", layout=LAYOUT, adapter="a", tenant="bc")
    assert one.tag != two.tag


def test_secrets_that_differ_only_in_padding_differ() -> None:
    tags = {
        Namespace(model="m", layout=LAYOUT, secret=secret).tag
        for secret in (b"", b"\0", b"a", b"a\0", b"a" * 64, b"a" * 65, b"a" * 66)
    }
    assert len(tags) == 7


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"model": "\ud800"}, "model"),
        ({"layout": None}, "layout"),
        ({"secret": "text"}, "secret"),
        ({"shard_rank": 2, "shard_size": 2}, "shard_rank"),
        ({"shard_rank": -1}, "shard_rank"),
        ({"shard_size": 0}, "shard_rank"),
        ({"tenant": None}, "tenant"),
        ({"extra": (("a", 1),)}, "extra.a"),
        ({"extra": (("a", "1"), ("a", "2"))}, "extra"),
        ({"extra": "ab"}, "extra"),
        ({"extra": (("a",),)}, "extra"),
    ],
    ids=repr,
)
def test_bad_fields(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Namespace(**{"model": "m", "layout": LAYOUT, **fields})
    assert caught.value.path == path


def test_golden_fingerprint() -> None:
    # By hand: BLAKE2b-256, person "kvdepot-model-v1", over the encoded pair of
    # '{"a":[1,{"b":2}],"dtype":"bfloat16"}' and "main".
    config = {"torch_dtype": "bfloat16", "a": [1, {"b": 2, "use_cache": True}], "use_cache": False}
    expected = "5c6f89024d3feb6d7b4d2020079c6de3f69d81310ae5d9eb7349c098879f0e6f"
    assert fingerprint(config, "main") == expected


def test_fingerprint_ignores_only_what_changes_nothing() -> None:
    base = {"hidden_size": 8, "rope_theta": 1e4, "dtype": "bfloat16", "text_config": {"x": None}}
    same: list[dict[str, Any]] = [
        {**base, "transformers_version": "5.0", "_name_or_path": "/here", "_commit_hash": "c"},
        dict(reversed(base.items())),
        {**base, "text_config": {"x": None, "transformers_version": "4.1"}},
        {"torch_dtype" if name == "dtype" else name: value for name, value in base.items()},
    ]
    other: list[dict[str, Any]] = [
        {**base, "hidden_size": 9},
        {**base, "dtype": "float16"},
        {**base, "text_config": {"x": 0}},
        {**base, "more": None},
    ]
    assert {fingerprint(config) for config in same} == {fingerprint(base)}
    assert fingerprint(base) not in {fingerprint(config) for config in other}
    assert len({fingerprint(base, revision) for revision in ("", "a", "b")}) == 3


def test_fingerprint_of_what_is_not_json() -> None:
    with pytest.raises(ConfigError, match="fingerprinted"):
        fingerprint({"a": object()})
