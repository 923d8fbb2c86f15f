"""The proxy before a stand-in for llama-server: requests are passed on, restored and stored."""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import h11
import pytest
from tests.support.fake_llama import FakeLlama
from tests.support.waiting import until

import kvdepot
from kvdepot.adapters.llama_cpp import proxy, server_watch
from kvdepot.adapters.llama_cpp.http_front import ProxyServer
from kvdepot.adapters.llama_cpp.http_relay import api_key
from kvdepot.adapters.llama_cpp.proxy import LlamaProxy
from kvdepot.adapters.llama_cpp.server_link import LinkSettings, PromptTiming, read_timing
from kvdepot.adapters.llama_cpp.server_watch import check_options
from kvdepot.core.audit import AuditFinding
from kvdepot.errors import ModelError

TEXT = "a long document, and then some more of it, again and again. " * 3


class Front:
    """A proxy that listens, and requests to it."""

    def __init__(self, server: FakeLlama, slots: Path, depot: kvdepot.Store) -> None:
        self.proxy = LlamaProxy(LinkSettings(server.url, slots, block_tokens=16), depot)
        self.server = ProxyServer(("127.0.0.1", 0), self.proxy)
        self.thread = Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.server.server_address[1], timeout=60)

    def ask(self, path: str, body: Any = None, method: str = "", key: str = "") -> tuple[int, Any]:
        connection = self.connection()
        content = None if body is None else json.dumps(body)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request(method or ("GET" if body is None else "POST"), path, content, headers)
        response = connection.getresponse()
        answer = response.status, json.loads(response.read() or b"{}")
        connection.close()
        return answer

    def complete(self, prompt: object, key: str = "", **more: Any) -> Any:
        status, answer = self.ask("/completion", {"prompt": prompt, **more}, key=key)
        assert status == 200
        return answer

    def complete_streamed(self, prompt: str, key: str) -> None:
        connection = self.connection()
        body = json.dumps({"prompt": prompt, "stream": True})
        connection.request("POST", "/completion", body, {"Authorization": f"Bearer {key}"})
        assert connection.getresponse().read()
        connection.close()

    def until_ready(self) -> None:
        until(lambda: bool(self.proxy.status()["ready"]))

    def until_stored(self, blocks: int) -> None:
        until(lambda: self.proxy.counters.stored_blocks >= blocks)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        self.proxy.close()


Start = Callable[..., Front]


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    path = tmp_path / "slots"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def fake(tmp_path: Path, slots: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLlama]:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"weights")
    # The stand-in's process is this one, and older than its model.
    monkeypatch.setattr(server_watch, "process_start_ns", lambda _: time.time_ns() + 10**9)
    server = FakeLlama(model, slots)
    server.hold.set()
    yield server
    server.close()


@pytest.fixture
def start(fake: FakeLlama, slots: Path) -> Iterator[Start]:
    with ExitStack() as stack:
        dram = {"capacity": "16MiB", "prefault": False, "huge_pages": "never"}
        depot = stack.enter_context(kvdepot.open(dram=dram))

        def make(**more: Any) -> Front:
            front = Front(more.get("server", fake), more.get("slots", slots), depot)
            stack.callback(front.close)
            return front

        yield make


@pytest.fixture
def front(start: Start) -> Front:
    """A proxy that has recognized the stand-in."""
    made = start()
    made.until_ready()
    return made


def erase(fake: FakeLlama) -> None:
    fake.contents = [[] for _ in fake.contents]


def test_the_status_shows_audits(front: Front) -> None:
    names = ("audited_blocks", "mismatched_blocks", "quarantined")
    assert [front.proxy.status()[name] for name in names] == [0, 0, False]
    served = front.proxy.watch.served()
    assert served is not None
    (key,) = served.blocks.space.keys(range(16))
    found = AuditFinding(key, False, 1.0, 0.25, 0, "llama.cpp b1")
    front.proxy._depot.audits.report(found)
    assert [front.proxy.status()[name] for name in names] == [1, 1, True]


