"""What this process, or another, has mapped, as the kernel tells."""

from pathlib import Path

ARENA = "kvdepot-arena"


def arenas(pid: int | str = "self") -> set[str]:
    """Inodes of the daemons' memories that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if ARENA in line}


def flags_at(address: int) -> set[str]:
    """The flags of the mapping that has an address; `dd` is: not in core dumps."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if first == "VmFlags:" and here:
            return set(line.split()[1:])
        if "-" in first and not first.endswith(":"):
            start, stop = (int(part, 16) for part in first.split("-"))
            here = start <= address < stop
    raise AssertionError(f"nothing is mapped at {address:#x}")
