"""A reader of the documents: a machine like this one, and a shell in it that types what is printed.

The machine has this one's files under a layer of its own, and processes, network and memory files
of its own: whatever a page installs, starts or deletes is gone with it. Making it needs root.
"""

import base64
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import IO, Self

ROOT = Path(__file__).parents[2]
HOME = Path("/home/reader")
CHECKOUT = HOME / "kvdepot"
_MARK = "--- typed"

_BOOT = """
set -e
mount -t tmpfs -o mode=0755 reader "$1"
cd "$1"
mkdir upper work root checkout-upper checkout-work
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" root
mount --rbind /dev root/dev
mount -t tmpfs -o mode=1777 shm root/dev/shm
mount -t proc proc root/proc
for empty in run mnt opt; do mount -t tmpfs -o mode=0755 "$empty" "root/$empty"; done
rm -rf root/etc/kvdepot root/var/lib/kvdepot
mkdir -p "root$2"
mount -t overlay overlay \
    -o "lowerdir=$3,upperdir=$1/checkout-upper,workdir=$1/checkout-work" "root$2"
for place in "$4" "$5"; do  # Python, and for users whom a page makes
    if [ ! -e "root$place/bin" ]; then  # it is on a filesystem of its own
        mkdir -p "root$place"
        mount --rbind "$place" "root$place"
        continue
    fi
    while [ "$place" != / ]; do
        [ -x "root$place" ] && chmod a+x "root$place"  # in this layer only
        place="$(dirname "$place")"
    done
done
ip link set lo up
exec chroot root /usr/bin/env -i HOME="${2%/*}" LC_ALL=C.UTF-8 TERM=dumb \
    PATH="${2%/*}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    bash --noprofile --norc
"""

_SHELL = r"""
failed=
trap 'failed+="$BASH_COMMAND ended with $?; "' ERR
started() {  # a server: in the background from the moment at which it says that it is ready
    local log="$HOME/server-$((servers += 1)).log"
    "$@" >"$log" 2>&1 &
    local pid=$!
    until grep -qE 'ready|listening|serving|complete|Server is ready' "$log"; do
        if ! kill -0 "$pid" 2>/dev/null; then cat "$log" >&2; return 1; fi
        sleep 0.1
    done
}
said() {  # wait until server number $2 has said $1
    until grep -q "$1" "$HOME/server-$2.log"; do sleep 0.1; done
}
stopped() {  # all that `started` has started
    local pid
    for pid in $(jobs -p); do kill "$@" "$pid" 2>/dev/null; done
    wait 2>/dev/null
    :
}
"""

_COMMANDS = {
    "kvdepot": 'exec env PYTHONPATH={source} {python} -m kvdepot "$@"',
    "python": 'exec env PYTHONPATH={source} {python} "$@"',
    "nats-server": 'exec {folder}/nats-server "$@"',
}

SYSTEMCTL = r"""
unit=/etc/systemd/system/kvdepot.service
value() { sed -n "s/^$1=//p" "$unit"; }
stop() { [ ! -e /run/kvdepot.pid ] || { kill "$(cat /run/kvdepot.pid)"; \
    while [ -e "/proc/$(cat /run/kvdepot.pid)" ]; do sleep 0.1; done; rm /run/kvdepot.pid; }; }
start() {
    install -d -o "$(value User)" -g "$(value Group)" -m "$(value RuntimeDirectoryMode)" \
        "/run/$(value RuntimeDirectory)"
    install -d -o "$(value User)" -g "$(value Group)" -m "$(value StateDirectoryMode)" \
        "/var/lib/$(value StateDirectory)"
    setsid runuser -u "$(value User)" -- $(value ExecStart) >/var/log/kvdepot.log 2>&1 &
    until [ -S /run/kvdepot/depot.sock ] && grep -q ready /var/log/kvdepot.log; do
        kill -0 $! || { cat /var/log/kvdepot.log >&2; exit 1; }
        sleep 0.1
    done
    pgrep -u "$(value User)" -f 'kvdepot serve' | head -n 1 >/run/kvdepot.pid
}
case "$*" in
daemon-reload) [ -e "$unit" ] ;;
"enable --now kvdepot" | "start kvdepot") start ;;
"restart kvdepot") stop && start ;;
"disable --now kvdepot" | "stop kvdepot") stop ;;
*) echo "systemctl $*: not known here" >&2; exit 1 ;;
esac
"""
"""Stands in for systemd's, which wants to be the first process: starts the unit's ExecStart as its
User, with its folders, and nothing more of it.
"""


_UNSHARED = ("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child")


def refusal(folder: Path) -> str:
    """Why no machine can be made here, as in a container without the right to mount; or nothing."""
    tried = """
        set -e
        mount -t tmpfs reader "$1"
        mkdir "$1/upper" "$1/work" "$1/root"
        mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
    """
    words = [*_UNSHARED, "bash", "-c", tried, "reader", str(folder)]
    ended = subprocess.run(words, capture_output=True, text=True)
    return ended.stderr.strip() or "it failed" if ended.returncode else ""


class Machine:
    """A fresh one; `run` works in one shell, in a checkout of the sources."""

    def __init__(self, folder: Path) -> None:
        layer = folder / "machine"
        layer.mkdir()
        self._errors: IO[str] = (folder / "stderr").open("w+")
        words = [*_UNSHARED, "bash", "-c", _BOOT, "reader"]
        words += [str(layer), str(CHECKOUT), str(ROOT), sys.prefix, sys.base_prefix]
        self._shell = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self.run(_SHELL)
        self.run(f"cd {CHECKOUT}; [ -e .venv ] || ln -s {sys.prefix} .venv")
        values = {"source": str(CHECKOUT / "src"), "python": shlex.quote(sys.executable)}
        values["folder"] = str(Path(sys.executable).parent)
        for name, body in _COMMANDS.items():
            self.command(name, body.format(**values))
        self.command("systemctl", SYSTEMCTL)

    def command(self, name: str, body: str) -> None:
        """Make a command of that name."""
        self.write(HOME / "bin" / name, f"#!/bin/bash\n{body}\n")
        self.run(f"chmod 755 {HOME} {HOME}/bin {HOME}/bin/{name}")

    def write(self, path: Path, text: str) -> None:
        coded = base64.b64encode(text.encode()).decode()
        self.run(f"mkdir -p {path.parent}; base64 -d <<<{coded} >{path}")

    def run(self, text: str) -> str:
        """What it prints. AssertionError: a command in it has failed."""
        assert self._shell.stdin is not None and self._shell.stdout is not None
        self._errors.seek(0, os.SEEK_END)
        begin = self._errors.tell()
        coded = base64.b64encode(text.encode()).decode()
        self._shell.stdin.write(
            f'failed=; typed=$(base64 -d <<<{coded})\neval "$typed" </dev/null\n'
            f'printf "\\n{_MARK} %s\\n" "$failed"\n'
        )
        self._shell.stdin.flush()
        said = ""
        for line in self._shell.stdout:
            if line.startswith(_MARK):
                failure = line.removeprefix(_MARK).strip()
                assert not failure, f"{text}\n{failure}\n{said}{self._said_wrong(begin)}"
                return said.removesuffix("\n")
            said += line
        raise AssertionError(f"the shell ended at\n{text}\n{said}{self._said_wrong(begin)}")

    def _said_wrong(self, begin: int) -> str:
        self._errors.seek(begin)
        return self._errors.read()[-4000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._shell.kill()  # with its children, and all that they have started
        self._shell.communicate()
        self._errors.close()
