"""The queries of the chaos tests: sound ones with others among them, drawn from a seed.

Owns what each kind is made of and what may come of it. Sizes and markers are those of `arena`'s
model servers and topics. Must not know a broker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from protos.embedding.v1 import query_pb2
from tests.harness.accounts import DIED_ALONE, OK, Sent

PARTITIONS = 6
TOKENS_MAX = 64
RESULT_BYTES_MAX = 4_096
"""`max.message.bytes` of the results topic: a vector fits, passed-on headers may not."""
FAULTS = {"[[raise]]": "raise", "[[nan]]": "nan", "[[die]]": "die"}
AGE_MS = 60_000
"""Of queries whose time was over before they were sent."""
WORDS = ("how", "do", "you", "make", "sourdough", "bread", "at", "home", "without", "yeast")

JSON = b"application/json"
PROTOBUF = b"application/protobuf"
EXPIRED = frozenset({"EXPIRED", "NO_SERVER"})

WEIGHTS = {
    "sound": 900,
    "refused": 20,
    "unknown model": 5,
    "undecodable": 15,
    "tombstone": 15,
    "text too long": 10,
    "result too large": 10,
    "expired": 15,
    "raises": 5,
    "not finite": 5,
}
"""Of the kinds, in thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A record to be sent."""

    sent: Sent
    partition: int
    timestamp_ms: int


class Mix:
    """Queries of all kinds, one after the other; see the module."""

    def __init__(self, seed: int) -> None:
        """Equal seeds give equal queries in equal order."""
        self._random = Random(seed)
        self._kinds = list(WEIGHTS)
        self._weights = list(WEIGHTS.values())
        self._number = 0

    def draw(self, kind: str | None = None) -> Draw:
        """The next one, of a kind of its own choosing or of this."""
        self._number += 1
        chosen = kind or self._random.choices(self._kinds, self._weights)[0]
        sent = self._make(chosen, f"{chosen} {self._number}")
        age_ms = AGE_MS if chosen == "expired" else 0
        return Draw(
            sent=sent,
            partition=self._random.randrange(PARTITIONS),
            timestamp_ms=time.time_ns() // 1_000_000 - age_ms,
        )

    def _make(self, kind: str, name: str) -> Sent:
        text = " ".join(self._random.choices(WORDS, k=self._random.randint(1, 20)))
        match kind:
            case "sound":
                return self._query(name, {"text": text})
            case "refused":
                return self._query(name, {"text": ""}, frozenset({"INVALID_FIELD"}))
            case "unknown model":
                fields = {"text": text, "model": "nobody's"}
                return self._query(name, fields, frozenset({"MODEL_UNKNOWN"}))
            case "undecodable":
                return Sent(name=name, value=b"{" + name.encode(), reasons=UNDECODABLE, key=b"k")
            case "tombstone":
                return Sent(name=name, value=None, reasons=UNDECODABLE, key=name.encode())
            case "text too long":
                fields = {"text": "word " * (TOKENS_MAX * 2)}
                return self._query(name, fields, frozenset({"INVALID_FIELD"}))
            case "result too large":
                large = ("large", b"x" * (RESULT_BYTES_MAX + 1_000))
                reasons = frozenset({"RESULT_TOO_LARGE"})
                return self._query(name, {"text": text}, reasons, more=(large,))
            case "expired":
                return self._query(name, {"text": text, "ttl_ms": AGE_MS // 2}, EXPIRED)
            case "raises":
                poison = {"text": f"{text} [[raise]]"}
                return self._query(name, poison, frozenset({"ENGINE_FAILED_ALONE"}))
            case "not finite":
                return self._query(name, {"text": f"{text} [[nan]]"}, frozenset({"NOT_FINITE"}))
            case "dies":
                return self._query(name, {"text": f"{text} [[die]]"}, frozenset({DIED_ALONE}))
        raise ValueError(f"no such kind: {kind}")

    def _query(
        self,
        name: str,
        fields: Mapping[str, str | int],
        reasons: frozenset[str] = frozenset({OK}),
        more: tuple[tuple[str, bytes], ...] = (),
    ) -> Sent:
        """In JSON or Protobuf, with and without key and headers."""
        random = self._random
        named: dict[str, str | int] = {"id": name, **fields}
        headers = [("traceparent", f"00-{random.getrandbits(128):032x}-01-01".encode()), *more]
        if random.random() < 0.5:
            value = query_pb2.Query(**named).SerializeToString()  # type: ignore[arg-type]
            headers.append(("content-type", PROTOBUF))
        else:
            value = json.dumps(named).encode()
            if random.random() < 0.5:
                headers.append(("content-type", JSON))
        return Sent(
            name=name,
            value=value,
            reasons=reasons,
            key=None if random.random() < 0.5 else name.encode(),
            headers=tuple(headers),
        )


UNDECODABLE = frozenset({"UNDECODABLE"})
