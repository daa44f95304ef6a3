"""Ends an engine's process group when its server or its leader is gone: run by path, as a script.

    python -I -S guard.py PIPE LEADER

PIPE is the reading end of a pipe whose writing end only the server has; LEADER the process that
leads the group, which this belongs to. A process of its own, since the leader may be killed at a
moment when what it starts does not yet look after itself (SGLang's processes import for many
seconds before they do), and since no thread of it may get to run.
"""

import os
import select
import signal
import sys


def main(pipe: int, leader: int) -> None:
    """Wait for either end, then end the group, this process included."""
    ends = select.poll()
    ends.register(pipe)  # POLLHUP is always told
    try:
        ends.register(os.pidfd_open(leader), select.POLLIN)
        ends.poll()
    except ProcessLookupError:
        pass  # it is gone already
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
