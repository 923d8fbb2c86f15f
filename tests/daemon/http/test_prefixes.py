"""Which prefix of a prompt is here: asked by routers over HTTP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.http_daemon import HttpDaemon
from tests.support.store_contract import BLOCK_BYTES, LAYOUT, TOKENS

from kvdepot.core.depot import NamespaceHandle
from kvdepot.daemon.http.guard import RATE, AccessRules, Guard
from kvdepot.testing.images import payload_for

TOKEN = "0123456789abcdef-token"
PROMPT = list(range(300, 300 + 6 * TOKENS))
SECRET = "c0ffee" * 8


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[HttpDaemon]:
    with HttpDaemon(tmp_path, TOKEN, tenants={"t": {"secret_hex": SECRET}}) as one:
        yield one


def put(daemon: HttpDaemon, space: NamespaceHandle, ids: list[int]) -> None:
    keys = space.keys(ids)
    payloads = [payload_for(key, BLOCK_BYTES) for key in keys]
    assert all(daemon.store.put_many(keys, payloads, timeout_s=60.0))


def query(daemon: HttpDaemon, ids: list[int], **more: Any) -> Any:
    reply = daemon.ask("POST", "/api/prefix", {"token_ids": ids, **more})
    assert reply.status == 200, reply.text
    return reply.json


def test_the_longest_prefix_is_told_by_tier_with_a_time(daemon: HttpDaemon) -> None:
    store = daemon.store
    space = store.namespace(model="m", layout=LAYOUT)
    put(daemon, space, PROMPT[: 4 * TOKENS])
    assert store.flush(60.0)
    lookups = store.stats()["traffic"]["lookups"]
    (row,) = query(daemon, PROMPT)["namespaces"]
    assert (row["model"], row["tokens"], row["memory_tokens"]) == ("m", 32, 32)
    assert row["tiers"] == {"dram": 32} and row["bytes"] == 4 * BLOCK_BYTES
    assert 0 < row["expected_s"] < 1
    store.inspect().drop_from_memory(space.keys(PROMPT)[2:4])
    found = query(daemon, PROMPT)
    (row,) = found["namespaces"]
    assert found["tokens"] == 32
    assert (row["memory_tokens"], row["tiers"]) == (16, {"dram": 16, "ssd": 16})
    drive = store.inspect().volumes.facts(0)
    assert (row["expected_s"] is None) == (not drive.read_bytes_per_s)
    assert query(daemon, [1, *PROMPT])["tokens"] == 0
    assert query(daemon, PROMPT[: TOKENS - 1])["tokens"] == 0
    assert store.stats()["traffic"]["lookups"] == lookups, "routers' questions are no lookups"


def test_namespaces_are_told_apart(daemon: HttpDaemon) -> None:
    store = daemon.store
    first = store.namespace(model="m", layout=LAYOUT)
    private = store.namespace(model="m", layout=LAYOUT, tenant="t")
    unknown = store.namespace(model="m", layout=LAYOUT, tenant="u", secret=b"not in the settings")
    put(daemon, first, PROMPT[:TOKENS])
    put(daemon, private, PROMPT[: 2 * TOKENS])
    put(daemon, unknown, PROMPT[: 3 * TOKENS])
    assert query(daemon, PROMPT)["tokens"] == TOKENS
    assert query(daemon, PROMPT, model="other") == {"tokens": 0, "namespaces": []}
    assert query(daemon, PROMPT, model="m", tenant="t")["tokens"] == 2 * TOKENS
    assert query(daemon, PROMPT, namespace=private.tag.hex())["tokens"] == 2 * TOKENS
    assert query(daemon, PROMPT, tenant="u")["namespaces"] == [], "its secret is not known here"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"token_ids": []}, 400),
        ({"token_ids": [-1]}, 400),
        ({"token_ids": [1 << 32]}, 400),
        ({"token_ids": [1.5]}, 400),
        ({"token_ids": [True]}, 400),
        ({"token_ids": "1 2 3"}, 400),
        ({"token_ids": [1], "namespace": "xyz"}, 400),
        ({"token_ids": [1], "secret": "s"}, 400),
        ({"token_ids": [1] * ((1 << 17) + 1)}, 400),
    ],
)
def test_bad_questions_are_refused(daemon: HttpDaemon, body: Any, status: int) -> None:
    reply = daemon.ask("POST", "/api/prefix", body)
    assert reply.status == status and reply.json["error"]


def test_it_needs_the_token_and_is_in_the_document(daemon: HttpDaemon) -> None:
    reply = daemon.ask("POST", "/api/prefix", {"token_ids": [1]}, authorization="Bearer no")
    assert reply.status == 401
    assert "/api/prefix" in daemon.ask("GET", "/openapi.json").json["paths"]


def test_routers_with_the_token_may_ask_as_often_as_they_like() -> None:
    async def app(*_: Any) -> None: ...

    guard = Guard(app, AccessRules(token=TOKEN.encode()), clock=lambda: 0.0)
    headers = [
        (b"authorization", f"Bearer {TOKEN}".encode()),
        (b"content-type", b"application/json"),
    ]

    def status(path: str, sent: list[tuple[bytes, bytes]]) -> int:
        from starlette.datastructures import Headers

        scope = {"type": "http", "path": path, "method": "POST", "headers": sent}
        found = guard._refusal(scope, Headers(scope=scope))
        return 200 if found is None else found.status_code

    asked = range(int(4 * RATE))
    assert {status("/api/prefix", headers) for _ in asked} == {200}
    assert {status("/api/prefix", []) for _ in asked} == {401, 429}
