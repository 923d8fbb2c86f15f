"""A stand-in for llama-server: its HTTP interface as the proxy uses it, with made-up states.

A token is a character's number. The answer names how much of the prompt came from the slot.
"""

import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.llama_states import MadeState

from kvdepot.adapters.llama_cpp.sequence_state import read_slot_file


class FakeLlama(ThreadingHTTPServer):
    """Listens on a free port of this process."""

    daemon_threads = True

    def __init__(self, model: Path, slots: Path, count: int = 2, n_ctx: int = 4096) -> None:
        super().__init__(("127.0.0.1", 0), _FakeHandler)
        self.model = model
        self.slots = slots
        self.contents: list[list[int]] = [[] for _ in range(count)]
        self.n_ctx = n_ctx
        self.refused: set[str] = set()
        """Parts of paths that are answered with an error."""
        self.seen: list[tuple[str, Any]] = []
        """Requests: paths and bodies."""
        self.states = MadeState(streams=count)
        self.adapters: list[dict[str, Any]] = []
        """Its LoRAs."""
        self.delay_s = 0.0
        """How long after a request has come its slot is still what it was."""
        self.forgets = 0
        """How many saves are never answered."""
        self.keys: set[str] = set()
        """API keys, without which POST requests are refused; empty: none is needed."""
        self.hold = threading.Event()
        """Streams wait for it in the middle."""
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()

    def complete(self, request: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        time.sleep(self.delay_s)
        slot = request.get("id_slot", -1)
        content = self.contents[slot]
        known = 0
        reusable = min(len(content), len(tokens) - 1) if request.get("cache_prompt", True) else 0
        while known < reusable and content[known] == tokens[known]:
            known += 1
        count = request.get("n_predict", request.get("max_tokens", 4))
        self.contents[slot] = tokens + [33] * (count - 1)
        timings: dict[str, float] = {
            "cache_n": known,
            "prompt_n": len(tokens) - known,
            "prompt_ms": 2.5 * (len(tokens) - known),
            "predicted_n": count,
        }
        return {"content": f"{known}", "slot": slot, "timings": timings}

    def seen_completions(self) -> list[Any]:
        return [body for path, body in self.seen if path == "/completion"]

    def act(self, slot: int, action: str, filename: str) -> dict[str, Any]:
        path = self.slots / filename
        if action == "erase":
            self.contents[slot] = []
        elif action == "save":
            tokens = self.contents[slot]
            made = self.states
            made.stream, made.cells, made.positions = slot, len(tokens), list(range(len(tokens)))
            path.write_bytes(made.file(tokens))
        else:
            self.contents[slot] = read_slot_file(path.read_bytes())[0].tolist()
            return {"n_restored": len(self.contents[slot])}
        return {}


class _FakeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeLlama

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        slots = [
            {"id": at, "n_ctx": self.server.n_ctx, "is_processing": False}
            for at in range(len(self.server.contents))
        ]
        known: dict[str, Any] = {
            "/props": {"model_path": str(self.server.model), "build_info": "b1"},
            "/slots": slots,
            "/lora-adapters": self.server.adapters,
        }
        self.reply(200, known.get(self.path, {"path": self.path}))

    def do_PUT(self) -> None:
        self.reply(200, {"method": "PUT"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        self.server.seen.append((self.path, body))
        key = self.headers.get("authorization", "").removeprefix("Bearer ")
        if self.server.keys and key not in self.server.keys:
            self.reply(401, {"error": {"message": "Invalid API Key"}})
            return
        if any(part in self.path for part in self.server.refused):
            self.reply(501, {"error": {"message": "not today"}})
            return
        if self.path.startswith("/slots/"):
            number, _, action = self.path.removeprefix("/slots/").partition("?action=")
            if action == "save" and self.server.forgets:
                self.server.forgets -= 1
                self.rfile.read(1)  # until the client is gone
                self.close_connection = True
                return
            self.reply(200, self.server.act(int(number), action, body.get("filename", "")))
        elif self.path == "/lora-adapters":
            for change in body:
                self.server.adapters[change["id"]]["scale"] = change["scale"]
            self.reply(200, {"success": True})
        elif self.path == "/tokenize":
            self.reply(200, {"tokens": [ord(letter) for letter in body["content"]]})
        elif self.path == "/apply-template":
            self.reply(200, {"prompt": self.template(body)})
        elif body.get("stream"):
            self.stream()
        else:
            text = body.get("prompt") or self.template(body)
            tokens = [ord(letter) for letter in text] if isinstance(text, str) else text
            self.reply(200, self.server.complete(body, tokens))

    def template(self, body: dict[str, Any]) -> str:
        return "".join(message["content"] for message in body.get("messages", []))

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in (b"data: one\n\n", b"data: two\n\n"):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.server.hold.wait()
        self.wfile.write(b"0\r\n\r\n")

    def reply(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
