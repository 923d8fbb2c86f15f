"""Trace files of every format become the same thing: requests over chained blocks."""

import gzip
import json
import lzma
from pathlib import Path

import pytest

from kvdepot.errors import TraceError
from kvdepot.sim.traces import BadLines, Replay, read_trace
from kvdepot.sim.workload import Workload


def mooncake(ids: list[int], tokens: int, at_ms: int = 0) -> str:
    fields = {"timestamp": at_ms, "input_length": tokens, "output_length": 5, "hash_ids": ids}
    return json.dumps(fields)


def write(path: Path, *lines: str) -> Path:
    text = "".join(line + "\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def blocks(workload: Workload) -> list[list[int]]:
    return [request.blocks.tolist() for request in workload]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.xz"])
def test_mooncake_requests_share_blocks_by_id(tmp_path: Path, name: str) -> None:
    lines = [mooncake([7, 9, 4], 1300), mooncake([7, 9, 5], 1400, 2500)]
    workload = read_trace(write(tmp_path / name, *lines))
    assert blocks(workload) == [[0, 1, 2], [0, 1, 3]]
    assert workload.parents == [-1, 0, 1, 1]
    assert workload.arrivals_s == [0.0, 2.5]
    assert workload.input_tokens == [1300, 1400]


def test_requests_are_served_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    lines = [mooncake([1], 10, 900), mooncake([2], 10, 100), mooncake([3], 10, 900)]
    workload = read_trace(write(tmp_path / "t.jsonl", *lines))
    assert blocks(workload) == [[1], [0], [2]]


BAD = {
    "not json": "{",
    "not an object": "[1]",
    "tokens": mooncake([1, 2, 3, 4], 100),
    "negative": mooncake([], -1),
    "no ids": json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1}),
    "other parent": mooncake([2, 1], 700),
    "known after new": mooncake([5, 1], 700),
    "twice": mooncake([5, 5], 700),
    "infinite": mooncake([9], 10).replace('"timestamp": 0', '"timestamp": Infinity'),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_line_is_named_or_left_out(tmp_path: Path, bad: str) -> None:
    path = write(tmp_path / "t.jsonl", mooncake([1, 2], 700), bad, mooncake([1, 3], 700))
    with pytest.raises(TraceError, match="line 2") as caught:
        read_trace(path)
    assert caught.value.line == 2
    skip: BadLines = "skip"
    workload = read_trace(path, bad_lines=skip)
    assert blocks(workload) == [[0, 1], [0, 2]]
    assert [line.split(":")[0] for line in workload.skipped] == ["line 2"]


def test_files_of_no_known_format_are_refused(tmp_path: Path) -> None:
    for lines in ([], ["hello"], ['{"a": 1}']):
        with pytest.raises(TraceError):
            read_trace(write(tmp_path / "t.jsonl", *lines))


def test_a_damaged_archive_is_an_error_of_ours(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl.xz", *[mooncake([n], 10) for n in range(999)])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)


def test_a_recording_has_full_blocks_only(tmp_path: Path) -> None:
    head = json.dumps({"format": "kvdepot-trace", "version": 1, "block_tokens": 100})
    asked = {"t": 1.5, "tokens": 250, "out": 3, "keys": ["aa", "bb"]}
    workload = read_trace(write(tmp_path / "r.jsonl", head, json.dumps(asked)))
    assert workload.block_tokens == 100
    assert blocks(workload) == [[0, 1]]
    too_many = {**asked, "keys": ["aa", "bb", "cc"]}
    with pytest.raises(TraceError, match="line 2"):
        read_trace(write(tmp_path / "r.jsonl", head, json.dumps(too_many)))
    with pytest.raises(TraceError, match="version 2"):
        read_trace(write(tmp_path / "r.jsonl", head.replace("1,", "2,", 1), json.dumps(asked)))


def session(*runs: list[list[int]], tools: int = 128, system: int = 64, **more: object) -> str:
    requests = [
        {"t": 10.0 * n, "type": "n", "out": 1, "in": 64 * sum(r[1] for r in run), "hash_ids": run}
        for n, run in enumerate(runs)
    ]
    facts = {"id": "x", "block_size": 64, "dup_of": None, "requests": requests}
    return json.dumps({**facts, "tool_tokens": tools, "system_tokens": system, **more})


def test_sessions_share_tools_and_system_prompt_only(tmp_path: Path) -> None:
    first = session([[1, 5]], [[1, 5], [6, 2]])
    same = session([[1, 5]])
    other_system = session([[1, 5]], system=128)
    path = write(tmp_path / "s.jsonl", first, same, other_system)
    workload = read_trace(path, replay=Replay(gap_s=1e-6))
    a, b, c, d = sorted(blocks(workload), key=lambda one: (one[-1], len(one)))
    assert a == [0, 1, 2, 3, 4]
    assert b == [0, 1, 2, 3, 4, 5, 6]
    assert c[:3] == [0, 1, 2] and not set(c[3:]) & set(b), "tools and system prompt, no more"
    assert d[:2] == [0, 1] and not set(d[2:]) & set(b), "the tools, no more"


def test_sub_agents_share_the_ids_of_their_session(tmp_path: Path) -> None:
    inner = json.loads(session([[1, 4], [50, 1]], tools=0, system=0))
    nested = {**inner, "type": "subagent", "t": 5.0}
    outer = json.loads(session([[1, 4]], tools=0, system=0))
    outer["requests"].append(nested)
    workload = read_trace(write(tmp_path / "s.jsonl", json.dumps(outer)))
    assert blocks(workload) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert workload.arrivals_s == [0.0, 5.0]


def test_copies_of_sessions_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", session([[1, 3]]), session([[1, 3]], dup_of="x"))
    assert len(read_trace(path)) == 1


def test_a_seed_repeats_a_replay_and_another_one_does_not(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", *[session([[1, 3]]) for _ in range(20)])
    runs = [read_trace(path, replay=Replay(seed=seed)).arrivals_s for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_merged_blocks_are_whole_groups(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", session([[1, 7]], [[1, 6], [9, 2]], tools=0, system=0))
    workload = read_trace(path, replay=Replay(merge=2))
    assert workload.block_tokens == 128
    assert blocks(workload) == [[0, 1, 2], [0, 1, 2, 3]]
