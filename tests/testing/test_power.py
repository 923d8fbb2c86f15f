"""The device that forgets, by itself: what a cut may and may not take."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdepot.format.record import PAGE
from kvdepot.io.files import Files
from kvdepot.testing.power import PowerFiles

Work = Callable[[Files, Path], None]
OLD, NEW = b"o" * PAGE, b"n" * PAGE


def make(files: Files, path: Path, data: bytes = OLD) -> int:
    fd = files.open_file(path, os.O_RDWR | os.O_CREAT)
    files.allocate(fd, 4 * PAGE)
    files.write(fd, 0, data * 4)
    return fd


def durable(files: Files, folder: Path, fd: int) -> None:
    files.sync(fd)
    directory = files.open_directory(folder)
    files.sync_directory(directory)
    os.close(directory)


def outcomes(folder: Path, work: Work) -> set[str]:
    """What is left of file `a` in 60 cuts, a letter a page: (o)ld, (n)ew, (0), (t)orn."""
    found = set()
    for seed in range(60):
        here = folder / str(seed)
        here.mkdir()
        files = PowerFiles(random.Random(seed), "python")
        work(files, here)
        files.cut()
        with pytest.raises(OSError):
            files.open_file(here / "a", os.O_RDWR | os.O_CREAT)
        found.add(describe(here / "a"))
        assert not (here / ".unsynced").exists()
        files.close()
    return found


def describe(path: Path) -> str:
    if not path.exists():
        return "gone"
    kinds = {OLD: "o", NEW: "n", bytes(PAGE): "0"}
    data = path.read_bytes()
    return "".join(kinds.get(data[at : at + PAGE], "t") for at in range(0, len(data), PAGE))


def test_what_was_synced_stays(tmp_path: Path) -> None:
    def work(files: Files, here: Path) -> None:
        fd = make(files, here / "a")
        durable(files, here, fd)
        os.close(fd)

    assert outcomes(tmp_path, work) == {"oooo"}


def test_unsynced_pages_are_kept_lost_or_torn_apart_from_each_other(tmp_path: Path) -> None:
    def work(files: Files, here: Path) -> None:
        fd = make(files, here / "a")
        durable(files, here, fd)
        files.write(fd, 0, NEW * 4)
        assert describe(here / "a") == "nnnn"
        os.close(fd)

    found = outcomes(tmp_path, work)
    assert {"oooo", "nnnn"} <= found and len(found) > 6
    assert any("t" in one for one in found)


def test_a_name_needs_its_directory_synced(tmp_path: Path) -> None:
    def work(files: Files, here: Path) -> None:
        fd = make(files, here / "a")
        files.sync(fd)
        os.close(fd)

    assert outcomes(tmp_path, work) == {"gone", "oooo"}


def test_a_rename_and_an_unlink_may_be_undone(tmp_path: Path) -> None:
    def rename(files: Files, here: Path) -> None:
        durable(files, here, make(files, here / "a"))
        files.sync(make(files, here / "b", NEW))
        files.replace(here / "b", here / "a")

    def unlink(files: Files, here: Path) -> None:
        durable(files, here, make(files, here / "a"))
        files.unlink(here / "a")

    (tmp_path / "unlink").mkdir()
    assert outcomes(tmp_path, rename) == {"oooo", "nnnn"}
    assert outcomes(tmp_path / "unlink", unlink) == {"oooo", "gone"}


def test_a_late_write_may_arrive_after_the_page_was_written_again(tmp_path: Path) -> None:
    def work(files: Files, here: Path) -> None:
        assert isinstance(files, PowerFiles)
        fd = make(files, here / "a")
        durable(files, here, fd)
        files.late = 1.0
        with pytest.raises(TimeoutError):
            files.write(fd, 0, NEW)
        assert files.may_still_write(fd, 0, PAGE) and not files.may_still_write(fd, PAGE, 2 * PAGE)
        files.late = 0.0
        files.write(fd, 0, OLD)
        files.sync(fd)

    assert outcomes(tmp_path, work) >= {"oooo", "nooo"}


def test_the_power_goes_at_a_chosen_write(tmp_path: Path) -> None:
    files = PowerFiles(random.Random(0), "python")
    fd = make(files, tmp_path / "a")
    files.cut_at = files.writes + 2
    files.write(fd, 0, NEW)
    with pytest.raises(OSError):
        files.write(fd, 0, NEW)
    assert files.off
    files.close()


def test_a_directory_that_is_moved_takes_its_unsynced_names_along(tmp_path: Path) -> None:
    found = set()
    for seed in range(60):
        here = tmp_path / str(seed)
        here.mkdir()
        files = PowerFiles(random.Random(seed), "python")
        os.close(make(files, here / "a"))
        here.rename(tmp_path / f"away-{seed}")
        files.cut()
        files.close()
        found.add((tmp_path / f"away-{seed}" / "a").exists())
    assert found == {True, False}


def test_a_directory_is_synced_wherever_it_is(tmp_path: Path) -> None:
    for seed in range(20):
        here, away = tmp_path / str(seed), tmp_path / f"away-{seed}"
        here.mkdir()
        files = PowerFiles(random.Random(seed), "python")
        directory = files.open_directory(here)
        fd = make(files, here / "a")
        here.rename(away)
        files.sync(fd)
        files.sync_directory(directory)
        for one in (fd, directory):
            os.close(one)
        away.rename(here)
        files.cut()
        files.close()
        assert describe(here / "a") == "oooo"


def test_a_directory_that_is_gone_has_no_names_and_a_cut_keeps_no_descriptor(
    tmp_path: Path,
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    here = tmp_path / "drive"
    here.mkdir()
    files = PowerFiles(random.Random(0), "python")
    os.close(make(files, here / "a"))
    os.close(make(files, here / "b"))
    shutil.rmtree(here)
    files.cut()
    files.close()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not here.exists()
