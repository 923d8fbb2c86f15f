"""Rounds of several nodes over a bucket of SeaweedFS, whose server is killed and started again."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from kvdepot.config.settings import ObjectConfig
from kvdepot.testing.torture.ledger import Ledger
from kvdepot.testing.torture.nodes import object_settings, play_over
from kvdepot.testing.torture.shared_bucket import open_objects

_HOST: Final = "127.0.0.1"
_BUCKET: Final = "torture"
_KEYS: Final = ("torture", "torture-secret")
_START_S: Final = 60.0
_LOOK_S: Final = 0.1


def weed_binary() -> str | None:
    """The server's program, beside Python or on the PATH."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


class SeaweedServer:
    """One server with its folder, which keeps what it has when it is killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._ports = _free_ports(10)
        self._process: subprocess.Popen[bytes] | None = None
        access, secret = _KEYS
        identity = {
            "name": "torture",
            "credentials": [{"accessKey": access, "secretKey": secret}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self.credentials = folder / "credentials"
        self.credentials.write_text(
            f"[default]\naws_access_key_id = {access}\naws_secret_access_key = {secret}\n"
        )

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self._ports[3]}"

    def serve(self, up: bool) -> None:
        """Start the server and wait until it answers, or kill it."""
        if up:
            self._start()
        elif self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        master, volume, filer, s3, *rest = self._ports
        binary = weed_binary()
        assert binary is not None
        with (self._folder / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    binary, "server", f"-dir={self._folder}", f"-ip={_HOST}", f"-ip.bind={_HOST}",
                    f"-master.port={master}", f"-master.port.grpc={rest[0]}",
                    f"-volume.port={volume}", f"-volume.port.grpc={rest[1]}",
                    "-filer=true", f"-filer.port={filer}", f"-filer.port.grpc={rest[2]}",
                    "-s3=true", f"-s3.port={s3}", f"-s3.port.grpc={rest[3]}",
                    f"-s3.port.iceberg={rest[4]}", f"-s3.port.lance={rest[5]}",
                    f"-s3.config={self._folder}/s3.json", "-volume.max=64",
                    "-master.volumeSizeLimitMB=64", "-master.defaultReplication=000",
                    "-master.telemetry=false",
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + _START_S
        bucket = f"http://{_HOST}:{filer}/buckets/{_BUCKET}/"
        while not (_answers(f"{self.endpoint}/healthz") and _answers(bucket, "POST")):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS does not start: see {self._folder}/weed.log")
            time.sleep(_LOOK_S)


def play_seaweedfs(folder: Path, ledger: Ledger, chance: random.Random) -> None:
    server = SeaweedServer(folder / "weed")
    server.serve(True)
    try:
        settings = {
            **object_settings(f"s3://{_BUCKET}/depot", chance),
            "endpoint": server.endpoint,
            "region": "us-east-1",
            "credentials_file": server.credentials,
            "measure": False,
        }
        bucket = open_objects(ObjectConfig(**{**settings, "capacity": 64 << 20}), None)
        play_over(folder, settings, bucket, ledger, chance, server=server.serve)
    finally:
        server.serve(False)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((_HOST, 0)) for _ in range(count)]
    try:
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _answers(url: str, method: str = "GET") -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5):
            return True
    except urllib.error.HTTPError as error:
        with error:
            return error.code == 409  # the bucket is there already
    except OSError:
        return False
