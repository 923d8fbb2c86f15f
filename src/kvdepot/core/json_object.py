"""JSON objects as they lie on volumes: read with care, because their bytes may be anything."""

import json
from typing import Any, NoReturn


def parse_object(text: bytes) -> dict[str, Any]:
    """A JSON object. ValueError if the text is none, is nested too deep or has an odd number."""
    try:
        found = json.loads(text.decode(), parse_constant=_no_number)
        json.dumps(found, allow_nan=False)  # 1e999 is no number either
    except RecursionError as error:
        raise ValueError("is nested too deep") from error
    if isinstance(found, dict):
        return found
    raise ValueError("is no JSON object")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
