"""Dead letters: a record that needs a person's eye, whole, with why it is here in its headers.

Owns the letter's headers. Invariants: key, value and headers of the record are untouched in the
full form; the bare form is a few kilobytes at most, whatever the record was. Knows nothing of when
a letter is due or of how it is replayed.
"""

from __future__ import annotations

from hashlib import sha256

from aggregator.core.effects import Form
from aggregator.core.failures import Failure, Reason
from aggregator.core.query import Query
from aggregator.wire.headers import ERROR_PREFIX, Headers, bounded
from aggregator.wire.query import ID_BYTES_MAX
from aggregator.wire.result import bounded_text

BARE_HEADERS_BYTES_MAX = 4096
"""Of the record's own headers that a bare letter keeps, in order, as far as they fit."""
BARE_KEY_BYTES_MAX = ID_BYTES_MAX
"""A bare letter of a record with a longer key has the query's id as key."""

Letter = tuple[bytes | None, bytes | None, Headers]
"""(key, value, headers) of a record to produce."""

_STAGES = {
    Reason.UNDECODABLE: "decode",
    Reason.ENGINE_FAILED_ALONE: "inference",
    Reason.ENGINE_DIED_ALONE: "inference",
    Reason.NOT_FINITE: "inference",
    Reason.BAD_ANSWER: "answer",
}
_STAGE_OTHERWISE = "request"


def encode_letter(query: Query, form: Form = Form.FULL) -> Letter:
    """Make the dead letter of `query`, for `query.failure`; raises ValueError if it has none.

    Its own headers come after the record's, so that the last of a name is this letter's. They are
    text; `timestamp` (Unix milliseconds) is left out where the record has none. The bare form has
    no value, but `value.size` (bytes) and `value.sha256` (hexadecimal).
    """
    if query.failure is None:
        raise ValueError("a dead letter needs a failure")
    added = _error_headers(query, query.failure)
    if form is Form.FULL:
        return query.key, query.value, [*query.headers, *added]
    value = query.value
    if value is not None:
        added.append(_header("value.size", str(len(value))))
        added.append(_header("value.sha256", sha256(value).hexdigest()))
    key = query.key
    if key is not None and len(key) > BARE_KEY_BYTES_MAX:
        key = query.id.encode()
    return key, None, [*bounded(query.headers, BARE_HEADERS_BYTES_MAX), *added]


def _error_headers(query: Query, failure: Failure) -> Headers:
    topic, partition = query.tp
    headers = [
        _header("topic", topic),
        _header("partition", str(partition)),
        _header("offset", str(query.offset)),
    ]
    if query.timestamp_ms is not None:
        headers.append(_header("timestamp", str(query.timestamp_ms)))
    return [
        *headers,
        _header("stage", _STAGES.get(failure.reason, _STAGE_OTHERWISE)),
        _header("code", failure.code),
        _header("reason", failure.reason),
        _header("message", bounded_text(failure.message)),
        _header("attempts", str(query.attempts)),
    ]


def _header(name: str, text: str) -> tuple[str, bytes | None]:
    return ERROR_PREFIX + name, text.encode()
