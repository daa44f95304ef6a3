"""What is put on the queries topic, and how each kind of record may end: a dumb table.

Owns the truth of a record: what was in it, what was done to it on its way, and which results and
letters of it have landed. It must not know how the aggregator works, only what is promised.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from aggregator.core.query import TopicPartition
from protos.embedding.v1 import query_pb2
from tests.sim import texts

PROTOBUF = [("content-type", b"application/protobuf")]
DEFAULT_TTL_MS = 60_000

LETTER_REASONS = frozenset(
    {
        *("UNDECODABLE", "ENGINE_FAILED_ALONE", "ENGINE_DIED_ALONE"),
        *("NOT_FINITE", "BAD_ANSWER", "SERVER_ERROR"),
    }
)
"""Ends that put the record on the dead letter topic too."""

_ONE_END = {
    "text empty": "INVALID_FIELD",
    "text oversize": "INVALID_FIELD",
    "ttl negative": "INVALID_FIELD",
    "value null": "UNDECODABLE",
    "value garbage": "UNDECODABLE",
    "content type unknown": "UNDECODABLE",
    "letter too large": "UNDECODABLE",
    "letter too large for the client": "UNDECODABLE",
    "headers too large": "HEADERS_TOO_LARGE",
    "model unknown": "MODEL_UNKNOWN",
    "estimator raises": "SERVER_ERROR",
}
"""Kinds that are refused before any server sees them."""

_SPOILT = {
    "text over the model's maximum": "INVALID_FIELD",
    "dimensions refused by the server": "INVALID_FIELD",
    "vector not finite": "NOT_FINITE",
    "engine raises": "ENGINE_FAILED_ALONE",
    "engine dies": "ENGINE_DIED_ALONE",
    "result too large": "RESULT_TOO_LARGE",
    "result too large in every form but the last": "RESULT_TOO_LARGE",
}
"""Kinds that never get their vector, and why, if nothing else happens to them."""


@dataclass(slots=True)
class Landed:
    """One result on its topic."""

    process: str
    epoch: int
    query: int
    """The identity of the query object that it was made of."""
    reason: str
    """"OK", or the error's."""


