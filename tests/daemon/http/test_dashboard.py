"""The dashboard in a real browser: numbers, console, requests, accessibility, width."""

from collections.abc import Iterator
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.browser import BINARY, Browser
from tests.support.http_daemon import HttpDaemon
from tests.support.store_contract import TOKENS, flood, prompt, put, small, space_of, tiers
from tests.support.waiting import until

from kvdepot.core.first_token import FirstToken, Reason

TOKEN = "0123456789abcdef-token"
IMAGES = Path(__file__).parents[3] / "docs" / "images"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="no Chromium is installed: apt-get install chromium"),
]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path) as opened:
        yield opened


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[HttpDaemon]:
    """A daemon that has done something, and rests."""
    ssd = {**small(tmp_path)["ssd"], "path": [str(tmp_path / "a"), str(tmp_path / "b")]}
    ssd |= {"promote": False, "writes_per_day": 5000.0}
    assumed = {"prefill_tokens_per_s": 100.0, "gpu_watts": 700.0}
    with HttpDaemon(tmp_path, ssd=ssd, ledger=assumed) as daemon:
        space = space_of(daemon.store)
        for number in range(6):
            keys = prompt(space, number, 8)
            put(daemon.store, keys)
            daemon.store.sessions.name(f"chat {number}", keys)
            daemon.store.match(keys)
            tiers(daemon.store, keys[:5])
        assert daemon.store.flush()
        flood(daemon.store, space, 100)
        daemon.store.sessions.name("chat 0 again", prompt(space, 0, 8)[:3])
        tiers(daemon.store, prompt(space, 0, 8))
        daemon.store.match(prompt(space, 77, 3))
        for number in range(3):
            first = FirstToken(1000 + number, 900, 0.2, 0.15, 1.7, Reason.FETCH)
            daemon.store.admin.report_first_token(first)
        daemon.store.admin.report_first_token(
            FirstToken(64, 0, 0.5, inf, inf, Reason.PREFILL_UNKNOWN)
        )
        assert daemon.store.flush()
        yield daemon


def opened(browser: Browser, url: str) -> None:
    browser.call("Page.navigate", url=url)
    until(lambda: bool(browser.evaluate("Number(document.body?.dataset.shown || 0) > 0")))


def scraped(daemon: HttpDaemon) -> dict[str, float]:
    """By name and labels, in the order of the text."""
    families = text_string_to_metric_families(daemon.get("/metrics").text)
    return {
        one.name
        + ("{" + ",".join(f'{k}="{v}"' for k, v in one.labels.items()) + "}" if one.labels else ""):
        one.value
        for family in families
        for one in family.samples
    }  # fmt: skip


def test_numbers_are_those_of_the_metrics(browser: Browser, busy: HttpDaemon) -> None:
    opened(browser, busy.url)
    shown: list[list[str]] = browser.evaluate(
        "[...document.querySelectorAll('[data-metric]')]"
        ".map(e => [e.dataset.metric, e.dataset.value, e.textContent])"
    )
    metrics = scraped(busy)
    assert len(shown) > 30
    for name, value, _ in shown:
        assert metrics[name] == pytest.approx(float(value), rel=1e-12), name
    texts = {name: text for name, _, text in shown}
    assert texts["kvdepot_blocks"] == f"{metrics['kvdepot_blocks']:,.0f}"
    assert texts["kvdepot_hit_ratio"] == f"{100 * metrics['kvdepot_hit_ratio']:.1f} %"
    assert texts['kvdepot_get_blocks_total{tier="ssd"}'] == "8"
    tokens = browser.evaluate("document.getElementById('tokens').textContent")
    assert tokens == f"{(6 * 5 + 8) * TOKENS:,}"
    assert texts["kvdepot_first_token_measured_seconds_total"] == "200 ms"
    assert texts["kvdepot_first_token_recompute_seconds_total"] == "1.70 s"
    log = "[...document.querySelectorAll('#log tr')].map(r => r.innerText.split('\\t').slice(1))"
    newest, second = browser.evaluate(log)[:2]
    assert newest[:6] == ["prefill unknown", "64", "0", "–", "500 ms", "–"]
    assert second[:6] == ["fetch", "1,002", "900", "150 ms", "200 ms", "1.70 s"]
    assert second[6] == Reason.FETCH.value
    assert browser.evaluate("document.querySelectorAll('#sessions tr').length") == 10
    assert browser.evaluate("document.querySelectorAll('#drives tr').length") == 2
    assert browser.complaints() == []
    assert all(one.startswith((busy.url, "data:", "about:")) for one in browser.requested())


def test_it_goes_on_and_pauses(browser: Browser, busy: HttpDaemon) -> None:
    opened(browser, busy.url)
    put(busy.store, prompt(space_of(busy.store), 500, 3))
    shown = "document.querySelector('[data-metric=kvdepot_blocks]').textContent"
    until(lambda: bool(browser.evaluate(shown) == f"{busy.store.stats()['blocks']:,}"))
    browser.evaluate("document.getElementById('pause').click()")
    assert (
        browser.evaluate("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
    )


def test_the_token_is_asked_for(browser: Browser, tmp_path: Path) -> None:
    with HttpDaemon(tmp_path / "", TOKEN) as daemon:
        browser.call("Page.navigate", url=daemon.url)
        until(lambda: browser.evaluate("document.getElementById('token-form')?.hidden") is False)
        browser.evaluate(
            f"document.getElementById('token').value = '{TOKEN}';"
            "document.getElementById('token-form').requestSubmit()"
        )
        until(lambda: bool(browser.evaluate("Number(document.body.dataset.shown || 0) > 0")))
        assert browser.evaluate("document.getElementById('token-form').hidden") is True


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_keeps_people_out(browser: Browser, busy: HttpDaemon, dark: bool) -> None:
    """axe-core, at both colours and at the width of a phone."""
    axe = resources.files("axe_core_python").joinpath("axe.min.js").read_text("utf-8")
    for width in (1200, 400):
        browser.view(width, 900, dark=dark)
        opened(browser, busy.url)
        browser.evaluate(axe + "; 0")
        found: list[Any] = browser.evaluate("axe.run().then(r => r.violations)")
        told = [(one["id"], one["impact"], [n["html"] for n in one["nodes"]]) for one in found]
        assert told == []
        wide = browser.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, "only tables may scroll sideways"


def test_every_control_is_reached_by_keyboard(browser: Browser, busy: HttpDaemon) -> None:
    opened(browser, busy.url)
    reached = []
    for _ in range(8):
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab",
                         windowsVirtualKeyCode=9)  # fmt: skip
        reached.append(browser.evaluate("document.activeElement.textContent.slice(0, 20).trim()"))
    assert {"Skip to the numbers", "Pause", "metrics", "API"} <= set(reached)


def test_the_screenshots_in_the_documents_are_small() -> None:
    for name in ("dashboard-light", "dashboard-dark", "dashboard-phone"):
        content = (IMAGES / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) < 300_000
