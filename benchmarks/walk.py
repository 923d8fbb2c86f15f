"""Which files of the package a block crosses, from real stack traces. Writes docs/tour.md.

    python benchmarks/walk.py            print the walks
    python benchmarks/walk.py --write    write them into docs/tour.md
    python benchmarks/walk.py --json     files and functions of each walk

Each walk is counted twice, see MEASURES. Stores are warm: what happens once (a new segment, a
connection, a pool of threads) is no part of a walk. `--root` and `--toy` are for
another checkout.
"""

import argparse
import contextlib
import importlib
import inspect
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
TOUR: Final = ROOT / "docs" / "tour.md"
BEGIN: Final = "<!-- walks: written by benchmarks/walk.py --write -->"
END: Final = "<!-- end of walks -->"

NATIVE: Final = {
    "transfer", "copy_in", "copy_out", "chunk_checksums", "gather", "scatter", "run",
}  # fmt: skip
SOCKET: Final = {"send", "sendall", "sendmsg", "recv", "recv_into", "recvmsg", "recvmsg_into"}
CATALOG: Final = {"reserve", "seal", "lease", "unlease", "use", "drop", "move"} | {
    "reserve_all", "seal_all", "drop_all",
}  # fmt: skip
QUEUES: Final = {"mark_dirty"}
"""Functions of the package that queue a block for another thread."""
NEVER: Final = (
    "native/", "errors.py", "testing/", "__init__.py", "daemon/server/listener.py",
)  # fmt: skip
"""The daemon's loop looks at the listening socket too, at times during a walk."""
OUTSIDE: Final = ("index/", "native/", "core/", "config/", "errors.py", "testing/", "__init__.py")
FORMATS: Final = ("format/record.py", "format/segment.py", "format/metadata.py")
LIBRARIES: Final = (*OUTSIDE, "policy/", *FORMATS)


@dataclass(frozen=True, slots=True)
class Goal:
    """How much a walk may enter; 0: no limit."""

    entered: int
    files: int = 0
    functions: int = 0


GOALS: Final = {
    "Put to disk": Goal(12, 21, 110),
    "Put to disk, through the daemon": Goal(18),
    "Hit in memory": Goal(5, 11, 35),
    "Hit on SSD": Goal(9, 16, 65),
    "Hit on a hard drive": Goal(11),
    "Hit in a bucket": Goal(11),
    "Hit in memory, through the daemon": Goal(11, 16),
    "vLLM load from SSD": Goal(15),
    "vLLM lookup in the scheduler": Goal(15),
}
"""tests/arch/test_tour.py holds the walks to them."""

MEASURES: Final = """\
**On the stack**: the union of the files on the stack, in all threads, at the moments where bytes
of a block move (a call into the native copy, checksum or I/O functions), where its index entry
changes (reserve, seal, lease, use, drop) and where it changes hands (a queue, a pool of threads,
a socket). **Entered**: all files that have a function called on the way, in the threads that
handle the block. Neither counts `index/`, `native/`, `core/`, `config/` and `errors.py`; the
second does not count the pure functions of `policy/` and of the formats in `format/` either.
**All**: files and functions entered, without `native/` and `errors.py` alone.
"""
HAPPENS: Final = {
    "adapters/tensors/mover.py": "scatters a block into the engine's tensors",
    "adapters/vllm/page_transfer.py": "one load: lease, deliver into vLLM's pages, release",
    "adapters/vllm/worker.py": "starts what the scheduler has planned for this step",
    "daemon/client/connections.py": "one connection: a request out, its answer in",
    "daemon/client/remote.py": "asks the daemon, copies out of the memory that both map",
    "daemon/server/client_resources.py": "what a client holds; the lease ends",
    "daemon/server/daemon.py": "takes requests off one connection, in the loop or a thread",
    "daemon/server/requests.py": "one request: parse, ask the store, answer",
    "store/move/mover.py": "leases dirty blocks, appends them, enters where they lie, releases",
    "store/read/reader.py": "looks blocks up, serves what is in memory, plans waves on volumes",
    "store/state/lower_tier.py": "the block joins the queue of a tier's write-back",
    "store/state/memory_tier.py": "a filled slot becomes a block of the memory tier",
    "store/state/state.py": "what the store's lock guards: leases and the tiers that want a block",
    "store/engine.py": "one call of the engine: who may use which blocks, then the work",
    "depot.py": "the public call: keys and buffers become arrays",
    "store/write/put.py": "finds a slot, copies and checksums in one pass, seals",
    "store/write/write_back.py": "a background thread chooses a drive and what goes to it",
    "io/files.py": "one batch to the native I/O engine",
    "volumes/log/segments.py": "gives the records places in the active segment, writes them",
    "volumes/log/reader.py": "plans operations for the records, reads and verifies them",
    "volumes/log/volume.py": "the interface of a volume: append, read",
    "format/copy_ops.py": "copies of parts of records, in one batch",
    "daemon/wire/frames.py": "frames over a socket",
}

