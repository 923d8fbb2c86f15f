"""The upgrade drill: `python tests/e2e/upgrade.py --json`, or `./dev e2e upgrade`.

The release before and this one, each a wheel in an environment of its own, take turns as the daemon
of one store, while a client of each stays attached and asks all the time: old, new, old after
`kill -9`, new. The clients are stand-ins for engines (tests/e2e/asking_engine.py).

CI takes `--before` from tests/data: the wheel of the first version with format 2. Without it this
version takes turns with itself.

Prints one line for each point of what must hold; with --json each is an object, and the last line
has all of them. Exit status 1 if one fails.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.e2e_points import Points

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "tests" / "e2e" / "asking_engine.py"
SEEDS = {"old": 1000, "new": 2000}
ASKED = 20
"""Hits of each engine that a state of the drill lasts for at least."""
WAIT_S = 120.0
Seen = dict[str, Any]


@dataclass
class Drill:
    """Both versions, one store, and what was found."""

    folder: Path
    points: Points

    def __post_init__(self) -> None:
        self.socket = self.folder / "depot.sock"
        self.settings = self.folder / "kvdepot.toml"
        self.settings.write_text(
            '[dram]\ncapacity = "4MiB"\nprefault = false\nhuge_pages = "never"\n'
            f'[ssd]\npath = "{self.folder}/kv"\ncapacity = "128MiB"\nsegment = "4MiB"\n'
            '[writeback]\nstaging = "4MiB"\n'
        )

    def install(self, version: str, wheel: Path, extra: str = "") -> None:
        """A wheel in an environment of its own, with the numpy that is here."""
        home = self.folder / version
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        wanted = [f"{wheel}{extra}", f"numpy=={numpy.__version__}"]
        env = without_sources()
        subprocess.run([*pip, "--python", str(home), "install", *wanted], check=True, env=env)

    def command(self, version: str, *words: str) -> tuple[list[str], dict[str, str]]:
        """A Python of a version, and its environment."""
        env = without_sources()
        return [str(self.folder / version / "bin" / "python"), *words], env

    def kvdepot(self, version: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of a version."""
        command, env = self.command(version, "-m", "kvdepot", *words)
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT_S)

    def start(self, version: str, settings: Path | None = None) -> subprocess.Popen[str]:
        """A daemon, ready."""
        words = ("-m", "kvdepot", "serve", "--json", "--config", str(settings or self.settings))
        command, env = self.command(version, *words, "--socket", str(self.socket))
        with (self.folder / "daemon.log").open("a") as log:
            daemon = subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert daemon.stdout is not None
        said = daemon.stdout.readline()
        if "ready" not in said:
            raise SystemExit(said + (self.folder / "daemon.log").read_text()[-3000:])
        return daemon


def without_sources() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class EngineProcess:
    """An asking engine of a version."""

    def __init__(self, drill: Drill, version: str) -> None:
        self.version = version
        self.seed = SEEDS[version]
        address = f"unix:{drill.socket}"
        command, env = drill.command(version, str(ENGINE), address, str(self.seed))
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)

    def told(self, word: str) -> Seen:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: the {self.version} engine has ended")
        answer: Seen = json.loads(line)
        return answer

    def wait_for_hits(self) -> bool:
        """Whether it gets hits from the daemon that is there now."""
        before = self.told("tell")["counts"]["hits"]
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if self.told("tell")["counts"]["hits"] >= before + ASKED:
                return True
            time.sleep(0.1)
        return False

    def absent(self) -> int:
        """Blocks that both engines have flushed and this one does not get."""
        deadline = time.monotonic() + WAIT_S
        while True:
            seen = [self.told(f"verify {first}") for first in SEEDS.values()]
            absent: int = sum(each["of"] - each["found"] for each in seen)
            if not absent or time.monotonic() > deadline:  # it may be about to attach
                return absent


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def check_state(drill: Drill, name: str, engines: list[EngineProcess]) -> None:
    """All that was flushed is there for both clients, with the right bytes."""
    served = [engine.wait_for_hits() for engine in engines]
    absent = {engine.version: engine.absent() for engine in engines}
    drill.points.add(name, all(served) and not any(absent.values()), absent_blocks=absent)


def protocols(drill: Drill) -> list[int]:
    """What the daemon's clients speak."""
    said = drill.kvdepot("new", "stats", "--socket", str(drill.socket), "--json")
    sessions = json.loads(said.stdout)["daemon"]["sessions"]
    return sorted({one["protocol"] for one in sessions})


