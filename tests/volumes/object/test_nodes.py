"""Several nodes over one bucket in memory: what one writes the others read; death, age, removal."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.object_nodes import (
    PAYLOAD,
    MemoryBucket,
    Node,
    keys_of,
    memory_bucket,
    paths_of,
    same_bucket,
)
from tests.support.waiting import eventually, until

from kvdepot.core.block import TAG_BYTES
from kvdepot.core.metadata import MetaEntry, MetaKind, Tombstone
from kvdepot.core.volume import NO_PLACE, Outcome
from kvdepot.errors import FormatError
from kvdepot.format.record import set_stamp
from kvdepot.testing.contract import discard, put
from kvdepot.testing.images import (
    STAMPS,
    Records,
    make_image,
    make_key,
    make_records,
    payload_for,
    records_of,
)
from kvdepot.volumes.object.bucket import BucketError

pytest.importorskip("obstore", reason="the extra s3 is not installed")

GRACE_S = 60.0
OpenNode = Callable[..., Node]


@pytest.fixture
def bucket() -> Any:
    return memory_bucket()


@pytest.fixture
def node(bucket: Any) -> Iterator[OpenNode]:
    opened: list[Node] = []

    def open_node(**more: Any) -> Node:
        opened.append(Node(bucket, **more))
        return opened[-1]

    yield open_node
    for one in opened:
        one.volume.close()


def pass_time(nodes: list[Node], seconds: float) -> None:
    """Time passes, and all that live look at the bucket a few times."""
    for _ in range(4):
        for one in nodes:
            one.clock.advance(seconds / 4)
            one.wall.advance(seconds / 4)
        for one in nodes:
            one.step()


def test_what_one_writes_the_others_read(node: OpenNode) -> None:
    first, second, third = node(), node(), node()
    first.put(range(8))
    for other in (second, third):
        other.step()
        assert other.knows() == keys_of(range(8))
        assert {other.read(number) for number in range(8)} == {Outcome.OK}
    second.put([8])
    first.step()
    assert first.read(8) is Outcome.OK


def test_lookups_ask_nothing_and_what_was_seen_costs_one_listing(node: OpenNode) -> None:
    first, second = node(capacity=64 << 20), node(capacity=64 << 20)
    for start in range(0, 512, 16):
        first.put(range(start, start + 16))
    first.step()
    second.step()
    assert len(second.knows()) == 512
    requests = second.bucket.requests
    assert requests.meta_gets <= 512 // 64
    before = requests.as_dict()
    second.step()
    after = requests.as_dict()
    assert after["gets"] == before["gets"]
    assert after["lists"] <= before["lists"] + 1


def test_a_dead_writers_blocks_stay_and_are_taken_over(bucket: Any, node: OpenNode) -> None:
    dead, living, other = node(), node(), node()
    dead.put(range(5))
    pass_time([living, other], GRACE_S / 2)
    dead.die()
    pass_time([living, other], 2 * GRACE_S)
    for one in (living, other):
        assert one.knows() == keys_of(range(5))
        assert {one.read(number) for number in range(5)} == {Outcome.OK}
    assert sorted(len(one.owned()) for one in (living, other)) == [0, 1], "one of them owns it now"
    pass_time([living, other], 2 * GRACE_S)
    alive = paths_of(bucket, "meta/alive/")
    assert len(alive) == 2
    writers = {path.split("/")[2] for path in paths_of(bucket, "meta/index/")}
    assert len(writers) == 1 and writers < {path.rsplit("/", 1)[1] for path in alive}


def test_a_node_that_closed_is_taken_over_at_once(node: OpenNode) -> None:
    first = node()
    first.put([1, 2])
    first.volume.close()
    second = node()
    assert second.knows() == keys_of([1, 2])
    assert len(second.owned()) == 1


def test_garbage_of_a_dead_writer_is_collected(bucket: Any, node: OpenNode) -> None:
    dead = node()
    dead.put([1])
    writer = paths_of(bucket, "data/")[0].split("/")[1]
    bucket.create(f"data/{writer}/ffffffffffff", b"uploaded, and never published")
    dead.die()
    living = node()
    pass_time([living], 2 * GRACE_S)
    pass_time([living], 2 * GRACE_S)
    assert len(paths_of(bucket, "data/")) == 1
    assert living.read(1) is Outcome.OK


def removal_by(node: Node, *names: bytes) -> list[MetaEntry]:
    """Tombstones with stamps of the node's own clock, as its store gives them."""
    return [Tombstone(name, node.stamps.next(), node.stamps.next()).entry for name in names]


