"""Two users on one machine: a daemon, its clients, and a user who is neither."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.other_user import (
    OTHER_USERS,
    as_other_user,
    needs_other_user,
    other_user_running,
    shared_folder,
)
from tests.support.store_contract import small

import kvdepot
from kvdepot.cli.main import main
from kvdepot.daemon.server.listener import Listener
from kvdepot.errors import DaemonError, UnsafePathError
from kvdepot.testing.daemons import DaemonProcess

LISTEN = """
listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listening.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listening.listen()
print("listening", flush=True)
connected, _ = listening.accept()
print(len(connected.recv(1 << 16)), flush=True)
"""
IMPORTS = """
from kvdepot.daemon.wire.frames import Channel, FrameKind
from tests.support.raw_client import hello
"""
GREET = """
connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connected.connect(sys.argv[1])
channel = Channel(connected)
channel.send(FrameKind.HELLO, 1, hello())
frame, descriptors = channel.receive_with(60.0)
print(frame.kind.name, len(descriptors))
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder where everybody may make files."""
    with shared_folder() as folder:
        yield Path(folder)


@needs_other_user
@pytest.mark.parametrize("uid", OTHER_USERS)
def test_nothing_is_said_to_another_users_daemon(public: Path, uid: int) -> None:
    path = public / "depot.sock"
    with other_user_running(LISTEN, path, uid=uid) as heard:
        assert heard() == "listening"
        with pytest.raises(DaemonError, match="is run by user") as caught:
            kvdepot.open(f"unix:{path}")
        assert "daemon_user=" in caught.value.hint
        assert heard() == "0", "it was told something"


@needs_other_user
def test_another_users_daemon_is_used_where_it_is_named(public: Path) -> None:
    path, uid = public / "depot.sock", OTHER_USERS[0]
    with other_user_running(LISTEN, path, uid=uid) as heard:
        assert heard() == "listening"
        with pytest.raises(DaemonError, match="no daemon answers"):
            kvdepot.open(f"unix:{path}", daemon_user=str(uid))
        assert int(heard()) > 0


@needs_other_user
def test_commands_trust_the_daemon_of_the_user_whom_the_environment_names(
    public: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, uid = public / "depot.sock", OTHER_USERS[0]
    command = ["tiers", "list", "--socket", str(path)]
    with other_user_running(LISTEN, path, uid=uid) as heard:
        assert heard() == "listening"
        monkeypatch.setenv("KVDEPOT_DAEMON_USER", str(uid))
        assert main(command) == 2
        assert "no daemon answers" in capsys.readouterr().err, "it is none, but it was asked"
        assert int(heard()) > 0


@needs_other_user
@pytest.mark.parametrize("uid", OTHER_USERS)
def test_a_daemon_serves_no_other_user_whatever_the_sockets_mode(public: Path, uid: int) -> None:
    with DaemonProcess(public, small(public / "kv")) as daemon:
        assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
        assert "Permission denied" in as_other_user(GREET, daemon.socket, imports=IMPORTS, uid=uid)
        daemon.socket.chmod(0o777)
        assert as_other_user(GREET, daemon.socket, imports=IMPORTS, uid=uid) == "REFUSED 0"
        with kvdepot.open(daemon.address) as store:
            assert store.stats()["daemon"]["counters"]["refused"] == 1


@needs_other_user
def test_a_daemon_serves_its_group(public: Path) -> None:
    member, other = OTHER_USERS
    with DaemonProcess(public, small(public / "kv"), "--group", "nogroup") as daemon:
        assert as_other_user(GREET, daemon.socket, imports=IMPORTS, uid=member) == "WELCOME 2"
        daemon.socket.chmod(0o777)
        assert as_other_user(GREET, daemon.socket, imports=IMPORTS, uid=other) == "REFUSED 0"


@needs_other_user
def test_another_users_lock_and_socket_are_not_used(public: Path) -> None:
    path = public / "depot.sock"
    as_other_user("Path(sys.argv[1]).touch(0o666)", f"{path}.lock")
    with pytest.raises(UnsafePathError, match="belongs to user"):
        Listener(path)


def test_a_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "diary").write_text("mine")
    (tmp_path / "depot.sock.lock").symlink_to(tmp_path / "diary")
    with pytest.raises(UnsafePathError, match="symbolic link"):
        Listener(tmp_path / "depot.sock")
    (tmp_path / "depot.sock.lock").unlink()
    (tmp_path / "depot.sock.lock").hardlink_to(tmp_path / "diary")
    with pytest.raises(UnsafePathError, match="2 hard links"):
        Listener(tmp_path / "depot.sock")
    assert (tmp_path / "diary").read_text() == "mine"
