"""`kvdepot serve` as an operator meets it: starting, permissions, stopping, mistakes."""

import ctypes
import grp
import json
import os
import platform
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.daemon_clients import StartDaemon
from tests.support.store_contract import (
    BLOCK_BYTES,
    LAYOUT,
    TOKENS,
    prompt,
    put,
    space_of,
    tiers,
)
from tests.support.waiting import eventually, until

import kvdepot
from kvdepot.cli.main import main
from kvdepot.daemon.client import connections
from kvdepot.daemon.server.listener import Listener
from kvdepot.daemon.wire.versions import PROTOCOL, PROTOCOL_OLDEST, SpokenVersions
from kvdepot.errors import DaemonError
from kvdepot.testing.daemons import DaemonProcess
from kvdepot.testing.images import payload_for

SYS_TGKILL = {"x86_64": 234, "aarch64": 131}
TINY = ["--set", "dram.capacity=2MiB", "--set", "dram.prefault=false"]


def serve(*arguments: str, **env: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "kvdepot", "serve", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **env})


def refused(*arguments: str) -> str:
    """What a daemon that cannot start says."""
    process = serve(*arguments)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    return errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_from_ready_to_stopped(tmp_path: Path, number: signal.Signals) -> None:
    path, store_path = tmp_path / "d.sock", tmp_path / "kv"
    disk = ["--set", f"ssd.path={store_path}", "--set", "ssd.capacity=16MiB"]
    process = serve("--socket", str(path), "--json", *TINY, *disk)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert ready["ready"] and ready["socket"] == str(path) and ready["pid"] == process.pid
    assert ready["protocol"] == PROTOCOL
    with kvdepot.open(f"unix:{path}") as store:
        keys = prompt(space_of(store), 1, 6)
        assert all(put(store, keys))
        process.send_signal(number)
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert json.loads(out) == {"stopped": True, "ok": True, "waiting": 0}
        assert "Traceback" not in errors
        assert not path.exists()
        assert tiers(store, keys) == [None] * 6
    with kvdepot.open(dram="2MiB", ssd={"path": store_path, "capacity": "16MiB"}) as store:
        space_of(store)
        assert tiers(store, keys) == ["ssd"] * 6


def test_people_are_told_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    process = serve("--socket", str(path), *TINY)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(f"ready: unix:{path}, 0 blocks, 2MiB of memory")
    process.terminate()
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert errors.splitlines()[-1] == "stopped"


def test_only_the_owner_may_connect_unless_a_group_is_named(start_daemon: StartDaemon) -> None:
    mine = start_daemon(folder="mine")
    mode = mine.socket.stat()
    assert stat.S_IMODE(mode.st_mode) == 0o600
    group = grp.getgrgid(os.getgid())
    ours = start_daemon("--group", group.gr_name, folder="ours").socket.stat()
    assert (stat.S_IMODE(ours.st_mode), ours.st_gid) == (0o660, group.gr_gid)


def test_a_second_daemon_is_told_of_the_first(daemon: DaemonProcess) -> None:
    errors = refused("--socket", str(daemon.socket), *TINY)
    assert f"a daemon is already running, process {daemon.pid}" in errors
    assert "hint: use it, stop it, or choose another --socket" in errors
    with kvdepot.open(daemon.address) as store:
        assert len(store.match([])) == 0, "the first one is not disturbed"


def test_a_socket_that_a_killed_daemon_left_is_replaced(daemon: DaemonProcess) -> None:
    daemon.kill()
    assert daemon.socket.is_socket()
    daemon.start()
    with kvdepot.open(daemon.address) as store:
        assert len(store.match([])) == 0


def test_what_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "d.sock"
    file.write_bytes(b"mine")
    assert "exists and is not a socket" in refused("--socket", str(file), *TINY)
    assert file.read_bytes() == b"mine"


def test_mistakes_are_explained_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.sock"
    cases = [
        (["--socket", str(path), "--set", "drm.capacity=1GiB"], "drm"),
        (["--socket", str(path), "--set", "dram.capacity=lots"], "dram.capacity"),
        (["--socket", str(path), "--config", str(tmp_path / "no.toml")], "no.toml"),
        (["--socket", str(path), *TINY, "--group", "nobody-here"], "nobody-here"),
        (["--socket", str(path), *TINY, "--clients", "0"], "--clients"),
        (["--socket", str(tmp_path / "none" / "d.sock"), *TINY], "No such file"),
        (["--socket", str(tmp_path / ("x" * 120)), *TINY], "at most"),
    ]
    for arguments, named in cases:
        with pytest.raises(SystemExit) as ended:  # some are found before there is a status
            sys.exit(main(["serve", *arguments]))
        assert ended.value.code == 2
        shown = capsys.readouterr()
        assert named in shown.err and not shown.out
        assert not path.exists()


