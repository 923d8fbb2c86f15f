"""The page of engines says what the tests have answered."""

import json

from tests.adapters.engines_page import PAGE, RESULTS, page, read, served_models


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()), served_models())


def test_points_are_read_from_every_form_of_answer() -> None:
    plain = '{"point": "f16: cold", "ok": true}\n{"point": "f16: warm", "ok": false}\n'
    assert read(plain) == {"f16: cold": True, "f16: warm": False}
    assert read(plain + '{"ok": false, "points": [{"point": "a", "ok": true}]}') == {"a": True}
    nested = {"1": {"ok": True, "checks": {"salted": {"ok": True}}}, "9": {"ok": None, "see": "x"}}
    assert read(json.dumps({"ok": True, "points": nested})) == {"salted": True}
    assert read("a log\n") == {}


def test_pytest_is_read_too() -> None:
    cases = (
        '<testcase classname="t" name="a"/>'
        '<testcase classname="t" name="b"><failure/></testcase>'
        '<testcase classname="t" name="c"><skipped/></testcase>'
    )
    text = f'<?xml version="1.0"?><testsuites><testsuite>{cases}</testsuite></testsuites>'
    assert read(text) == {"t::a": True, "t::b": False}


def made(**points: bool) -> str:
    result = {"version": "1", "date": "2026-11-16", "points": points}
    return page({"llama": result}, 0)


def test_a_feature_is_named_where_all_its_tests_passed() -> None:
    text = made(**{"f16: cold": True, "q8_0: cold": True, "q8_0: warm": True})
    line = "| 1 | 2026-11-16 | 3 of 3 | SmolLM2 | f16, q8_0 | – |"
    assert line in text
    assert "Points that failed" not in text


def test_one_that_failed_is_named_as_such() -> None:
    text = made(**{"f16: cold": True, "q8_0: cold": True, "q8_0: warm": False})
    assert "| 2 of 3 | SmolLM2 | f16 | *not right*: q8_0 |" in text
    assert "- llama.cpp, proxy: q8_0: warm\n" in text


def test_an_engine_without_a_run_says_so() -> None:
    assert "[SGLang, HiCache](guides/sglang.md) | – | not run |" in made()


def test_parts_that_were_run_are_named() -> None:
    result = {"version": "1", "date": "2026-11-16", "points": {"audit: a": True}, "parts": "audit"}
    text = page({"vllm": result}, 0)
    assert "`python tests/e2e/vllm_connector.py --json audit`" in text
    assert "`python tests/e2e/llama_proxy.py --json`" in text
    assert "| 1 of 1 | – | – | audit |" in text
