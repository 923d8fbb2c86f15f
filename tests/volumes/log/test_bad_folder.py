"""A drive whose folder cannot be read is left out, and the other one is used."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_store import prompt, put, settings, space_of, tiers

from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.io.files import Files
from kvdepot.store.open import assemble
from kvdepot.store.store import Store

CODES = [errno.EIO, errno.ESTALE]


def opened(folder: Path, files: Files | None = None, mode: Any = "rw") -> Store:
    tree = settings([folder / "a", folder / "b"], capacity="16MiB", promote=False)
    return assemble(load(overrides=tree), mode=mode, files=files)


def filled(folder: Path) -> list[BlockKey]:
    with opened(folder) as store:
        keys = prompt(space_of(store), 1, 120)
        assert all(put(store, keys)) and store.flush()
    return keys


def assert_one_drive_works(folder: Path, keys: list[BlockKey], mode: str = "rw") -> None:
    with opened(folder, mode=mode) as store:
        assert [entry.error is None for entry in store.inspect().volumes.entries] == [True, False]
        space = space_of(store)
        assert 0 < sum(tier is not None for tier in tiers(store, keys)) < len(keys)
        if mode == "rw":
            assert all(put(store, prompt(space, 2, 4))) and store.flush()


@pytest.mark.parametrize("mode", ["rw", "r"])
def test_a_dangling_link_named_like_a_segment(tmp_path: Path, mode: str) -> None:
    keys = filled(tmp_path)
    (tmp_path / "b" / "segment-000077.kvs").symlink_to(tmp_path / "nowhere")
    assert_one_drive_works(tmp_path, keys, mode)
    assert (tmp_path / "b" / "segment-000077.kvs").is_symlink()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("call", ["listdir", "scandir", "stat"])
def test_a_folder_that_cannot_be_read(
    tmp_path: Path, call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = filled(tmp_path)
    real: Callable[..., Any] = getattr(os, call)

    def fails(path: Any = ".", *args: Any, **options: Any) -> Any:
        if isinstance(path, (str, Path)) and str(path).startswith(str(tmp_path / "b")):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, call, fails)
    with opened(tmp_path) as store:
        space_of(store)
        found = sum(tier is not None for tier in tiers(store, keys))
        assert 0 < found <= len(keys)
        works = [entry.error is None for entry in store.inspect().volumes.entries]
        assert works[0] and works[1] == (found == len(keys))


class FailingFiles(Files):
    """Files of which the nth operation on drive `b` fails, and all later ones."""

    def __init__(self, number: int, code: int) -> None:
        super().__init__("python")
        self.left = number
        self._code = code

    def _step(self, path: str) -> None:
        if "/b" in path:
            self.left -= 1
            if self.left <= 0:
                raise OSError(self._code, os.strerror(self._code))

    def open_file(self, path: Path, flags: int) -> int:
        self._step(str(path))
        return super().open_file(path, flags)

    def open_directory(self, path: Path) -> int:
        self._step(str(path))
        return super().open_directory(path)

    def make_directory(self, path: Path) -> None:
        self._step(str(path))
        super().make_directory(path)

    def unlink(self, path: Path) -> None:
        self._step(str(path))
        super().unlink(path)

    def read(self, fd: int, offset: int, nbytes: int) -> memoryview:
        self._step(os.readlink(f"/proc/self/fd/{fd}"))
        return super().read(fd, offset, nbytes)

    def write(self, fd: int, offset: int, data: bytes) -> None:
        self._step(os.readlink(f"/proc/self/fd/{fd}"))
        super().write(fd, offset, data)


@pytest.mark.parametrize("code", CODES)
def test_a_drive_that_fails_at_any_step_of_opening_it(tmp_path: Path, code: int) -> None:
    keys = filled(tmp_path)
    number, over = 0, False
    while not over:
        number += 1
        files = FailingFiles(number, code)
        with opened(tmp_path, files) as store:
            space_of(store)
            over = files.left > 0
            if not over:
                assert sum(tier is not None for tier in tiers(store, keys)) > 0, number
            files.left = 1 << 30
    assert number > 20
