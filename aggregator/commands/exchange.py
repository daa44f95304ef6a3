"""Queries out, their results in, matched one to one.

Owns the correlation: every query carries a header of ours, which the aggregator passes on to the
result; a result that came without it (one too large for its headers) is known by its id.
Invariants: results are read from the topic's end as it was before the first query was sent; each
query is answered at most once here, further results of it count as duplicates; memory grows with
unanswered queries only. One thread.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from confluent_kafka import KafkaError, Message

from aggregator.commands.kafka_client import QuerySender, ResultReader, Topics
from aggregator.commands.received import header, headers_of
from protos.embedding.v1 import query_pb2

CORRELATION_HEADER = "aggregator-correlation"
JSON, PROTOBUF = "json", "protobuf"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryFields:
    """What queries have besides text and id; None: absent. Named as in CONTRACTS' JSON schema."""

    model: str | None = None
    input_type: str | None = None
    dimensions: int | None = None
    encoding: str | None = None
    truncate: bool | None = None
    ttl_ms: int | None = None


def encode_query(text: str, identity: str, fields: QueryFields, *, content_type: str) -> bytes:
    """A record's value.

    Raises:
        ValueError: the text is not valid Unicode, or a number is out of its field's range.
    """
    values: dict[str, Any] = {"id": identity, "text": text}
    values |= {
        name: value
        for name in QueryFields.__slots__
        if (value := getattr(fields, name)) is not None
    }
    if content_type == JSON:
        return json.dumps(values, ensure_ascii=False).encode()
    if fields.input_type is not None:
        values["input_type"] = f"INPUT_TYPE_{fields.input_type.upper()}"
    if fields.encoding is not None:
        values["encoding"] = f"ENCODING_{fields.encoding.upper()}"
    return query_pb2.Query(**values).SerializeToString()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The answer to query `number`: its record, or why it was not even sent."""

    number: int
    record: Message | None = None
    not_sent: str = ""


class Exchange:
    """One conversation with the topics. A context manager."""

    def __init__(
        self,
        topics: Topics,
        *,
        content_type: str = PROTOBUF,
        fields: QueryFields | None = None,
        idempotent: bool = False,
    ) -> None:
        """Fix the place in the results topic, then connect the producer.

        A person who waits for one result rather has it half a second sooner (`idempotent`, as in
        `QuerySender`): a query doubled by a retry is answered twice, and shown once.

        Raises:
            KafkaClientError: no broker answers, or a topic is missing.
        """
        self._run = f"send-{secrets.token_hex(4)}"
        self._content_type = content_type
        self._fields = fields or QueryFields()
        self._numbers: dict[str, int] = {}
        self._by_id: dict[str, int] = {}
        self._ids: dict[int, tuple[str, str]] = {}
        self._failed: list[Arrival] = []
        self.duplicates = 0
        """Further results of queries that already had one."""
        self._reader = ResultReader(topics)
        self._sender = QuerySender(topics, idempotent=idempotent)

    def __enter__(self) -> Self:
        """Exchange in a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self._reader.close()

    @property
    def unanswered(self) -> int:
        """Queries sent that have no result yet."""
        return len(self._ids)

    def send(self, number: int, text: str, *, identity: str | None = None) -> None:
        """Send query `number` (never used before); its id is `identity` or one of our own.

        Raises:
            ValueError: the text is not valid Unicode, or a field is out of range.
            KafkaClientError: the record was refused at once.
        """
        correlation = f"{self._run}-{number}"
        identity = identity or correlation
        value = encode_query(text, identity, self._fields, content_type=self._content_type)
        headers: Mapping[str, str] = {
            "content-type": f"application/{self._content_type}",
            CORRELATION_HEADER: correlation,
        }
        # Registered first: a full queue is served below, and its reports may be this very query's.
        self._ids[number] = (correlation, identity)
        self._numbers[correlation] = number
        self._by_id[identity] = number
        send = partial(
            self._sender.send,
            value,
            list(headers.items()),
            key=None,
            on_delivery=partial(self._delivered, number),
        )
        try:
            send()
        except BufferError:
            self._sender.poll(1.0)
            send()

    def collect(self, timeout_s: float) -> list[Arrival]:
        """Wait up to `timeout_s` for something of ours; give what has come, first results only.

        Raises:
            KafkaClientError: the results topic can't be read any more.
        """
        self._sender.poll()
        arrivals = []
        for record in self._reader.read(timeout_s):
            number = self._number(record)
            if number is None:
                continue
            if self.forget(number):
                arrivals.append(Arrival(number=number, record=record))
            else:
                self.duplicates += 1
        failed, self._failed = self._failed, []
        return [*arrivals, *failed]

    def forget(self, number: int) -> bool:
        """Wait for this query no longer; False: nobody was waiting."""
        names = self._ids.pop(number, None)
        if names is None:
            return False
        correlation, identity = names
        del self._numbers[correlation]
        # Of two queries with one id the later one holds the name.
        if self._by_id.get(identity) == number:
            del self._by_id[identity]
        return True

    def _number(self, record: Message) -> int | None:
        """Whose result this is; None: somebody else's."""
        headers = headers_of(record)
        correlation = header(headers, CORRELATION_HEADER)
        if correlation is None:
            return self._by_id.get(header(headers, "embedding-id") or "")
        run, _, number = correlation.rpartition("-")
        return int(number) if run == self._run else None

    def _delivered(self, number: int, error: KafkaError | None, _: Message) -> None:
        if error is not None and self.forget(number):
            self._failed.append(Arrival(number=number, not_sent=error.str()))