def put_by(node: Node, number: int) -> Records:
    """Store a block with a stamp of the node's own clock."""
    key = make_key(number)
    image = make_image(key, payload_for(key, PAYLOAD))
    set_stamp(image, node.stamps.next())
    records = records_of([key], [PAYLOAD], [image])
    assert put(node.volume, records) != [NO_PLACE]
    return records


def test_a_removal_holds_on_every_node_and_for_those_that_come_later(node: OpenNode) -> None:
    first, second = node(), node()
    first.put([1, 2])
    second.put([3])
    first.step()
    second.step()
    removal = removal_by(second, make_key(1), make_key(3))
    assert second.volume.put_meta(removal)
    first.step()
    assert first.learned.all() == removal, "as it was made"
    assert node().knows() == keys_of([2])
    first.step()
    assert node().knows() == keys_of([2])


def test_a_removal_by_a_node_whose_clock_is_slow_holds(node: OpenNode) -> None:
    ahead, behind = node(wall_s=1.9e9), node(wall_s=1.7e9)
    put_by(ahead, 1)
    behind.step()
    assert behind.volume.put_meta(removal_by(behind, make_key(1)))
    assert node().knows() == []


def test_a_block_put_again_after_its_removal_is_back(node: OpenNode) -> None:
    first, second = node(wall_s=1.9e9), node(wall_s=1.7e9)
    put_by(first, 1)
    assert first.volume.put_meta(removal_by(first, make_key(1)))
    second.step()
    put_by(second, 1)
    assert node().knows() == keys_of([1])


def test_a_record_older_than_its_removal_does_not_come_back_from_another_node(
    node: OpenNode,
) -> None:
    """It keeps the stamp that it was put with, whoever writes it down again, and when."""
    first, second = node(), node()
    records = put_by(first, 1)
    second.step()
    assert second.volume.put_meta(removal_by(second, make_key(1)))
    assert put(first.volume, records) != [NO_PLACE], "a copy that had not heard of it"
    assert node().knows() == []


def test_a_namespace_that_one_node_removes_goes_from_all(node: OpenNode) -> None:
    first, second = node(), node()
    first.put([1])
    second.step()
    assert second.volume.put_meta(removal_by(second, make_key(1)[:TAG_BYTES]))
    first.step()
    assert list(first.learned.tombstones) == [make_key(1)[:TAG_BYTES]]
    assert node().knows() == []


def test_released_objects_stay_readable_for_a_grace_period(bucket: Any, node: OpenNode) -> None:
    owner, reader = node(), node()
    owner.put([1])
    reader.step()
    (segment,) = owner.owned()
    discard(owner.volume, list(owner.places.values()), PAYLOAD)
    assert owner.volume.release(segment)
    owner.step()
    assert len(paths_of(bucket, "data/")) == 1
    assert reader.read(1) is Outcome.OK, "it has not heard of it yet"
    reader.step()
    assert reader.knows() == []
    pass_time([owner], 1.5 * GRACE_S)
    assert paths_of(bucket, "data/") == []


def test_old_objects_are_deleted(bucket: Any, node: OpenNode) -> None:
    owner, reader = node(max_age=1000.0), node(max_age=1000.0)
    owner.put([1])
    owner.wall.advance(900.0)
    owner.put([2])
    reader.step()
    owner.wall.advance(200.0)
    owner.step()
    reader.step()
    assert owner.knows() == reader.knows() == keys_of([2])
    pass_time([owner, reader], 2 * GRACE_S)
    assert len(paths_of(bucket, "data/")) == 1


