"""The `kvdepot` command, also as `python -m kvdepot` where nothing was installed."""

import signal
import sys


def run() -> int:
    """Run the command of this process and return its exit status.

    Ctrl-C while modules are imported, or while the interpreter ends, ends the process as it ends
    other programs; in between `main` says so.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvdepot.cli.main import main

    status = main(on_interrupt=before)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return status


if __name__ == "__main__":
    sys.exit(run())
