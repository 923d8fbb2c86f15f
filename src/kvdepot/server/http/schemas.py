"""Checks of what comes in against the endpoints' fields, and the OpenAPI document made of them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import kvdepot
from kvdepot.errors import ConfigError
from kvdepot.server.http.api import ENDPOINTS, Endpoint, Field

_ERROR: Final = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "hint": {"type": "string"}},
    "required": ["error"],
}
_REFUSALS: Final = {
    "400": "the request makes no sense, or cannot be done",
    "401": "a token is needed",
    "403": "changes need a token",
    "404": "there is no such path, tier or session",
    "405": "the path is there for another method",
    "409": "another change is under way",
    "413": "the body is too large",
    "415": "the body is of another media type",
    "421": "the server has another name",
    "429": "too many requests",
    "503": "the daemon stops",
}
_ARCHIVE: Final = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_PLAIN: Final = {
    "/healthz": ("The daemon runs.", "application/json"),
    "/readyz": ("The daemon takes clients.", "application/json"),
    "/metrics": ("Metrics as Prometheus text.", "text/plain"),
    "/openapi.json": ("This document.", "application/json"),
    "/": ("The dashboard.", "text/html"),
}


def parse_body(raw: bytes) -> dict[str, Any]:
    """The object in a body, or ConfigError."""
    try:
        found = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError("body", "is not JSON") from error
    if not isinstance(found, dict):
        raise ConfigError("body", "is not an object")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def checked_values(fields: Sequence[Field], given: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The values of the fields at one place, or ConfigError that says which is wrong."""
    known = {field.name: field for field in fields if field.place == place}
    for name in given:
        if name not in known:
            raise ConfigError(str(name)[:100], f"is not a field; known: {', '.join(known)}")
    for field in known.values():
        if field.required and field.name not in given:
            raise ConfigError(field.name, "is missing")
    return {name: _checked(name, known[name].schema, value) for name, value in given.items()}


def _checked(name: str, schema: Mapping[str, Any], value: Any) -> Any:
    kind = schema["type"]
    if kind == "integer" and isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        value = int(value)  # a query has text only
    if kind in ("integer", "number"):
        numeric = int if kind == "integer" else int | float
        if isinstance(value, bool) or not isinstance(value, numeric):
            raise ConfigError(name, f"is not a {kind}")
        low, high = schema["minimum"], schema["maximum"]
        if not low <= value <= high:
            raise ConfigError(name, f"is not from {low} to {high}")
        return value
    if kind == "array":
        if not isinstance(value, list) or not schema["minItems"] <= len(value):
            raise ConfigError(name, "is not a list with something in it")
        if len(value) > schema["maxItems"]:
            raise ConfigError(name, f"has more than {schema['maxItems']} items")
        return [_checked(name, schema["items"], item) for item in value]
    return _checked_text(name, schema, value)


def _checked_text(name: str, schema: Mapping[str, Any], value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(name, "is not text")
    if "enum" in schema:
        if value not in schema["enum"]:
            raise ConfigError(name, f"is not one of {', '.join(schema['enum'])}")
        return value
    if not schema.get("minLength", 0) <= len(value) <= schema["maxLength"]:
        raise ConfigError(name, f"is empty or longer than {schema['maxLength']} characters")
    if not value.isprintable():
        raise ConfigError(name, "has characters that cannot be printed")
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        raise ConfigError(name, f"is not of the form {schema['pattern']}")
    return value


def openapi() -> dict[str, Any]:
    """The API as an OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for path, (text, media) in _PLAIN.items():
        good = {"description": text, "content": {media: {"schema": {}}}}
        paths[path] = {"get": {"summary": text, "security": [], "responses": _responses(good)}}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvdepot",
            "version": kvdepot.__version__,
            "description": "Watch and change a daemon's store. docs/dashboard.md",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if endpoint.archive and endpoint.method == "GET":
        content = dict(_ARCHIVE)
    good = {"description": endpoint.text, "content": content}
    operation: dict[str, Any] = {"summary": endpoint.text, "responses": _responses(good)}
    if endpoint.method != "GET":
        operation["responses"]["202"] = {
            "description": "It was begun and takes longer; GET /api/change tells how it goes on.",
            "content": content,
        }
        operation["security"] = [{"token": []}]
        inside = [field for field in endpoint.fields if field.place == "body"]
        schema = {
            "type": "object",
            "additionalProperties": False,
            "properties": {f.name: {**f.schema, "description": f.text} for f in inside},
            "required": [field.name for field in inside if field.required],
        }
        sent = _ARCHIVE if endpoint.archive else {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": dict(sent)}
    if endpoint.private:
        operation["security"] = [{"token": []}]
    outside = [field for field in endpoint.fields if field.place != "body"]
    if outside:
        operation["parameters"] = [
            {
                "name": field.name,
                "in": field.place,
                "required": field.required,
                "description": field.text,
                "schema": dict(field.schema),
            }
            for field in outside
        ]
    return operation


def _responses(good: dict[str, Any]) -> dict[str, Any]:
    schema = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refused = {code: {"description": text, "content": schema} for code, text in _REFUSALS.items()}
    return {"200": good, **refused}