def test_a_node_that_comes_late_gets_its_share(node: OpenNode) -> None:
    capacity = 2 << 20
    first = node(capacity=capacity)
    number = 0
    while first.volume.facts().room_bytes >= 20480:
        first.put([number])
        number += 1
    second = node(capacity=capacity)
    assert second.volume.facts().room_bytes >= 20480
    second.put(range(1000, 1008))
    first.step()
    first.step()
    assert first.volume.facts().held_bytes <= capacity
    second.step()
    assert set(keys_of(range(1000, 1008))) <= set(second.knows())


def test_a_bucket_emptied_underfoot(bucket: Any, node: OpenNode) -> None:
    first, second = node(), node()
    first.put([1, 2])
    second.step()
    bucket.delete(paths_of(bucket))
    assert second.read(1) is Outcome.FAILED, "a miss"
    for _ in range(2):
        first.step()
        second.step()
    assert first.knows() == second.knows() == []
    assert first.volume.facts().held_bytes == 0
    first.put([1])
    second.step()
    assert second.read(1) is Outcome.OK
    assert "meta/format" in paths_of(bucket)


def test_manifests_merged_after_the_bucket_was_emptied(bucket: Any, node: OpenNode) -> None:
    """What they list is gone all the same."""
    first, second = node(), node()
    first.put([1, 2])
    first.put([3])
    second.step()
    bucket.delete(paths_of(bucket))
    first.put([4])
    for _ in range(3):
        first.step()
        second.step()
    assert first.knows() == second.knows() == keys_of([4])
    assert second.read(4) is Outcome.OK


