"""`kvdepot proxy llama-server`, the command: what it says, what it refuses, how it ends."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

COMMAND = ["proxy", "llama-server", "--upstream", "http://127.0.0.1:1", "--listen", "127.0.0.1:0"]
MEMORY = ["--set", "dram.capacity=16MiB", "--set", "dram.prefault=false"]


def test_it_listens_without_a_server_and_ends_when_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvdepot", *COMMAND, *MEMORY, "--json"]
    command += ["--slots", str(tmp_path / "slots")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["ready"]
        with urllib.request.urlopen(said["url"] + "/kvdepot/status", timeout=60) as answer:
            status = json.loads(answer.read())
        assert not status["ready"]
        assert status["reason"]
        process.send_signal(signal.SIGTERM)
        said = json.loads(process.stdout.readline())
        assert said["stopped"] and said["requests"] == 0
        assert process.wait() == 0
