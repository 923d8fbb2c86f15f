"""`kvdepot demo`: it tells the truth when all is well, and when it is not."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdepot.cli.demo import command as demo
from kvdepot.cli.demo import play as demo_play
from kvdepot.cli.demo.script import NAMES, QUESTIONS, Conversation, User, handbook
from kvdepot.cli.demo.server import Server, ServerError
from kvdepot.cli.main import main

STAND_IN = (sys.executable, str(Path(__file__).parents[1] / "support" / "demo_stand_in.py"))
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROGRAM", STAND_IN)
    monkeypatch.chdir(tmp_path)


def play(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["demo", "--json", "--users", "2", "--turns", "2", *arguments]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_document_says_what_happened(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "scratch").mkdir()
    answer = play(capsys, "--path", str(tmp_path / "scratch"))
    assert answer["identical"] is True
    passes = [turn["pass"] for turn in answer["turns"]]
    assert passes == ["with"] * 4 + ["returned"] * 2 + ["damaged"]
    assert [turn["after_restart"] for turn in answer["turns"]] == [False] * 4 + [True] * 3
    first, second, *_, again = answer["turns"]
    assert (first["fetched"], first["speedup"]) == ({"dram": 0, "ssd": 0}, 1.0)
    assert (second["fetched"], second["speedup"]) == ({"dram": 0, "ssd": 1000}, 20.0)
    assert again["misses"] == {"corrupt": 1}
    assert answer["ttft_ratio_by_tier"] == {"dram": None, "ssd": pytest.approx(0.05)}
    after = answer["after_restart"]
    assert (after["kills"], after["turns"], after["fetched"]["ssd"]) == (3, 2, 2000)
    assert answer["damage"]["identical"] is True
    assert list((tmp_path / "scratch").iterdir()) == []


def test_report_is_written_where_asked(tmp_path: Path, capsys: Capture) -> None:
    assert play(capsys)["report"] == str(tmp_path / "kvdepot-demo.html")
    answer = play(capsys, "--turns", "1", "--report", str(tmp_path / "other.html"))
    page = Path(answer["report"]).read_text()
    assert answer["report"] == str(tmp_path / "other.html")
    assert page.startswith("<!DOCTYPE html>")
    assert "kvdepot demo --json --users 2 --turns 2 --turns 1" in page


def test_without_is_measured_several_times(capsys: Capture) -> None:
    turns = play(capsys)["turns"]
    assert all(turn["ttfts_without_s"] == [2.0] * 3 for turn in turns)
    assert turns[0]["why_slow"].startswith("the depot had nothing of it yet")
    turns = play(capsys, "--repeats", "1")["turns"]
    assert all(turn["ttfts_without_s"] == [2.0] for turn in turns)


def test_people_get_a_line_for_every_turn(capsys: Capture) -> None:
    assert main(["demo", "--users", "2", "--turns", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("20.0×") == 3
    assert "SIGKILL" in shown
    assert "all 5 answers are the same, token for token" in shown
    assert "mostly from ssd: 1/20.0 of the recompute" in shown
    assert "the flipped bit was noticed: 700 more tokens were computed" in shown


def test_an_answer_that_differs_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("STAND_IN", "differ")
    assert main(["demo", "--users", "1", "--turns", "1"]) == 1
    shown = capsys.readouterr().out
    assert "wrong: turn 1 of Ada has another answer with the depot" in shown
    assert "3 of 3 answers differ" in shown
    assert main(["demo", "--users", "1", "--turns", "1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["identical"] is False


def test_what_the_server_refuses_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("STAND_IN", "refuse")
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.endswith("error: no such model\nhint: take another\n")


def test_last_words_of_a_dead_server_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("STAND_IN", "die")
    assert main(["demo"]) == 2
    told = capsys.readouterr().err
    assert "error: the serving process ended with status 1; its last words:" in told
    assert "something broke" in told


def test_a_server_that_hangs_is_an_error_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("STAND_IN", "hang")
    monkeypatch.setattr(demo_play, "ANSWER_TIMEOUT_S", 0.3)
    (tmp_path / "scratch").mkdir()
    assert main(["demo", "--path", str(tmp_path / "scratch")]) == 2
    assert "did not answer within 0 s" in capsys.readouterr().err
    assert list((tmp_path / "scratch").iterdir()) == []


def test_keep_leaves_the_store(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "scratch").mkdir()
    play(capsys, "--path", str(tmp_path / "scratch"), "--keep")
    (kept,) = (tmp_path / "scratch").iterdir()
    assert (kept / "store" / "segment-000000.kvs").exists()


def test_too_many_turns_are_explained(capsys: Capture) -> None:
    assert main(["demo", "--turns", "500"]) == 2
    told = capsys.readouterr().err
    assert "error: turns: 500 turns need about" in told
    assert "hint: give fewer --turns" in told


def test_too_little_room_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(demo, "NEEDED_BYTES", 1 << 62)
    assert main(["demo", "--path", str(tmp_path)]) == 2
    assert "hint: give one with --path" in capsys.readouterr().err


def test_report_that_cannot_be_written_is_told_first(tmp_path: Path, capsys: Capture) -> None:
    assert main(["demo", "--report", str(tmp_path / "no" / "r.html")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: report: {tmp_path / 'no'} does not exist\nhint:")


@pytest.mark.parametrize("arguments", [["--users", "0"], ["--turns", "x"], ["--new-tokens", "-1"]])
def test_bad_arguments_are_explained(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: argument {arguments[0]}")


def test_a_killed_server_is_gone(tmp_path: Path) -> None:
    settings = json.dumps({"store": None})
    with Server([*STAND_IN, settings], {}, tmp_path / "log", lambda what: None) as server:
        told = server.ready("x", 30)
        assert told["model"] == "stand-in"
        os.kill(server.pid, 0)
        server.kill()
        with pytest.raises(ProcessLookupError):
            os.kill(server.pid, 0)
        with pytest.raises((ServerError, ValueError)):
            server.ask({"messages": [], "new_tokens": 1}, "x", 30)


def test_parent_hears_what_it_waits_for(tmp_path: Path) -> None:
    heard: list[str] = []
    settings = json.dumps({"store": None})
    with Server([*STAND_IN, settings], {}, tmp_path / "log", heard.append) as server:
        server.ready("starting", 30)
    assert heard[0] == "starting"


def test_everybody_asks_something_else() -> None:
    for turn in range(1, 8):
        asked = [User(number).question(turn) for number in range(len(QUESTIONS))]
        assert len(set(asked)) == len(QUESTIONS)
    names = [User(number).name for number in range(3 * len(NAMES))]
    assert len(set(names)) == len(names)


def test_conversations_share_their_beginning_only() -> None:
    one, other = Conversation(), Conversation()
    one.ask("a?")
    one.hear("b")
    assert [message["role"] for message in one.messages] == ["system", "user", "assistant"]
    assert other.messages == one.messages[:1]
    assert handbook() in one.messages[0]["content"]


def test_one_bit_is_flipped_where_asked(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"segment-00000{number}.kvs").write_bytes(bytes(100))
    damage = demo_play.flip_bit(tmp_path, 130)
    assert (damage.file, damage.offset) == ("segment-000001.kvs", 30)
    assert (tmp_path / damage.file).read_bytes() == bytes(30) + b"\1" + bytes(69)
    assert (tmp_path / "segment-000000.kvs").read_bytes() == bytes(100)