def test_an_upload_that_arrived_although_it_failed_is_collected(
    bucket: Any, node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = node()
    create = first.bucket.create

    def arrives_unanswered(path: str, body: Any) -> None:
        create(path, body)
        raise BucketError("no answer")

    monkeypatch.setattr(first.bucket, "create", arrives_unanswered)
    with pytest.raises(AssertionError):
        first.put([1])
    monkeypatch.undo()
    assert paths_of(bucket, "data/")
    pass_time([first], 2 * GRACE_S)
    assert not paths_of(bucket, "data/")


def test_half_an_object_is_a_miss(bucket: Any, node: OpenNode) -> None:
    first = node()
    first.put(range(4))
    (path,) = paths_of(bucket, "data/")
    body = bucket.get(path)
    bucket.overwrite(path, body[: len(body) // 2])
    outcomes = [first.read(number) for number in range(4)]
    assert outcomes.count(Outcome.OK) == 2
    assert {Outcome.OK} < set(outcomes) <= {Outcome.OK, Outcome.CORRUPT, Outcome.FAILED}


def test_a_damaged_manifest_hides_its_blocks_only(bucket: Any, node: OpenNode) -> None:
    first = node()
    first.put([1])
    (path,) = paths_of(bucket, "meta/index/")
    first.put([2])
    body = bytearray(bucket.get(path))
    body[-1] ^= 1
    bucket.overwrite(path, bytes(body))
    assert node().knows() == keys_of([2])


def test_another_format_is_one_clear_error(bucket: Any) -> None:
    bucket.create("meta/format", b'{"kvdepot": "object", "version": 3}')
    with pytest.raises(FormatError, match="format 3"):
        Node(same_bucket(bucket))


def test_two_writers_never_overwrite_each_other(bucket: Any, node: OpenNode) -> None:
    first = node()
    first.put([1])
    (path,) = paths_of(bucket, "data/")
    before = bucket.get(path)
    second = node()
    # As if their names were the same.
    second.volume._contents.writer = first.volume._contents.writer
    assert put(second.volume, make_records([make_key(2)], PAYLOAD)) == [NO_PLACE]
    assert bucket.get(path) == before


def test_a_node_that_was_taken_for_dead_comes_back(bucket: Any, node: OpenNode) -> None:
    paused, living = node(), node()
    paused.put([1, 2])
    living.step()
    pass_time([living], 3 * GRACE_S)
    assert len(living.owned()) == 1
    for _ in range(3):
        paused.step()
    assert paused.knows() == living.knows() == keys_of([1, 2])
    assert paused.read(1) is Outcome.OK
    assert paused.owned() == [], "it has another owner"
    paused.put([3])
    living.step()
    assert living.read(3) is Outcome.OK


def test_an_object_that_is_missing_leaves_its_manifest(bucket: Any, node: OpenNode) -> None:
    owner = node()
    owner.put([1])
    owner.put([2])
    bucket.delete(paths_of(bucket, "data/")[:1])
    assert owner.read(1) is Outcome.FAILED
    owner.step()
    assert owner.knows() == keys_of([2])
    assert node().knows() == keys_of([2])


class OverloadedBucket(MemoryBucket):
    """Answers 503 while it is `down`."""

    down = False
    refused = 0

    def _ask(self, work: Callable[[], Any], **counts: int) -> Any:
        if self.down:
            self.refused += 1
            raise BucketError("the server answers 503")
        return super()._ask(work, **counts)


def test_503s_for_a_minute_are_misses_and_few_requests(bucket: Any) -> None:
    shared = OverloadedBucket(bucket._reader, bucket._writer, "memory")
    first, second = Node(shared), Node(shared)
    first.put(range(3))
    second.step()
    overloaded = second.bucket
    assert isinstance(overloaded, OverloadedBucket)
    overloaded.down = True
    breaker = second.volume._breaker
    for _ in range(120):
        assert second.read(1) is Outcome.FAILED
        if breaker.allows():  # as the background thread does
            try:
                second.step()
            except BucketError as error:
                breaker.failed(error.reason, at_once=True)
        second.clock.advance(0.5)
    assert not second.volume.facts().up
    assert overloaded.refused < 20, "a server that fails is left alone"
    overloaded.down = False
    until(lambda: _tried_again(second))
    assert {second.read(number) for number in range(3)} == {Outcome.OK}
    for node in (first, second):
        node.volume.close()


def _tried_again(node: Node) -> bool:
    node.clock.advance(1.0)
    if node.volume._breaker.allows():
        node.step()
        node.volume._breaker.succeeded()
    return node.volume.facts().up


def described(tag: bytes) -> MetaEntry:
    return MetaEntry(MetaKind.NAMESPACE, tag, STAMPS.next(), b"text")


def test_a_namespace_is_described_with_its_first_blocks(node: OpenNode) -> None:
    first = node()
    assert first.volume.put_meta([described(make_key(1)[:TAG_BYTES])])
    puts = first.bucket.requests.puts
    first.put([1])
    assert first.bucket.requests.puts == puts + 2, "one object and one manifest"
    assert node().described() == {make_key(1)[:TAG_BYTES]: b"text"}


def test_a_namespace_that_no_manifest_took_is_described_in_the_next(
    node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = node()
    assert first.volume.put_meta([described(b"first")])
    with monkeypatch.context() as patched:
        patched.setattr(first.bucket, "create", refuses)
        with pytest.raises(BucketError):
            first.volume.upkeep.step()
    assert node().described() == {}
    first.volume.upkeep.step()
    puts = first.bucket.requests.puts
    first.volume.upkeep.step()
    assert first.bucket.requests.puts == puts, "it is told once"
    assert node().described() == {b"first": b"text"}


def refuses(path: str, body: object) -> None:
    raise BucketError("refused")


def test_a_namespace_does_not_wait_for_a_bucket_that_hangs(
    node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = node()
    create, begun, go_on = first.bucket.create, threading.Event(), threading.Event()

    def waits(path: str, body: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        create(path, body)

    monkeypatch.setattr(first.bucket, "create", waits)
    first.volume.put_meta([described(b"first")])
    round_ = threading.Thread(target=first.volume.upkeep.step)
    asked = threading.Thread(target=first.volume.put_meta, args=([described(b"other")],))
    round_.start()
    assert begun.wait(60)
    asked.start()
    answered = eventually(lambda: not asked.is_alive(), 20.0)
    go_on.set()
    for thread in (round_, asked):
        thread.join()
    assert answered
    first.volume.close()
    assert node().described() == {b"first": b"text", b"other": b"text"}