def take_turns(drill: Drill) -> None:
    with ExitStack() as stack:
        daemon = drill.start("old")
        stack.enter_context(ended(daemon))
        engines = []
        for version in SEEDS:
            engines.append(EngineProcess(drill, version))
            stack.enter_context(ended(engines[-1].process))
        new = engines[-1]
        kept = [engine.told("keep")["kept"] for engine in engines]
        drill.points.add("both put to the old daemon and flush", all(kept))
        check_state(drill, "old daemon, old and new client", engines)
        check_commands(drill)

        daemon.send_signal(signal.SIGTERM)
        status = daemon.wait(WAIT_S)
        daemon = drill.start("new")
        stack.enter_context(ended(daemon))
        check_state(drill, "new daemon, the same clients", engines)
        spoken = protocols(drill)
        drill.points.add("protocols agreed on", status == 0 and len(spoken) > 0, spoken=spoken)
        drill.points.add("a session is kept", new.told("do session").get("kept", False))

        daemon.kill()
        daemon.wait()
        daemon = drill.start("old")
        stack.enter_context(ended(daemon))
        check_state(drill, "old daemon again, after kill -9", engines)

        daemon.send_signal(signal.SIGTERM)
        status = daemon.wait(WAIT_S)
        daemon = drill.start("new")
        stack.enter_context(ended(daemon))
        check_state(drill, "new daemon again", engines)
        sessions = new.told("do known").get("sessions")
        drill.points.add("the session is known again", sessions == ["drill"], sessions=sessions)

        ends = {engine.version: engine.told("stop") for engine in engines}
        counts = {version: end["counts"] for version, end in ends.items()}
        right = all(not end["counts"]["failed"] + end["counts"]["wrong"] for end in ends.values())
        errors = [error for end in ends.values() for error in end["errors"]]
        drill.points.add("no request failed, no byte was wrong", right, **counts, errors=errors)
        daemon.send_signal(signal.SIGTERM)
        drill.points.add("the last daemon ends well", status == 0 and daemon.wait(WAIT_S) == 0)
    checked = drill.kvdepot("new", "check", str(drill.folder / "kv"), "--json")
    drill.points.add("kvdepot check", checked.returncode == 0)
    log = (drill.folder / "daemon.log").read_text()
    drill.points.add("no traceback in the daemons' log", "Traceback" not in log, log=log[-400:])


def check_commands(drill: Drill) -> None:
    """What commands of the new version say of an old daemon."""
    at = ["--socket", str(drill.socket)]
    said = drill.kvdepot("new", "upgrade-check", "--config", str(drill.settings), *at, "--json")
    verdicts = {one["what"].split()[0]: one for one in json.loads(said.stdout)["findings"]}
    told = verdicts["daemon"]["found"]
    drill.points.add("upgrade-check", said.returncode == 0 and "protocol" in told, found=told)
    runs = [("stats",), ("top", "--once", "--json"), ("top", "--once"), ("tiers", "list")]
    ends = [drill.kvdepot("new", *words, *at) for words in runs]
    wrong = [end.stderr[-500:] for end in ends if end.returncode]
    drill.points.add("stats, top and tiers list", not wrong, errors=wrong)


def object_tier(drill: Drill) -> None:
    """An old client, and a new daemon whose blocks lie where old clients know no tier."""
    settings = drill.folder / "object.toml"
    settings.write_text(
        drill.settings.read_text().split("[ssd]")[0].replace("4MiB", "2MiB")
        + f'[object]\nurl = "file://{drill.folder}/bucket"\ncapacity = "64MiB"\n'
    )
    (drill.folder / "bucket").mkdir()
    with ExitStack() as stack:
        daemon = drill.start("new", settings)
        stack.enter_context(ended(daemon))
        engines = {}
        for version in ("new", "old"):
            engines[version] = EngineProcess(drill, version)
            stack.enter_context(ended(engines[version].process))
        kept = all(engine.told("keep")["kept"] for engine in engines.values())
        absent = engines["old"].absent()
        end = engines["old"].told("stop")["counts"]
        right = kept and not absent + end["failed"] + end["wrong"]
        drill.points.add(
            "old client, blocks in the tier object", right, absent_blocks=absent, **end
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--wheel", type=Path, required=True, help="the new version")
    parser.add_argument("--before", type=Path, help="the release before; left out, the new one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvdepot-drill-") as folder:
        drill = Drill(Path(folder), Points(args.json))
        drill.install("old", args.before or args.wheel)
        drill.install("new", args.wheel, "[s3]")
        take_turns(drill)
        object_tier(drill)
    if args.json:
        print(json.dumps({"ok": drill.points.ok, "points": drill.points.found}))
    return 0 if drill.points.ok else 1


if __name__ == "__main__":
    sys.exit(main())
