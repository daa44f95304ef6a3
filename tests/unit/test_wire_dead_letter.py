"""Dead letters: untouched records, and why they are here."""

from __future__ import annotations

from hashlib import sha256

import pytest

from aggregator.core.effects import Form
from aggregator.core.failures import Code, Failure, Reason
from aggregator.wire.dead_letter import encode_letter
from aggregator.wire.headers import headers_bytes
from tests.unit.wire_builders import BROKEN, WALL_MS, decoded, from_json

HEADERS: list[tuple[str, bytes | None]] = [
    ("content-type", b"application/json"),
    ("ce_id", b"\xff"),
    ("x", None),
    ("x", b""),
    ("__aggregator.errors.code", b"OLD"),
]


def test_the_record_is_untouched_and_ours_are_added() -> None:
    query = decoded(b"{", HEADERS, key=b"\x00key")
    query.attempts = 2
    key, value, headers = encode_letter(query)

    assert (key, value) == (b"\x00key", b"{")
    assert headers[: len(HEADERS)] == HEADERS
    assert query.failure is not None
    assert headers[len(HEADERS) :] == [
        ("__aggregator.errors.topic", b"queries"),
        ("__aggregator.errors.partition", b"3"),
        ("__aggregator.errors.offset", b"41"),
        ("__aggregator.errors.timestamp", str(WALL_MS).encode()),
        ("__aggregator.errors.stage", b"decode"),
        ("__aggregator.errors.code", b"INVALID_ARGUMENT"),
        ("__aggregator.errors.reason", b"UNDECODABLE"),
        ("__aggregator.errors.message", query.failure.message.encode()),
        ("__aggregator.errors.attempts", b"2"),
    ]


def test_null_keys_and_values_stay_null() -> None:
    query = decoded(None, timestamp_ms=None)
    key, value, headers = encode_letter(query)

    assert (key, value) == (None, None)
    assert "__aggregator.errors.timestamp" not in dict(headers)
    assert encode_letter(query, Form.BARE) == (key, value, headers)


@pytest.mark.parametrize(
    ("reason", "stage"),
    [
        (Reason.UNDECODABLE, b"decode"),
        (Reason.ENGINE_FAILED_ALONE, b"inference"),
        (Reason.ENGINE_DIED_ALONE, b"inference"),
        (Reason.NOT_FINITE, b"inference"),
        (Reason.BAD_ANSWER, b"answer"),
        (Reason.SERVER_ERROR, b"request"),
    ],
)
def test_stages(reason: Reason, stage: bytes) -> None:
    query = from_json()
    query.failure = Failure(code=Code.INTERNAL, reason=reason, message="m", dead_letter=True)

    assert dict(encode_letter(query)[2])["__aggregator.errors.stage"] == stage


def test_the_bare_form_has_size_and_hash_instead_of_the_value() -> None:
    value = b'{"text":"hello"}'
    query = decoded(value, HEADERS, key=b"k")
    query.failure = BROKEN
    key, bare, headers = encode_letter(query, Form.BARE)

    assert (key, bare) == (b"k", None)
    assert headers[: len(HEADERS)] == HEADERS
    named = dict(headers)
    assert named["__aggregator.errors.value.size"] == b"16"
    assert named["__aggregator.errors.value.sha256"] == sha256(value).hexdigest().encode()
    assert named["__aggregator.errors.reason"] == b"ENGINE_FAILED_ALONE"


def test_the_bare_form_is_small_whatever_the_record_was() -> None:
    huge = [("h" * 1000, b"v" * 10**5), ("small", b"1"), *[("", None)] * 10_000]
    query = decoded(b"v" * 10**6, huge, key=b"k" * 10**6)
    query.failure = Failure(code=Code.INTERNAL, reason=Reason.BAD_ANSWER, message="\udc00é" * 10**6)
    key, value, headers = encode_letter(query, Form.BARE)

    assert key == b"queries-3-41"
    assert value is None
    assert ("small", b"1") in headers
    assert headers_bytes(headers) < 4096 + 2048


def test_a_letter_needs_a_failure() -> None:
    with pytest.raises(ValueError, match="failure"):
        encode_letter(from_json())
