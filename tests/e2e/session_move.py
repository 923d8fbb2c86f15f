"""A conversation moves: `python tests/e2e/session_move.py --json`, or `./dev e2e move`.

SmolLM2 answers a first turn here, as root, from a depot in this process. The session is exported,
and imported by a daemon of another user, in another path, under another Python. The next turn,
served from there, has the tokens that it has here and that the model computes without a depot.

Needs root, another Python (3.12 or newer, --python) and the demo's model (./dev setup). The other
user sees that Python through a mount of its own. Prints one line for each point; with --json each
is an object, and the last line has all of them. Exit status 1 if one fails.
"""

import argparse
import glob
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.e2e_points import Points

import kvdepot
from kvdepot.adapters.hf import smollm2
from kvdepot.adapters.hf.model import DepotModel, attach
from kvdepot.cli.directories import models_folder

ROOT = Path(__file__).resolve().parents[2]
USER = "nobody"
PYTHONS = ("~/.pyenv/versions/3.1[2-9]*/bin/python3", "/usr/bin/python3.1[2-9]")
BLOCK_TOKENS = 32
PROMPT_TOKENS, ANSWER_TOKENS, QUESTION_TOKENS = 300, 16, 20
WAIT_S = 120.0
ENTER = (
    'mount --bind "$1" "$2" && shift 2 && '
    'exec setpriv --reuid "$0" --regid "$0" --clear-groups "$@"'
)
Seen = dict[str, Any]


@dataclass
class OtherMachine:
    """Another user with a Python, a path and an environment of its own."""

    folder: Path
    python: Path

    def __post_init__(self) -> None:
        self.user = pwd.getpwnam(USER)
        self.home, self._site = self.folder / "home", self.folder / "site"
        self._sources, self._prefix = self.folder / "src", self.folder / "python"
        self._real = Path(self._asked("import sys; print(sys.base_prefix)"))
        self.version = self._asked("import platform; print(platform.python_version())")
        for place in (self.home, self._prefix):
            place.mkdir()
        os.chown(self.home, self.user.pw_uid, self.user.pw_gid)
        pip = [str(self.python), "-m", "pip", "-q", "--disable-pip-version-check", "install"]
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([*pip, "--target", str(self._site), "numpy"], check=True, env=clean)
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src" / "kvdepot", self._sources / "kvdepot", ignore=leave)
        self.socket = self.home / "depot.sock"

    def _asked(self, program: str) -> str:
        return subprocess.check_output([str(self.python), "-c", program], text=True).strip()

    def command(self, *words: str) -> tuple[list[str], dict[str, str]]:
        """`kvdepot` with these words, as the other user, and its environment."""
        python = self._prefix / "bin" / f"python{'.'.join(self.version.split('.')[:2])}"
        enter = ["unshare", "-m", "sh", "-c", ENTER, str(self.user.pw_uid)]
        run = [str(self._real), str(self._prefix), str(python), "-m", "kvdepot", *words]
        env = {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(self._prefix / "lib"),
            "PYTHONPATH": f"{self._sources}:{self._site}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return [*enter, *run], env

    @contextmanager
    def daemon(self) -> Iterator[None]:
        settings = ["--set", "dram.capacity=64MiB", "--set", f"ssd.path={self.home}/kv"]
        settings += ["--set", "ssd.capacity=256MiB", "--socket", str(self.socket)]
        command, env = self.command("serve", "--json", *settings)
        process = subprocess.Popen(
            command, env=env, cwd=self.home, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            if "ready" not in (said := process.stdout.readline()):
                raise SystemExit(f"error: the daemon of {USER} does not start: {said}")
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_S)
            process.stdout.close()

    def bring(self, file: Path) -> Path:
        """A file, as it comes to another machine: the user's own, in another place."""
        there = self.home / file.name
        shutil.copyfile(file, there)
        os.chown(there, self.user.pw_uid, self.user.pw_gid)
        there.chmod(0o600)
        return there

    def insert_recovered(self, file: Path) -> Seen:
        """`kvdepot session import`, by the other user."""
        words = ("session", "import", str(file), "--socket", str(self.socket), "--json")
        command, env = self.command(*words)
        done = subprocess.run(
            command, env=env, cwd=self.home, stdout=subprocess.PIPE, text=True, timeout=WAIT_S
        )
        found: Seen = json.loads(done.stdout)
        return found


def loaded() -> tuple[Any, list[int]]:
    """The model, and the tokens of a text."""
    torch.set_num_threads(1)
    folder = smollm2.prepare(models_folder(os.environ))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text: list[int] = tokenizer.encode((ROOT / "docs" / "tour.md").read_text())[:1000]
    return model.eval(), text


def answer(model: Any, tokens: Sequence[int]) -> list[int]:
    """What a model says to these tokens, greedily."""
    ids = torch.tensor([list(tokens)])
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=ANSWER_TOKENS,
            min_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    said: list[int] = output[0, len(tokens) :].tolist()
    return said


def move(points: Points, folder: Path, python: Path) -> None:
    other = OtherMachine(folder, python)
    plain, text = loaded()
    prompt, question = text[:PROMPT_TOKENS], text[-QUESTION_TOKENS:]
    file = folder / "chat.kvsession"
    drive = {"path": folder / "here", "capacity": "256MiB"}
    with (
        kvdepot.open(dram="64MiB", ssd=drive) as store,
        attach(plain, store, block_tokens=BLOCK_TOKENS) as served,
    ):
        first = answer(served, prompt)
        served.flush()
        told = [*prompt, *first]
        blocks = served.session("chat", told)
        exported = store.sessions.export("chat", file)
        turn = [*told, *question]
        here = answer(served, turn)
    computed = answer(plain, turn)
    points.add("exported", exported["blocks"] == blocks > 0, **exported)
    with other.daemon():
        taken = other.insert_recovered(other.bring(file))
        points.add("imported", taken.get("complete", False), python=other.version, **taken)
        with (
            kvdepot.open(f"unix:{other.socket}", daemon_user=USER) as away,
            attach(plain, away, block_tokens=BLOCK_TOKENS) as served,
        ):
            there = answer(served, turn)
            fetched = fetched_tokens(served)
    wanted = blocks * BLOCK_TOKENS
    points.add("served from what was imported", fetched == wanted, fetched=fetched, of=len(turn))
    same = there == here == computed
    points.add("the same tokens on the next turn", same, here=here, there=there, computed=computed)


def fetched_tokens(served: DepotModel) -> int:
    return sum(served.last.rows[0].fetched.values())


def find_python(given: Path | None) -> Path:
    if given is not None:
        return given
    found = [Path(name) for each in PYTHONS for name in sorted(glob.glob(os.path.expanduser(each)))]
    mine = sys.version_info[:2]
    others = [path for path in found if f"3.{mine[1]}" not in str(path)]
    if not others:
        raise SystemExit("error: there is no other Python\nhint: --python /path/of/python3.12")
    return others[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--python", type=Path, help="another Python than this one")
    args = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("error: only root can act as another user")
    points = Points(args.json)
    with tempfile.TemporaryDirectory(prefix="kvdepot-move-") as folder:
        os.chmod(folder, 0o755)
        move(points, Path(folder), find_python(args.python))
    if args.json:
        print(json.dumps({"ok": points.ok, "points": points.found}))
    return 0 if points.ok else 1


if __name__ == "__main__":
    sys.exit(main())
