"""The proxy before a real llama-server: the same tokens, cold, restored, and after a kill.

Each token is computed by itself (n_ubatch=1): llama.cpp's results depend on how many tokens it
computes at once, and only then are greedy tokens the same whatever was restored.
"""

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.support.llama_server import LlamaServer, ask
from tests.support.waiting import until

import kvdepot
from kvdepot.adapters.demo import smollm2
from kvdepot.adapters.llama_cpp.http_relay import ProxyServer
from kvdepot.adapters.llama_cpp.proxy import LlamaProxy
from kvdepot.adapters.llama_cpp.server_link import LinkSettings

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


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_with_and_without(kind: str, tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.mkdir(mode=0o700)
    settings = {"n_ctx": 1024, "n_ubatch": 1, **KINDS[kind]}
    dram = {"capacity": "64MiB", "prefault": False, "huge_pages": "never"}
    model = smollm2.gguf_file()
    with kvdepot.open(dram=dram) as depot, LlamaServer(model, slots, **settings) as server:
        proxy = LlamaProxy(LinkSettings(server.url, slots, block_tokens=16), depot)
        front = ProxyServer(("127.0.0.1", 0), proxy)
        url = f"http://127.0.0.1:{front.server_address[1]}"
        thread = Thread(target=front.serve_forever, args=(0.05,))
        thread.start()
        try:
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
                for slot in range(settings.get("n_parallel", 1)):
                    ask(f"http://127.0.0.1:{server.port}", f"/slots/{slot}?action=erase", {})
                direct = f"http://127.0.0.1:{server.port}"
                assert answer(direct, "Where does he write?")[0] == other
        finally:
            front.shutdown()
            front.server_close()
            thread.join()
            proxy.close()
