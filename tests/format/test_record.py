"""One block as bytes: what is written is read back, and nothing else is taken for it."""

import random
import struct

import numpy as np
import pytest

from kvdepot.core.clock import STAMP_MAX
from kvdepot.errors import ConfigError
from kvdepot.format.record import (
    CHUNKS_MAX,
    HEAD_BYTES,
    IDENTITY,
    PAGE,
    SIZE_MAX,
    TABLE_OFFSET,
    Head,
    Kind,
    chunk_count,
    fill_tokens,
    filled_tokens,
    identities,
    own_chunk_bytes,
    parse_head,
    payload_intact,
    place,
    place_records,
    producer_of,
    record_bytes,
    record_sizes,
    set_stamp,
    stamp_of,
    token_ids,
    tokens_max,
    write_head,
)
from kvdepot.native import address_of
from kvdepot.testing.images import make_image, make_key, payload_for

KEY = make_key(1)
CHUNK = PAGE


def placed(nbytes: int = 3 * CHUNK + 5, segment_id: int = 77, stamp: int = 88) -> memoryview:
    image = make_image(KEY, payload_for(KEY, nbytes), CHUNK)
    set_stamp(image, stamp)
    place(image, segment_id)
    return image


@pytest.mark.parametrize("nbytes", [1, CHUNK, CHUNK + 1, 7 * CHUNK, 7 * CHUNK + 4095])
def test_a_head_is_read_back_as_it_was_written(nbytes: int) -> None:
    head = parse_head(placed(nbytes, 2**64 - 1, STAMP_MAX))
    chunks = -(-nbytes // CHUNK)
    assert head == Head(Kind.BLOCK, KEY, 2**64 - 1, STAMP_MAX, nbytes, CHUNK, chunks)
    assert payload_intact(placed(nbytes), head)


def test_the_head_lies_as_the_format_page_says() -> None:
    image = placed(3 * CHUNK + 5)
    assert bytes(image[8:12]) == b"KVR2"
    assert struct.unpack_from("<HH", image, 12) == (2, 1)
    assert bytes(image[16:48]) == KEY
    assert struct.unpack_from("<QQI", image, 48) == (77, 88, TABLE_OFFSET + 8 * 4)
    sizes = (3 * CHUNK + 5, 3 * CHUNK + 5, CHUNK, 4)  # payload, stored, chunk, number of chunks
    assert struct.unpack_from("<QQQI", image, 72) == sizes
    assert len(image) == 5 * PAGE
    assert bytes(image[HEAD_BYTES : HEAD_BYTES + 3 * CHUNK + 5]) == payload_for(KEY, 3 * CHUNK + 5)


def test_a_flip_of_any_payload_byte_is_noticed(seed: int) -> None:
    rng = random.Random(seed)
    image = placed()
    head = parse_head(image)
    assert head is not None
    edges = [0, CHUNK - 1, CHUNK, 3 * CHUNK - 1, 3 * CHUNK, 3 * CHUNK + 4]
    for at in edges + [rng.randrange(3 * CHUNK + 5) for _ in range(200)]:
        bit = 1 << rng.randrange(8)
        image[HEAD_BYTES + at] ^= bit
        assert not payload_intact(image, head), f"byte {at}, bit {bit}"
        image[HEAD_BYTES + at] ^= bit
    assert payload_intact(image, head)


def test_an_unplaced_head_is_not_a_head() -> None:
    """Its checksum is set when it is written down, not before."""
    assert parse_head(make_image(KEY, payload_for(KEY, 100), CHUNK)) is None


def test_garbage_zeros_and_stumps_are_not_heads(seed: int) -> None:
    noise = bytearray(random.Random(seed).randbytes(HEAD_BYTES))
    assert parse_head(memoryview(noise)) is None
    assert parse_head(memoryview(bytes(HEAD_BYTES))) is None
    assert parse_head(memoryview(b"")) is None
    assert parse_head(placed()[: HEAD_BYTES - 1]) is None


@pytest.mark.parametrize(
    ("offset", "code", "value"),
    [
        (12, "<H", 1),
        (14, "<H", 9),
        (14, "<H", 0),
        (56, "<Q", STAMP_MAX + 1),
        (64, "<I", TABLE_OFFSET - 8),
        (64, "<I", HEAD_BYTES + 8),
        (64, "<I", TABLE_OFFSET + 8 * 3),
        (68, "<H", 1),
        (72, "<Q", 100 * CHUNK),
        (80, "<Q", 3 * CHUNK + 4),
        (88, "<Q", 0),
        (96, "<I", 5),
    ],
)
def test_a_head_that_contradicts_itself_is_refused_though_its_checksum_fits(
    offset: int, code: str, value: int
) -> None:
    image = placed()
    struct.pack_into(code, image, offset, value)
    (used,) = struct.unpack_from("<I", image, 64)
    if used <= HEAD_BYTES:
        place(image, 77)
    assert parse_head(image) is None


def test_a_record_cut_short_is_not_intact() -> None:
    image = placed()
    head = parse_head(image)
    assert head is not None
    assert not payload_intact(image[: len(image) - PAGE], head)


def test_what_a_reader_expects_is_what_the_head_holds() -> None:
    keys = np.frombuffer(KEY + KEY + make_key(2), np.uint64).reshape(-1, 4)
    right, *wrong = identities(keys, np.array([77, 78, 77]))
    head = bytes(placed()[IDENTITY])
    assert right.tobytes() == head
    assert all(one.tobytes() != head for one in wrong)


def test_records_are_placed_together_as_one_by_one() -> None:
    images = [make_image(make_key(number), payload_for(KEY, 100), CHUNK) for number in range(3)]
    place_records(np.array([address_of(image)[0] for image in images]), 77)
    assert [head and head.segment_id for head in map(parse_head, images)] == [77] * 3


@pytest.mark.parametrize(
    ("payload", "expected"), [(0, PAGE), (1, 2 * PAGE), (PAGE, 2 * PAGE), (PAGE + 1, 3 * PAGE)]
)
def test_a_record_is_a_head_and_whole_pages(payload: int, expected: int) -> None:
    assert record_bytes(payload) == record_sizes(np.array([payload]))[0] == expected


def test_a_head_holds_so_many_checksums_and_no_more() -> None:
    assert TABLE_OFFSET + 8 * CHUNKS_MAX <= HEAD_BYTES < TABLE_OFFSET + 8 * (CHUNKS_MAX + 1)
    assert chunk_count(CHUNKS_MAX * 100, 100) == CHUNKS_MAX
    for payload in (CHUNKS_MAX * 100 + 1, 0):
        with pytest.raises(ConfigError, match="chunk"):
            chunk_count(payload, 100)


TOKENS = struct.pack("<16I", *range(1000, 1016))


def test_token_ids_lie_behind_the_checksums_and_change_nothing_else() -> None:
    image = placed()
    before = parse_head(image)
    write_head(image, Kind.BLOCK, KEY, 3 * CHUNK + 5, CHUNK, TOKENS)
    set_stamp(image, 88)
    place(image, 77)
    assert token_ids(image, KEY) == TOKENS
    assert token_ids(image, make_key(2)) == b""
    assert struct.unpack_from("<I", image, 100) == (16,)
    used = TABLE_OFFSET + 8 * 4
    assert struct.unpack_from("<I", image, 64) == (used,), "the head ends before them"
    assert bytes(image[used : used + 64]) == TOKENS
    after = parse_head(image)
    assert before is not None and after is not None
    assert after == before._replace(token_count=16)
    assert payload_intact(image, after)


def test_a_head_without_token_ids_keeps_none_of_those_before() -> None:
    image = placed()
    image[100:TABLE_OFFSET] = b"\xff" * (TABLE_OFFSET - 100)
    image[TABLE_OFFSET + 8 * 4 : HEAD_BYTES] = b"\xff" * (HEAD_BYTES - TABLE_OFFSET - 8 * 4)
    write_head(image, Kind.BLOCK, KEY, 3 * CHUNK + 5, CHUNK)
    assert token_ids(image, KEY) == b""
    assert not any(image[100:TABLE_OFFSET])
    assert not any(image[TABLE_OFFSET + 8 * 4 : HEAD_BYTES])


def test_token_ids_that_do_not_match_their_checksum_are_none(seed: int) -> None:
    image = placed()
    write_head(image, Kind.BLOCK, KEY, 3 * CHUNK + 5, CHUNK, TOKENS)
    bit = random.Random(seed).randrange(8 * len(TOKENS))
    image[TABLE_OFFSET + 8 * 4 + bit // 8] ^= 1 << bit % 8
    assert token_ids(image, KEY) == b""


def test_token_ids_that_do_not_fit_are_left_out() -> None:
    room = tokens_max(3 * CHUNK + 5, CHUNK)
    assert room == (HEAD_BYTES - TABLE_OFFSET - 8 * 4) // 4
    image = placed()
    for count, kept in ((room, room), (room + 1, 0)):
        write_head(image, Kind.BLOCK, KEY, 3 * CHUNK + 5, CHUNK, bytes(4 * count))
        assert len(token_ids(image, KEY)) == 4 * kept
        fill_tokens(image, 3 * CHUNK + 5, CHUNK, bytes(4 * count))
        assert len(filled_tokens(image, 3 * CHUNK + 5, CHUNK)) == 4 * kept


def test_a_count_that_lies_gives_no_token_ids() -> None:
    image = placed()
    struct.pack_into("<I", image, 100, 1 << 31)
    assert token_ids(image, KEY) == b""
    assert filled_tokens(image, 3 * CHUNK + 5, CHUNK) == b""


def test_no_flipped_bit_of_a_head_raises_or_lets_a_size_through_that_is_none() -> None:
    """Memory holds heads without a checksum that is checked; a tier holds them with one. Every bit
    of the fields, and some of the token ids behind them.
    """
    nbytes, fields = CHUNK - 5, 8 * (TABLE_OFFSET + 8)
    for bit in (*range(fields), *range(fields, 8 * HEAD_BYTES, 41)):
        image = placed(nbytes)
        image[bit // 8] ^= 1 << bit % 8
        assert 0 <= own_chunk_bytes(image, KEY, nbytes) <= SIZE_MAX
        token_ids(image, KEY)
        producer_of(image, KEY)
        filled_tokens(image, nbytes, CHUNK)
        stamp_of(image)
        head = parse_head(image)
        if bit < fields:
            assert head is None, "its checksum is wrong"
        place(image, 77)
        again = parse_head(image)  # as a writer that did not look would have closed it
        if again is not None:
            assert 0 < again.chunk_bytes <= SIZE_MAX and again.payload_bytes <= SIZE_MAX
            payload_intact(image, again)


@pytest.mark.parametrize("sizes", [(SIZE_MAX + 1, SIZE_MAX), (4096, 1 << 63), (1 << 63, 1 << 63)])
def test_sizes_that_no_head_can_have_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="chunk_bytes"):
        chunk_count(*sizes)
