"""One depot for all who ask for the same; a daemon where processes share it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from kvdepot.adapters.vllm import shared_depot
from kvdepot.adapters.vllm.config import ConnectorConfig, read
from kvdepot.core.layout import KVLayout
from kvdepot.daemon.client import connections
from kvdepot.errors import DaemonError, UnsafePathError


def settings(folder: Path, **more: object) -> ConnectorConfig:
    disk = {"path": str(folder / "kv"), "capacity": "16MiB", "segment": "1MiB"}
    memory = {"capacity": "4MiB", "huge_pages": "never"}
    return read({"dram": memory, "ssd": disk, "writeback": {"staging": "2MiB"}, **more})


def test_equal_settings_share_a_depot_until_the_last_has_gone(tmp_path: Path) -> None:
    config = settings(tmp_path)
    one = shared_depot.open_depot(config, one_process=True)
    other = shared_depot.open_depot(config, one_process=True)
    assert one.store is other.store
    one.close()
    one.close()
    assert other.store.stats()["blocks"] == 0
    other.close()
    again = shared_depot.open_depot(config, one_process=True)
    assert again.store is not one.store
    again.close()


def test_without_a_daemon_it_is_an_error_if_none_may_be_started(tmp_path: Path) -> None:
    config = settings(tmp_path, socket=str(tmp_path / "d.sock"), daemon="never")
    with pytest.raises(DaemonError):
        shared_depot.open_depot(config, one_process=False)


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("not a folder")
    config = settings(tmp_path, socket=str(tmp_path / "d.sock"))
    with pytest.raises(DaemonError, match="neither a directory"):
        shared_depot.open_depot(config, one_process=False)


def test_no_daemon_is_started_where_another_user_may_write(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o1777)
    config = settings(tmp_path, socket=str(tmp_path / "run" / "d.sock"))
    with pytest.raises(UnsafePathError, match="may be written by other users"):
        shared_depot.open_depot(config, one_process=False)


def test_a_link_in_place_of_the_lock_truncates_nothing(tmp_path: Path) -> None:
    (tmp_path / "diary").write_text("mine")
    for name in ("d.lock", "d.toml", "d.log"):
        (tmp_path / name).symlink_to(tmp_path / "diary")
        config = settings(tmp_path, socket=str(tmp_path / "d.sock"))
        with pytest.raises(UnsafePathError, match="symbolic link"):
            shared_depot.open_depot(config, one_process=False)
        assert (tmp_path / "diary").read_text() == "mine"
        (tmp_path / name).unlink()


def test_the_default_place_is_this_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = shared_depot.default_socket(settings(tmp_path))
    own = (tmp_path / "home", Path(f"/run/user/{os.getuid()}"))
    assert any(path.is_relative_to(folder) for folder in own)
    assert path != shared_depot.default_socket(settings(tmp_path / "other"))


def test_a_daemon_is_started_once_and_stays(tmp_path: Path) -> None:
    config = settings(tmp_path, socket=str(tmp_path / "d.sock"))
    first = shared_depot.open_depot(config, one_process=False)
    process = shared_depot._daemons[-1]
    try:
        space = first.store.namespace(model="m", layout=KVLayout.opaque(4096, 4))
        (key,) = space.keys([1, 2, 3, 4])
        assert first.store.put_many([key], [b"x" * 4096])[0]
        first.close()
        assert process.poll() is None
        second = shared_depot.open_depot(config, one_process=True)
        assert shared_depot._daemons[-1] is process
        second.store.namespace(model="m", layout=KVLayout.opaque(4096, 4))
        assert len(second.store.match([key])) == 1
        second.close()
    finally:
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 0
        shared_depot._daemons.remove(process)


def test_a_daemon_is_not_pinned_to_the_core_of_the_engine_that_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does on a CPU: OpenMP is preloaded and pins what it is loaded into."""
    openmp = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    cores = os.sched_getaffinity(0)
    if not openmp.exists() or len(cores) < 2:
        pytest.skip("needs torch's libgomp and two cores")
    monkeypatch.setenv("LD_PRELOAD", str(openmp))
    monkeypatch.setenv("GOMP_CPU_AFFINITY", str(min(cores)))
    look = "import os; print(len(os.sched_getaffinity(0)))"
    pinned = subprocess.run([sys.executable, "-c", look], capture_output=True, check=True)
    assert pinned.stdout == b"1\n", "else this shows nothing"
    config = settings(tmp_path, socket=str(tmp_path / "d.sock"))
    assert config.socket is not None
    process = shared_depot.start_daemon(config.socket, config)
    try:
        assert os.sched_getaffinity(process) >= cores
    finally:
        os.kill(process, signal.SIGTERM)
        assert shared_depot._daemons.pop().wait(30) == 0


@pytest.mark.parametrize("daemon", ["never", "auto"])
def test_a_daemon_that_is_too_busy_to_answer_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemon: str
) -> None:
    """As when several workers start side by side: one of them has just started it."""
    monkeypatch.setattr(connections, "HELLO_TIMEOUT_S", 0.2)
    config = settings(tmp_path, socket=str(tmp_path / "d.sock"), daemon=daemon)
    assert config.socket is not None
    assert not connections.is_served(config.socket)
    process = shared_depot.start_daemon(config.socket, config)
    assert connections.is_served(config.socket)
    os.kill(process, signal.SIGSTOP)
    later = threading.Timer(0.5, os.kill, (process, signal.SIGCONT))
    later.start()
    depot = shared_depot.open_depot(config, one_process=False)
    later.join()
    assert depot.store.stats()["blocks"] == 0
    depot.close()
    os.kill(process, signal.SIGTERM)
