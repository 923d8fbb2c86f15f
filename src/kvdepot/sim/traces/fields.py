"""Fields of a trace line, checked: a bad one says what it is and what it should be."""

import json
import math
from typing import Any, cast

from kvdepot.sim.traces.trace_file import BadLine

Fields = dict[str, Any]


def parse(line: str) -> Fields:
    """The object on a line."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadLine(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadLine("not a JSON object")
    return cast(Fields, value)


def count(fields: Fields, name: str) -> int:
    """A whole number that is not negative."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadLine(f"{name} is {value!r}, and should be a whole number from 0 on")
    return value


def seconds(fields: Fields, name: str) -> float:
    """A number that is not negative."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadLine(f"{name} is {value!r}, and should be a number")
    if not math.isfinite(value) or value < 0:
        raise BadLine(f"{name} is {value!r}, and should be a number from 0 on")
    return float(value)


def items(fields: Fields, name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise BadLine(f"{name} is {type(value).__name__}, and should be a list")
    return value
