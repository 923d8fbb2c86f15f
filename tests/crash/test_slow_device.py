"""A block device that really is slow, and one that really fails: nbdkit behind a loop device.

Emulated, but below the kernel: page tables, the block layer and ext4 see a slow disk.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.crash.test_disks import (
    assert_quiet,
    prompt,
    put_all,
    settings,
    space_of,
    until,
    verified_hits,
    works_again,
)

from kvdepot.core.block import Put
from kvdepot.core.config import load
from kvdepot.store.opening import assemble
from kvdepot.store.store import Store

DELAY_S = 0.02
NEEDED = ("nbdkit", "nbdfuse", "losetup", "mkfs.ext4", "fusermount3")

pytestmark = [
    pytest.mark.root,
    pytest.mark.crash,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(
        not all(map(shutil.which, NEEDED)) or not Path("/dev/fuse").exists(),
        reason="needs FUSE and nbdkit: apt-get install nbdkit libnbd-bin fuse3",
    ),
]


@dataclass(frozen=True)
class Device:
    """An ext4 file system on the emulated disk."""

    mount: Path
    trigger: Path

    def fail(self) -> None:
        """Every read and write gives EIO from now on."""
        self.trigger.touch()

    def heal(self) -> None:
        self.trigger.unlink()


def run(*command: object) -> str:
    done = subprocess.run(
        list(map(str, command)), check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    """A disk of 64 MiB that takes DELAY_S for each request."""
    socket, fuse, mount = tmp_path / "socket", tmp_path / "fuse", tmp_path / "mount"
    found = Device(mount, tmp_path / "trigger")
    fuse.mkdir()
    mount.mkdir()
    delay = f"{DELAY_S * 1000:.0f}ms"
    server = subprocess.Popen(
        [
            "nbdkit", "--foreground", "--unix", str(socket), "--filter=error", "--filter=delay",
            "memory", "64M", f"delay-read={delay}", f"delay-write={delay}",
            "error-rate=100%", f"error-file={found.trigger}", "error=EIO",
        ],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until(socket.exists)
    bridge = subprocess.Popen(["nbdfuse", str(fuse / "disk"), "--unix", str(socket)])
    loop = ""
    try:
        until((fuse / "disk").exists)
        loop = run("losetup", "--find", "--show", "--direct-io=on", fuse / "disk")
        run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0", "-O", "^has_journal", loop)
        run("mount", loop, mount)
        yield found
    finally:
        found.trigger.unlink(missing_ok=True)
        if os.path.ismount(mount):
            run("umount", mount)
        if loop:
            run("losetup", "--detach", loop)
        run("fusermount3", "-u", "-z", fuse)
        for process in (bridge, server):
            process.terminate()
            process.wait(30)


def open_store(device: Device, **ssd: object) -> Store:
    return assemble(load(overrides=settings(device.mount / "kv", **ssd)))


def test_a_slow_disk_keeps_its_promises_and_its_deadlines(device: Device) -> None:
    with open_store(device, read_timeout="20s", write_timeout="20s") as store:
        keys = prompt(space_of(store), 1, 12)
        assert put_all(store, keys) == [Put.STORED] * 12
        assert store.flush(60.0)
    with open_store(device, read_timeout="20s", write_timeout="20s") as store:
        space = space_of(store)
        targets = [bytearray(64 << 10) for _ in keys]
        started = time.monotonic()
        answers = store.get_many(keys, targets, timeout_s=DELAY_S / 4)
        assert time.monotonic() - started < 20.0
        assert {answer.reason for answer in answers} == {"late"}
        # What was late has taken the drive out for a moment.
        until(lambda: verified_hits(store, keys) == 12)
        works_again(store, space, 5)
        assert_quiet(store)


def test_a_disk_that_fails_costs_misses_until_it_works_again(device: Device) -> None:
    with open_store(device, read_timeout="5s", write_timeout="5s") as store:
        space = space_of(store)
        keys = prompt(space, 1, 12)
        put_all(store, keys)
        assert store.flush(60.0)
    with open_store(device, read_timeout="5s", write_timeout="5s") as store:
        space = space_of(store)
        device.fail()
        assert verified_hits(store, keys) == 0
        fresh = prompt(space, 2, 4)
        assert put_all(store, fresh) == [Put.STORED] * 4
        assert verified_hits(store, fresh) == 4
        assert not store.flush(10.0)
        device.heal()
        works_again(store, space, 10)
        assert_quiet(store)
    with open_store(device) as store:
        space_of(store)
        assert store.check().ok
        verified_hits(store, keys)
