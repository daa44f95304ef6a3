"""What the scheduler knows of each stream: what it holds, its window, when it last heard of us.

The unary calls together are one more stream, `UNARY`, that holds and is guarded like the others but
has no window and hears nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from model_server.core.events import UNARY
from model_server.core.limits import Limits
from model_server.core.requests import Request
from model_server.core.windows import SHARED_TARGETS, WindowShares

_SECOND_NS = 1_000_000_000
SILENCE_NS_MAX = 4 * _SECOND_NS
"""With the check each second, a stream that is owed something hears of us every 5 s at least."""
_SHARE_EVERY_NS = _SECOND_NS // 4
_CHANGE_RATIO_MIN = 16
"""Windows that move by less than target / 16 are not worth a message."""


class Stream:
    """One stream's account."""

    __slots__ = ("held_tokens", "requests", "said_ns", "window_tokens")

    def __init__(self, now_ns: int) -> None:
        self.held_tokens = 0
        """Exact tokens of its unanswered inputs."""
        self.requests: set[int] = set()
        self.window_tokens = 0
        self.said_ns = now_ns


class Streams:
    """All of them."""

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {UNARY: Stream(0)}
        self._shares = WindowShares()
        self._shared_ns = 0
        self._untokenized: dict[int, int] = {}
        """Requests that were read and have not arrived yet, and their streams."""
        self.held_tokens = 0
        """Over all streams."""

    def get(self, stream: int) -> Stream | None:
        """None: closed already."""
        return self._streams.get(stream)

    def open(self, stream: int, now_ns: int) -> None:
        """A new stream."""
        self._streams[stream] = Stream(now_ns)
        self._shares.open(stream, now_ns)

    def close(self, stream: int) -> Sequence[int]:
        """Forget a stream; returns the requests that it still held."""
        closed = self._streams.pop(stream, None)
        if closed is None:
            return ()
        self._shares.close(stream)
        self._untokenized = {k: s for k, s in self._untokenized.items() if s != stream}
        self.held_tokens -= closed.held_tokens
        return tuple(closed.requests)

    def open_streams(self) -> list[int]:
        """Those that hear of us."""
        return [stream for stream in self._streams if stream != UNARY]

    @property
    def untokenized(self) -> int:
        """Requests of open streams that wait for the tokenizer."""
        return len(self._untokenized)

    def read(self, request: int, stream: int) -> None:
        """A request waits for the tokenizer: its stream is owed something."""
        if stream in self._streams:
            self._untokenized[request] = stream

    def tokenized(self, request: int) -> None:
        """It no longer does."""
        self._untokenized.pop(request, None)

    def hold(self, request: Request, now_ns: int) -> None:
        """A request was taken in."""
        stream = self._streams[request.stream]
        stream.requests.add(request.key)
        stream.held_tokens += request.held_tokens
        self.held_tokens += request.held_tokens
        self._shares.sent(request.stream, request.held_tokens, now_ns)

    def release(self, request: Request, tokens: int) -> None:
        """Some of a request's tokens are answered."""
        self._streams[request.stream].held_tokens -= tokens
        self.held_tokens -= tokens

    def forget(self, request: Request) -> None:
        """A request is complete, or cancelled."""
        self._streams[request.stream].requests.discard(request.key)

    def said(self, stream: int, now_ns: int) -> None:
        """A message to it was ordered."""
        known = self._streams.get(stream)
        if known is not None:
            known.said_ns = now_ns

    def said_to_all(self, now_ns: int) -> None:
        """A message to each was ordered."""
        for stream in self._streams.values():
            stream.said_ns = now_ns

    def silent(self, now_ns: int) -> list[int]:
        """Streams that are owed something and have not heard of us for too long."""
        return [
            key
            for key, stream in self._streams.items()
            if key != UNARY
            and now_ns - stream.said_ns >= SILENCE_NS_MAX
            and (stream.requests or key in self._untokenized.values())
        ]

    def window_tokens(self, stream: int) -> int:
        """The window last shared out; 0 for a stream that is gone."""
        known = self._streams.get(stream)
        return known.window_tokens if known is not None else 0

    def windows_due(self, now_ns: int) -> bool:
        """Whether shares may have moved enough to look again."""
        return len(self._shares) > 1 and now_ns - self._shared_ns >= _SHARE_EVERY_NS

    def share(self, limits: Limits, now_ns: int, shared_targets: int = SHARED_TARGETS) -> list[int]:
        """Share windows out anew; returns the streams whose window moved noticeably."""
        self._shared_ns = now_ns
        target = limits.batch_tokens_target
        windows = self._shares.windows(
            target=target,
            input_tokens_max=limits.input_tokens_max,
            now_ns=now_ns,
            shared_targets=shared_targets,
        )
        changed = []
        for key, window in windows.items():
            stream = self._streams[key]
            if abs(window - stream.window_tokens) * _CHANGE_RATIO_MIN >= target:
                stream.window_tokens = window
                changed.append(key)
        return changed
