"""The headers of Kafka records: names, what is passed on to a result, and how much of it.

Owns the names of our own headers and the rule which of a query's headers its result carries.
Invariants: what is passed on is copied and never obeyed; its size never exceeds `bytes_max`; order,
repeats and nulls are kept. Knows nothing of the values' meaning, `content-type` apart, which
`aggregator.wire.query` reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from aggregator.core.query import HeaderList

Headers = list[tuple[str, bytes | None]]

CONTENT_TYPE = "content-type"
STATUS = "embedding-status"
ID = "embedding-id"
OWN_PREFIX = "__aggregator."
ERROR_PREFIX = "__aggregator.errors."
REPLAY_ID = "__aggregator.replay.id"
REPLAY_ATTEMPTS = "__aggregator.replay.attempts"
REPLAYED = "__aggregator.replayed"

PROTOBUF = b"application/protobuf"
JSON = b"application/json"
PROTOBUF_TYPES = frozenset({PROTOBUF, b"application/x-protobuf"})
JSON_TYPES = frozenset({JSON, b""})

DROP_DEFAULT = (
    "contentType",
    "content-encoding",
    "__TypeId__",
    "__KeyTypeId__",
    "__ContentTypeId__",
    "__key_schema_id",
    "__value_schema_id",
    "ce_*",
)
"""What describes the query's bytes and would be false of the result's (Spring, schema registries,
CloudEvents: a copied `ce_id` makes its consumers drop the result as a duplicate)."""

_VERDICTS_MAX = 4096
_NAME_CACHED_MAX = 256


def header_bytes(name: str, value: bytes | None) -> int:
    """Size of one header: its name in UTF-8 and its value, at least 1 so that none is free."""
    size = len(name) if name.isascii() else len(name.encode("utf-8", "replace"))
    if value is not None:
        size += len(value)
    return size or 1


def headers_bytes(headers: HeaderList) -> int:
    """Size of all of them, bytes."""
    return sum(header_bytes(name, value) for name, value in headers)


def bounded(headers: HeaderList, bytes_max: int) -> Headers:
    """Those that fit, in order: one too large for what is left is left out, later ones may fit."""
    kept: Headers = []
    left = bytes_max
    for name, value in headers:
        size = header_bytes(name, value)
        if size <= left:
            left -= size
            kept.append((name, value))
    return kept


@dataclass(frozen=True, slots=True)
class HeaderRules:
    """Which of a query's headers its result carries.

    `drop`: names in any case; `*` stands for any characters. Always dropped besides: our own three
    and `__aggregator.*`.
    """

    bytes_max: int = 16384
    drop: Sequence[str] = DROP_DEFAULT
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _verdicts: dict[str, bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make one pattern of the names; verdicts are remembered, since producers repeat names."""
        names = [CONTENT_TYPE, STATUS, ID, OWN_PREFIX + "*", *self.drop]
        parts = (".*".join(re.escape(part) for part in name.split("*")) for name in names)
        pattern = re.compile("|".join(parts), re.IGNORECASE | re.DOTALL)
        object.__setattr__(self, "_pattern", pattern)
        object.__setattr__(self, "_verdicts", {})

    def passes(self, name: str) -> bool:
        """Whether a header of this name is passed on."""
        verdict = self._verdicts.get(name)
        if verdict is None:
            verdict = self._pattern.fullmatch(name) is None
            # Bounded: hostile producers may send a new name with each record.
            if len(name) <= _NAME_CACHED_MAX and len(self._verdicts) < _VERDICTS_MAX:
                self._verdicts[name] = verdict
        return verdict

    def candidates(self, headers: HeaderList) -> Headers:
        """Those whose names pass, whatever their size."""
        known = self._verdicts.get
        return [
            header
            for header in headers
            if (verdict := known(header[0])) or (verdict is None and self.passes(header[0]))
        ]

    def too_large(self, headers: HeaderList) -> bool:
        """Whether what would be passed on exceeds `bytes_max`."""
        return headers_bytes(self.candidates(headers)) > self.bytes_max

    def passed_on(self, headers: HeaderList) -> Headers:
        """What a result carries after our own: those whose names pass, as far as they fit."""
        if len(headers) == 1 and self._verdicts.get(headers[0][0]) is False:
            return []  # nearly every query: its content type is all
        candidates = self.candidates(headers)
        return bounded(candidates, self.bytes_max) if candidates else candidates
