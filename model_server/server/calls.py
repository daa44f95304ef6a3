"""The two kinds of callers, as the driver sees them, and the request that waits for its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from model_server.core.failures import Failure
from model_server.server.answers import Group
from model_server.server.requests import Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds: arrival of the request to the start of the pass, and the pass."""

    queue_us: int
    inference_us: int


class Caller(Protocol):
    """Who is to be answered. Each call is one message (or the whole answer of a unary call)."""

    def answer(
        self,
        held: Held,
        groups: Sequence[Group],
        failures: Sequence[tuple[int, Failure]],
        *,
        last: bool,
        timing: Timing | None,
    ) -> None:
        """Inputs are answered; without `timing` no pass was involved."""
        ...

    def refuse(self, held: Held, failure: Failure) -> None:
        """The whole request is refused."""
        ...


@dataclass(slots=True, kw_only=True)
class Held:
    """A request that has unanswered inputs."""

    key: int
    stream: int
    request_id: int
    arrived_ns: int
    caller: Caller
    columns: Columns
    exclusive: bool = False
    bulk: bool = False
