"""A real NFS server (nfs-ganesha) in a network of its own, and mounts of it by FUSE (fuse-nfs).

Both work in user space, where the kernel has neither an NFS server nor a client. The server has no
lock manager: a client that wants a lock fails.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.waiting import until

TOOLS = ("ganesha.nfsd", "rpcbind", "fuse-nfs", "unshare", "nsenter", "ip", "umount")
_NETWORK = "ip link set lo up && mount -t tmpfs tmpfs /run && exec rpcbind -f -w"
_CONFIG = """
NFS_CORE_PARAM {{ NFS_Port = 2049; MNT_Port = 20048; NFS_Protocols = 3;
                  Enable_NLM = false; Enable_RQUOTA = false; }}
EXPORT {{ Export_Id = 1; Path = {path}; Pseudo = /depot; Access_Type = RW; Protocols = 3;
          Squash = No_Root_Squash; SecType = sys; Transports = TCP; FSAL {{ Name = VFS; }} }}
LOG {{ Default_Log_Level = WARN; }}
"""


def missing_tool() -> str | None:
    """What keeps an NFS server from running here."""
    if os.geteuid() != 0:
        return "not root"
    if not os.path.exists("/dev/fuse"):
        return "there is no FUSE"
    return next((f"there is no {tool}" for tool in TOOLS if shutil.which(tool) is None), None)


class NfsServer:
    """One exported folder; the server can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.export = folder / "export"
        self.export.mkdir(parents=True)
        (folder / "ganesha.conf").write_text(_CONFIG.format(path=self.export))
        self._log = (folder / "processes.log").open("ab")
        self._network = self._run(
            ["unshare", "--net", "--mount", "--propagation", "slave", "sh", "-c", _NETWORK]
        )
        self._server: subprocess.Popen[bytes] | None = None
        self._mounts: list[Path] = []

    def start(self) -> None:
        until(lambda: self._listens(111))
        config, log = self.folder / "ganesha.conf", self.folder / "ganesha.log"
        command = ["ganesha.nfsd", "-F", "-f", str(config), "-L", str(log), "-p", "/run/nfs.pid"]
        self._server = self._run([*self._inside("--mount"), *command])
        until(lambda: self._listens(2049) and self._listens(20048))

    def kill(self) -> None:
        if self._server is not None:
            _end(self._server)
            self._server = None

    def mount(self, name: str) -> Path:
        """One more client, with caches of its own."""
        target = self.folder / name
        target.mkdir()
        url = f"nfs://127.0.0.1{self.export}?version=3&nfsport=2049&mountport=20048"
        subprocess.run(
            [*self._inside(), "fuse-nfs", "-n", url, "-m", str(target)],
            check=True, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        self._mounts.append(target)
        until(lambda: os.path.ismount(target))
        return target

    def close(self) -> None:
        for target in self._mounts:
            subprocess.run(["umount", "-l", target], check=False, stderr=self._log)
        self.kill()
        _end(self._network)
        self._log.close()

    def _inside(self, *more: str) -> list[str]:
        return ["nsenter", "--net", *more, "--target", str(self._network.pid)]

    def _listens(self, port: int) -> bool:
        assert self._network.poll() is None, "rpcbind ended"
        assert self._server is None or self._server.poll() is None, "the server ended"
        table = Path(f"/proc/{self._network.pid}/net/tcp").read_text()
        table += Path(f"/proc/{self._network.pid}/net/tcp6").read_text()
        return any(f":{port:04X} " in line.split("0A")[0] for line in table.splitlines())

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def nfs_server(folder: Path) -> Iterator[NfsServer]:
    server = NfsServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.close()
