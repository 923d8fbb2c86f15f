"""The proxy before a real llama-server: the same tokens, cold, restored, and after a kill; what
cannot be cut is refused.

Each token is computed by itself (n_ubatch=1): llama.cpp's results depend on how many tokens it
computes at once, and only then are greedy tokens the same whatever was restored.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.support.llama_models import write_lora, write_window_model
from tests.support.llama_server import LlamaServer, ask
from tests.support.waiting import until

import kvdepot
from kvdepot.adapters.hf import smollm2
from kvdepot.adapters.llama_cpp.http_front import ProxyServer
from kvdepot.adapters.llama_cpp.proxy import LlamaProxy
from kvdepot.adapters.llama_cpp.server_link import LinkSettings
from kvdepot.depot import Depot

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow

DOCUMENT = "The lighthouse keeper counts ships, gulls and storms, and writes them into a book. " * 2
LETTER = (
    "Dear Anna, the ferry was late again and I walked home along the harbour in the rain. Your aunt"
    " has sold her bakery to a young couple from the north, who want to keep the old oven. On"
    " Friday we shall paint the boat, if Karl remembers to buy brushes; he says green, I say blue."
    " Write soon and tell me how your exam went, what you eat, and whether"
)
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


def answer(url: str, question: str, key: str = "", **more: Any) -> tuple[str, int]:
    """The answer, and the number of prompt tokens that were not computed."""
    messages = [{"role": "user", "content": DOCUMENT + question}]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, **more}
    found = ask(url, "/v1/chat/completions", body, key=key)
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


@pytest.mark.parametrize("unified", [False, True])
def test_users_share_no_kv(unified: bool, slots: Path, depot: Depot) -> None:
    """Each gets the same answer with its own KV: in slots, from the depot, and when the server
    chooses the slot itself."""
    settings = {"n_ctx": 1024, "n_ubatch": 1, "n_parallel": 2, "kv_unified": unified}
    model, question = smollm2.gguf_file(), "What does the keeper count?"
    with (
        LlamaServer(model, slots, **settings) as server,
        proxy_before(server, slots, depot) as (proxy, url),
    ):
        until(lambda: bool(proxy.status()["ready"]))
        cold, cached = answer(url, question, "alice")
        assert cached == 0
        until(lambda: proxy.status()["stored_blocks"] >= 3)
        assert answer(url, question, "bob") == (cold, 0)
        until(lambda: proxy.status()["stored_blocks"] >= 6)
        assert answer(url, question, "carol", n_probs=1, id_slot=0) == (cold, 0)
        assert answer(url, question, "carol", id_slot=1) == (cold, 0)
        for key in ("alice", "bob"):
            again, cached = answer(url, question, key)
            assert (again, cached >= 48) == (cold, True)
        server.kill()
        with LlamaServer(model, slots, port=server.port, **settings):
            until(lambda: bool(proxy.status()["ready"]))
            assert answer(url, question, "dave") == (cold, 0)
            for key in ("alice", "bob"):
                again, cached = answer(url, question, key)
                assert (again, cached >= 48) == (cold, True)
            assert proxy.status()["failed"] == 0


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "lora.gguf"
    write_lora(path, seed=7)
    until(lambda: time.time() > path.stat().st_ctime + 2)  # see window_model
    return path


def say(url: str, key: str = "", **more: Any) -> tuple[str, int]:
    """The continuation of the letter, and the number of prompt tokens that were not computed."""
    body = {"prompt": LETTER, "n_predict": 8, "temperature": 0, **more}
    found = ask(url, "/completion", body, key=key)
    return found["content"], found["timings"]["cache_n"]


def cold_answers(url: str, scales: Sequence[float]) -> dict[float, str]:
    """The answers of a server without a cache, with each scale of its LoRA."""
    found = {
        scale: say(url, cache_prompt=False, lora=[{"id": 0, "scale": scale}])[0] for scale in scales
    }
    assert len(set(found.values())) == len(scales)
    return found


def set_scale(url: str, scale: float) -> None:
    ask(url, "/lora-adapters", [{"id": 0, "scale": scale}])


@pytest.mark.parametrize("unified", [False, True])
def test_adapters_that_change_while_the_server_runs(
    unified: bool, slots: Path, depot: Depot, lora: Path
) -> None:
    """By /lora-adapters, by a request's own `lora`, and behind the proxy's back. Every answer is
    that of a server without a cache, and KV of one scale is used for that scale alone."""
    settings = {"n_ctx": 1024, "n_ubatch": 1, "n_parallel": 2, "kv_unified": unified, "lora": lora}
    model = smollm2.gguf_file()
    with (
        LlamaServer(model, slots, **settings) as server,
        proxy_before(server, slots, depot) as (proxy, url),
    ):
        until(lambda: bool(proxy.status()["ready"]))
        cold = cold_answers(server.url, (1.0, 0.5, 0.0))

        def first(scale: float, **more: Any) -> None:
            before = proxy.status()["stored_blocks"]
            assert say(url, **more) == (cold[scale], 0)
            until(lambda: proxy.status()["stored_blocks"] >= before + 4)

        def again(scale: float, **more: Any) -> None:
            text, cached = say(url, **more)
            assert (text, cached >= 64) == (cold[scale], True)

        first(1.0)
        set_scale(url, 0.0)
        first(0.0)
        first(0.5, lora=[{"id": 0, "scale": 0.5}])
        again(0.0)
        set_scale(url, 1.0)
        again(1.0)
        again(0.5, lora=[{"id": 0, "scale": 0.5}])
        set_scale(server.url, 0.0)
        again(0.0)
        again(1.0, lora=[{"id": 0, "scale": 1.0}])
        assert proxy.status()["failed"] == 0
        server.kill()
        with LlamaServer(model, slots, port=server.port, **settings):
            until(lambda: bool(proxy.status()["ready"]))
            again(1.0)


@pytest.mark.parametrize("unified", [False, True])
def test_users_share_no_kv_while_adapters_change(
    unified: bool, slots: Path, depot: Depot, lora: Path
) -> None:
    """Every answer is that of a server without a cache. KV is used for the same user with the same
    scale alone."""
    settings = {"n_ctx": 1024, "n_ubatch": 1, "n_parallel": 2, "kv_unified": unified, "lora": lora}
    with (
        LlamaServer(smollm2.gguf_file(), slots, **settings) as server,
        proxy_before(server, slots, depot) as (proxy, url),
    ):
        until(lambda: bool(proxy.status()["ready"]))
        cold = cold_answers(server.url, (1.0, 0.0))
        seen: set[tuple[str, float]] = set()
        for scale in (1.0, 0.0, 1.0, 0.0):
            set_scale(url, scale)
            for key in ("alice", "bob"):
                text, cached = say(url, key)
                assert text == cold[scale], (key, scale)
                assert cached >= 64 if (key, scale) in seen else cached == 0, (key, scale)
                seen.add((key, scale))
                until(lambda: proxy.status()["stored_blocks"] >= 4 * len(seen))
        assert proxy.status()["failed"] == 0


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
