"""Parses JSON objects from volumes, whose bytes may be damaged or forged."""

import json
from typing import Any, NoReturn


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. ValueError if it is malformed, nested too deep or
    has NaN or infinity.
    """
    try:
        found = json.loads(text.decode(), parse_constant=_no_number)
        json.dumps(found, allow_nan=False)  # 1e999 was parsed as infinity
    except RecursionError as error:
        raise ValueError("is nested too deep") from error
    if isinstance(found, dict):
        return found
    raise ValueError("is not a JSON object")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
