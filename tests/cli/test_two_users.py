"""Every path that the product makes by itself: another user neither reads nor changes it."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.other_user import OTHER_USERS, as_other_user, needs_other_user, shared_folder
from tests.support.store_contract import prompt, put, small, space_of

import kvdepot
from kvdepot.cli.directories import scratch_directory, write_page
from kvdepot.core.private import make_private_folder, open_private_file, replace_private_file
from kvdepot.daemon.server.listener import Listener
from kvdepot.errors import KVDepotError

MEDDLE = """
def tries(what, *arguments):
    try:
        what(*arguments)
    except OSError:
        return False
    return True

for path in sys.argv[1:]:
    done = [what.__name__ for what, arguments in [
        (os.listdir, (path,)),
        (os.open, (path, os.O_RDONLY)),
        (os.open, (path, os.O_WRONLY)),
        (os.truncate, (path, 0)),
        (os.chmod, (path, 0o777)),
        (os.rename, (path, path + ".mine")),
        (os.link, (path, path + ".link")),
        (os.unlink, (path,)),
        (os.rmdir, (path,)),
        (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect, (path,)),
        (open, (os.path.join(path, "planted"), "w")),
    ] if tries(what, *arguments)]
    print(path, done) if done else None
print("tried", len(sys.argv) - 1)
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder where everybody may make files, and a umask that would let everybody in."""
    before = os.umask(0)
    try:
        with shared_folder() as folder:
            yield Path(folder)
    finally:
        os.umask(before)


def make_store(place: Path) -> None:
    with kvdepot.open(**small(place / "kv")) as store:
        put(store, prompt(space_of(store), 1, 3))
        store.admin.record(str(place / "trace.jsonl"))
        store.admin.stop_recording()


def make_socket(place: Path) -> None:
    listener = Listener(make_private_folder(place / "run") / "depot.sock")
    listener.listen()
    os.close(listener._lock)  # as a killed daemon leaves it
    listener._lock = -1
    listener._socket.close()


def make_page(place: Path) -> None:
    write_page(place / "report.html", "<p>")


def make_cache(place: Path) -> None:
    folder = make_private_folder(place / "cache" / "speeds")
    replace_private_file(folder / "x.json", b"{}")


def make_scratch(place: Path) -> None:
    with scratch_directory(place, "kvdepot-bench-", keep=True) as folder:
        (folder / "inside").write_text("inside")


def make_lock(place: Path) -> None:
    os.close(open_private_file(place / "depot.lock", os.O_RDWR | os.O_CREAT))


Maker = Callable[[Path], None]
MAKERS: list[Maker] = [make_store, make_socket, make_page, make_cache, make_scratch, make_lock]
PREDICTABLE: dict[Maker, str] = {
    make_store: "kv",
    make_socket: "run",
    make_page: "report.html",
    make_cache: "cache/speeds",
    make_lock: "depot.lock",
}


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_made_is_for_its_owner_alone(public: Path, make: Maker) -> None:
    make(public)
    made = [path for path in public.rglob("*") if path.name != "inside"]
    assert made
    open_to_others = {
        str(path): oct(path.lstat().st_mode)
        for path in made
        if stat.S_IMODE(path.lstat().st_mode) & 0o077
    }
    assert not open_to_others


@needs_other_user
@pytest.mark.parametrize("uid", OTHER_USERS)
def test_another_user_can_do_nothing_to_it(public: Path, uid: int) -> None:
    for make in MAKERS:
        make(public)
    paths = sorted(public.rglob("*"))
    assert len(paths) > 12
    before = {path: path.lstat().st_size for path in paths if not path.is_dir()}
    assert as_other_user(MEDDLE, *paths, uid=uid) == f"tried {len(paths)}"
    assert sorted(public.rglob("*")) == paths
    assert {path: path.lstat().st_size for path in before} == before


@needs_other_user
@pytest.mark.parametrize("make", PREDICTABLE)
@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_what_another_user_has_made_first_is_not_used(public: Path, make: Maker, what: str) -> None:
    (public / "cache").mkdir(mode=0o777)
    (public / "cache").chmod(0o1777)
    diary = public / "diary"
    diary.write_text("mine")
    diary.chmod(0o600)
    path = public / PREDICTABLE[make]
    plant = {
        "folder": "os.mkdir(sys.argv[1], 0o777); os.chmod(sys.argv[1], 0o777)",
        "file": "Path(sys.argv[1]).touch(); os.chmod(sys.argv[1], 0o777)",
        "link": "os.symlink(sys.argv[2], sys.argv[1])",
    }
    as_other_user(plant[what], path, diary)
    assert path.lstat().st_uid == OTHER_USERS[0]
    with pytest.raises((KVDepotError, OSError)):
        make(public)
    assert diary.read_text() == "mine"
    assert path.is_symlink() or not path.is_dir() or not list(path.iterdir())
