"""The doctor's facts, read from a machine laid out in a folder, and its judgement of them."""

import argparse
import dataclasses
import importlib
import io
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdepot.cli import output
from kvdepot.cli.doctor import command as doctor
from kvdepot.cli.doctor import machine
from kvdepot.cli.doctor.command import Status
from kvdepot.cli.main import COMMANDS, main

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
            "sys/block/loop0/size": "2048",
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
    assert facts.features == ("avx2", "sha_ni")
    assert facts.memory_bytes == 1 << 30
    assert facts.memory_limit_bytes == 512 * MIB
    assert facts.numa_nodes == 2
    assert facts.huge_pages == machine.HugePages(8, 3, 2 * MIB, "madvise", "never")
    assert [disk.name for disk in facts.disks] == ["nvme0n1", "sda"]
    assert facts.disks[0] == machine.Disk("nvme0n1", MIB, rotational=False, model="Quick SSD")
    assert facts.disks[1].rotational
    assert facts.gpus == (machine.GpuCard("NVIDIA H200", "580.95.05"),)
    assert len(facts.dax_devices) == 1
    assert facts.far_nodes == ()


def test_memory_behind_cxl_is_offered(server: Path) -> None:
    node = {"cpulist": "\n", "meminfo": "Node 2 MemTotal:       1024 kB\nNode 2 MemFree: 1 kB\n"}
    lay(server, {f"sys/devices/system/node/node2/{name}": text for name, text in node.items()})
    found = doctor.slower_memory_check(machine.read_machine(server))
    assert found.status is doctor.Status.OK
    assert "NUMA node 2" in found.found and "dax0.0" in found.found
    assert found.advice.startswith("cxl.node = 2 or cxl.path = ")
    (server / "dev/dax0.0").unlink()
    (server / "sys/devices/system/node/node2/meminfo").unlink()
    missing = doctor.slower_memory_check(machine.read_machine(server))
    assert "stand in" in missing.found and not missing.advice


def test_an_unreadable_machine_is_empty_not_an_error(tmp_path: Path) -> None:
    facts = machine.read_machine(tmp_path)
    assert facts.memory_bytes == 0
    assert facts.disks == ()
    assert facts.gpus == ()
    assert list(doctor.machine_checks(facts))


def test_the_deepest_and_latest_mount_counts(server: Path) -> None:
    def filesystem(path: str) -> str:
        mount = machine.find_mount(Path(path), server)
        assert mount is not None
        return mount.filesystem

    assert filesystem("/data/kv") == "overlay"
    assert filesystem("/database") == "ext4"
    assert filesystem("/with space/kv") == "btrfs"


def test_a_partition_leads_to_its_disk(server: Path) -> None:
    partition, whole = machine.find_disk("259:1", server), machine.find_disk("8:0", server)
    assert partition is not None
    assert partition.name == "nvme0n1"
    assert whole is not None
    assert whole.name == "sda"
    assert machine.find_disk("0:50", server) is None


def test_asks_nvidia_smi_where_the_driver_shows_nothing(tmp_path: Path) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.95.05'\n")
    script.chmod(0o755)
    gpus = machine.read_machine(tmp_path, nvidia_smi=str(script)).gpus
    assert gpus == (machine.GpuCard("NVIDIA H200", "580.95.05"),)
    script.write_text("#!/bin/sh\nexit 9\n")
    assert machine.read_machine(tmp_path, nvidia_smi=str(script)).gpus == ()


def test_a_directory_is_looked_at_and_left_as_it_was(tmp_path: Path) -> None:
    facts = machine.read_path(tmp_path)
    assert facts.problem == ""
    assert 0 < facts.free_bytes <= facts.total_bytes
    speed = machine.measure_speed(facts, size_bytes=8 * MIB)
    assert speed.read_bytes_per_s > 0
    assert speed.write_bytes_per_s is not None
    assert speed.write_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_progress_is_told_no_more_than_was_moved(tmp_path: Path) -> None:
    told: list[int] = []
    machine.measure_speed(machine.read_path(tmp_path), size_bytes=8 * MIB, advance=told.append)
    assert sum(told) <= 16 * MIB


def test_the_scratch_file_is_gone_even_while_it_is_used(tmp_path: Path) -> None:
    with machine.scratch_file(tmp_path) as (fd, _):
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(fd).st_nlink == 0


