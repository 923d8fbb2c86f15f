"""vLLM servers in processes of their own, asked over HTTP, killed without warning."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

READY_S = 600.0
ANSWER_S = 300.0
ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """An OpenAI server of vLLM; `extra=None` leaves kvdepot out. A scope: killed at its end."""

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        extra: Mapping[str, Any] | None,
        *options: str,
        role: str = "kv_both",
        cores: str = "",
    ) -> None:
        self.model = str(model)
        self.port = free_port()
        self._log = log
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--dtype", "float32", "--enforce-eager", "--port", str(self.port)]
        command += ["--max-model-len", "4224", "--enable-prompt-tokens-details", *options]
        if extra is not None:
            transfer = {
                "kv_connector": "KVDepotConnector",
                "kv_connector_module_path": "kvdepot.adapters.vllm",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=environment(cores),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """kill -9 of the server and its workers, not of a daemon that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def processes(self) -> list[int]:
        """The server and its workers, not a daemon that it started."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(int(entry.name)) == self.process.pid:
                    found.append(int(entry.name))
        return found

    def ask(self, prompt: list[int], tokens: int = 16) -> dict[str, Any]:
        """A greedy answer: its text, log-probabilities, cached tokens and seconds."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
        }
        started = time.perf_counter()
        answer = json.loads(self._call("/v1/completions", body))
        choice, usage = answer["choices"][0], answer["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return {
            "seconds": time.perf_counter() - started,
            "prompt": usage["prompt_tokens"],
            "cached": details.get("cached_tokens") or 0,
            "tokens": choice["text"],
            "logprobs": choice["logprobs"]["token_logprobs"],
        }

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._call("/reset_prefix_cache", {})

    def post(self, path: str, body: Any = None) -> tuple[int, str]:
        """The status of the answer, and what it says."""
        try:
            return 200, self._call(path, {} if body is None else body)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """kvdepot's counters, and vLLM's for external hits, by name and labels."""
        found = {}
        for line in self._call("/metrics", None).splitlines():
            if line.startswith(("vllm:kvdepot_", "vllm:external_prefix", "vllm:prompt_tokens_")):
                name, _, value = line.rpartition(" ")
                if "_created{" not in name:
                    found[name] = float(value)
        return found

    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def _call(self, path: str, body: Any) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            return str(reply.read().decode())

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                self._call("/health", None)
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
            else:
                return
        self.kill()
        raise RuntimeError(f"the server did not start:\n{self.text()[-3000:]}")


def environment(cores: str = "") -> dict[str, str]:
    """The same core binding for every server: one with a connector would get another."""
    bound = {"VLLM_CPU_OMP_THREADS_BIND": cores} if cores else {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
    return {
        **os.environ,
        **bound,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def kill_daemon(path: Path) -> None:
    """kill -9 of the daemon that listens on a socket, if there is one."""
    lock = path.with_name(path.name + ".lock")
    if lock.exists() and lock.read_text().strip().isdigit():
        try:
            os.kill(int(lock.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            return


def start_daemon(python: Path, path: Path) -> None:
    """Start the daemon that vLLM has started on a socket before, and wait until it answers."""
    command = [str(python), "-m", "kvdepot", "serve", "--config", str(path.with_suffix(".toml"))]
    daemon = subprocess.Popen(
        [*command, "--socket", str(path)],
        env=environment(),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert daemon.stdout is not None
    if not daemon.stdout.readline():
        raise RuntimeError(f"the daemon on {path} did not start again")
