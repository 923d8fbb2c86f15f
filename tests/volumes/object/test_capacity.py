"""A bucket's capacity under load, as a listing sees it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import kvdepot
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.store.store import Store

NODES, PARALLEL = 3, 2
CAPACITY, OBJECT_BYTES, BLOCK_BYTES = 24 << 20, 1 << 20, 120_000
BOUND = CAPACITY + NODES * PARALLEL * OBJECT_BYTES
"""Above the capacity by the objects that are being uploaded."""
SPACE = Namespace(model="m", layout=KVLayout.opaque(BLOCK_BYTES, 4))
LISTINGS, PUT_MIN = 60, 4 * CAPACITY
LIMIT_S = 60.0
OpenStore = Callable[[], Store]


def data_bytes(folder: Path) -> int:
    """Bytes of all data objects."""
    total = 0
    for file in (folder / "data").rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total


@pytest.fixture
def node(tmp_path: Path) -> Iterator[OpenStore]:
    with ExitStack() as stack:

        def opened() -> Store:
            store = kvdepot.open(
                None,
                dram={"capacity": "8MiB", "prefault": False, "huge_pages": "never"},
                writeback={"staging": "4MiB"},
                object={
                    "url": f"file://{tmp_path}/shared",
                    "capacity": CAPACITY,
                    "object_size": OBJECT_BYTES,
                    "parallel": PARALLEL,
                    "refresh": "100ms",
                    "measure": False,
                },
            )
            stack.callback(store.close)
            store.namespace(SPACE)
            return store

        yield opened


@pytest.mark.slow
def test_it_is_kept_while_all_nodes_put(node: OpenStore, tmp_path: Path) -> None:
    stores = [node() for _ in range(NODES)]
    stop, put = threading.Event(), [0] * NODES

    def load(number: int) -> None:
        prompt = 0
        while not stop.is_set():
            prompt += 1
            keys = SPACE.keys([number, prompt, *range(30)])
            answers = stores[number].put_many(keys, [bytes(BLOCK_BYTES)] * len(keys))
            put[number] += BLOCK_BYTES * sum(map(bool, answers))

    threads = [threading.Thread(target=load, args=(number,)) for number in range(NODES)]
    for thread in threads:
        thread.start()
    listed: list[int] = []
    deadline_s = time.monotonic() + LIMIT_S
    try:
        while len(listed) < LISTINGS or (sum(put) < PUT_MIN and time.monotonic() < deadline_s):
            listed.append(data_bytes(tmp_path / "shared"))
            time.sleep(0.05)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert sum(put) >= PUT_MIN, "the nodes put too little to fill the bucket"
    assert max(listed) <= BOUND
    assert max(listed) >= CAPACITY // 2


def test_a_burst_of_a_new_node_waits_for_its_share(node: OpenStore) -> None:
    """More than `parallel` objects, which the first node has no room for until it is known."""
    first = node()
    keys = SPACE.keys([1, *range(4 * 220)])
    for start in range(0, len(keys), 32):
        part = keys[start : start + 32]
        first.put_many(part, [bytes(BLOCK_BYTES)] * len(part))
        first.flush()
    second = node()
    burst = SPACE.keys([2, *range(4 * 28)])
    assert all(second.put_many(burst, [bytes(BLOCK_BYTES)] * len(burst)))
    assert second.flush(LIMIT_S)
    third = node()
    assert len(third.match(burst)) == len(burst)
