"""Blocking calls off the loop that nobody has to wait for at the end.

`asyncio.to_thread` keeps a process alive until its calls have returned, and a call into Kafka's
client can't be taken back: without a broker it blocks for many seconds. Here a call that is given
up goes on in a daemon thread and ends with the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def in_daemon_thread(
    function: Callable[P, R], /, *arguments: P.args, **keywords: P.kwargs
) -> R:
    """Call it in a thread of its own and return what it returns, or raise what it raises.

    Cancelled, it returns at once; what becomes of the call is then nobody's business.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def finish(result: R | None, error: BaseException | None) -> None:
        if done.done():  # given up
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type] # without an error it is one

    def call() -> None:
        outcome: tuple[R | None, BaseException | None]
        try:
            outcome = function(*arguments, **keywords), None
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            outcome = None, error
        try:
            loop.call_soon_threadsafe(finish, *outcome)
        except RuntimeError:  # the loop is closed: the process is ending
            return

    threading.Thread(target=call, name=function.__name__, daemon=True).start()
    return await done
