"""A disk below the kernel that can be slowed, made to fail and pulled: nbdkit behind a loop device.

Page tables, the block layer and ext4 see a real disk. What it holds outlives being pulled; plugged
in again, the system knows it by another name.
"""

import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

NEEDED = ("nbdkit", "nbdfuse", "losetup", "mkfs.ext4", "fusermount3")


def are_there() -> bool:
    """Whether this machine can have such disks."""
    tools = all(map(shutil.which, NEEDED)) and Path("/dev/fuse").exists()
    return tools and os.geteuid() == 0


def run(*command: object) -> str:
    done = subprocess.run(
        list(map(str, command)), check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


def until_there(path: Path) -> None:
    for _ in range(2000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} does not appear")


@dataclass
class Disk:
    """An ext4 file system at `mount`, on a disk of `mebibytes` that is plugged in."""

    folder: Path
    mebibytes: int = 64
    delay_s: float = 0.0
    """Of each request."""
    bytes_per_s: int = 0
    """At most; 0 is as fast as it goes."""
    journal: bool = False
    """With one, ext4 makes itself read-only for good where it meets an error."""
    _plugs: int = 0
    _loop: str = ""
    _processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    _pulled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.mount.mkdir()
        self._image.write_bytes(b"")
        os.truncate(self._image, self.mebibytes << 20)
        self._attach()
        journal = "has_journal" if self.journal else "^has_journal"
        run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0", "-O", journal, self._loop)
        run("mount", self._loop, self.mount)

    @property
    def mount(self) -> Path:
        return self.folder / "mount"

    def fail(self) -> None:
        """Every read and write gives EIO from now on."""
        self._trigger.touch()

    def heal(self) -> None:
        self._trigger.unlink()

    def limit(self, bytes_per_s: int) -> None:
        """How fast it is from now on."""
        self._rate.write_text(f"{8 * bytes_per_s}")

    def pull(self) -> None:
        """The disk is gone; who has files open gets errors."""
        subprocess.run(["sync", "-f", self.mount], check=True)
        self._trigger.touch()
        run("umount", "-l", self.mount)
        self._pulled.append(self._loop)

    def plug(self) -> None:
        """The disk is back, with what it held, at the same folder under another name."""
        self._attach()
        run("mount", self._loop, self.mount)

    def remove(self) -> None:
        """Give everything back; nobody may use the disk any more."""
        self._trigger.unlink(missing_ok=True)
        if os.path.ismount(self.mount):
            run("umount", self.mount)
        for loop in {*self._pulled, self._loop}:
            subprocess.run(["losetup", "--detach", loop], capture_output=True, check=False)
        for number in range(1, self._plugs + 1):
            run("fusermount3", "-u", "-z", self._fuse(number))
        for process in reversed(self._processes):
            process.terminate()
            process.wait(30)

    @property
    def _image(self) -> Path:
        return self.folder / "image"

    @property
    def _rate(self) -> Path:
        return self.folder / "rate"

    @property
    def _trigger(self) -> Path:
        return self.folder / f"trigger-{self._plugs}"

    def _fuse(self, number: int) -> Path:
        return self.folder / f"fuse-{number}"

    def _attach(self) -> None:
        """A server of its own each time: the one before answers with errors for ever."""
        self._plugs += 1
        socket, fuse = self.folder / f"socket-{self._plugs}", self._fuse(self._plugs)
        fuse.mkdir()
        delay = f"{self.delay_s * 1000:.0f}ms"
        command = [
            "nbdkit", "--foreground", "--unix", str(socket), "--filter=error", "--filter=delay",
            *(["--filter=rate"] if self.bytes_per_s else []), "file", str(self._image),
            f"delay-read={delay}", f"delay-write={delay}",
            "error-rate=100%", f"error-file={self._trigger}", "error=EIO",
        ]  # fmt: skip
        if self.bytes_per_s:
            self.limit(self.bytes_per_s)
            command += [f"rate={8 * self.bytes_per_s}", f"rate-file={self._rate}"]
        self._processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        until_there(socket)
        bridge = ["nbdfuse", str(fuse / "disk"), "--unix", str(socket)]
        self._processes.append(subprocess.Popen(bridge))
        until_there(fuse / "disk")
        self._loop = run("losetup", "--find", "--show", "--direct-io=on", fuse / "disk")
