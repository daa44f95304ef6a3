"""A record of the results topic, as a consumer reads it, and how people are shown it.

Both content types become one `ReceivedResult`. Its JSON is the schema of JSON results, so that
`--json` prints the same whatever was on the topic.
"""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from confluent_kafka import Message
from google.protobuf.message import DecodeError

from aggregator.adapters.record_headers import read_headers
from aggregator.commands.wording import counted, shown
from aggregator.core.query import HeaderList
from protos.embedding.v1 import query_pb2

DIMENSIONS_SHOWN = 4
_ENCODING_NAMES = {
    number: name.removeprefix("ENCODING_").lower()
    for name, number in query_pb2.Encoding.items()
    if number
}
_TIMES = ("queue_ms", "inference_ms")
"""To the microsecond when shown."""
_NUMPY = {"float32": "<f4", "float16": "<f2", "int8": "i1", "ubinary": "u1"}


_NO_RESULT = (DecodeError, ValueError, KeyError, TypeError, OverflowError, RecursionError)


class NotAResultError(ValueError):
    """The record is not a result of an aggregator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedResult:
    """One result.

    `status`: `OK` or the error's code. `vector`: float32 of shape (dimensions,) with `scale`
    applied, for ubinary of 0 and 1; None for an error. `fields`: the result by the JSON schema, the
    vector left as an array of numbers.
    """

    id: str
    status: str
    vector: npt.NDArray[np.float32] | None
    fields: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether it holds a vector."""
        return self.status == "OK"

    @property
    def tokens(self) -> int:
        """Exact tokens; 0 for an error."""
        return int(self.fields.get("tokens", 0))

    def as_json(self) -> str:
        """The result on one line, by the schema of JSON results."""
        times = {name: round(self.fields[name], 3) for name in _TIMES if name in self.fields}
        return json.dumps(self.fields | times, ensure_ascii=False)

    def as_line(self) -> str:
        """Id, status, tokens, times and the first numbers, for people."""
        if self.vector is None:
            error = self.fields["error"]
            field = f" (field {error['field']})" if error.get("field") else ""
            why = f"{error.get('reason')}{field}: {error.get('message')}"
            return shown(f"{self.id}  {self.status}  {why}")
        numbers = " ".join(f"{number:+.4f}" for number in self.vector[:DIMENSIONS_SHOWN])
        more = " ..." if len(self.vector) > DIMENSIONS_SHOWN else ""
        queue_ms, inference_ms = self.fields.get("queue_ms", 0), self.fields.get("inference_ms", 0)
        return (
            f"{shown(self.id)}  OK  {counted(self.tokens, 'token')}  queue {queue_ms:.1f} ms  "
            f"inference {inference_ms:.1f} ms  {len(self.vector)} dims [{numbers}{more}]"
        )


def headers_of(record: Message) -> HeaderList:
    """A record's headers; none where the client can't read them (a name that is not UTF-8).

    Ask once for a record: asked again for such ones the client fails otherwise.
    """
    try:
        return tuple(read_headers(record) or ())
    except SystemError:
        return ()


def header(headers: HeaderList, name: str) -> str | None:
    """The last header of this name as text; None: there is none."""
    for key, value in reversed(headers):
        if key == name and isinstance(value, bytes):
            return value.decode("utf-8", "replace")
    return None


def read_result(record: Message) -> ReceivedResult:
    """Read a record of the results topic.

    Raises:
        NotAResultError: its content type or its value is not that of a result.
    """
    content_type, value = header(headers_of(record), "content-type"), record.value()
    read = _READERS.get(content_type or "")
    if read is None or not isinstance(value, bytes):
        raise NotAResultError(f"its content-type is {content_type!r}" if value else "it is empty")
    try:
        fields = read(value)
        _check(fields)
        vector = _vector(fields)
    except _NO_RESULT as error:
        raise NotAResultError(f"its value can't be read: {error}") from error
    if (vector is None) == ("error" not in fields):
        raise NotAResultError("it has neither a vector nor an error, or both")
    status = str(fields["error"].get("code", "UNKNOWN")) if "error" in fields else "OK"
    return ReceivedResult(id=str(fields.get("id", "")), status=status, vector=vector, fields=fields)


def _check(fields: dict[str, Any]) -> None:
    """Raises TypeError or OverflowError for what can't be shown."""
    if not isinstance(fields.get("error", {}), dict):
        raise TypeError("its error is no object")
    for name in ("tokens", *_TIMES):
        if not math.isfinite(fields.get(name, 0)):
            raise TypeError(f"{name} is no number")


def _fields_of_protobuf(data: bytes) -> dict[str, Any]:
    """The same names and types as in JSON; absent fields are left out."""
    fields: dict[str, Any] = {}
    for descriptor, value in query_pb2.Result.FromString(data).ListFields():
        if descriptor.name in ("error", "source"):
            fields[descriptor.name] = {part.name: content for part, content in value.ListFields()}
        elif descriptor.name == "encoding":
            fields["encoding"] = _ENCODING_NAMES[value]
        elif descriptor.name == "scale":
            fields["scale"] = _shortest(np.float32(value))
        else:
            fields[descriptor.name] = value
    if "embedding" in fields:
        fields["embedding"] = _listed(fields["embedding"], fields["encoding"])
    return fields


def _fields_of_json(value: bytes) -> dict[str, Any]:
    fields = json.loads(value)
    if not isinstance(fields, dict):
        raise TypeError("not a JSON object")
    fields = {name: content for name, content in fields.items() if content is not None}
    embedding = fields.get("embedding")
    if isinstance(embedding, str):
        data = base64.b64decode(embedding, validate=True)
        fields["embedding"] = _listed(data, fields["encoding"])
    return fields


_READERS = {"application/protobuf": _fields_of_protobuf, "application/json": _fields_of_json}


def _listed(data: bytes, encoding: str) -> list[int] | list[float]:
    """Whole numbers, or floats as `_shortest` has them."""
    numbers: npt.NDArray[Any] = np.frombuffer(data, _NUMPY[encoding])
    if numbers.dtype.kind == "f":
        return [_shortest(number) for number in numbers.astype(np.float32)]
    whole: list[int] = numbers.tolist()
    return whole


def _shortest(number: np.float32) -> float:
    """The double that prints with the digits that tell a float32 from its neighbours, no more.

    As in JSON results, where orjson writes float32 so.
    """
    return float(str(number))


def _vector(fields: dict[str, Any]) -> npt.NDArray[np.float32] | None:
    """The vector in float32, or None for an error.

    Raises:
        ValueError: its encoding is unknown, or it has not the dimensions that the result says.
    """
    if "embedding" not in fields:
        return None
    encoding = fields["encoding"]
    if encoding not in _NUMPY:
        raise ValueError(f"unknown encoding {encoding!r}")
    if encoding == "ubinary":
        vector = np.unpackbits(np.asarray(fields["embedding"], np.uint8)).astype(np.float32)
    else:
        vector = np.asarray(fields["embedding"], np.float32)
    if encoding == "int8":
        vector *= np.float32(fields["scale"])
    if vector.shape != (fields["dimensions"],):
        raise ValueError(f"{len(vector)} numbers for {fields['dimensions']} dimensions")
    return vector
