"""Requests into columns, Statuses out of failures, and the grouping of answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.rpc import error_details_pb2

from model_server.core.failures import (
    EXPIRED,
    Code,
    Failure,
    Reason,
    engine_died,
    failed_alone,
    invalid,
    not_started,
    too_large,
    too_much_held,
)
from model_server.engines.base import Engine, ModelInfo, Text, TextRefused, Tokens
from model_server.server.answers import group_answers
from model_server.server.jobs import embed, tokenize
from model_server.server.requests import Prompts, Reader
from model_server.server.statuses import status_of
from model_server.vectors import Encoding
from protos.embedding.v1 import embedding_service_pb2 as pb


def info(**changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {
        "revision": "r",
        "dimensions": 16,
        "matryoshka_dimensions": (8, 10),
        "normalized": True,
        "input_tokens_max": 20,
        "engine": "fake",
        "device": "cpu",
        "precision": "float32",
    }
    return ModelInfo(**{**fields, **changes})


def read(*inputs: pb.Input, model: ModelInfo | None = None) -> Any:
    return Reader(model or info()).read(inputs, arrived_ns=1_000)


def test_defaults_are_filled_in() -> None:
    columns = read(pb.Input(text="ab"), pb.Input(text="жж"))
    assert columns.texts == [Text(text="ab"), Text(text="жж")]
    assert columns.text_bytes == [2, 4]
    assert columns.encodings == [Encoding.FLOAT32] * 2
    assert columns.dimensions == [16, 16]
    assert columns.deadlines_ns is None
    assert columns.failures == {}
    assert columns.uniform


def test_what_is_asked_for_is_kept() -> None:
    columns = read(
        pb.Input(text="a", dimensions=8, encoding=4, timeout_ms=5),  # type: ignore[arg-type]
        pb.Input(text="b", truncate=True),
    )
    assert columns.dimensions == [8, 16]
    assert columns.encodings == [Encoding.UBINARY, Encoding.FLOAT32]
    assert columns.deadlines_ns == [5_001_000, 0]
    assert [text.truncate for text in columns.texts] == [False, True]
    assert not columns.uniform


def test_the_first_fault_of_an_input_is_the_one_told() -> None:
    columns = read(pb.Input(text="", dimensions=3, timeout_ms=-1), pb.Input(text="a"))
    assert list(columns.failures) == [0]
    assert columns.failures[0].field == "text"


def test_an_explicit_zero_is_not_the_default() -> None:
    assert read(pb.Input(text="a", dimensions=0)).failures[0].field == "dimensions"
    assert read(pb.Input(text="a", timeout_ms=0)).failures == {}


def test_ubinary_needs_a_multiple_of_8() -> None:
    columns = read(pb.Input(text="a", dimensions=10, encoding=4))  # type: ignore[arg-type]
    assert columns.failures[0].field == "encoding"


@pytest.mark.parametrize(
    ("prompts", "default", "expected"),
    [
        ({}, None, ["", "", ""]),
        ({}, "d: ", ["d: ", "", ""]),
        ({"query": "q: "}, "d: ", ["d: ", "q: ", ""]),
        ({"query": "", "document": ""}, "d: ", ["d: ", "", ""]),
        ({"passage": "p: ", "corpus": "c: "}, None, ["", "", ""]),
        ({"passage": "p: ", "document": "doc: "}, None, ["", "", "doc: "]),
    ],
)
def test_prompts_are_chosen_as_sentence_transformers_does(
    prompts: dict[str, str], default: str | None, expected: list[str]
) -> None:
    chosen = Prompts(info(prompts=prompts, default_prompt=default)).by_type
    assert [chosen[kind] for kind in (0, 1, 2)] == expected
    columns = read(
        *[pb.Input(text="x", input_type=kind) for kind in (0, 1, 2)],  # type: ignore[arg-type]
        model=info(prompts=prompts, default_prompt=default),
    )
    assert [text.prompt for text in columns.texts] == expected


# Tokenizing


class PanicError(BaseException):
    """As a panic of a library in Rust arrives: it is no Exception."""


class FakeEngine:
    """Counts characters; refuses "refuse", raises on "panic", and returns what it is told to."""

    def __init__(self, vectors: Any = None) -> None:
        self.info = info()
        self.vectors = vectors

    def tokenize(self, texts: list[Text]) -> list[Tokens | TextRefused]:
        if any("panic" in text.text for text in texts):
            raise PanicError
        return [
            TextRefused(message="No.") if t.text == "refuse" else Tokens(ids=range(len(t.text)))
            for t in texts
        ]

    def embed(self, inputs: list[Tokens]) -> Any:
        return self.vectors


def fake(vectors: Any = None) -> Engine:
    made: Any = FakeEngine(vectors)
    return made  # type: ignore[no-any-return]


def test_tokens_land_beside_their_inputs() -> None:
    columns = read(
        pb.Input(text="four"), pb.Input(text=""), pb.Input(text="refuse"), pb.Input(text="no")
    )
    tokenize(fake(), columns)
    assert columns.counts == [4, 0, 0, 2]
    assert sorted(columns.failures) == [1, 2]
    assert columns.failures[2].message == "No."


def test_a_text_that_makes_the_tokenizer_panic_fails_alone() -> None:
    columns = read(pb.Input(text="four"), pb.Input(text="panic"), pb.Input(text="no"))
    tokenize(fake(), columns)
    assert columns.counts == [4, 0, 2]
    assert columns.failures[1].field == "text"


def test_a_request_of_refused_inputs_only_is_not_tokenized() -> None:
    columns = read(pb.Input(text=""))
    tokenize(fake(), columns)
    assert columns.counts == [0]


@pytest.mark.parametrize(
    "vectors",
    [
        np.zeros((1, 16), np.float32),
        np.zeros((2, 15), np.float32),
        np.zeros((2, 16), np.float64),
        np.zeros(32, np.float32),
    ],
)
def test_vectors_of_the_wrong_shape_are_a_pass_that_failed(vectors: Any) -> None:
    with pytest.raises(Exception, match="the engine returned"):
        embed(fake(vectors), [Tokens(ids=[1]), Tokens(ids=[2])])


# Answers


def test_answers_are_grouped_by_what_was_asked_for() -> None:
    columns = read(
        pb.Input(text="a"),
        pb.Input(text="b", encoding=3),  # type: ignore[arg-type]
        pb.Input(text="c", dimensions=8),
        pb.Input(text="d"),
    )
    vectors = np.random.default_rng(3).normal(size=(3, 16)).astype(np.float32)
    vectors[2, 0] = np.nan
    groups, failures = group_answers(columns, [1, 0, 3], vectors, normalized=True)
    found = [(g.encoding, g.dimensions, list(g.indexes), g.encoded.rows.shape) for g in groups]
    assert found == [
        (Encoding.INT8, 16, [1], (1, 16)),
        (Encoding.FLOAT32, 16, [0], (1, 64)),
    ]
    assert [(index, failure.reason) for index, failure in failures] == [(3, Reason.NOT_FINITE)]


def test_a_group_of_bad_rows_only_is_left_out() -> None:
    columns = read(pb.Input(text="a", encoding=3))  # type: ignore[arg-type]
    vectors = np.full((1, 16), np.inf, np.float32)
    groups, failures = group_answers(columns, [0], vectors, normalized=True)
    assert groups == []
    assert [index for index, _ in failures] == [0]


# Statuses


@pytest.mark.parametrize(
    "failure",
    [
        invalid("text", "The text is empty."),
        too_large("inputs", "Too many."),
        not_started("Draining."),
        engine_died("Gone."),
        too_much_held("Too much.", 0),
        failed_alone("boom"),
        EXPIRED,
    ],
)
def test_every_status_has_its_details(failure: Failure) -> None:
    status = status_of(failure)
    assert status.code == failure.code
    assert status.message == failure.message
    kinds = {detail.type_url.rpartition(".")[2]: detail for detail in status.details}
    reason = error_details_pb2.ErrorInfo.FromString(kinds["ErrorInfo"].value)
    assert (reason.reason, reason.domain) == (str(failure.reason), "embedding.v1")
    retryable = failure.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)
    assert ("RetryInfo" in kinds) == retryable
    if retryable:
        delay = error_details_pb2.RetryInfo.FromString(kinds["RetryInfo"].value).retry_delay
        assert delay.seconds or delay.nanos
    assert ("BadRequest" in kinds) == (failure.field is not None)
    if failure.field is not None:
        bad = error_details_pb2.BadRequest.FromString(kinds["BadRequest"].value)
        assert [violation.field for violation in bad.field_violations] == [failure.field]
