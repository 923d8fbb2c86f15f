"""Checks a store after its end, and the files, descriptors and threads that it left."""

import time
from typing import Any, Final

from kvdepot.store.check.offline import audit
from kvdepot.store.store import Store
from kvdepot.testing.power import PowerFiles
from kvdepot.testing.torture.ledger import Ledger
from kvdepot.testing.torture.workload import descriptors, threads
from kvdepot.testing.torture.world import SEGMENT_BYTES, World, all_blocks, read_blocks

_SOON_S: Final = 10.0


def judge_files(world: World, ledger: Ledger) -> None:
    """The offline check must find nothing on any drive that was initialized."""
    for path in (*world.ssd_paths, *world.hdd_paths):
        if (path / "superblock").exists():
            for finding in audit(path).findings:
                ledger.fault("unclean", f"{path.parent.name}: {finding}")


def judge_store(
    store: Store,
    world: World,
    ledger: Ledger,
    *,
    cut: bool = False,
    files: PowerFiles | None = None,
) -> None:
    """Check all that must hold after a store's end."""
    expected, blocks = ledger.expected, all_blocks()
    drives = drive_facts(store)
    ledger.write("opened", drives=drives, left_out=left_out(store))
    present = {block.number for block in blocks if store.match([block.key])}
    down = any(not drive["healthy"] for drive in drives)  # paused after a late write
    away = down or bool(world.away())
    gone, must = expected.removed, must_be_there(world, ledger)
    if cut:
        gone = expected.synced
    if away:
        gone = gone - expected.doubtful
    if cut and world.mix.fsync == "never":
        gone, must = set(), set()
    for number in sorted(present & gone):
        ledger.fault("back", f"block {number} was removed and is present again")
    for number in sorted(set() if away else must - present):
        ledger.fault("lost", f"block {number} was flushed and is missing")
    there = [block for block in blocks if block.number in present]
    right, wrong = read_blocks(store, there)
    for block in wrong:
        ledger.fault("wrong", f"block {block.number} has wrong bytes")
    if files is not None and files.off:
        return
    read = {block.number for block in (*right, *wrong)}
    for block in [blocks[number] for number in sorted(present - read)]:
        if not store.match([block.key]):
            continue
        # A copy on a drive that works again meanwhile makes it present: then it can be read.
        right, wrong = read_blocks(store, [block])
        if wrong:
            ledger.fault("wrong", f"block {block.number} has wrong bytes")
        elif not right and store.match([block.key]):
            ledger.fault("lost", f"block {block.number} is present and cannot be read")
    for finding in store.admin.check(deep=False).findings:
        ledger.fault("unclean", str(finding))
    quarantined = store.stats()["counters"]["quarantined"]
    if quarantined and world.mix.fsync != "never":
        ledger.fault("unclean", f"{quarantined} blocks were quarantined")
    if not away and world.mix.fsync != "never":
        judge_pins(store, ledger, present)
    ledger.write("present", present, away=away, cut=cut, ssds=world.ssds)


def judge_pins(store: Store, ledger: Ledger, present: set[int]) -> None:
    """Every pin with a receipt must exist, and its blocks must be present."""
    known = {one["name"]: one["pin"] for one in store.sessions.list(limit=1000)}
    kept = {name: blocks for name, blocks in ledger.expected.kept.items() if blocks}
    for name, blocks in sorted(kept.items()):
        if known.get(name) is None:
            ledger.fault("broken", f"{name}: its pin is missing")
        for number in sorted(blocks - present):
            ledger.fault("broken", f"{name}: block {number} is pinned and missing")
    ledger.write("kept", count=len(kept))


def left_out(store: Store) -> int:
    """The number of volumes that could not be opened."""
    entries = store.inspect().state.volumes.entries
    return sum(entry.error is not None for entry in entries)


def drive_facts(store: Store) -> list[dict[str, Any]]:
    """The state of each volume, for readers of the ledger."""
    wanted = ("path", "healthy", "reason", "segments", "free_segments", "capacity_bytes", "damage")
    described = [
        one for lower in store.inspect().state.lower_tiers for one in lower.volumes.describe()
    ]
    return [{name: one.get(name) for name in wanted} for one in described]


def must_be_there(world: World, ledger: Ledger) -> set[int]:
    """Blocks that cannot have been evicted: those that the index had at the end, and all flushed
    blocks if the capacity is at least four times the bytes ever put.
    """
    expected, mix = ledger.expected, world.mix
    there = set(expected.apart)
    if expected.had_snapshot:
        there |= expected.must
    room = world.ssd_bytes
    if mix.hdds:
        room = min(room, mix.hdds * mix.hdd_segments * 2 * SEGMENT_BYTES)
    if not expected.drives.shrunk and 4 * expected.put_bytes < room:
        there |= expected.flushed
    return there


def judge_leaks(ledger: Ledger, before_fds: int, before_threads: list[str]) -> None:
    """A closed store must have no descriptors and, within _SOON_S, no threads."""
    deadline = time.monotonic() + _SOON_S
    while True:
        left = descriptors() - before_fds
        names = [name for name in threads() if name not in before_threads]
        if (left <= 0 and not names) or time.monotonic() > deadline:
            break
        time.sleep(0.005)
    if left > 0:
        ledger.fault("leaked", f"{left} descriptors are still open", count=left)
    if names:
        ledger.fault("leaked", f"threads still run: {', '.join(names)}", count=len(names))
