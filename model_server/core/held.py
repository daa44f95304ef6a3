"""The requests that are held: taken in, struck off input by input, given up.

Owns them until their last input is answered, and keeps streams' accounts and deadlines in step.
Invariant: an input is struck off once, and each way of doing so says what is to be answered. It
does not know why.
"""

from __future__ import annotations

from collections.abc import Sequence

from model_server.core.effects import Effect, Fail, Refuse
from model_server.core.expiries import Expiries
from model_server.core.failures import EXPIRED, Failure
from model_server.core.requests import Request
from model_server.core.streams import Streams


class HeldRequests:
    """See the module; `requests` has those alive, by key."""

    def __init__(self, streams: Streams) -> None:
        self.requests: dict[int, Request] = {}
        self._streams = streams
        self._expiries = Expiries(self.requests)

    def take(self, request: Request, now_ns: int) -> None:
        """A request with unanswered inputs was taken in."""
        self.requests[request.key] = request
        self._streams.hold(request, now_ns)
        self._expiries.add(request)

    def cancel(self, request: Request) -> None:
        """Nobody waits for it, though its stream is open."""
        self._streams.release(request, request.held_tokens)
        self._streams.forget(request)
        self.drop(request)

    def drop(self, request: Request) -> None:
        """Its inputs leave wherever they are; for one whose stream is gone, nothing else does."""
        request.gone = True
        del self.requests[request.key]

    def answered(self, request: Request, indexes: Sequence[int], now_ns: int) -> bool:
        """Strike inputs off everywhere; True when the request is complete."""
        held = request.held_tokens
        last = request.answered(indexes)
        self._streams.release(request, held - request.held_tokens)
        self._streams.said(request.stream, now_ns)
        if last:
            self._streams.forget(request)
            self.drop(request)
        return last

    def fail(
        self, key: int, indexes: Sequence[int], failure: Failure, now_ns: int
    ) -> Sequence[Effect]:
        """Answer inputs with a failure, if anybody waits for them."""
        request = self.requests.get(key)
        if request is None or not indexes:
            return ()
        last = self.answered(request, indexes, now_ns)
        failures = [(index, failure) for index in indexes]
        return (Fail(request=key, failures=failures, last=last),)

    def fail_waiting(self, failure: Failure, now_ns: int) -> list[Effect]:
        """The same for all that wait for a pass; requests of which none has run are refused."""
        effects: list[Effect] = []
        for request in list(self.requests.values()):
            waiting = request.waiting[request.position :]
            if len(waiting) == len(request.tokens):
                self.answered(request, waiting, now_ns)
                effects.append(Refuse(request=request.key, failure=failure))
            else:
                effects += self.fail(request.key, waiting, failure, now_ns)
        return effects

    def expire(self, now_ns: int) -> list[Effect]:
        """The same for waiting inputs whose time is over."""
        effects: list[Effect] = []
        for request, due in self._expiries.take(now_ns):
            effects += self.fail(request.key, due, EXPIRED, now_ns)
        return effects

    def expires_ns(self) -> int | None:
        """The earliest deadline; None: there is none."""
        return self._expiries.next_ns()
