"""The doctor names every setting that lets others at a store."""

import json
import os
import socket
from pathlib import Path

import pytest
from tests.support.other_user import OTHER_USERS, needs_other_user, shared_folder

import kvdepot
from kvdepot.cli.doctor import privacy
from kvdepot.cli.doctor.privacy import Exposure
from kvdepot.cli.main import main
from kvdepot.core.private import make_private_folder
from kvdepot.testing.store_contract import small


def unsafe(*paths: Path, stores: tuple[Path, ...] = ()) -> dict[str, Exposure]:
    """What is found wrong with folders, by subject."""
    found = [
        one for path in paths for one in privacy.folder_exposures(path, is_store=path in stores)
    ]
    return {one.subject: one for one in found if one.advice}


def lay(root: Path, name: str, text: str) -> Path:
    make_private_folder((root / name).parent)
    (root / name).write_text(text)
    return root


def test_swap_is_named(tmp_path: Path) -> None:
    head = "Filename Type Size Used Priority\n"
    lay(tmp_path, "proc/swaps", head)
    assert privacy.swap_exposure(tmp_path) == Exposure("swap", "off")
    lay(tmp_path, "proc/swaps", head + "/dev/vdb partition 8388608 0 -2\n")
    seen = privacy.swap_exposure(tmp_path)
    assert "/dev/vdb (8GiB)" in seen.found and seen.advice


@pytest.mark.parametrize(
    ("pattern", "limit", "named"),
    [
        ("core", 0, ""),
        ("core", -1, "as core, up to unlimited"),
        ("/var/crash/%p", 1 << 20, "as /var/crash/%p, up to 1MiB"),
        ("|/usr/lib/systemd/systemd-coredump %P", 0, "to /usr/lib/systemd/systemd-coredump"),
    ],
)
def test_core_dumps_are_named(tmp_path: Path, pattern: str, limit: int, named: str) -> None:
    lay(tmp_path, "proc/sys/kernel/core_pattern", pattern + "\n")
    seen = privacy.dump_exposure(tmp_path, limit)
    assert bool(seen.advice) is bool(named)
    assert named in seen.found


def test_modes_and_links_of_folders_are_named(tmp_path: Path) -> None:
    folder = make_private_folder(tmp_path / "kv")
    assert unsafe(folder) == {}
    folder.chmod(0o755)
    assert unsafe(folder) == {}, "a store in it would be a folder of its own"
    assert unsafe(folder, stores=(folder,))[f"{folder} access"].advice == f"chmod 700 {folder}"
    folder.chmod(0o777)
    seen = unsafe(folder, stores=(folder,))[f"{folder} access"]
    assert "may be written by other users" in seen.found and seen.refused
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert "symbolic link" in unsafe(link)[f"{link} access"].found


def test_a_folder_above_that_others_may_change_is_named(tmp_path: Path) -> None:
    above = tmp_path / "above"
    folder = make_private_folder(above / "kv")
    above.chmod(0o777)
    assert str(above) in unsafe(folder)[f"{folder} above"].found
    above.chmod(0o1777)
    assert unsafe(folder) == {}, "there they cannot rename what is not theirs"


@needs_other_user
def test_another_users_folder_is_named() -> None:
    with shared_folder() as public:
        folder = make_private_folder(Path(public) / "kv")
        os.chown(folder, OTHER_USERS[0], -1)
        seen = unsafe(folder, stores=(folder,))[f"{folder} access"]
        assert f"belongs to user {OTHER_USERS[0]}" in seen.found and seen.refused
        inside = make_private_folder(folder / "deeper")
        assert f"user {OTHER_USERS[0]}" in unsafe(inside)[f"{inside} above"].found


def test_files_of_a_store_are_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with kvdepot.open(**small(folder)):
        pass
    assert unsafe(folder) == {}
    (folder / "superblock").chmod(0o644)
    (folder / "linked").symlink_to("/etc/passwd")
    found = unsafe(folder)[f"{folder} files"].found
    assert "superblock has mode 0644" in found and "linked is a symbolic link" in found


def test_sockets_that_all_may_use_are_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    path = make_private_folder(tmp_path / "kvdepot") / "depot.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
    path.chmod(0o600)
    assert not any(one.advice for one in privacy.runtime_exposures(env))
    path.chmod(0o666)
    (seen,) = [one for one in privacy.runtime_exposures(env) if one.advice]
    assert (seen.subject, seen.advice) == (str(path), f"chmod o= {path}")
    tmp_path.chmod(0o777)
    wrong = [one.subject for one in privacy.runtime_exposures(env) if one.advice]
    assert "runtime folder" in wrong


def test_the_command_tells_and_fails_where_a_store_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_private_folder(tmp_path / "kv")
    file = tmp_path / "depot.toml"
    file.write_text(f'[ssd]\npath = "{folder}"\ncapacity = "64MiB"\n')
    assert main(["doctor", "--quick", "--json", "--config", str(file)]) == 0
    folder.chmod(0o777)
    assert main(["doctor", "--quick", "--json", "--config", str(file)]) == 1
    out = capsys.readouterr().out
    checks = json.JSONDecoder().raw_decode(out[out.rindex('{\n  "ok"') :])[0]["checks"]
    seen = {check["subject"]: check for check in checks}
    assert seen[f"{folder} access"]["status"] == "bad"
    assert seen[f"{folder} access"]["advice"] == f"chmod go-w {folder}"
    assert {"swap", "core dumps", "memlock", "runtime folder"} <= set(seen)
