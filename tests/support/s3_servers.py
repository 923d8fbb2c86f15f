"""S3 servers of two makes on free ports, and a proxy before one that can fail in many ways.

SeaweedFS is a server that people run; Moto follows what Amazon documents, answer by answer, and
keeps everything in memory.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.waiting import until

ACCESS_KEY, SECRET_KEY = "kvkey", "kvsecret-never-shown"
BUCKET = "depot-test"


def weed_binary() -> str | None:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


class S3Server:
    """One server process with its folder."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.host = host
        folder.mkdir(parents=True, exist_ok=True)
        self.port = 0
        """Where it speaks S3."""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def settings(self, prefix: str, **more: Any) -> dict[str, Any]:
        """An `object` section for this server."""
        credentials = self.folder / "credentials"
        credentials.write_text(
            f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        )
        return {
            "url": f"s3://{BUCKET}/{prefix}",
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "credentials_file": credentials,
            "capacity": "64MiB",
            "refresh": "100ms",
            "retry_initial": "50ms",
            "retry_max": "500ms",
            **more,
        }

    def answers(self, url: str, method: str = "GET") -> bool:
        assert self.process is not None and self.process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, method=method), timeout=5
            ) as answer:
                return int(answer.status) < 300
        except urllib.error.HTTPError as error:
            with error:
                return error.code == 409  # the bucket is there already
        except (urllib.error.URLError, OSError):
            return False


class SeaweedServer(S3Server):
    """It can be killed and started again."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        super().__init__(folder, host)
        self.ports = free_ports(10)
        self.port = self.ports[3]
        identity = {
            "name": "kv",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def start(self) -> None:
        master, volume, filer, s3, *grpc = map(str, self.ports)
        binary = weed_binary()
        assert binary is not None
        with (self.folder / "weed.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    binary, "server", f"-dir={self.folder}", f"-ip={self.host}",
                    f"-ip.bind={self.host}", "-master.telemetry=false",
                    f"-master.port={master}", f"-master.port.grpc={grpc[0]}",
                    f"-volume.port={volume}", f"-volume.port.grpc={grpc[1]}",
                    "-filer=true", f"-filer.port={filer}", f"-filer.port.grpc={grpc[2]}",
                    "-s3=true", f"-s3.port={s3}", f"-s3.port.grpc={grpc[3]}",
                    f"-s3.port.iceberg={grpc[4]}", f"-s3.port.lance={grpc[5]}",
                    f"-s3.config={self.folder}/s3.json", "-volume.max=64",
                    "-master.volumeSizeLimitMB=64", "-master.defaultReplication=000",
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        until(lambda: self.answers(f"{self.endpoint}/healthz"))
        until(self._makes_bucket)

    def _makes_bucket(self) -> bool:
        return self.answers(f"http://{self.host}:{self.ports[2]}/buckets/{BUCKET}/", "POST")


class MotoServer(S3Server):
    """What it had is gone when it is killed."""

    def start(self) -> None:
        (self.port,) = free_ports(1)
        command = [sys.executable, "-m", "moto.server", "-H", self.host, "-p", str(self.port)]
        with (self.folder / "moto.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        until(lambda: self.answers(f"{self.endpoint}/{BUCKET}", "PUT"))


def s3_servers() -> dict[str, type[S3Server]]:
    """Those that are installed."""
    found: dict[str, type[S3Server]] = {}
    if weed_binary() is not None:
        found["seaweedfs"] = SeaweedServer
    if find_spec("moto") is not None and find_spec("flask_cors") is not None:
        found["moto"] = MotoServer
    return found


@contextmanager
def running(server: S3Server) -> Iterator[S3Server]:
    try:
        server.start()
        yield server
    finally:
        server.kill()


class FaultProxy:
    """Passes connections on to a server, or spoils them: set `fault`.

    "" passes all on; "refuse" closes at once; "503" answers so; "cut" ends an answer in the middle
    of its body; "hang" never answers.
    """

    CUT_AFTER = 9000

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._fault = ""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def fault(self) -> str:
        return self._fault

    @fault.setter
    def fault(self, value: str) -> None:
        self._fault = value
        self._hang_up()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._hang_up()

    def _hang_up(self) -> None:
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            self._open.add(client)
        fault = self._fault
        try:
            with client, suppress(OSError):
                if fault == "503":
                    client.recv(65536)
                    client.sendall(
                        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n"
                        b"Connection: close\r\n\r\n"
                    )
                elif fault == "hang":
                    while client.recv(65536):
                        pass
                elif fault != "refuse":
                    self._pass_on(client, self.CUT_AFTER if fault == "cut" else None)
        finally:
            with self._lock:
                self._open.discard(client)

    def _pass_on(self, client: socket.socket, limit: int | None) -> None:
        with socket.create_connection(self._target) as server:
            with self._lock:
                self._open.add(server)
            up = threading.Thread(target=_pump, args=(client, server, None), daemon=True)
            up.start()
            _pump(server, client, limit)
            for one in (client, server):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            up.join()
            with self._lock:
                self._open.discard(server)


def _pump(source: socket.socket, target: socket.socket, limit: int | None) -> None:
    passed = 0
    with suppress(OSError):
        while data := source.recv(65536):
            if limit is not None and passed + len(data) > limit:
                target.sendall(data[: limit - passed])
                return
            passed += len(data)
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
