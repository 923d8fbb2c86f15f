"""The `kvdepot` command itself: failures as messages, pipes, Ctrl-C, terminals, completion."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvdepot.cli.main import COMMANDS, main
from kvdepot.cli.report.tables import Table

Seen = pytest.CaptureFixture[str]
INTERRUPTED_AT = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
at, sys.argv = sys.argv[1], ["kvdepot", "config", "show"]
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == at:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
runpy.run_module("kvdepot", run_name="__main__")
"""
"""Ctrl-C at the moment when a module is about to be imported."""


def run(*words: str, stdout: int | None = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvdepot", *words]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )


def test_a_closed_stdout_is_one_error() -> None:
    command = f"{sys.executable} -m kvdepot config show >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "error: standard output is closed\n")


def test_a_full_stdout_is_one_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = run("config", "show", stdout=full.fileno())
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


@pytest.mark.parametrize("words", [("--help",), ("config", "show")])
def test_a_reader_that_goes_is_not_an_error(words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run(*words, stdout=writing)
    os.close(writing)
    assert done.returncode in (0, 141)  # argparse keeps a failed write to itself
    assert done.stderr == ""


@pytest.mark.parametrize("closed", [">/dev/null 2>&-", "2>/dev/full >&2"])
def test_nobody_is_told_where_stderr_is_gone(closed: str) -> None:
    command = f"{sys.executable} -m kvdepot config show --set nothing {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("at", "status"), [("kvdepot.cli.main", -signal.SIGINT), ("kvdepot.cli.config", 130)]
)
def test_ctrl_c_while_it_starts_leaves_no_trace(at: str, status: int) -> None:
    command = [sys.executable, "-c", INTERRUPTED_AT, at]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [("plan", "nowhere"), ("tiers", "list", "--socket", "none.sock"), ("sim", "--bogus")]
)
def test_errors_are_json_where_json_was_asked_for(words: tuple[str, ...], capsys: Seen) -> None:
    try:
        status = main([*words, "--json"])
    except SystemExit as end:  # words that make no command
        status = int(str(end.code))
    seen = capsys.readouterr()
    assert status == 2
    told = json.loads(seen.out)
    assert told["ok"] is False and told["error"] in seen.err and told["hint"] in seen.err


def on_a_terminal(*words: str, columns: int = 80, **env: str) -> str:
    """What a person sees of a command, stdout and stderr together."""
    controller, terminal = pty.openpty()
    subprocess.run(["stty", "cols", str(columns)], stdin=terminal, check=True)
    command = [sys.executable, "-m", "kvdepot", *words]
    settings = {**os.environ, "TERM": "xterm", **env}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=settings
    )
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(controller, 4096):
            shown += piece
    except OSError:
        pass  # how a terminal ends
    os.close(controller)
    process.wait(timeout=60)
    return shown.decode().replace("\r\n", "\n")


def test_colour_is_for_terminals_that_want_it() -> None:
    wrong = ("config", "show", "--set", "nothing")
    assert "\x1b[1;31merror:\x1b[0m" in on_a_terminal(*wrong, NO_COLOR="")
    assert "\x1b" not in on_a_terminal(*wrong, NO_COLOR="1")
    assert "\x1b" not in run(*wrong).stderr
    assert "\x1b[32mok  \x1b[0m  python" in on_a_terminal("doctor", NO_COLOR="")


def test_tables_fit_the_terminal() -> None:
    shown = on_a_terminal("size", "--models", columns=60)
    assert "llama" in shown.lower()
    assert max(map(len, shown.splitlines())) <= 60


def test_words_are_wrapped_before_rows_become_lists() -> None:
    table = Table(("what", "why", "n"), [("a", "because it is so and not otherwise", 1)])
    assert table.text(200) == table.text()
    wrapped = table.text(30).splitlines()
    assert max(map(len, wrapped)) <= 30 and len(wrapped) > 3
    assert "otherwise" in table.text(30)
    assert table.text(12).splitlines()[0] == "what  a"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(shell: str, capsys: Seen) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--completion", shell])
    assert end.value.code == 0
    script = capsys.readouterr().out
    for command in COMMANDS:
        assert command in script


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kvdepot si", "sim size"),
        ("kvdepot tiers dr", "drain"),
        ("kvdepot sim --bad-lines s", "stop skip"),
        ("kvdepot tiers add --dae", "--daemon-user"),
        ("kvdepot sim --trace x", ""),
    ],
)
def test_bash_completes(typed: str, offered: str, capsys: Seen) -> None:
    with pytest.raises(SystemExit):
        main(["--completion", "bash"])
    script = capsys.readouterr().out
    words = typed.split(" ")
    ask = f'COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _kvdepot; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True)
    assert done.stderr == ""
    assert sorted(done.stdout.split()) == sorted(offered.split())