def test_a_signal_that_another_thread_receives_stops_it(tmp_path: Path) -> None:
    process = serve("--socket", str(tmp_path / "d.sock"), "--json", *TINY)
    assert process.stdout is not None and process.stdout.readline()
    others = {int(one) for one in os.listdir(f"/proc/{process.pid}/task")} - {process.pid}
    thread_kill = ctypes.CDLL(None, use_errno=True).syscall
    assert (
        thread_kill(SYS_TGKILL[platform.machine()], process.pid, min(others), signal.SIGTERM) == 0
    )
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_by_default_it_listens_in_the_runtime_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with serve("--json", *TINY) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["socket"] == str(tmp_path / "kvdepot" / "depot.sock")
        assert (tmp_path / "kvdepot").stat().st_mode & 0o777 == 0o700
        assert main(["tiers", "list"]) == 0
        process.terminate()
        process.communicate()


def test_systemd_is_told_when_it_is_ready(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(60)
        process = serve(
            "--socket", str(tmp_path / "d.sock"), *TINY, NOTIFY_SOCKET=str(tmp_path / "notify")
        )
        assert listening.recv(100) == b"READY=1"
    process.terminate()
    process.communicate(timeout=60)


def test_a_client_of_another_version_names_both(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvdepot.open(daemon.address) as store:
        monkeypatch.setattr(connections, "_SPOKEN", SpokenVersions(77, 78, 1, 1))
        spoken = rf"protocol {PROTOCOL_OLDEST} to {PROTOCOL},.*protocol 77 to 78,"
        with pytest.raises(DaemonError, match=spoken) as caught:
            kvdepot.open(daemon.address)
        assert "same version" in caught.value.hint
        daemon.kill()
        daemon.start()
        assert len(store.match([])) == 0, "an update meanwhile is a miss, not an error"
        assert "protocol 77" in store.stats()["client"]["reason"]


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_an_idle_daemon_with_clients_uses_no_processor(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store, kvdepot.open(daemon.address) as other:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        space_of(other)
        tiers(other, keys)
        assert store.flush()

        def idle() -> bool:
            before = cpu_ticks(daemon.pid)
            threading.Event().wait(0.6)
            return cpu_ticks(daemon.pid) - before <= 2

        assert any(idle() for _ in range(20)), "once all is done"


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def serving_threads(pid: int) -> int:
    """Threads of the daemon that serve clients."""
    names = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
    return sum(name.startswith("kvdepot-client") for name in names)


def come_and_go(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 3)
        put(store, keys)
        tiers(store, keys)


def test_clients_that_come_and_go_leave_no_descriptor_or_thread(daemon: DaemonProcess) -> None:
    come_and_go(daemon)
    with kvdepot.open(daemon.address) as store:
        assert eventually(lambda: len(store.stats()["daemon"]["sessions"]) == 1)
        store.flush()  # the segment that is written to is open
        mine, theirs = len(os.listdir("/proc/self/fd")), descriptors(daemon.pid)
        for _ in range(30):
            come_and_go(daemon)
        assert eventually(lambda: descriptors(daemon.pid) == theirs)
        assert len(os.listdir("/proc/self/fd")) == mine
    assert eventually(lambda: serving_threads(daemon.pid) == 0)


def test_a_group_that_the_daemon_is_not_in_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    listener = Listener(tmp_path / "d.sock", grp.getgrgid(os.getgid()).gr_name)
    monkeypatch.setattr(os, "chown", refuse)  # as for users other than root
    try:
        with pytest.raises(DaemonError) as told:
            listener.listen()
        assert "as a member of --group" in told.value.hint
    finally:
        listener.close()


def test_it_tells_routers_of_its_blocks_when_asked_to(start_daemon: StartDaemon) -> None:
    pytest.importorskip("zmq")
    from tests.support.routers import EventFollower

    anywhere = "tcp://127.0.0.1:0"
    given = [f"events.endpoint={anywhere}", f"events.replay={anywhere}"]
    daemon = start_daemon("--set", given[0], "--set", given[1])
    with kvdepot.open(daemon.address) as store:
        space = store.namespace(model="m", layout=LAYOUT)
        ids = list(range(2 * TOKENS))
        keys = space.keys(ids)
        payloads = [payload_for(key, BLOCK_BYTES) for key in keys]
        assert all(store.put_many(keys, payloads, token_ids=ids))
        assert store.stats()["events"]["endpoint"] == daemon.ready["events"]
        with EventFollower(daemon.ready["events"]) as router:

            def told() -> bool:
                router.follow(0.05)
                return router.held("CPU") == {tuple(ids[:TOKENS]), tuple(ids[TOKENS:])}

            until(told)


def test_a_file_beside_the_socket_that_is_no_socket_is_left(tmp_path: Path) -> None:
    (tmp_path / "d.sock.new").write_bytes(b"theirs")
    with closing(Listener(tmp_path / "d.sock")) as listener, pytest.raises(DaemonError):
        listener.listen()
    assert (tmp_path / "d.sock.new").read_bytes() == b"theirs"
