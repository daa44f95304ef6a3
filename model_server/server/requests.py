"""Requests read out of their messages into columns, each input checked on the way.

Fields are read a column at a time, and a column is judged by its distinct values: in the common
case, where all inputs ask for the same, the checks cost nothing per input. It decides nothing that
needs exact token counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from model_server.core.failures import EXPIRED, Failure, invalid
from model_server.core.limits import (
    TEXT_BYTES_MAX,
    TIMEOUT_MS_MAX,
    check_dimensions,
    check_text,
    check_timeout,
    deadline_ns,
)
from model_server.engines.base import ModelInfo, Text, TextRefused, Tokens
from model_server.vectors import Encoding
from protos.embedding.v1 import embedding_service_pb2 as pb
from protos.embedding.v1 import query_pb2

_QUERY = query_pb2.INPUT_TYPE_QUERY
_DOCUMENT = query_pb2.INPUT_TYPE_DOCUMENT


class Prompts:
    """The prompt of each input type, chosen as sentence-transformers does.

    `encode` takes the default prompt, `encode_query` the one named "query", `encode_document` the
    one named "document". A SentenceTransformer always has these two names, with an empty prompt
    where the model declares none, so nothing else ever stands in for them.
    """

    def __init__(self, info: ModelInfo) -> None:
        self.by_type: dict[int, str] = {
            query_pb2.INPUT_TYPE_UNSPECIFIED: info.default_prompt or "",
            _QUERY: info.prompts.get("query", ""),
            _DOCUMENT: info.prompts.get("document", ""),
        }


@dataclass(slots=True, kw_only=True)
class Columns:
    """The inputs of one request, one entry an input; what `failures` refuses has a default."""

    texts: list[Text]
    text_bytes: list[int]
    encodings: list[Encoding]
    dimensions: list[int]
    deadlines_ns: list[int] | None
    failures: dict[int, Failure] = field(default_factory=dict)
    tokens: list[Tokens | None] = field(default_factory=list)
    """After tokenizing; None where refused."""
    counts: list[int] = field(default_factory=list)
    """Exact tokens, 0 where refused."""

    @property
    def uniform(self) -> bool:
        """All inputs ask for one encoding and one size."""
        return len(set(self.encodings)) == 1 and len(set(self.dimensions)) == 1

    def take_tokens(self, answers: Sequence[Tokens | TextRefused]) -> None:
        """Answers of the tokenizer, one for each text that `failures` does not refuse."""
        if not self.failures and not any(isinstance(a, TextRefused) for a in answers):
            self.tokens = list(answers)  # type: ignore[arg-type]
            self.counts = [len(a.ids) for a in answers]  # type: ignore[union-attr]
            return
        given = iter(answers)
        for index in range(len(self.texts)):
            answer = None if index in self.failures else next(given)
            if isinstance(answer, TextRefused):
                self.failures[index] = invalid("text", answer.message)
                answer = None
            self.tokens.append(answer)
            self.counts.append(len(answer.ids) if answer is not None else 0)

    def expire(self, now_ns: int) -> None:
        """Refuse the inputs whose time has run out before they were tokenized."""
        for index, deadline in enumerate(self.deadlines_ns or ()):
            if 0 < deadline <= now_ns:
                self.failures.setdefault(index, EXPIRED)

    def texts_to_tokenize(self) -> Sequence[Text]:
        """Those that are not refused already."""
        if not self.failures:
            return self.texts
        return [text for i, text in enumerate(self.texts) if i not in self.failures]


class Reader:
    """Reads inputs for one model."""

    def __init__(self, info: ModelInfo) -> None:
        self._prompts = Prompts(info).by_type
        self._own = info.dimensions
        self._offered = frozenset({info.dimensions, *info.matryoshka_dimensions})

    def read(self, inputs: Iterable[pb.Input], arrived_ns: int) -> Columns:
        """All inputs of a request, which may be refused one by one."""
        items = list(inputs)
        failures: dict[int, Failure] = {}
        texts = [item.text for item in items]
        text_bytes = _sizes(texts, failures)
        dimensions = self._dimensions(items, failures)
        encodings = self._encodings(items, dimensions, failures)
        prompts = self._prompts_of(items, failures)
        truncates = [item.truncate for item in items]
        return Columns(
            texts=[
                Text(text=text, prompt=prompt, truncate=truncate)
                for text, prompt, truncate in zip(texts, prompts, truncates, strict=True)
            ],
            text_bytes=text_bytes,
            encodings=encodings,
            dimensions=dimensions,
            deadlines_ns=_deadlines(items, arrived_ns, failures),
            failures=failures,
        )

    def _dimensions(self, items: Sequence[pb.Input], failures: dict[int, Failure]) -> list[int]:
        own = self._own
        asked = [item.dimensions for item in items]
        if not any(asked) and True not in [item.HasField("dimensions") for item in items]:
            return [own] * len(items)

        def refuse(index: int) -> Failure | None:
            if not items[index].HasField("dimensions"):
                asked[index] = own
            return check_dimensions(asked[index], offered=self._offered, multiple_of_8=False)

        _refuse(len(items), refuse, failures)
        return [own if index in failures else value for index, value in enumerate(asked)]

    def _encodings(
        self, items: Sequence[pb.Input], dimensions: Sequence[int], failures: dict[int, Failure]
    ) -> list[Encoding]:
        asked: list[int] = [item.encoding for item in items]
        if not any(asked):
            return [Encoding.FLOAT32] * len(items)
        for index, value in enumerate(asked):
            if value not in _ENCODINGS:
                failures.setdefault(index, invalid("encoding", f"Unknown encoding {value}."))
            elif value == Encoding.UBINARY:
                failure = check_dimensions(
                    dimensions[index], offered=self._offered, multiple_of_8=True
                )
                if failure is not None:
                    failures.setdefault(index, failure)
        return [_ENCODINGS.get(value, Encoding.FLOAT32) for value in asked]

    def _prompts_of(self, items: Sequence[pb.Input], failures: dict[int, Failure]) -> list[str]:
        types: list[int] = [item.input_type for item in items]
        prompts = self._prompts
        for value in set(types):
            if value not in prompts:
                failure = invalid("input_type", f"Unknown input type {value}.")
                for index in (i for i, given in enumerate(types) if given == value):
                    failures.setdefault(index, failure)
        return [prompts.get(value, "") for value in types]


_ENCODINGS = {0: Encoding.FLOAT32, **{int(encoding): encoding for encoding in Encoding}}


def _refuse(
    count: int, check: Callable[[int], Failure | None], failures: dict[int, Failure]
) -> None:
    """Apply a check to each input; the first failure of an input stays."""
    for index in range(count):
        failure = check(index)
        if failure is not None:
            failures.setdefault(index, failure)


def _sizes(texts: Sequence[str], failures: dict[int, Failure]) -> list[int]:
    """UTF-8 bytes of each text."""
    sizes = [len(text) if text.isascii() else len(text.encode()) for text in texts]
    if sizes and (min(sizes) == 0 or max(sizes) > TEXT_BYTES_MAX):
        _refuse(len(sizes), lambda index: check_text(sizes[index]), failures)
    return sizes


def _deadlines(
    items: Sequence[pb.Input], arrived_ns: int, failures: dict[int, Failure]
) -> list[int] | None:
    timeouts = [item.timeout_ms for item in items]
    if not any(timeouts):
        return None
    if min(timeouts) < 0:
        _refuse(len(items), lambda index: check_timeout(timeouts[index]), failures)
    if max(timeouts) > TIMEOUT_MS_MAX or min(timeouts) <= 0:
        return [deadline_ns(arrived_ns, max(timeout, 0)) for timeout in timeouts]
    return [arrived_ns + timeout * 1_000_000 for timeout in timeouts]
