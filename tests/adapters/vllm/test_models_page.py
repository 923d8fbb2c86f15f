"""The page of supported models says what was seen."""

import json
from typing import Any

from tests.adapters.vllm.models_page import PAGE, RESULTS, page

SERVED = {
    "outcome": "served",
    "groups": ["full", "window 64", "window 64"],
    "cached": 480,
    "vllm_cached": 480,
    "bytes_a_token": 1540,
    "bytes_a_token_of_all_layers": 3072,
    "control": 0.5,
}


SEEN = {"release": "0.32.0", "date": "2026-11-16", "architectures": 118}


def made(**rows: Any) -> str:
    return page({"rows": rows, **SEEN})


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()))


def test_a_model_that_is_served_has_its_figures() -> None:
    text = made(One=SERVED, Two=SERVED | {"control": 1e-5}, Six=SERVED | {"dtype": "bfloat16"})
    assert "| One | full, 2 × window 64 | 480, 480 | 1,540, 3,072 | yes |" in text
    assert "| Two | full, 2 × window 64 | 480, 480 | 1,540, 3,072 | no |" in text
    assert "Tried were 3 of 118: 3 served." in text
    assert "| Six | full, 2 × window 64 | 480, 480 | 1,540, 3,072 (bfloat16) | yes |" in text
    assert "##" not in text


def test_others_have_their_reason_in_a_table_that_holds() -> None:
    text = made(
        One={"outcome": "refused", "reason": "RSWASpec: not a KV cache | that can be kept"},
        Two={"outcome": "not run", "reason": "OSError: '/root/a folder' is `gone`"},
        Three={"outcome": "failed", "reason": "an answer is another one"},
    )
    assert "## Refused by kvdepot" in text
    assert "| One | RSWASpec: not a KV cache / that can be kept |" in text
    assert "/root" not in text
    assert "## Runs in vLLM, but not right with kvdepot" in text


def test_rows_of_several_calls_are_marked() -> None:
    assert "from several calls" in made(One=SERVED)
    assert "from several calls" in page({"rows": {"One": SERVED}, "calls": 2, **SEEN})
    assert "All rows are from one call" in page({"rows": {"One": SERVED}, "calls": 1, **SEEN})
