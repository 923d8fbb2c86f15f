"""The doctor: facts of a machine that is laid out in a folder, and the checks of them."""

import dataclasses
import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from tests.support.other_user import OTHER_USERS, needs_other_user, shared_folder
from tests.support.store_contract import small

import kvdepot
from kvdepot.bench.raw import nameless
from kvdepot.cli import doctor, drive_speed, machine
from kvdepot.cli.doctor import Check
from kvdepot.cli.main import main
from kvdepot.core.private import make_private_folder
from kvdepot.io.speed import VolumeBenchmark

Seen = pytest.CaptureFixture[str]
MIB = 1 << 20


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A two-socket machine with a partitioned NVMe disk, a hard disk and one GPU."""
    root = lay(
        tmp_path / "root",
        {
            "proc/meminfo": "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n"
            "HugePages_Total: 8\nHugePages_Free: 3\nHugepagesize: 2048 kB\n",
            "proc/cpuinfo": "model name : Fast CPU\nflags : fpu avx2 sha_ni\n\n"
            "model name : Other\n",
            "proc/sys/kernel/osrelease": "6.18.0\n",
            "proc/self/mountinfo": "20 1 254:0 / / rw - ext4 /dev/vda rw\n"
            "21 20 259:1 / /data rw - xfs /dev/nvme0n1p1 rw\n"
            "22 20 8:0 / /with\\040space rw - btrfs /dev/sda rw\n"
            "23 20 0:50 / /data rw - overlay overlay rw\n",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA x86_64 Kernel Module  580.95.05\n",
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t NVIDIA H200\nIRQ: 5\n",
            "sys/fs/cgroup/memory.max": f"{512 * MIB}\n",
            "sys/devices/system/node/node0/cpulist": "0",
            "sys/devices/system/node/node1/cpulist": "1",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always advise [never] deny\n",
            "sys/block/nvme0n1/size": "2048",
            "sys/block/nvme0n1/queue/rotational": "0",
            "sys/block/nvme0n1/device/model": "Quick SSD   \n",
            "sys/block/nvme0n1/nvme0n1p1/partition": "1",
            "sys/block/sda/size": "4096",
            "sys/block/sda/queue/rotational": "1",
            "dev/dax0.0": "",
        },
    )
    blocks = root / "sys/dev/block"
    blocks.mkdir(parents=True)
    (blocks / "259:1").symlink_to(root / "sys/block/nvme0n1/nvme0n1p1")
    (blocks / "8:0").symlink_to(root / "sys/block/sda")
    return root


def test_reads_the_machine(server: Path) -> None:
    facts = machine.read_machine(server)
    assert facts.cpu == "Fast CPU"
    assert facts.memory_bytes == 1 << 30
    assert facts.memory_limit_bytes == 512 * MIB
    assert facts.gpus == ("NVIDIA H200, driver 580.95.05",)
    assert len(facts.dax_devices) == 1
    assert facts.far_nodes == ()
    (pages,) = doctor.huge_page_checks(facts, server)
    assert pages.found.startswith("3 of 8 free, 2MiB each; transparent: madvise")


def test_memory_behind_cxl_is_offered(server: Path) -> None:
    node = {"cpulist": "\n", "meminfo": "Node 2 MemTotal:       1024 kB\nNode 2 MemFree: 1 kB\n"}
    lay(server, {f"sys/devices/system/node/node2/{name}": text for name, text in node.items()})
    (found,) = doctor.slower_memory_checks(machine.read_machine(server))
    assert found.status == "ok"
    assert "NUMA node 2" in found.found and "dax0.0" in found.found
    assert found.advice.startswith("cxl.node = 2 or cxl.path = ")
    (server / "dev/dax0.0").unlink()
    (server / "sys/devices/system/node/node2/meminfo").unlink()
    (missing,) = doctor.slower_memory_checks(machine.read_machine(server))
    assert "DRAM would be used" in missing.found and not missing.advice


def test_an_unreadable_machine_is_empty_not_an_error(tmp_path: Path) -> None:
    facts = machine.read_machine(tmp_path)
    assert (facts.memory_bytes, facts.gpus) == (0, ())
    assert [check for checks in doctor.MACHINE_CHECKS for check in checks(facts)]


def test_the_deepest_and_latest_mount_counts(server: Path) -> None:
    paths = {"/data/kv": "overlay", "/database": "ext4", "/with space/kv": "btrfs"}
    assert {path: machine.find_mount(Path(path), server)[0] for path in paths} == paths


def test_a_partition_leads_to_its_disk(server: Path) -> None:
    partition, whole = machine.find_disk("259:1", server), machine.find_disk("8:0", server)
    assert partition is not None and whole is not None
    assert partition == machine.Disk("nvme0n1", MIB, rotational=False, model="Quick SSD")
    assert (whole.name, whole.rotational) == ("sda", True)
    assert machine.find_disk("0:50", server) is None


def test_a_directory_is_measured_and_left_unchanged(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    facts = machine.read_path(tmp_path)
    assert facts.problem == "" and 0 < facts.free_bytes <= facts.total_bytes
    profile = drive_speed.measure_path(facts, 8 * MIB)
    assert profile.read_bytes_per_s > 0 and profile.write_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []
    assert set(threading.enumerate()) <= before


def test_the_scratch_file_has_no_name_while_it_is_used(tmp_path: Path) -> None:
    with nameless(tmp_path) as (fd, _):
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(fd).st_nlink == 0


@pytest.mark.parametrize("name", ["absent", "file"])
def test_an_unusable_path_is_bad(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (check,) = doctor.place_checks(machine.read_path(tmp_path / name))
    assert check.status == "bad" and check.advice


@pytest.mark.root
def test_a_raw_device_is_measured_but_never_written(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(range(256)) * (8 * MIB // 256))
    before = image.read_bytes()
    attach = ["losetup", "--find", "--show", "--direct-io=on", str(image)]
    try:
        device = subprocess.run(attach, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop devices here: {error}")
    try:
        facts = machine.read_path(Path(device))
        assert facts.is_device and facts.total_bytes == 8 * MIB
        profile = drive_speed.measure_path(facts, 16 * MIB)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
    assert profile.read_bytes_per_s > 0 and profile.write_bytes_per_s == 0
    assert image.read_bytes() == before


def test_warnings_have_advice_and_what_is_ok_has_none() -> None:
    facts = machine.PathFacts("/d", problem="", direct_io=False, free_bytes=1)
    wrong = (
        *doctor.place_checks(facts),
        *doctor.limit_checks(8 * MIB, 1024, -1),
        *doctor.native_checks("", False, "seccomp"),
    )
    checks = {check.subject: check for check in wrong}
    for subject in ("/d", "/d O_DIRECT", "memlock", "open files", "io_uring"):
        assert checks[subject].status == "warn" and checks[subject].advice, subject
    assert "seccomp" in checks["io_uring"].found
    for check in (*doctor.limit_checks(-1, -1, -1), *doctor.native_checks("", True, "")):
        assert check.status == "ok" and not check.advice


def test_without_the_extension_io_uring_is_not_blamed() -> None:
    missing, uring = doctor.native_checks("no gcc", False, "not built")
    assert (missing.status, uring.status) == ("warn", "info")
    assert "no gcc" in missing.found


def test_too_little_room_is_not_measured(tmp_path: Path) -> None:
    facts = dataclasses.replace(machine.read_path(tmp_path), free_bytes=10)
    assert doctor.speed_check(facts).status == "info"


def test_a_failing_disk_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(VolumeBenchmark, "step", fail)
    check = doctor.speed_check(machine.read_path(tmp_path), 4 * MIB)
    assert check.status == "bad" and "Input/output error" in check.found
    assert list(tmp_path.iterdir()) == []


def test_one_filesystem_is_measured_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    measured = []

    def measure(facts: machine.PathFacts) -> Check:
        measured.append(facts.path)
        return Check("measured", "ok", "")

    checks = list(doctor.path_checks([tmp_path, tmp_path / "a"], measure=measure))
    assert measured == [str(tmp_path)]
    assert f"same filesystem as {tmp_path}" in checks[-1].found


def test_command(tmp_path: Path, capsys: Seen) -> None:
    assert main(["doctor", "--quick", str(tmp_path)]) == 0
    seen = capsys.readouterr()
    assert "io_uring" in seen.out and str(tmp_path) in seen.out
    assert "0 bad" in seen.err
    assert main(["doctor", "--quick", "--json", str(tmp_path / "absent")]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["machine"]["cores"] > 0
    assert {"subject", "status", "found", "advice"} == set(answer["checks"][0])
    assert "bad" in {check["status"] for check in answer["checks"]}


def unsafe(*paths: Path, stores: tuple[Path, ...] = ()) -> dict[str, Check]:
    """What is wrong with folders, by subject."""
    found = [one for path in paths for one in doctor.folder_checks(path, is_store=path in stores)]
    return {one.subject: one for one in found if one.advice}


def test_swap_is_named(tmp_path: Path) -> None:
    head = "Filename Type Size Used Priority\n"
    assert doctor.swap_check(lay(tmp_path, {"proc/swaps": head})) == Check("swap", "ok", "off")
    lay(tmp_path, {"proc/swaps": head + "/dev/vdb partition 8388608 0 -2\n"})
    seen = doctor.swap_check(tmp_path)
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
    lay(tmp_path, {"proc/sys/kernel/core_pattern": pattern + "\n"})
    seen = doctor.core_dump_check(tmp_path, limit)
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
    assert "may be written by other users" in seen.found and seen.status == "bad"
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
        assert f"belongs to user {OTHER_USERS[0]}" in seen.found and seen.status == "bad"
        inside = make_private_folder(folder / "deeper")
        assert f"user {OTHER_USERS[0]}" in unsafe(inside)[f"{inside} above"].found


def test_files_of_a_store_are_checked(tmp_path: Path) -> None:
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
    assert not any(one.advice for one in doctor.runtime_checks(env))
    path.chmod(0o666)
    (seen,) = [one for one in doctor.runtime_checks(env) if one.advice]
    assert (seen.subject, seen.advice) == (str(path), f"chmod o= {path}")
    tmp_path.chmod(0o777)
    wrong = [one.subject for one in doctor.runtime_checks(env) if one.advice]
    assert "runtime folder" in wrong


def test_the_command_fails_on_a_store_that_others_may_change(tmp_path: Path, capsys: Seen) -> None:
    folder = make_private_folder(tmp_path / "kv")
    file = tmp_path / "depot.toml"
    file.write_text(f'[ssd]\npath = "{folder}"\ncapacity = "64MiB"\n')
    assert main(["doctor", "--quick", "--json", "--config", str(file)]) == 0
    capsys.readouterr()
    folder.chmod(0o777)
    assert main(["doctor", "--quick", "--json", "--config", str(file)]) == 1
    seen = {check["subject"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert seen[f"{folder} access"]["status"] == "bad"
    assert seen[f"{folder} access"]["advice"] == f"chmod go-w {folder}"
    assert {"swap", "core dumps", "memlock", "runtime folder"} <= set(seen)
