"""A real llama-server, from the wheel xllamacpp, in a process of its own.

    python tests/support/llama_server.py MODEL SLOTS/ n_ctx=8192 cache_type_k=q8_0 …

The arguments are fields of xllamacpp's CommonParams. It prints `listening URL` when it is ready,
and is made to be killed. `LlamaServer` is that process as a test sees it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, Final, Self

ROOT: Final = Path(__file__).resolve().parents[2]
READY: Final = "listening "
ENUMS: Final = {
    "cache_type_k": ("ggml_type", "GGML_TYPE_"),
    "cache_type_v": ("ggml_type", "GGML_TYPE_"),
    "flash_attn_type": ("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_"),
}


class LlamaServer:
    """The child process; `url` is where it listens. Killed at the end of its scope."""

    def __init__(self, model: Path, slots: Path, **params: object) -> None:
        settings = {"n_ctx": 4096, "n_parallel": 1, **params}
        command = [sys.executable, str(Path(__file__).resolve()), str(model), f"{slots}/"]
        command += [f"{name}={value}" for name, value in settings.items()]
        self._log = slots / f"server-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env={**os.environ}
            )
        self.url = ""
        self._drain: threading.Thread | None = None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(READY.encode()):
                self.url = line.decode().removeprefix(READY).strip()
                break
        if not self.url:
            self.kill()
            raise RuntimeError(f"llama-server did not start: {self.log()[-2000:]}")
        # What it prints is read on, so that it never waits for its reader.
        self._drain = threading.Thread(target=self.process.stdout.read, daemon=True)
        self._drain.start()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """May be called twice."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self._drain is not None:
            self._drain.join()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def ask(url: str, path: str, body: Any = None, timeout_s: float = 300.0, key: str = "") -> Any:
    """One request and its answer, as JSON. `key` is the API key."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.loads(answer.read())


def serve(model: str, slots: str, settings: list[str]) -> None:
    import xllamacpp  # type: ignore[import-untyped]

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.slot_save_path = slots
    params.endpoint_slots = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # others may need the rest
    for setting in settings:
        name, _, text = setting.partition("=")
        value: Any = text
        if name in ENUMS:
            kind, prefix = ENUMS[name]
            value = getattr(getattr(xllamacpp, kind), prefix + text.upper())
        elif name == "lora":
            adapter = xllamacpp.CommonAdapterLoraInfo()
            adapter.path, adapter.scale = text, 1.0
            name, value = "lora_adapters", [adapter]
        else:
            value = type(getattr(params, name))(json.loads(text.lower()))
        setattr(params, name, value)
    server = xllamacpp.Server(params)
    print(READY + server.listening_address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3:])
