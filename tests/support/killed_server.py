"""Forks children to kill: `python -m tests.support.killed_server`, plans in, exit codes out.

It has imported everything and started nothing, so a child is at work in milliseconds.
"""

import gc
import json
import os
import signal
import sys
import time
import traceback

from tests.support.crash_workload import Plan, Workload


def child(plan: Plan) -> None:
    code = 1
    try:
        Workload(plan).run()
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve(plan: Plan) -> int:
    """Run one child to its end. Returns its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        child(plan)
    if plan.kill_after_s is not None:
        time.sleep(plan.kill_after_s)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    for line in sys.stdin:
        started = time.monotonic()
        code = serve(Plan(**json.loads(line)))
        answer = {"code": code, "seconds": time.monotonic() - started}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    gc.freeze()  # a child that looked through what was imported would copy all of it
    main()
