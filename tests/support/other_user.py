"""Runs code as another user of this machine, which only root can."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

OTHER_USERS = (65534, 12345)
needs_other_user = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs a second user, which only root can be: run as root"
)
_BECOME = """
import os, socket, sys
from pathlib import Path
{imports}
os.setgroups([])
os.setgid({uid})
os.setuid({uid})
os.chdir("/")
"""


def as_other_user(
    code: str, *arguments: object, uid: int = OTHER_USERS[0], imports: str = ""
) -> str:
    """What the code prints when another user runs it; the last line of its error if it fails.
    `imports` run before: the other user may not be able to read our sources.
    """
    become = _BECOME.format(uid=uid, imports=imports)
    command = [sys.executable, "-c", become + code, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return ended.stdout.strip() or ended.stderr.strip().rpartition("\n")[2]


@contextmanager
def other_user_running(
    code: str, *arguments: object, uid: int = OTHER_USERS[0]
) -> Iterator[Callable[[], str]]:
    """`as_other_user` beside the test, killed at the end; gives what reads its next line."""
    become = _BECOME.format(uid=uid, imports="")
    command = [sys.executable, "-c", become + code, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield lambda: (process.stdout.readline() if process.stdout else "").strip()
    finally:
        process.kill()
        process.communicate()


def shared_folder() -> "tempfile.TemporaryDirectory[str]":
    """A folder where everybody may make files, like the system's own for temporary ones."""
    folder = tempfile.TemporaryDirectory(prefix="kvdepot-shared-", dir="/dev/shm")
    Path(folder.name).chmod(0o1777)
    return folder