@pytest.mark.parametrize("name", ["absent", "file"])
def test_an_unusable_path_is_bad(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (check,) = doctor.path_checks(machine.read_path(tmp_path / name))
    assert check.status is Status.BAD
    assert check.advice


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
        assert facts.is_device
        assert facts.total_bytes == 8 * MIB
        speed = machine.measure_speed(facts, size_bytes=16 * MIB)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
    assert speed.read_bytes_per_s > 0
    assert speed.write_bytes_per_s is None
    assert image.read_bytes() == before


def test_what_falls_short_is_a_warning_with_advice() -> None:
    facts = machine.PathFacts("/d", problem="", direct_refusal="refused", free_bytes=1)
    limits = doctor.ProcessLimits(memlock_bytes=8 * MIB, open_files=1024, open_files_hard=None)
    blocked = doctor.Native(loaded=True, reason="", uring=False, uring_reason="seccomp")
    found = (
        *doctor.path_checks(facts),
        *doctor.limit_checks(limits),
        *doctor.software_checks(blocked),
    )
    checks = {check.subject: check for check in found}
    for subject in ("/d", "/d O_DIRECT", "memlock", "open files", "io_uring"):
        assert checks[subject].status is Status.WARN, subject
        assert checks[subject].advice, subject
    assert "seccomp" in checks["io_uring"].found


def test_without_the_extension_io_uring_is_not_blamed() -> None:
    without_c = doctor.Native(loaded=False, reason="no gcc", uring=False, uring_reason="not built")
    checks = {check.subject: check for check in doctor.software_checks(without_c)}
    assert checks["native"].status is Status.WARN
    assert "no gcc" in checks["native"].found
    assert checks["io_uring"].status is Status.INFO


def test_what_is_well_needs_no_advice() -> None:
    limits = doctor.ProcessLimits(memlock_bytes=None, open_files=None, open_files_hard=None)
    fast_path = doctor.Native(loaded=True, reason="", uring=True, uring_reason="")
    for check in (*doctor.limit_checks(limits), *doctor.software_checks(fast_path)):
        assert check.status is Status.OK
        assert not check.advice


def test_too_little_room_is_not_measured(tmp_path: Path) -> None:
    facts = dataclasses.replace(machine.read_path(tmp_path), free_bytes=10)
    assert doctor.speed_check(facts).status is Status.INFO


def test_a_failing_disk_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, buffers: object, offset: int) -> int:
        raise OSError(5, "Input/output error")

    facts = machine.read_path(tmp_path)
    monkeypatch.setattr(os, "preadv", fail)
    check = doctor.speed_check(facts, size_bytes=4 * MIB)
    assert check.status is Status.BAD
    assert "Input/output error" in check.found
    assert list(tmp_path.iterdir()) == []


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", str(tmp_path)]) == 0
    seen = capsys.readouterr()
    assert "io_uring" in seen.out
    assert str(tmp_path) in seen.out
    assert "0 bad" in seen.err


def test_command_json_and_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json", str(tmp_path / "absent")]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["machine"]["cores"] > 0
    assert {"subject", "status", "found", "advice"} == set(answer["checks"][0])
    assert "bad" in {check["status"] for check in answer["checks"]}


def test_one_filesystem_is_measured_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    measured = []

    def measure(facts: machine.PathFacts) -> doctor.Check:
        measured.append(facts.path)
        return doctor.Check("measured", Status.OK, "")

    checks = list(doctor.paths_checks([tmp_path, tmp_path / "a"], measure=measure))
    assert measured == [str(tmp_path)]
    assert f"same filesystem as {tmp_path}" in checks[-1].found


def test_progress_is_silent_for_two_seconds_off_a_terminal() -> None:
    now_s, stream = [0.0], io.StringIO()
    with output.Progress("copying", 100, stream=stream, clock=lambda: now_s[0]) as progress:
        progress.advance(10)
        assert stream.getvalue() == ""
        now_s[0] = 2.5
        progress.advance(40)
    assert stream.getvalue() == "copying … 50 %\n"


def test_progress_on_a_terminal_leaves_a_clean_line() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with output.Progress("copying", stream=stream):
        assert stream.getvalue() == "\rcopying …"
    assert stream.getvalue().endswith("\r")


@pytest.mark.parametrize("arguments", [["docter"], ["doctor", "--jsn"], ["--nothing"]])
def test_a_mistyped_command_gets_a_hint(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("error: ")
    assert "hint: kvdepot" in seen.err


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("kvdepot 0.")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_speaks_json(name: str) -> None:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    importlib.import_module(COMMANDS[name].module).add_parser(subparsers)
    for leaf in leaves(parser):
        assert "--json" in leaf.format_help(), leaf.prog


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers below which there is no further choice: what can be run."""
    choices = [
        choice
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for choice in action.choices.values()
    ]
    for choice in choices:
        yield from leaves(choice)
    if not choices:
        yield parser


def test_measuring_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    machine.measure_speed(machine.read_path(tmp_path), size_bytes=4 * MIB)
    assert set(threading.enumerate()) <= before
