"""Dead letters read back: what they say, what is sent again, and the mark that it was.

Owns the headers of a replay and of the marker that follows it. Invariants: whatever the topic
holds, reading gives a letter, a marker or neither, and never raises; of a letter's headers only the
block that its writer appended counts, so a record that brought such headers along can't speak for
itself; what is sent again is key and value untouched and the record's own headers, less ours of
before.
Knows nothing of topics as a whole, nor of rates.

A marker names the letter in a record of its own, since a topic can't be written in the past: null
value, `__aggregator.replayed` = PARTITION-OFFSET of the letter, `__aggregator.replayed.time` = Unix
milliseconds of the confirmed send. A letter with a null value has `__aggregator.errors.*`; a marker
has none of those.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from aggregator.core.query import HeaderList, TopicPartition
from aggregator.wire.dead_letter import Letter
from aggregator.wire.headers import ERROR_PREFIX, REPLAY_ATTEMPTS, REPLAY_ID, REPLAYED, Headers
from aggregator.wire.query import DecodeOptions, decode_record

REPLAYED_TIME = f"{REPLAYED}.time"

_BLOCK_START = ERROR_PREFIX + "topic"
_REQUIRED = ("topic", "partition", "offset", "code", "reason")
_NUMBER = re.compile(r"[0-9]{1,19}")
_PLACE = re.compile(r"([0-9]{1,10})-([0-9]{1,19})")
# Which models there are is no matter here: an id is read before the model's name is.
_FOR_THE_ID = DecodeOptions(models=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A dead letter, taken apart.

    `headers` are the record's own. `id` is the one that its result has; None: it was in the value
    that was left out. `replays`: how often it was replayed before. `value_bytes` is the size of the
    record's value, and `value_sha256` its hash where the value was left out.
    """

    key: bytes | None
    value: bytes | None
    headers: Headers
    tp: TopicPartition
    offset: int
    timestamp_ms: int | None
    stage: str
    code: str
    reason: str
    message: str
    attempts: int
    id: str | None
    replays: int
    value_bytes: int
    value_sha256: str | None

    @property
    def whole(self) -> bool:
        """Whether it holds the record's value, so that it can be sent again."""
        return self.value_sha256 is None

    def hindrance(self, replay_attempts_max: int) -> str | None:
        """Say why it can't be replayed; None: it can."""
        if self.value_sha256 is not None:
            return (
                f"its value of {self.value_bytes} bytes did not fit the dead letter topic and was "
                f"left out (SHA-256 {self.value_sha256})"
            )
        if self.replays >= replay_attempts_max:
            return f"it was replayed {self.replays} times, replay_attempts_max"
        return None


def read_letter(key: bytes | None, value: bytes | None, headers: HeaderList) -> DeadLetter | None:
    """Take a record of the dead letter topic apart; None: it is no dead letter."""
    starts = [number for number, (name, _) in enumerate(headers) if name == _BLOCK_START]
    if not starts:
        return None
    own = list(headers[: starts[-1]])
    block = _block(headers[starts[-1] :])
    if any(name not in block for name in _REQUIRED):
        return None
    partition, offset = _number(block["partition"]), _number(block["offset"])
    if partition is None or offset is None:
        return None
    tp = (block["topic"], partition)
    sha256 = block.get("value.sha256") if value is None else None
    size = _number(block.get("value.size", "")) if sha256 else len(value or b"")
    return DeadLetter(
        key=key,
        value=value,
        headers=own,
        tp=tp,
        offset=offset,
        timestamp_ms=_number(block.get("timestamp", "")),
        stage=block.get("stage", ""),
        code=block["code"],
        reason=block["reason"],
        message=block.get("message", ""),
        attempts=_number(block.get("attempts", "")) or 0,
        id=_id(value, own, tp, offset, whole=sha256 is None),
        replays=_replays(own),
        value_bytes=size or 0,
        value_sha256=sha256,
    )


def encode_replay(letter: DeadLetter) -> Letter:
    """Make the record that is sent again.

    Raises:
        ValueError: the letter lacks its value.
    """
    if not letter.whole or letter.id is None:
        raise ValueError("a letter without its value can't be sent again")
    ours = (REPLAY_ID, REPLAY_ATTEMPTS)
    kept = [
        (name, value)
        for name, value in letter.headers
        if name not in ours and not name.startswith(ERROR_PREFIX)
    ]
    added: Headers = [
        (REPLAY_ID, letter.id.encode()),
        (REPLAY_ATTEMPTS, str(letter.replays + 1).encode()),
    ]
    return letter.key, letter.value, kept + added


def marker_headers(partition: int, offset: int, time_ms: int) -> Headers:
    """Headers of the marker for the letter at this place; its value is null."""
    return [
        (REPLAYED, f"{partition}-{offset}".encode()),
        (REPLAYED_TIME, str(time_ms).encode()),
    ]


def read_marker(value: bytes | None, headers: HeaderList) -> tuple[int, int] | None:
    """Partition and offset of the letter that a marker names; None: the record is no marker."""
    if value is not None or any(name.startswith(ERROR_PREFIX) for name, _ in headers):
        return None
    for name, place in headers:
        if name == REPLAYED and (found := _PLACE.fullmatch(_text(place))):
            return int(found[1]), int(found[2])
    return None


def _block(headers: Sequence[tuple[str, bytes | None]]) -> dict[str, str]:
    """What the letter's writer appended, by name without the prefix."""
    return {
        name.removeprefix(ERROR_PREFIX): _text(value)
        for name, value in headers
        if name.startswith(ERROR_PREFIX)
    }


def _id(
    value: bytes | None, headers: Headers, tp: TopicPartition, offset: int, *, whole: bool
) -> str | None:
    """The id of the record's result: read as the aggregator reads it."""
    if not whole and not any(name == REPLAY_ID for name, _ in headers):
        return None
    query = decode_record(
        _FOR_THE_ID,
        tp=tp,
        epoch=0,
        offset=offset,
        key=None,
        value=value,
        headers=headers,
        timestamp_ms=None,
        arrived_ns=0,
        wall_ms=0,
    )
    return query.id


def _replays(headers: Headers) -> int:
    """How often it was replayed; what we can't have written there counts for nothing."""
    counts = [value for name, value in headers if name == REPLAY_ATTEMPTS]
    return (_number(_text(counts[-1])) or 0) if counts else 0


def _number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