@dataclass(eq=False, slots=True)
class Record:
    """One query on its topic."""

    tp: TopicPartition
    offset: int
    kind: str
    text: str
    ttl_ms: int
    appended_ns: int
    deleted: bool = False
    """Retention took it: nobody owes it a result any more."""
    results: list[Landed] = field(default_factory=list)
    letters: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    """What was done to requests that it was in."""
    alone_hits: int = 0
    """Engines or streams that died with it alone in an exclusive request."""

    @property
    def name(self) -> str:
        return f"{self.tp[1]}/{self.offset} ({self.kind})"

    def complaint(self, reason: str, now_ns: int, *, clocks_jump: bool) -> tuple[int, str] | None:
        """The guarantee that this end of it breaks, and how; None: it may end so."""
        only = _ONE_END.get(self.kind)
        if only is not None:
            return None if reason == only else (6, f"ended as {reason}, not as {only}")
        spoilt = _SPOILT.get(self.kind)
        if reason == "OK":
            return (6, "has a vector all the same") if spoilt else None
        if reason in ("EXPIRED", "NO_SERVER"):
            if self.ttl_ms == 0:
                return 1, f"ended as {reason} though it lives for ever"
            # Timestamps are whole milliseconds.
            early = now_ns - self.appended_ns < (self.ttl_ms - 1) * 1_000_000
            if early and not clocks_jump and self.kind != "timestamp old":
                return 1, f"ended as {reason} before its time"
            return None
        rightly = reason == spoilt
        if reason == "ENGINE_DIED_ALONE" and self.alone_hits < 2:
            return 6, f"convicted after {self.alone_hits} deaths alone"
        if reason in ("ENGINE_DIED_ALONE", "BAD_ANSWER", "SERVER_ERROR"):
            return None if rightly or self._excused(reason) else (6, f"was blamed: {reason}")
        return None if rightly else (6, f"ended as {reason}")

    def _excused(self, reason: str) -> bool:
        """Whether what was done to it from outside accounts for such an end."""
        if reason == "ENGINE_DIED_ALONE":
            return self.alone_hits >= 2
        if reason == "BAD_ANSWER":
            lies = sum(count for what, count in self.hits.items() if what.startswith("answer"))
            return lies >= 3
        return (
            self.hits.total() >= 5
            and self.hits.keys()
            & {
                "answer with an odd status",
                "claim refused with an odd status",
            }
            != set()
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits that records are made to exceed."""

    text_bytes_max: int
    headers_bytes_max: int
    results_bytes_max: int
    letters_bytes_max: int
    client_bytes_max: int
    input_tokens_max: int


@dataclass(slots=True)
class Made:
    """A record before it has an offset."""

    kind: str
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    text: str
    ttl_ms: int
    timestamp_ms: int
    key: bytes | None


def make(
    rng: random.Random, kind: str, number: int, *, sizes: Sizes, wall_ms: int, ttl_ms: int
) -> Made:
    """A record of a kind; numbers make texts differ."""
    words = 2 + min(int(rng.expovariate(0.15)), sizes.input_tokens_max // 2)
    text = texts.text_of(words, number, _MARKS.get(kind, "word"))
    fields: dict[str, Any] = {"text": text}
    made = Made(kind, None, [], text, ttl_ms, wall_ms, None)
    if rng.random() < 0.3:
        made.key = f"key-{number}".encode()
    shape = _SHAPES.get(kind)
    if shape is not None:
        shape(rng, made, fields, sizes)
    made.text = str(fields.get("text", ""))
    if "ttl_ms" in fields:
        made.ttl_ms = max(fields["ttl_ms"], 0)
    if made.value is None and kind != "value null":
        _encode(rng, made, fields)
    return made


def _encode(rng: random.Random, made: Made, fields: dict[str, Any]) -> None:
    if rng.random() < 0.6:
        made.value = query_pb2.Query(**fields).SerializeToString()
        made.headers[:0] = PROTOBUF
    else:
        made.value = orjson.dumps(fields)


def _padding(rng: random.Random, made: Made, least: int, most: int) -> None:
    made.headers.append(("x-padding", b"p" * rng.randrange(least, most)))


def _null(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    made.headers = list(PROTOBUF) if rng.random() < 0.5 else []


def _garbage(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    made.value = rng.choice([b"{", b"[]", b"\xff\xfe", b"", b"null", b"3"])


def _unknown_type(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    made.headers = [("content-type", b"text/plain")]
    made.value = b"hello"


def _empty(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    fields["text"] = ""
    fields["ttl_ms"] = 1000


def _oversize(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    fields["text"] = "w " * sizes.text_bytes_max


def _long(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    fields["text"] += " w" * (sizes.input_tokens_max + rng.randrange(50))


def _truncated(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    _long(rng, made, fields, sizes)
    fields["truncate"] = True


def _headers(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    _padding(rng, made, sizes.headers_bytes_max + 1, sizes.headers_bytes_max + 100)


def _result_large(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    """With its vector it is too large; the error alone mostly fits."""
    _padding(rng, made, sizes.results_bytes_max - 640, sizes.results_bytes_max - 540)


def _all_large(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    _padding(rng, made, sizes.results_bytes_max + 1, sizes.headers_bytes_max - 100)


def _letter_large(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    largest = sizes.client_bytes_max - 700
    if largest <= sizes.letters_bytes_max:  # the client refuses what the topic would
        _letter_huge(rng, made, fields, sizes)
        return
    made.value = b"{" + b"x" * rng.randrange(sizes.letters_bytes_max, largest)


def _letter_huge(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    made.value = b"{" + b"x" * (sizes.client_bytes_max + 10)


def _model(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    fields["model"] = "nobody's"


def _ttl_negative(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    fields["ttl_ms"] = -5


def _dimensions(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    fields["dimensions"] = 5


def _ttl_short(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    fields["ttl_ms"] = rng.choice([1, 30, 100, 500, 3000])


def _raises(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    """Some of them expire while they are found out."""
    if rng.random() < 0.4:
        fields["ttl_ms"] = rng.choice([10, 30, 80])


def _ttl_none(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    fields["ttl_ms"] = 0


def _old(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    made.timestamp_ms -= rng.choice([1000, 59_900, 10**9])


def _future(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    made.timestamp_ms += rng.choice([1000, 10**9])


def _large(rng: random.Random, made: Made, fields: dict[str, Any], sizes: Sizes) -> None:
    fields["text"] += " w" * (sizes.input_tokens_max // 3)
    _padding(rng, made, 10, 600)


_MARKS = {
    "engine dies": texts.KILLS,
    "engine raises": texts.RAISES,
    "vector not finite": texts.NOT_FINITE,
    "estimator raises": texts.BREAKS_ESTIMATOR,
}
_Shape = Callable[[random.Random, Made, dict[str, Any], Sizes], None]
_SHAPES: dict[str, _Shape] = {
    "text empty": _empty,
    "value null": _null,
    "value garbage": _garbage,
    "content type unknown": _unknown_type,
    "text oversize": _oversize,
    "text over the model's maximum": _long,
    "text truncated": _truncated,
    "headers too large": _headers,
    "result too large": _result_large,
    "result too large in every form but the last": _all_large,
    "letter too large": _letter_large,
    "letter too large for the client": _letter_huge,
    "model unknown": _model,
    "ttl negative": _ttl_negative,
    "dimensions refused by the server": _dimensions,
    "engine raises": _raises,
    "ttl short": _ttl_short,
    "ttl none": _ttl_none,
    "timestamp old": _old,
    "timestamp in the future": _future,
    "large": _large,
}
