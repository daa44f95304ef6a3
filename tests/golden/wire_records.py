"""Records whose bytes must not change unnoticed: consumers elsewhere read them.

`python -m tests.golden.wire_records` writes `wire_records.json` anew; its diff is what a change
does to every consumer.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from aggregator.core.effects import Dispatch, Form
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import Query, VectorGroup
from aggregator.wire.dead_letter import encode_letter
from aggregator.wire.headers import HeaderRules, Headers
from aggregator.wire.result import ResultEncoder
from aggregator.wire.rpc import build_request
from protos.embedding.v1 import query_pb2
from tests.unit.wire_builders import ARRIVED_NS, decoded, group_of

FILE = Path(__file__).with_name("wire_records.json")

FLOATS = np.array([[0.0, -0.5, 1 / 3, 1.0, -1.0, 65504.0, 0.1, 0.0009765625]])
GROUPS = {
    "float32": group_of(1, 8, FLOATS.astype("<f4").tobytes(), 1),
    "float16": group_of(2, 8, FLOATS.astype("<f2").tobytes(), 1),
    "int8": group_of(
        3,
        8,
        np.array([0, -64, 42, 127, -127, 1, -1, 2], "<i1").tobytes(),
        1,
        [float(np.float32(1 / 127))],
    ),
    "ubinary": group_of(4, 16, bytes([0b10110000, 0b00000001]), 1),
}
HEADERS: Headers = [
    ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("reply-topic", b"replies"),
    ("x", None),
    ("x", b"\xff"),
    ("ce_id", b"1"),
    ("Embedding-Status", b"forged"),
]
UNAVAILABLE = Failure(
    code=Code.UNAVAILABLE,
    reason=Reason.NO_SERVER,
    message="No server of this model is ready.",
    retryable=True,
    retry_after_ms=1000,
)


def query_of(form: str) -> Query:
    """Decode a query with headers, by the format that its result has."""
    if form == "protobuf":
        value = query_pb2.Query(id="q-1", text="grüß dich").SerializeToString()
        return decoded(value, [*HEADERS, ("content-type", b"application/protobuf")], key=b"user-7")
    text = f'{{"id":"q-1","text":"grüß dich","format":"{form}"}}'
    return decoded(text.encode(), HEADERS, key=b"user-7")


def vector(query: Query, group: VectorGroup) -> tuple[bytes, bytes, Headers]:
    """Encode the result."""
    return ResultEncoder(HeaderRules()).encode_vector(
        query,
        group,
        0,
        model_revision="0f1e2d3c",
        inference_us=15_250,
        answered_ns=ARRIVED_NS + 17_000_000,
    )


def errors() -> Iterator[tuple[str, Query]]:
    """Give queries that failed, by name."""
    for form in ("protobuf", "array"):
        unavailable = query_of(form)
        unavailable.failure = UNAVAILABLE
        yield f"unavailable, {form}", unavailable
    yield "undecodable, array", decoded(b"[]", HEADERS)
    yield "text empty, array", decoded(b'{"id":"q-2","text":""}')
    yield "model unknown, array", decoded(b'{"text":"a","model":"gpt"}', key=b"")


def records() -> dict[str, object]:
    """Give every golden record by name."""
    made: dict[str, object] = {}
    for name, group in GROUPS.items():
        for form in ("protobuf", "array", "base64"):
            made[f"vector, {name}, {form}"] = _shown(*vector(query_of(form), group))
    encoder = ResultEncoder(HeaderRules())
    for name, query in errors():
        made[f"error, {name}"] = _shown(*encoder.encode_error(query))
        made[f"error, {name}, bare"] = _shown(*encoder.encode_error(query, Form.BARE))
        made[f"letter, {name}"] = _shown(*encode_letter(query))
        made[f"letter, {name}, bare"] = _shown(*encode_letter(query, Form.BARE))
    claim = Dispatch(
        claim_id=1,
        model="minilm",
        server="a:1",
        queries=[query_of("protobuf"), decoded(b'{"text":"b","encoding":"int8","ttl_ms":0}')],
        estimate=6.0,
        exclusive=True,
    )
    made["request"] = build_request(claim, ARRIVED_NS).SerializeToString().hex()
    return made


def _shown(key: bytes | None, value: bytes | None, headers: Headers) -> dict[str, object]:
    lines = [name if header is None else f"{name}: {_text(header)}" for name, header in headers]
    return {"key": _text(key), "value": _text(value), "headers": lines}


def _text(value: bytes | None) -> str | None:
    """Printable ASCII as it is, everything else as hexadecimal."""
    if value is None:
        return None
    if value.isascii() and all(chr(byte) in _PRINTABLE for byte in value):
        return value.decode("ascii")
    return "hex:" + value.hex()


_PRINTABLE = frozenset(string.printable) - frozenset("\r\x0b\x0c")


def main() -> None:
    """Write the file."""
    FILE.write_text(json.dumps(records(), indent=1, ensure_ascii=True) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
