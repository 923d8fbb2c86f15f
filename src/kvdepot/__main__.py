"""The `kvdepot` command, also available as `python -m kvdepot`."""

import signal
import sys


def run() -> int:
    """Run the command of this process and return its exit status.

    During import and shutdown Ctrl-C ends the process by SIGINT; in between `main` handles it.
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
