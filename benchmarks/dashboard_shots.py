"""Screenshots of the dashboard for docs/images: a store with some traffic, in a real Chromium.

python benchmarks/dashboard_shots.py
"""

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.browser import Browser  # noqa: E402
from tests.support.http_daemon import HttpDaemon  # noqa: E402
from tests.support.store_contract import flood, prompt, put, space_of, tiers  # noqa: E402

from kvdepot.core.first_token import FirstToken, Reason  # noqa: E402

IMAGES: Final = ROOT / "docs" / "images"
SHOTS: Final = (("light", 1100, False), ("dark", 1100, True), ("phone", 400, False))


def traffic(daemon: HttpDaemon, rng: random.Random) -> None:
    """Some turns of some conversations."""
    space = space_of(daemon.store)
    for _ in range(40):
        number = min(rng.randrange(12), rng.randrange(12))
        keys = prompt(space, number, 6 + number)
        daemon.store.match(keys)
        tiers(daemon.store, keys)
        put(daemon.store, keys)
        daemon.store.sessions.name(f"support-{number:02}", keys)
        daemon.store.admin.report_first_token(first_token(rng))


def first_token(rng: random.Random) -> FirstToken:
    """Made up, with times as a vLLM on a large GPU has them."""
    prompt_tokens = rng.randrange(2_000, 24_000)
    recompute_s = prompt_tokens / 9_000
    if rng.random() < 0.15:
        seconds = recompute_s * rng.uniform(0.95, 1.1)
        return FirstToken(prompt_tokens, 0, seconds, recompute_s, recompute_s, Reason.RECOMPUTE)
    predicted_s = 0.04 + 0.12 * recompute_s
    seconds, fetched = predicted_s * rng.uniform(0.85, 1.3), int(prompt_tokens * 0.9)
    return FirstToken(prompt_tokens, fetched, seconds, predicted_s, recompute_s, Reason.FETCH)


def main() -> None:
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        names = ("nvme0", "nvme1")
        ssd = {"path": [str(folder / name) for name in names], "capacity": 24 << 20}
        ssd |= {"segment": 1 << 20, "writes_per_day": 5000.0}
        hdd = {"path": str(folder / "hdd0"), "capacity": 48 << 20, "segment": 2 << 20}
        dram = {"capacity": 8 << 20, "prefault": False, "huge_pages": "never"}
        token = "a token for the screenshots"
        ledger = {"prefill_tokens_per_s": 20.0, "gpu_watts": 700.0}
        with HttpDaemon(folder, token, dram=dram, ssd=ssd, hdd=hdd, ledger=ledger) as daemon:
            traffic(daemon, rng)
            flood(daemon.store, space_of(daemon.store), 400)
            with Browser(folder) as browser:
                for name, width, dark in SHOTS:
                    shoot(daemon, browser, (name, width, dark), token, rng)


def shoot(
    daemon: HttpDaemon,
    browser: Browser,
    shot: tuple[str, int, bool],
    token: str,
    rng: random.Random,
) -> None:
    name, width, dark = shot
    browser.view(width, 800, dark=dark)
    browser.call("Page.navigate", url=daemon.url)
    time.sleep(1.0)
    browser.evaluate(f"sessionStorage.setItem('token', '{token}'); look()")
    for _ in range(4):
        traffic(daemon, rng)
        time.sleep(0.6)
    # A picture of the whole page is long: some rows of its two logs are enough.
    rows = "document.querySelectorAll('#log tr:nth-child(n+6), #events li:nth-child(n+6)')"
    browser.evaluate(f"{rows}.forEach(row => row.remove())")
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / f"dashboard-{name}.png").write_bytes(browser.screenshot())


if __name__ == "__main__":
    main()