BY_TIMING: Final = {"daemon/server/daemon.py": "Connection._serve"}
"""What is named where the first function depends on the thread that happens to serve."""

Functions = dict[str, list[str]]
"""By file, both in the order in which they were first seen."""


@dataclass(slots=True)
class Walk:
    stack: Functions = field(default_factory=dict)
    entered: Functions = field(default_factory=dict)
    everything: Functions = field(default_factory=dict)

    @property
    def functions(self) -> int:
        return sum(map(len, self.everything.values()))


class Recorder:
    """Collects calls of all threads that start after `install`, while recording."""

    def __init__(self) -> None:
        self.package = str(Path(importlib.import_module("kvdepot").__file__ or "").parent) + "/"
        self._on = False
        self._stack: Functions = {}
        self._entered: dict[int, Functions] = {}
        self._handling: set[int] = set()
        """Threads that have seen a block."""

    def install(self) -> None:
        threading.setprofile(self.look)
        sys.setprofile(self.look)

    def remove(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Walk]:
        walk = Walk()
        self._stack, self._entered, self._handling = {}, {}, set()
        self._on = True
        try:
            yield walk
        finally:
            self._on = False
            walk.stack = self._stack
            for thread in self._handling:
                for file, names in self._entered[thread].items():
                    for files in (
                        walk.everything,
                        *[walk.entered] * (not file.startswith(LIBRARIES)),
                    ):
                        known = files.setdefault(file, [])
                        known += [name for name in names if name not in known]

    @contextlib.contextmanager
    def not_this_thread(self) -> Iterator[None]:
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(self.look)

    @contextlib.contextmanager
    def this_thread_handles(self) -> Iterator[None]:
        """All that this thread calls is part of the walk, as if it saw a block."""
        self._handling.add(threading.get_ident())
        yield

    def look(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self._on:
            return
        thread = threading.get_ident()
        if event == "call":
            self._add(frame, self._entered.setdefault(thread, {}), NEVER)
            is_moment = self._is_moment(frame)
        else:
            is_moment = event == "c_call" and _is_native_moment(arg)
        if is_moment:
            self._handling.add(thread)
            frames = []
            above: FrameType | None = frame
            while above is not None:
                frames.append(above)
                above = above.f_back
            for one in reversed(frames):
                self._add(one, self._stack, OUTSIDE)

    def _is_moment(self, frame: FrameType) -> bool:
        name, path = frame.f_code.co_name, frame.f_code.co_filename
        if name in CATALOG and path.endswith("/index/catalog.py"):
            return True
        if name == "submit" and path.endswith("/concurrent/futures/thread.py"):
            return True
        return name in QUEUES and path.startswith(self.package)

    def _add(self, frame: FrameType, functions: Functions, without: tuple[str, ...]) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(self.package):
            return
        file = file.removeprefix(self.package)
        name = frame.f_code.co_qualname.partition(".<locals>")[0]
        if file.startswith(without) or name.startswith("<"):
            return
        names = functions.setdefault(file, [])
        if name not in names:
            names.append(name)


def _is_native_moment(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    module = getattr(owner, "__name__", "") if inspect.ismodule(owner) else type(owner).__module__
    name = function.__name__
    if "_native" in module:
        return name in NATIVE
    if type(owner).__name__ == "socket":
        return name in SOCKET
    return type(owner).__name__ == "SimpleQueue" and name == "put"


TOKENS: Final = 16
BLOCK_BYTES: Final = 1 << 20
BLOCKS: Final = 4


class Depots:
    """Opens stores in one folder and moves prompts of a few blocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings: dict[str, Any] = {
            "dram": {"capacity": "64MiB", "prefault": False, "huge_pages": "never"},
            "ssd": {"path": str(folder / "ssd"), "capacity": "512MiB", "segment": "64MiB"},
            "writeback": {"staging": "16MiB"},
        }

    def open(self) -> Any:
        import kvdepot

        return kvdepot.open(**self.settings)

    def keys(self, store: Any, prompt: int) -> list[Any]:
        import kvdepot

        layout = kvdepot.KVLayout.opaque(BLOCK_BYTES, TOKENS)
        space = store.namespace(model="walk", layout=layout)
        return list(space.keys([prompt, *range(1, TOKENS * BLOCKS)]))

    def put(self, store: Any, prompt: int) -> None:
        keys = self.keys(store, prompt)
        payload = bytes(BLOCK_BYTES)
        assert all(store.put_many(keys, [payload] * len(keys), timeout_s=60.0))

    def get(self, store: Any, prompt: int, tier: str) -> None:
        keys = self.keys(store, prompt)
        targets = [bytearray(BLOCK_BYTES) for _ in keys]
        found = [got.tier for got in store.get_many(keys, targets, timeout_s=60.0)]
        assert found == [tier] * len(keys), found


def _wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not is_true():
        assert time.monotonic() < end, "not within a minute"
        time.sleep(0.01)


def walk_embedded(recorder: Recorder, folder: Path) -> dict[str, Walk]:
    """Put to disk, hit in memory, hit on SSD."""
    walks = {}
    depots = Depots(folder)
    store = depots.open()
    depots.put(store, 1)
    store.flush()
    before = store.stats()["counters"]["written"]
    keys = depots.keys(store, 2)
    payload = bytes(BLOCK_BYTES)
    with recorder.recording() as walks["Put to disk"]:
        store.put_many(keys, [payload] * len(keys), timeout_s=60.0)
        with recorder.not_this_thread():
            _wait_until(lambda: store.stats()["counters"]["written"] >= before + BLOCKS)
            time.sleep(0.1)
    store.flush()
    depots.get(store, 1, "dram")
    targets = [bytearray(BLOCK_BYTES) for _ in keys]
    with recorder.recording() as walks["Hit in memory"]:
        store.get_many(keys, targets)
    store.close()
    store = depots.open()
    depots.get(store, 1, "ssd")
    keys = depots.keys(store, 2)
    with recorder.recording() as walks["Hit on SSD"]:
        store.get_many(keys, targets, timeout_s=60.0)
    store.close()
    for name, tier, more in (
        (
            "Hit on a hard drive",
            "hdd",
            {"hdd": {**depots.settings["ssd"], "path": str(folder / "hdd")}},
        ),
        (
            "Hit in a bucket",
            "object",
            {"object": {"url": f"file://{folder}/bucket", "capacity": "1GiB"}},
        ),
    ):
        walks[name] = walk_lower_tier(recorder, folder, tier, more)
    return walks


def walk_lower_tier(recorder: Recorder, folder: Path, tier: str, settings: dict[str, Any]) -> Walk:
    """A hit on a tier that is the only one below memory."""
    (folder / "bucket").mkdir(exist_ok=True)
    depots = Depots(folder)
    del depots.settings["ssd"]
    depots.settings |= settings
    store = depots.open()
    depots.put(store, 1)
    depots.put(store, 2)
    store.flush()
    store.close()
    store = depots.open()
    depots.get(store, 1, tier)
    keys, targets = depots.keys(store, 2), [bytearray(BLOCK_BYTES) for _ in range(BLOCKS)]
    with recorder.recording() as walk:
        store.get_many(keys, targets, timeout_s=60.0)
    store.close()
    return walk


def walk_daemon(recorder: Recorder, folder: Path) -> dict[str, Walk]:
    """Put, and hit in memory, through the daemon, whose loop is a thread of this process."""
    import kvdepot
    from kvdepot.config.settings import load
    from kvdepot.daemon.server.daemon import Daemon
    from kvdepot.daemon.server.listener import Listener

    depots = Depots(folder)
    path = folder / "depot.sock"
    listener = Listener(path)
    daemon = Daemon(load(overrides=depots.settings), listener)
    listener.listen()
    loop = threading.Thread(target=daemon.run, name="kvdepot-daemon")
    loop.start()
    store = kvdepot.open(f"unix:{path}")
    depots.put(store, 1)
    store.flush()
    before = store.stats()["counters"]["written"]
    keys, payload = depots.keys(store, 2), bytes(BLOCK_BYTES)
    with recorder.recording() as put:
        store.put_many(keys, [payload] * len(keys), timeout_s=60.0)
        with recorder.not_this_thread():
            _wait_until(lambda: _written(daemon) >= before + BLOCKS)
            time.sleep(0.1)
    store.flush()
    depots.get(store, 1, "dram")
    targets = [bytearray(BLOCK_BYTES) for _ in keys]
    with recorder.recording() as hit:
        store.get_many(keys, targets)
        with recorder.not_this_thread():
            time.sleep(0.2)  # the release has no answer
    store.close()
    daemon.stop()
    loop.join()
    daemon.close()
    return {
        "Put to disk, through the daemon": put,
        "Hit in memory, through the daemon": hit,
    }


def _written(daemon: Any) -> int:
    return int(daemon.store.stats()["counters"]["written"])


def walk_vllm(recorder: Recorder, folder: Path, toy: str) -> dict[str, Walk]:
    """A prompt that a toy of vLLM's engine loads from SSD, from the worker's step on."""
    toys = importlib.import_module(toy)
    from kvdepot.adapters.vllm.config import ConnectorConfig

    depots = Depots(folder)
    settings = ConnectorConfig(load_timeout=60.0, decide=False)

    def request(number: int, name: str) -> Any:
        tokens = [(7 * index + number) % toys.VOCABULARY for index in range(43)]
        return toys.ToyRequest(name, tokens, max_tokens=1)

    store = depots.open()
    engine = toys.ToyEngine(store, settings)
    for number in (1, 2):
        engine.add(request(number, f"first {number}"))
        engine.run()
    store.flush()
    engine.close()
    store = depots.open()
    engine = toys.ToyEngine(store, settings, roles="consumer")
    engine.add(request(1, "warm"))
    engine.run()
    before = engine.computed_tokens
    engine.add(request(2, "again"))
    match, found = engine.side.match, []

    def looked_up(*given: Any) -> Any:
        with recorder.recording() as walk, recorder.this_thread_handles():
            sys.setprofile(recorder.look)
            tokens = match(*given)
            sys.setprofile(None)
        found.append(walk)
        return tokens

    worker = engine.workers[0]
    begin = worker.begin
    load = contextlib.ExitStack()
    loads: list[Walk] = []

    def watched(plan: Any) -> None:
        if not loads:
            loads.append(load.enter_context(recorder.recording()))
        sys.setprofile(recorder.look)
        begin(plan)
        sys.setprofile(None)

    engine.side.match, worker.begin = looked_up, watched
    with recorder.not_this_thread(), load:
        engine.step()
        engine.side.match = match
        engine.run()
    assert engine.computed_tokens - before < toys.PAGE_TOKENS + 1, "the prompt was not loaded"
    engine.close()
    return {"vLLM load from SSD": loads[0], "vLLM lookup in the scheduler": found[0]}


def walks(toy: str, *, quick: bool = False) -> dict[str, Walk]:
    """All walks; the quick ones need no torch."""
    recorder = Recorder()
    found: dict[str, Walk] = {}
    parts: list[Callable[[Recorder, Path], dict[str, Walk]]] = [walk_embedded, walk_daemon]
    if not quick:
        parts.append(lambda recorder, folder: walk_vllm(recorder, folder, toy))
    recorder.install()
    try:
        for part in parts:
            with tempfile.TemporaryDirectory(prefix="kvdepot-walk-") as folder:
                found |= part(recorder, Path(folder))
    finally:
        recorder.remove()
    return found


def as_markdown(found: dict[str, Walk]) -> str:
    lines = [MEASURES.replace("\n", " ").strip(), ""]
    lines += [
        "| walk | on the stack | entered | goal | all files | goal | all functions | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, walk in found.items():
        goal = GOALS[name]
        lines.append(
            f"| {name} | {len(walk.stack)} | {len(walk.entered)} | {goal.entered} "
            f"| {len(walk.everything)} | {goal.files or '–'} "
            f"| {walk.functions} | {goal.functions or '–'} |"
        )
    for name, walk in found.items():
        lines += ["", f"### {name}", ""]
        for file, functions in walk.stack.items():
            name = BY_TIMING.get(file, functions[0])
            lines.append(f"- `{file}: {name}` – {HAPPENS.get(file, 'passes it on')}")
        others = ", ".join(f"`{file}`" for file in sorted(walk.entered.keys() - walk.stack.keys()))
        lines += ["", f"Also entered: {others}."]
    return "\n".join(lines)


def write_tour(text: str) -> None:
    before, begin, rest = TOUR.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"error: {TOUR} has no markers {BEGIN} and {END}")
    TOUR.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description="which files a block crosses")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="without the vLLM walk")
    parser.add_argument("--write", action="store_true", help="write docs/tour.md")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout that has the toy engine")
    parser.add_argument("--toy", default="tests.support.toy_engine", help="module of the toy")
    args = parser.parse_args()
    sys.path[:0] = [str(args.root), str(args.root / "tests" / "vllm")]
    found = walks(args.toy, quick=args.quick)
    if args.json:
        print(json.dumps({name: asdict(walk) for name, walk in found.items()}, indent=1))
    elif args.write:
        write_tour(as_markdown(found))
    else:
        print(as_markdown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
