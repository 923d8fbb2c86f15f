"""The proxy before a real llama-server: the same tokens, cold, restored, and after a kill; what
cannot be cut is refused.

Each token is computed by itself (n_ubatch=1): llama.cpp's results depend on how many tokens it
computes at once, and only then are greedy tokens the same whatever was restored.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.support.llama_models import write_window_model
from tests.support.llama_server import LlamaServer, ask
from tests.support.waiting import until

import kvdepot
from kvdepot.adapters.demo import smollm2
from kvdepot.adapters.llama_cpp.http_relay import ProxyServer
from kvdepot.adapters.llama_cpp.proxy import LlamaProxy
from kvdepot.adapters.llama_cpp.server_link import LinkSettings
from kvdepot.core.depot import Depot

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow

DOCUMENT = "The lighthouse keeper counts ships, gulls and storms, and writes them into a book. " * 2
KINDS: dict[str, dict[str, Any]] = {
    "f16, split": {"n_parallel": 2},
    "q8_0, unified": {
        "n_parallel": 2,
        "kv_unified": True,
        "cache_type_k": "q8_0",
        "cache_type_v": "q8_0",
    },
    "q4_0 and f16, without flash attention": {
        "flash_attn_type": "disabled",
        "cache_type_k": "q4_0",
    },
}


def answer(url: str, question: str) -> tuple[str, int]:
    """What it says, and how many tokens of the prompt were not computed."""
    messages = [{"role": "user", "content": DOCUMENT + question}]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
    found = ask(url, "/v1/chat/completions", body)
    return found["choices"][0]["message"]["content"], found["timings"]["cache_n"]


@contextmanager
def proxy_before(
    server: LlamaServer, slots: Path, depot: Depot
) -> Iterator[tuple[LlamaProxy, str]]:
    """A proxy in this process, and where it listens."""
    proxy = LlamaProxy(LinkSettings(server.url, slots, block_tokens=16), depot)
    front = ProxyServer(("127.0.0.1", 0), proxy)
    thread = Thread(target=front.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield proxy, f"http://127.0.0.1:{front.server_address[1]}"
    finally:
        front.shutdown()
        front.server_close()
        thread.join()
        proxy.close()


@pytest.fixture
def depot() -> Iterator[Depot]:
    with kvdepot.open(dram={"capacity": "64MiB", "prefault": False, "huge_pages": "never"}) as made:
        yield made


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    path = tmp_path / "slots"
    path.mkdir(mode=0o700)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_with_and_without(kind: str, slots: Path, depot: Depot) -> None:
    settings = {"n_ctx": 1024, "n_ubatch": 1, **KINDS[kind]}
    model = smollm2.gguf_file()
    with (
        LlamaServer(model, slots, **settings) as server,
        proxy_before(server, slots, depot) as (proxy, url),
    ):
        until(lambda: bool(proxy.status()["ready"]))
        cold, cached = answer(url, "What does the keeper count?")
        assert cached == 0
        until(lambda: proxy.status()["stored_blocks"] >= 3)
        server.kill()
        with LlamaServer(model, slots, port=server.port, **settings):
            until(lambda: bool(proxy.status()["ready"]))
            warm, cached = answer(url, "What does the keeper count?")
            assert (warm, cached >= 48) == (cold, True)
            other, cached = answer(url, "Where does he write?")
            assert cached >= 48
            assert proxy.status()["failed"] == 0
            direct = f"http://127.0.0.1:{server.port}"
            for slot in range(settings.get("n_parallel", 1)):
                ask(direct, f"/slots/{slot}?action=erase", {})
            assert answer(direct, "Where does he write?")[0] == other


def test_conversations_that_end_together_wait_for_no_save(slots: Path, depot: Depot) -> None:
    """llama-server forgets one of several saves that it has put off."""
    questions = [f"What is on page {number}?" for number in range(16)]
    with (
        LlamaServer(smollm2.gguf_file(), slots, n_ctx=2048, n_parallel=4) as server,
        proxy_before(server, slots, depot) as (proxy, url),
    ):
        until(lambda: bool(proxy.status()["ready"]))
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda question: answer(url, question), questions))
        assert len(found) == len(questions)
        until(lambda: not list(slots.glob("kvdepot-*")))


@pytest.fixture(scope="module")
def window_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("model") / "window.gguf"
    write_window_model(model)
    # A file that seems newer than the server's process is refused; the kernel counts its start in
    # hundredths of a second.
    until(lambda: time.time() > model.stat().st_ctime + 2)
    return model


@pytest.mark.parametrize(("flash", "whole"), [("enabled", False), ("disabled", True)])
def test_sliding_windows_are_refused_with_the_reason(
    flash: str, whole: bool, slots: Path, depot: Depot, window_model: Path
) -> None:
    """Also where the server keeps all of their tokens (--swa-full); requests are passed on."""
    settings = {"n_parallel": 2, "swa_full": whole, "flash_attn_type": flash}
    with (
        LlamaServer(window_model, slots, n_ctx=1024, **settings) as server,
        proxy_before(server, slots, depot) as (proxy, url),
    ):
        until(lambda: "sliding windows" in proxy.status()["reason"])
        body = {"prompt": "abc" * 60, "max_tokens": 3, "temperature": 0, "cache_prompt": False}
        text = ask(url, "/v1/completions", body)["choices"][0]["text"]
        assert text == ask(server.url, "/v1/completions", body)["choices"][0]["text"]
        status = proxy.status()
        assert (status["ready"], status["stored_blocks"], status["failed"]) == (False, 0, 0)