def test_a_known_prefix_is_restored_to_a_slot(
    front: Front, start: Start, fake: FakeLlama, slots: Path
) -> None:
    assert front.complete(TEXT)["content"] == "0"
    front.until_stored(len(TEXT) // 16)
    erase(fake)
    second = start()  # Knows of no slot's content.
    second.until_ready()
    assert second.complete(TEXT + "?")["content"] == str(len(TEXT) // 16 * 16)
    chat = {"messages": [{"role": "user", "content": TEXT + "!"}]}
    answer = second.ask("/v1/chat/completions", chat)[1]
    assert int(answer["content"]) >= len(TEXT) // 16 * 16
    assert second.proxy.status()["restored"] >= 1
    assert second.proxy.status()["failed"] == 0
    until(lambda: not list(slots.glob("kvdepot-*")))


def test_a_slot_that_is_saved_too_early_is_saved_again(front: Front, fake: FakeLlama) -> None:
    fake.delay_s = 0.2
    front.complete(TEXT)
    front.until_stored(len(TEXT) // 16)
    assert front.proxy.status()["failed"] == 0


def test_a_save_that_the_server_forgets_is_asked_for_again(
    front: Front, fake: FakeLlama, slots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_FORGOTTEN_S", 0.05)
    fake.forgets = 2
    front.complete(TEXT)
    front.until_stored(len(TEXT) // 16)
    assert front.proxy.status()["failed"] == 0
    assert int(front.complete(TEXT + "?")["content"]) >= len(TEXT) // 16 * 16
    until(lambda: not list(slots.glob("kvdepot-*")))


def test_a_server_that_saves_no_slot_costs_no_request(
    front: Front, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_FORGOTTEN_S", 0.05)
    monkeypatch.setattr(proxy, "_SAVE_LIMIT_S", 0.05)
    fake.forgets = 100
    for number in range(3):
        assert front.complete(f"{number} {TEXT}")["content"] == "0"
    until(lambda: front.proxy.status()["failed"] == 3)


def test_everything_else_is_passed_on(start: Start, fake: FakeLlama) -> None:
    front = start()
    assert front.ask("/any/path?with=query") == (200, {"path": "/any/path?with=query"})
    assert front.ask("/thing", {"a": 1}, "PUT") == (200, {"method": "PUT"})
    front.until_ready()
    body = {"prompt": [TEXT, TEXT], "n_predict": 1}
    fake.refused = {"/completion"}
    assert front.ask("/completion", body) == (501, {"error": {"message": "not today"}})
    assert fake.seen[-1] == ("/completion", body)


def test_answers_are_streamed(front: Front, fake: FakeLlama) -> None:
    fake.hold.clear()
    connection = front.connection()
    connection.request("POST", "/completion", json.dumps({"prompt": TEXT, "stream": True}))
    response = connection.getresponse()
    assert response.read1() == b"data: one\n\n"
    fake.hold.set()
    assert response.read() == b"data: two\n\n"
    connection.close()


@pytest.mark.parametrize("refused", ["/tokenize", "restore", "save"])
def test_a_failure_costs_no_request(
    front: Front, start: Start, fake: FakeLlama, refused: str
) -> None:
    front.complete(TEXT)
    front.until_stored(len(TEXT) // 16)
    erase(fake)
    second = start()
    second.until_ready()
    fake.refused = {refused}
    assert "content" in second.complete(TEXT + " and a new end that fills a block")
    until(lambda: second.proxy.status()["failed"] == 1)
    assert "not today" in second.proxy.status()["last_failure"]
    fake.refused = set()
    assert "content" in second.complete(TEXT)


def test_a_request_that_our_changes_spoil_is_sent_as_it_came(front: Front, fake: FakeLlama) -> None:

    def refuse(request: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        if "id_slot" in request:
            raise ConnectionError("no slots")
        return {"content": "as it came"}

    fake.complete = refuse  # type: ignore[method-assign]
    fake.handle_error = lambda *_: None  # type: ignore[method-assign]
    status, _ = front.ask("/completion", {"prompt": TEXT})
    assert status == 502
    fake.refused = {"/completion"}
    before = len(fake.seen)
    assert front.ask("/completion", {"prompt": TEXT})[0] == 501
    sent = [body for path, body in fake.seen[before:] if path == "/completion"]
    assert sent[-1] == {"prompt": TEXT}


def test_a_server_that_is_gone_is_a_bad_gateway(front: Front, fake: FakeLlama) -> None:
    fake.close()
    status, answer = front.ask("/completion", {"prompt": TEXT})
    assert status == 502
    assert "did not answer" in answer["error"]["message"]


def test_another_server_is_another_namespace(
    front: Front, start: Start, fake: FakeLlama, slots: Path, tmp_path: Path
) -> None:
    front.complete(TEXT)
    front.until_stored(1)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"weightz")
    server = FakeLlama(other, slots)
    server.hold.set()
    second = start(server=server)
    second.until_ready()
    assert second.complete(TEXT)["content"] == "0"
    server.close()


def load_lora(fake: FakeLlama, folder: Path, **more: Any) -> None:
    path = folder / "lora.gguf"
    path.write_bytes(b"lora")
    fake.adapters = [{"id": 0, "path": str(path), "scale": 1.0, **more}]


def test_a_request_is_sent_with_the_loras_that_its_blocks_are_named_by(
    start: Start, fake: FakeLlama, tmp_path: Path
) -> None:
    load_lora(fake, tmp_path)
    front = start()
    front.until_ready()
    assert front.complete(TEXT)["content"] == "0"
    front.until_stored(len(TEXT) // 16)
    assert fake.seen_completions()[-1]["lora"] == [{"id": 0, "scale": 1.0}]
    own = [{"id": 0, "scale": 0.5}]
    assert front.complete(TEXT, lora=own)["content"] == "0", "what the slot has is not used"
    assert fake.seen_completions()[-1]["lora"] == own
    front.until_stored(2 * (len(TEXT) // 16))
    assert int(front.complete(TEXT)["content"]) == len(TEXT) // 16 * 16
    fake.adapters[0]["scale"] = 0.0
    assert front.complete(TEXT)["content"] == "0"
    assert fake.seen_completions()[-1]["lora"] == [{"id": 0, "scale": 0.0}]
    assert front.proxy.status()["failed"] == 0


def test_kv_from_the_servers_own_cache_is_not_stored(
    start: Start, fake: FakeLlama, tmp_path: Path
) -> None:
    """It may belong to other LoRAs."""
    load_lora(fake, tmp_path)
    front = start()
    front.until_ready()
    front.complete(TEXT[:32])
    front.until_stored(2)
    plain = fake.complete

    def from_a_cache(request: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        fake.contents[request["id_slot"]] = tokens[:-1]
        return plain(request, tokens)

    fake.complete = from_a_cache  # type: ignore[method-assign]
    front.complete(TEXT)
    until(lambda: front.proxy.counters.saved_slots == 2)
    assert front.proxy.counters.stored_blocks == 2


def test_an_activated_lora_is_refused(start: Start, fake: FakeLlama, tmp_path: Path) -> None:
    load_lora(fake, tmp_path, alora_invocation_tokens=[5])
    front = start()
    until(lambda: "activated LoRA" in front.proxy.status()["reason"])
    assert "content" in front.complete(TEXT)


def test_a_lora_that_the_server_does_not_have_changes_nothing(
    front: Front, fake: FakeLlama
) -> None:
    front.complete(TEXT, lora=[{"id": 0, "scale": 1.0}])
    front.until_stored(len(TEXT) // 16)
    erase(fake)
    assert front.proxy.status()["ready"]


def test_a_shifted_context_ends_it(front: Front, fake: FakeLlama) -> None:
    front.complete(TEXT, n_predict=5000)
    until(lambda: "--context-shift" in front.proxy.status()["reason"])


def test_slots_that_are_saved_elsewhere_are_reported(start: Start, tmp_path: Path) -> None:
    front = start(slots=tmp_path / "elsewhere")
    until(lambda: "saves its slots elsewhere" in front.proxy.status()["reason"])
    assert "content" in front.complete(TEXT)


def test_an_odd_length_is_refused(start: Start) -> None:
    front = start()
    connection = front.connection()
    connection.putrequest("POST", "/completion")
    connection.putheader("Content-Length", "many")
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()


def test_a_chunked_request_is_read(start: Start, fake: FakeLlama) -> None:
    front = start()
    connection = front.connection()
    pieces = iter([b'{"prompt": ', b'"x"}'])
    connection.request("POST", "/completion", pieces, encode_chunked=True)
    assert connection.getresponse().status == 200
    assert "x" in [body["prompt"] for path, body in fake.seen if path == "/completion"]
    connection.close()


def test_options_that_move_kv_are_refused() -> None:
    import subprocess
    import sys

    code = "import time; print(flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code, "--cache-reuse", "256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ModelError, match="--cache-reuse"):
            check_options(process.pid)
        process.kill()


def test_the_servers_timings_are_reported(start: Start, fake: FakeLlama) -> None:
    """The stand-in says that each token took 2.5 ms."""
    front = start()
    depot = front.proxy._depot
    front.until_ready()
    front.complete(TEXT)
    front.until_stored(len(TEXT) // 16)

    def measured() -> Any:
        return depot.admin.ledger()["assumed"]["measured"]

    until(lambda: len(measured()) == 1)
    (found,) = measured().values()
    assert 300 < found["tokens_per_s"] < 500
    assert not depot.stats()["first_tokens"]["latest"], "the depot had nothing"
    erase(fake)
    second = start()
    second.until_ready()
    second.complete(TEXT + "?")
    until(lambda: bool(depot.stats()["first_tokens"]["latest"]))
    (latest,) = depot.stats()["first_tokens"]["latest"]
    known = len(TEXT) // 16 * 16
    assert (latest["prompt_tokens"], latest["fetched_tokens"]) == (len(TEXT) + 1, known)
    assert latest["seconds"] >= 2.5e-3 * (len(TEXT) + 1 - known)
    assert latest["recompute_s"] > 0.25 * 2.5e-3 * len(TEXT)


def test_timings_of_an_answer() -> None:
    whole = b'"timings": {"cache_n": 3, "prompt_n": 4, "prompt_ms": 8.5, "predicted_n": 2}'
    assert read_timing(whole) == PromptTiming(4, 3, 2, 8.5e-3)
    assert read_timing(whole.replace(b"8.5", b"-1")) == PromptTiming(4, 3, 2, None)
    assert read_timing(whole.replace(b"8.5", b"1e999")) == PromptTiming(4, 3, 2, None)
    for bad in (b"", whole.replace(b"3", b"1e999"), whole.replace(b"4", b"-+"), whole[:30]):
        assert read_timing(bad) is None


BLOCKS = len(TEXT) // 16
"""Blocks of TEXT, of which each letter is a token."""


def test_users_with_other_api_keys_share_no_kv(front: Front, start: Start, fake: FakeLlama) -> None:
    """Neither in slots, which the server has, nor from the depot; each user hits its own."""
    for stored, key in enumerate(("alice", "bob", ""), 1):
        assert front.complete(TEXT, key)["content"] == "0"
        front.until_stored(stored * BLOCKS)
    erase(fake)
    second = start()  # knows of no slot's content
    second.until_ready()
    assert second.complete(TEXT + "?", "carol")["content"] == "0"
    for key in ("alice", "bob", ""):
        assert int(second.complete(TEXT + "?", key)["content"]) >= BLOCKS * 16
    assert second.proxy.status()["failed"] == 0


def test_a_user_reuses_its_own_slot(front: Front, fake: FakeLlama) -> None:
    """Two users take turns in two slots, with a prompt too short for a block of the depot."""
    for _ in range(2):
        fresh = [front.complete("a short one", key)["slot"] for key in ("alice", "bob")]
        assert sorted(fresh) == [0, 1]
    assert front.complete("a short one, too", "alice")["content"] == str(len("a short one"))
    assert front.complete("a short one, too", "carol")["content"] == "0"


@pytest.mark.parametrize("wish", [{"id_slot": 0}, {"n": 2}])
def test_a_request_that_is_passed_on_uses_no_slot_of_another_user(
    wish: dict[str, int], front: Front, fake: FakeLlama
) -> None:
    """The server chooses its slot, or the client does."""
    for number in range(2):
        assert front.complete(f"{number}{TEXT}", "alice")["slot"] == number
    front.until_stored(2 * BLOCKS)
    for number in range(2):
        prompt = f"{number}{TEXT}?"
        assert front.complete(prompt, "bob", **wish)["content"] == "0"
        # The server has the prompt now, for bob: alice does not find it, but what is her own.
        assert front.complete(prompt, "alice")["content"] == str(BLOCKS * 16)


def test_a_user_keeps_its_slots_while_it_is_alone(front: Front, fake: FakeLlama) -> None:
    """A request that is passed on uses what the server has, and does not disturb the user's own."""
    short = "a short one"
    slot = front.complete(short, "alice")["slot"]
    passed_on = front.complete(short + ", too", "alice", id_slot=slot)
    assert passed_on["content"] == str(len(short))
    assert front.ask("/tokenize", {"content": "x"}, key="bob")[0] == 200, "uses no slot"
    assert front.complete(short + ", too", "alice")["content"] == str(len(short) + 4)


def test_a_refused_request_disturbs_the_slots_of_others(front: Front, fake: FakeLlama) -> None:
    """It is sent again without a slot, and the server chooses one."""
    front.complete("a short one", "alice")
    fake.refused = {"/completion"}
    assert front.ask("/completion", {"prompt": "another"}, key="bob")[0] == 501
    fake.refused = set()
    assert front.complete("a short one, too", "alice")["content"] == "0"


@pytest.mark.parametrize(("other", "loras"), [("bob", False), ("alice", True)])
def test_a_slot_that_another_request_may_have_used_is_not_stored(
    other: str, loras: bool, start: Start, fake: FakeLlama, tmp_path: Path
) -> None:
    """It continues alice's prompt in her slot before the slot is saved: another user's request, or
    one with scales of LoRAs that the proxy does not know."""
    if loras:
        load_lora(fake, tmp_path)
    front = start()
    front.until_ready()
    fake.hold.clear()
    streamed = Thread(target=front.complete_streamed, args=(TEXT, "alice"))
    streamed.start()
    until(lambda: ("/completion", True) in [(p, b.get("stream")) for p, b in fake.seen])
    front.complete(TEXT + " and what only bob knows, in some blocks", other, id_slot=0)
    fake.hold.set()
    streamed.join()
    until(lambda: "another request" in front.proxy.counters.last_failure)
    assert front.proxy.counters.stored_blocks == 0


def test_a_change_of_scales_does_not_affect_requests_in_progress(
    start: Start, fake: FakeLlama, tmp_path: Path
) -> None:
    """They were sent with scales of their own: their slots are stored."""
    load_lora(fake, tmp_path)
    front = start()
    front.until_ready()
    fake.hold.clear()
    streamed = Thread(target=front.complete_streamed, args=(TEXT, "alice"))
    streamed.start()
    until(lambda: any(body.get("stream") for body in fake.seen_completions()))
    assert front.ask("/lora-adapters", [{"id": 0, "scale": 0.5}])[0] == 200
    fake.contents[fake.seen_completions()[-1]["id_slot"]] = [ord(letter) for letter in TEXT]
    fake.hold.set()
    streamed.join()
    until(lambda: front.proxy.counters.saved_slots + front.proxy.counters.failed == 1)
    counted = front.proxy.counters.as_dict()
    assert (counted["stored_blocks"], counted["last_failure"]) == (BLOCKS, "")


def test_kv_is_used_for_the_same_user_and_scales_only(
    start: Start, fake: FakeLlama, tmp_path: Path
) -> None:
    """Two users take turns with one prompt, and a LoRA's scale changes between their requests."""
    load_lora(fake, tmp_path)
    front = start()
    front.until_ready()
    seen: set[tuple[str, float]] = set()
    for scale in (1.0, 0.5, 1.0, 0.5):
        assert front.ask("/lora-adapters", [{"id": 0, "scale": scale}])[0] == 200
        for key in ("alice", "bob"):
            cached = BLOCKS * 16 if (key, scale) in seen else 0
            assert front.complete(TEXT, key)["content"] == str(cached), (key, scale)
            assert fake.seen_completions()[-1]["lora"] == [{"id": 0, "scale": scale}]
            seen.add((key, scale))
            front.until_stored(len(seen) * BLOCKS)
    assert front.proxy.status()["failed"] == 0


@pytest.mark.parametrize("odd", [{"lora": [{"id": 0, "scale": 10**400}]}, {"prompt": [10**30]}])
def test_numbers_that_are_too_large_are_passed_on(
    odd: dict[str, Any], start: Start, fake: FakeLlama, tmp_path: Path
) -> None:
    load_lora(fake, tmp_path)
    front = start()
    front.until_ready()
    fake.refused = {"/completion"}
    body = {"prompt": TEXT, **odd}
    assert front.ask("/completion", body) == (501, {"error": {"message": "not today"}})
    assert fake.seen[-1] == ("/completion", body)
    assert "too large" in front.proxy.status()["last_failure"]


@pytest.mark.parametrize("loras", [False, True])
def test_equal_tokens_of_another_user_are_not_stored(
    loras: bool, start: Start, fake: FakeLlama, tmp_path: Path
) -> None:
    """The slot has alice's KV of the same prompt, and of her long answer, until bob's begins."""
    if loras:
        load_lora(fake, tmp_path)
    front = start()
    front.until_ready()
    slot = front.complete(TEXT, "alice", n_predict=40)["slot"]
    alices = (len(TEXT) + 39) // 16
    front.until_stored(alices)
    assert front.complete("short", "alice")["slot"] != slot
    fake.delay_s = 0.2
    assert front.complete(TEXT, "bob", n_predict=1)["slot"] == slot
    until(lambda: front.proxy.counters.as_dict()["stored_blocks"] > alices)
    assert front.proxy.counters.stored_blocks == alices + BLOCKS


def test_a_key_that_the_server_refuses_makes_no_namespace(front: Front, fake: FakeLlama) -> None:
    fake.keys = {"alice"}
    for prompt in (TEXT, [1, 2, 3] * 20):
        for key in ("mallory", ""):
            assert front.ask("/completion", {"prompt": prompt}, key=key)[0] == 401
    served = front.proxy.watch.served()
    assert served is not None
    assert len(served.blocks.tags) == 1
    assert front.ask("/completion", {"prompt": TEXT}, key="alice")[0] == 200
    assert len(served.blocks.tags) == 2


def test_the_api_key_is_read_as_llama_server_reads_it() -> None:
    def key(*headers: tuple[str, str]) -> bytes:
        return api_key(h11.Request(method="GET", target="/", headers=[("Host", "x"), *headers]))

    assert key() == b""
    assert key(("Authorization", "Bearer k")) == b"k"
    assert key(("authorization", "k")) == b"k"
    assert key(("X-Api-Key", "k")) == b"k"
    assert key(("X-Api-Key", "other"), ("Authorization", "Bearer k")) == b"k"
    assert key(("Authorization", "Bearer k"), ("Authorization", "Bearer other")) == b"k"
