"""Requests made up from the OpenAPI document, sensible and not: none ends as 500."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.http_daemon import HttpDaemon
from tests.support.store_contract import prompt, put, space_of

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
        one.store.sessions.name("chat", keys)
        yield one


Schema = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """One method of one path, as /openapi.json has it."""

    method: str
    path: str
    fields: dict[str, tuple[str, bool, Schema]]
    """By name: where it goes, whether it is required, and its schema."""
    media: str

    @classmethod
    def all(cls, document: Schema) -> list["Operation"]:
        schemas = document["components"]["schemas"]
        found = []
        for path, methods in document["paths"].items():
            for method, said in methods.items():
                fields = {
                    one["name"]: (one["in"], one.get("required", False), one["schema"])
                    for one in said.get("parameters", ())
                }
                content = said.get("requestBody", {}).get("content", {})
                for body in content.values():
                    name = body["schema"].get("$ref", "").rpartition("/")[2]
                    for field, schema in schemas.get(name, {}).get("properties", {}).items():
                        required = field in schemas[name].get("required", ())
                        whole = (
                            schemas[schema["$ref"].rpartition("/")[2]]
                            if "$ref" in schema
                            else schema
                        )
                        fields[field] = ("body", required, whole)
                found.append(cls(method.upper(), path, fields, next(iter(content), "")))
        return found


def fitting(schema: Schema) -> st.SearchStrategy[Any]:
    """Values that the document allows."""
    schema = next((one for one in schema.get("anyOf", ()) if one.get("type") != "null"), schema)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema["type"] in ("integer", "number"):
        below = schema.get("exclusiveMaximum", math.inf) - 1
        return st.integers(schema["minimum"], int(min(below, schema.get("maximum", below))))
    if schema["type"] == "array":
        return st.lists(fitting(schema["items"]), min_size=1, max_size=20)
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True)
    known = st.sampled_from(["chat", "ssd", "dram", "8MiB", "/nowhere/at/all", "../../etc/passwd"])
    # A drive that is added is a folder that is made: none where the tests run as root.
    return known | st.text(min_size=1, max_size=40).map(lambda text: text.lstrip("/") or "x")


@st.composite
def requests(draw: st.DrawFn, operations: list[Operation]) -> tuple[Operation, str, Any]:
    asked = draw(st.sampled_from(operations))
    values: dict[str, dict[str, Any]] = {"path": {}, "query": {}, "body": {}}
    for name, (place, required, schema) in asked.fields.items():
        if required or draw(st.booleans()):
            values[place][name] = draw(fitting(schema) if draw(st.integers(0, 3)) else WRONG)
    path = asked.path
    for name, value in values["path"].items():
        path = path.replace(f"{{{name}}}", quote(str(value), safe="") or "x")
    query = "&".join(f"{quote(name)}={quote(str(one))}" for name, one in values["query"].items())
    body: Any = draw(WRONG) if not draw(st.integers(0, 5)) else values["body"]
    return asked, path + (f"?{query}" if query else ""), body


def test_no_request_ends_as_an_error_of_ours(daemon: HttpDaemon) -> None:
    statuses: dict[int, int] = {}
    operations = Operation.all(daemon.get("/openapi.json").json)
    assert sum(len(one.fields) for one in operations) > 30

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(requests(operations))
    def fuzz(asked: tuple[Operation, str, Any]) -> None:
        operation, path, body = asked
        sent = None if operation.method == "GET" else json.dumps(body).encode()
        reply = daemon.ask(operation.method, path, sent, content_type=operation.media)
        if reply.headers.get("content-type") == "application/octet-stream":
            assert reply.status == 200 and reply.body.startswith(b"KVSESSN"), path
            statuses[200] = statuses.get(200, 0) + 1
            return
        assert reply.status in (200, 202, 400, 404, 405, 409), (reply.status, reply.text)
        assert "root:" not in reply.text and "Traceback" not in reply.text
        if operation.path != "/metrics":
            assert isinstance(reply.json, dict)
        statuses[reply.status] = statuses.get(reply.status, 0) + 1

    fuzz()
    assert statuses[200] > 30 and statuses[400] > 30
    assert daemon.get("/healthz").status == 200
    assert daemon.store.admin.check()
