"""The engine's process: one pass after the other, as its parent asks for them.

    python -m model_server.engines.child RUNNER SOCKET PIPE PARENT

RUNNER is a module with `start(options, died) -> Runner`, where `died` is for it to call, from any
thread, when it can't go on: it says why and ends the process. SOCKET and PIPE are file descriptors
that are open in this process, PARENT the number of the process that has their other ends.
Invariants: it ends with its parent, whatever state it is in, and whatever it started ends with it;
it leaves signals that are meant for the server to the server, and so does what it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from model_server.engines.base import (
    EngineDiedError,
    EngineOutOfMemoryError,
    EnginePass,
    Tokens,
    Vectors,
)
from model_server.engines.child.frames import (
    Failed,
    Fault,
    FrameError,
    Kind,
    pack_failed,
    pack_object,
    pack_vectors,
    receive,
    send,
    unpack_inputs,
    unpack_object,
)
from model_server.engines.model_folder import ModelRefusedError

_PR_SET_PDEATHSIG = 1
_MESSAGE_CHARACTERS_MAX = 1_000
STATUS_FAILED = 1


class Runner(Protocol):
    """An engine, started in this process."""

    @property
    def ready(self) -> Mapping[str, Any]:
        """What runs, as JSON values."""
        ...

    def embed(self, inputs: Sequence[Tokens]) -> tuple[Vectors, Sequence[EnginePass]]:
        """One list, in one forward pass; vectors, and the passes as the engine counted them."""
        ...


class Connection:
    """This end of the socket: read by one thread, written by any."""

    def __init__(self, descriptor: int) -> None:
        # What this process starts must not hold the socket open.
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()
        self.frames: SimpleQueue[tuple[Kind, bytes]] = SimpleQueue()

    def read(self) -> None:
        """Read on while a pass runs: the end of the stream is the end of this process."""
        with contextlib.suppress(OSError, FrameError):
            while (frame := receive(self._socket)) is not None:
                self.frames.put(frame)
        end_group()

    def next(self, expected: Kind) -> bytes:
        """Wait for the next frame.

        Raises:
            FrameError: it is of another kind.
        """
        kind, payload = self.frames.get()
        if kind is not expected:
            raise FrameError(f"{kind.name} came where {expected.name} was expected")
        return payload

    def answer(self, kind: Kind, payload: bytes) -> None:
        """Write a frame; a parent that is gone is seen by `read`."""
        with contextlib.suppress(OSError), self._lock:
            send(self._socket, kind, payload)

    def fail(self, fault: Fault, message: str) -> None:
        """Answer with a failure, in one line."""
        line = " ".join(message.split())[:_MESSAGE_CHARACTERS_MAX]
        self.answer(Kind.FAILED, pack_failed(Failed(fault=fault, message=line)))

    def died(self, message: str) -> None:
        """Say why this process ends, and end it."""
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
        self.fail(Fault.DIED, message)
        end_group()


def end_group() -> None:
    """End this process and all that it started, at once."""
    os.killpg(0, signal.SIGKILL)


def main(runner: str, descriptor: int, pipe: int, parent: int) -> int:
    """Serve until the parent closes the socket; returns the exit status."""
    # Inherited by what is started from here: a service manager signals every process of a service,
    # and a pass must finish.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _die_with(parent)
    _guard(pipe)
    connection = Connection(descriptor)
    threading.Thread(target=connection.read, daemon=True).start()
    try:
        options = unpack_object(connection.next(Kind.START))
        engine: Runner = importlib.import_module(runner).start(options, connection.died)
    except Exception as error:  # noqa: BLE001 - the parent is told
        traceback.print_exc()
        connection.fail(_fault(error), str(error) or type(error).__name__)
        return STATUS_FAILED
    connection.answer(Kind.READY, pack_object(engine.ready))
    while True:
        payload = connection.next(Kind.EMBED)
        try:
            vectors, passes = engine.embed(unpack_inputs(payload))
            answer = pack_vectors(vectors, passes)
        except Exception as error:  # noqa: BLE001 - the parent is told
            traceback.print_exc()
            connection.fail(_fault(error), str(error) or type(error).__name__)
        else:
            connection.answer(Kind.VECTORS, answer)


def _fault(error: Exception) -> Fault:
    if isinstance(error, EngineOutOfMemoryError):
        return Fault.OUT_OF_MEMORY
    if isinstance(error, EngineDiedError):
        return Fault.DIED
    return Fault.REFUSED if isinstance(error, ModelRefusedError) else Fault.ERROR


def _die_with(parent: int) -> None:
    """Have the kernel end this process with its parent: it may hang where no thread of it runs."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(STATUS_FAILED)


def _guard(pipe: int) -> None:
    """Have another process see to the end of this group: see `guard`."""
    script = Path(__file__).with_name("guard.py")
    subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), str(pipe), str(os.getpid())], pass_fds=[pipe]
    )
    os.close(pipe)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:5])))
