"""Runs a command that can't outlive the process which asked for it.

`python -m aggregator.commands.guard GRACE_SECONDS COMMAND...`: the command runs in a session of its
own. It is ended (SIGTERM, then SIGKILL to its process group) when this process's standard input
closes, which the operating system does for an owner that is killed too, or when it gets a SIGTERM.
Exits with the command's status. Standard library only: it starts in a few milliseconds and knows
nothing of the aggregator.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """Run the command until it ends or its owner does."""
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    ended = threading.Event()
    # Set before the command exists, so that no signal falls between; it is for the owner to stop.
    signal.signal(signal.SIGTERM, lambda _number, _frame: ended.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_watch_owner, args=(ended,), daemon=True).start()
    threading.Thread(target=_watch_child, args=(child, ended), daemon=True).start()
    # In slices: a signal handler runs in this thread, between waits.
    while not ended.wait(0.2):
        pass
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            print(f"killed: did not end within {grace_s:g} s", file=sys.stderr)  # noqa: T201
    _kill_group(child.pid)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _watch_owner(ended: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    ended.set()


def _watch_child(child: subprocess.Popen[bytes], ended: threading.Event) -> None:
    child.wait()
    ended.set()


def _kill_group(group: int) -> None:
    """End what is left of the command's processes, itself included."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # Nobody is left; macOS says it in the second way when only a zombie is.
        return


if __name__ == "__main__":
    raise SystemExit(main())
