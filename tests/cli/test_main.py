"""The `kvdepot` command itself: errors, pipes, Ctrl-C, terminals, options, completion."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvdepot.cli import output
from kvdepot.cli.command import COMMANDS, command_tree, parse_options
from kvdepot.cli.main import main

ROOT = Path(__file__).parents[2]
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
def test_a_closed_stderr_is_not_an_error(closed: str) -> None:
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
    assert main([*words, "--json"]) == 2
    seen = capsys.readouterr()
    told = json.loads(seen.out)
    assert told["ok"] is False and told["error"] in seen.err and told["hint"] in seen.err


def on_a_terminal(*words: str, columns: int = 80, **env: str) -> str:
    """What a person sees of a command, stdout and stderr together."""
    controller, terminal = pty.openpty()
    subprocess.run(["stty", "cols", str(columns)], stdin=terminal, check=True)
    command = [sys.executable, "-m", "kvdepot", *words]
    settings = {**os.environ, "TERM": "xterm", **env}
    settings.pop("COLUMNS", None)  # it would count more than the terminal
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


def test_no_command_shows_help(capsys: Seen) -> None:
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().err


def test_version(capsys: Seen) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("kvdepot 0.")


def test_every_command_has_json_and_a_help_for_each_option() -> None:
    tree = dict(command_tree())
    assert {"kvdepot session pin", "kvdepot config check", "kvdepot completion"} <= tree.keys()
    for name, command in tree.items():
        assert command.help and (command.run is None) == bool(command.verbs), name
        options = command.parsed_options()
        assert all(option.help for option in options), name
        assert (command.run is None) or "--json" in {option.name for option in options}, name
        known = {option.name for option in options}
        refused = {other for option in options for other in (*option.needs, *option.not_with)}
        assert refused <= known, name


def test_options_are_read_from_their_text() -> None:
    text = """
    [FILE...]          arguments
    --seed N           a number, explained in
                       two lines [default: 7]
    --order old|new    words [needs: --seed, --key]
    --key PATH         a path [required] [not with: --seed]
    --set NAME=VALUE   settings [repeat]
    --all              a flag [alone]
    """
    file, seed, order, key, each, every = parse_options(text, {})
    assert (file.dest, file.many, file.default) == ("file", "*", [])
    assert (seed.help, seed.default) == ("a number, explained in two lines (default: 7)", 7)
    assert (order.choices, order.needs) == (("old", "new"), ("--seed", "--key"))
    assert (key.kind, key.required, key.not_with) == (Path, True, ("--seed",))
    assert (each.many, each.help) == ("append", "settings (may be repeated)")
    assert every.alone and every.default is False and not every.metavar
    (keyword,) = parse_options("--for TIME    how long", {"TIME": float})
    assert (keyword.dest, keyword.kind) == ("for_", float)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(shell: str, capsys: Seen) -> None:
    assert main(["completion", shell]) == 0
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
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    words = typed.split(" ")
    ask = f'COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _kvdepot; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True)
    assert done.stderr == ""
    assert sorted(done.stdout.split()) == sorted(offered.split())


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


@pytest.mark.parametrize("there", ["2.6.0", "2.7.1+cu128", "2.13.0+cpu", "3.0.0a1+rocm"])
def test_the_extra_keeps_a_torch_that_is_there(there: str) -> None:
    """pip leaves alone what satisfies the requirement, whichever index it came from."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["optional-dependencies"]["hf"]]
    (torch,) = (one for one in wanted if one.name == "torch")
    assert torch.specifier.contains(there, prereleases=True) and torch.url is None
