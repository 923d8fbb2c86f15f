"""Requests made up from the OpenAPI document, sensible and not: none ends as 500."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.http_daemon import HttpDaemon

from kvdepot.server.http.api import ENDPOINTS, Endpoint, Field
from kvdepot.testing.store_contract import prompt, put, space_of

TOKEN = "0123456789abcdef-token"
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
WRONG = ANYTHING.filter(lambda value: not (isinstance(value, str) and value.startswith("/")))
pytestmark = pytest.mark.slow


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[HttpDaemon]:
    with HttpDaemon(tmp_path, TOKEN) as one:
        keys = prompt(space_of(one.store), 1, 4)
        put(one.store, keys)
        one.store.session("chat", keys)
        yield one


def fitting(field: Field) -> st.SearchStrategy[Any]:
    """Values that the document allows."""
    schema = field.schema
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema["type"] in ("integer", "number"):
        return st.integers(schema["minimum"], schema["maximum"])
    if schema["type"] == "array":
        items = schema["items"]
        if items["type"] == "integer":
            return st.lists(st.integers(items["minimum"], items["maximum"]), min_size=1)
        return st.lists(st.from_regex(items["pattern"], fullmatch=True), min_size=1)
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True)
    known = st.sampled_from(["chat", "ssd", "dram", "8MiB", "/nowhere/at/all", "../../etc/passwd"])
    # A drive that is added is a folder that is made: none where the tests run as root.
    return known | st.text(min_size=1, max_size=40).map(lambda text: text.lstrip("/") or "x")


@st.composite
def requests(draw: st.DrawFn) -> tuple[Endpoint, str, Any]:
    endpoint = draw(st.sampled_from(ENDPOINTS))
    values = {}
    for field in endpoint.fields:
        if field.required or draw(st.booleans()):
            values[field.name] = draw(fitting(field) if draw(st.integers(0, 3)) else WRONG)
    places = {field.name: field.place for field in endpoint.fields}
    path = endpoint.path
    for name, place in places.items():
        if place == "path":
            path = path.replace(f"{{{name}}}", quote(str(values[name]), safe="") or "x")
    query = "&".join(
        f"{quote(name)}={quote(str(value))}"
        for name, value in values.items()
        if places[name] == "query"
    )
    inside = {name: value for name, value in values.items() if places[name] == "body"}
    body: Any = draw(WRONG) if not draw(st.integers(0, 5)) else inside
    return endpoint, path + (f"?{query}" if query else ""), body


def test_no_request_ends_as_an_error_of_ours(daemon: HttpDaemon) -> None:
    statuses: dict[int, int] = {}

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(requests())
    def fuzz(asked: tuple[Endpoint, str, Any]) -> None:
        endpoint, path, body = asked
        sent = None if endpoint.method == "GET" else json.dumps(body).encode()
        media = "application/octet-stream" if endpoint.archive else "application/json"
        reply = daemon.ask(endpoint.method, path, sent, content_type=media)
        if reply.headers.get("content-type") == "application/octet-stream":
            assert reply.status == 200 and reply.body.startswith(b"KVSESSN"), path
            statuses[200] = statuses.get(200, 0) + 1
            return
        assert reply.status in (200, 202, 400, 404, 405, 409), (reply.status, reply.text)
        assert "root:" not in reply.text and "Traceback" not in reply.text
        assert isinstance(reply.json, dict)
        statuses[reply.status] = statuses.get(reply.status, 0) + 1

    fuzz()
    assert statuses[200] > 30 and statuses[400] > 30
    assert daemon.get("/healthz").status == 200
    assert daemon.store.check()
