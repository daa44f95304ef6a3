"""Requests from claims, answers checked, statuses read."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from aggregator.core.effects import Dispatch
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import Answer, Query
from aggregator.wire.rpc import build_request, check_response, failure_of_status, server_limits
from protos.embedding.v1 import embedding_service_pb2 as pb
from protos.embedding.v1 import query_pb2
from tests.unit.wire_builders import ARRIVED_NS, from_json

DIMENSIONS = 4


def claim(queries: list[Query], *, exclusive: bool = False) -> Dispatch:
    return Dispatch(
        claim_id=9,
        model="minilm",
        server="a:1",
        queries=queries,
        estimate=10.0,
        exclusive=exclusive,
    )


def status(
    code: int, *details: Message, reason: str = "", message: str = "m", domain: str = "embedding.v1"
) -> status_pb2.Status:
    made = status_pb2.Status(code=code, message=message)
    if reason:
        details = (error_details_pb2.ErrorInfo(reason=reason, domain=domain), *details)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        made.details.append(packed)
    return made


INVALID = status(code_pb2.INVALID_ARGUMENT, reason="INVALID_FIELD")

# Requests ---------------------------------------------------------------------------------------


def test_a_request_has_the_claim_s_inputs_in_order() -> None:
    queries = [
        from_json(text="one", ttl_ms=0),
        from_json(
            text="two",
            input_type="query",
            dimensions=8,
            encoding="int8",
            truncate=True,
            ttl_ms=1000,
        ),
    ]

    assert build_request(claim(queries), ARRIVED_NS + 400_000_000) == pb.EmbedStreamRequest(
        request_id=9,
        model="minilm",
        inputs=[
            pb.Input(text="one"),
            pb.Input(
                text="two",
                input_type=query_pb2.INPUT_TYPE_QUERY,
                dimensions=8,
                encoding=query_pb2.ENCODING_INT8,
                truncate=True,
                timeout_ms=600,
            ),
        ],
    )


@pytest.mark.parametrize("after_ms", [999, 999.5, 1000, 5000, 10**9])
def test_a_deadline_is_never_sent_as_none(after_ms: float) -> None:
    query = from_json(ttl_ms=1000)
    request = build_request(claim([query]), ARRIVED_NS + int(after_ms * 1e6))

    assert request.inputs[0].timeout_ms == 1


def test_the_longest_time_to_live_fits() -> None:
    request = build_request(claim([from_json(ttl_ms=2**63 - 1)]), ARRIVED_NS)

    assert request.inputs[0].timeout_ms > 2**33


def test_exclusive_and_priority() -> None:
    request = build_request(
        claim([from_json()], exclusive=True), ARRIVED_NS, priority=pb.PRIORITY_BULK
    )

    assert request.exclusive
    assert request.priority == pb.PRIORITY_BULK


# Answers ----------------------------------------------------------------------------------------


def queries_of(count: int = 3, **fields: object) -> list[Query]:
    return [from_json(**fields) for _ in range(count)]


def float32_response() -> pb.EmbedStreamResponse:
    matrix = (np.arange(8) / 10).astype("<f4")
    return pb.EmbedStreamResponse(
        request_id=9,
        groups=[
            pb.EmbeddingGroup(
                encoding=query_pb2.ENCODING_FLOAT32,
                dimensions=DIMENSIONS,
                indexes=[2, 0],
                tokens=[12, 10],
                embeddings=matrix.tobytes(),
            )
        ],
        errors=[pb.InputError(index=1, status=INVALID)],
        last=True,
        queue_us=7,
        inference_us=8,
    )


def checked(response: pb.EmbedStreamResponse, queries: list[Query] | None = None) -> Answer:
    answer = check_response(response, queries_of() if queries is None else queries, DIMENSIONS)
    if answer.fault is not None:
        assert (answer.groups, answer.errors, answer.refused) == ([], [], None)
    return answer


def test_a_sound_answer_in_columns() -> None:
    answer = checked(float32_response())

    assert answer.fault is None
    assert (answer.claim_id, answer.last, answer.queue_us, answer.inference_us) == (9, True, 7, 8)
    group = answer.groups[0]
    assert (group.encoding, group.dimensions, group.stride) == (1, 4, 16)
    assert (group.indexes, group.tokens, group.scales) == ([2, 0], [12, 10], [])
    assert len(group.embeddings) == 32
    assert [failed.index for failed in answer.errors] == [1]
    assert answer.errors[0].failure.reason is Reason.INVALID_FIELD


def group_response(encoding: int, dimensions: int, **fields: object) -> pb.EmbedStreamResponse:
    group = pb.EmbeddingGroup(dimensions=dimensions, indexes=[0], tokens=[1], **fields)  # type: ignore[arg-type]
    group.encoding = encoding  # type: ignore[assignment]
    return pb.EmbedStreamResponse(request_id=9, groups=[group])


@pytest.mark.parametrize(
    ("word", "encoding", "dimensions", "fields", "stride"),
    [
        ("float32", query_pb2.ENCODING_FLOAT32, 4, {"embeddings": bytes(16)}, 16),
        ("float16", query_pb2.ENCODING_FLOAT16, 4, {"embeddings": bytes(8)}, 8),
        ("int8", query_pb2.ENCODING_INT8, 4, {"embeddings": b"\xff" * 4, "scales": [0.5]}, 4),
        ("int8", query_pb2.ENCODING_INT8, 4, {"embeddings": bytes(4), "scales": [0.0]}, 4),
        ("ubinary", query_pb2.ENCODING_UBINARY, 16, {"embeddings": b"\xff" * 2}, 2),
    ],
)
def test_every_encoding(
    word: str, encoding: int, dimensions: int, fields: dict[str, object], stride: int
) -> None:
    queries = queries_of(1, encoding=word, dimensions=dimensions)
    answer = checked(group_response(encoding, dimensions, **fields), queries)

    assert answer.fault is None
    assert answer.groups[0].stride == stride


def test_the_model_s_own_dimensions_may_be_asked_for_by_number() -> None:
    assert checked(float32_response(), queries_of(dimensions=DIMENSIONS)).fault is None


def with_value(value: float, position: int) -> Callable[[pb.EmbedStreamResponse], None]:
    def change(response: pb.EmbedStreamResponse) -> None:
        matrix = np.arange(8).astype("<f4")
        matrix[position] = value
        response.groups[0].embeddings = matrix.tobytes()

    return change


def groups(
    change: Callable[[pb.EmbeddingGroup], object],
) -> Callable[[pb.EmbedStreamResponse], None]:
    def change_first(response: pb.EmbedStreamResponse) -> None:
        change(response.groups[0])

    return change_first


def set_status(response: pb.EmbedStreamResponse) -> None:
    response.status.code = 14


FAULTS: dict[str, Callable[[pb.EmbedStreamResponse], None]] = {
    "nan": with_value(math.nan, 7),
    "infinite": with_value(-math.inf, 0),
    "a byte short": groups(lambda g: setattr(g, "embeddings", g.embeddings[:-1])),
    "a byte long": groups(lambda g: setattr(g, "embeddings", g.embeddings + b"\0")),
    "a vector short": groups(lambda g: setattr(g, "embeddings", g.embeddings[16:])),
    "no vectors": groups(lambda g: g.ClearField("embeddings")),
    "tokens short": groups(lambda g: g.tokens.pop()),
    "tokens long": groups(lambda g: g.tokens.append(1)),
    "index out of range": groups(lambda g: g.indexes.__setitem__(0, 3)),
    "index doubled": groups(lambda g: g.indexes.__setitem__(0, 0)),
    "index also an error": groups(lambda g: g.indexes.__setitem__(0, 1)),
    "no indexes": groups(lambda g: g.ClearField("indexes")),
    "scales for floats": groups(lambda g: g.scales.extend([1.0, 1.0])),
    "no dimensions": groups(lambda g: g.ClearField("dimensions")),
    "other dimensions": groups(lambda g: setattr(g, "dimensions", 2)),
    "huge dimensions": groups(lambda g: setattr(g, "dimensions", 2**32 - 1)),
    "no encoding": groups(lambda g: g.ClearField("encoding")),
    "unknown encoding": groups(lambda g: setattr(g, "encoding", 77)),
    "other encoding": groups(lambda g: setattr(g, "encoding", query_pb2.ENCODING_FLOAT16)),
    "two groups of one input": lambda r: r.groups.append(r.groups[0]),
    "error out of range": lambda r: setattr(r.errors[0], "index", 3),
    "error without index": lambda r: r.errors[0].ClearField("index"),
    "error doubled": lambda r: r.errors.append(r.errors[0]),
    "error without status": lambda r: r.errors[0].ClearField("status"),
    "error says OK": lambda r: setattr(r.errors[0].status, "code", 0),
    "refused and answered": set_status,
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    response = float32_response()
    FAULTS[name](response)
    answer = checked(response)

    assert answer.fault is not None
    assert answer.claim_id == 9
    assert answer.last


@pytest.mark.parametrize("scale", [math.nan, math.inf, -0.5])
def test_scales_must_be_finite_and_not_negative(scale: float) -> None:
    response = group_response(
        query_pb2.ENCODING_INT8, DIMENSIONS, embeddings=bytes(4), scales=[scale]
    )

    assert checked(response, queries_of(1, encoding="int8")).fault is not None


@pytest.mark.parametrize(
    ("encoding", "word", "dimensions", "embeddings"),
    [
        (query_pb2.ENCODING_INT8, "int8", 4, bytes(4)),
        (query_pb2.ENCODING_UBINARY, "ubinary", 12, bytes(1)),
        (query_pb2.ENCODING_FLOAT16, "float16", 4, np.full(4, np.inf, "<f2").tobytes()),
    ],
)
def test_faults_of_other_encodings(
    encoding: int, word: str, dimensions: int, embeddings: bytes
) -> None:
    queries = queries_of(1, encoding=word, dimensions=dimensions)
    answer = checked(group_response(encoding, dimensions, embeddings=embeddings), queries)

    assert answer.fault is not None


def test_a_query_gets_no_vector_of_its_neighbour_s_kind() -> None:
    queries = [from_json(encoding="float16"), from_json(), from_json()]
    assert checked(float32_response(), queries).fault is not None
    queries = [from_json(dimensions=2), from_json(), from_json()]
    assert checked(float32_response(), queries).fault is not None


def test_a_refusal_of_the_whole_request() -> None:
    refused = pb.EmbedStreamResponse(
        request_id=9, last=True, status=status(code_pb2.UNAVAILABLE, reason="NOT_STARTED")
    )
    answer = checked(refused)

    assert answer.fault is None
    assert answer.refused is not None
    assert answer.refused.reason is Reason.NOT_STARTED

    refused.last = False
    assert checked(refused).fault is not None
    refused.last = True
    refused.status.code = 0
    assert checked(refused).fault is not None


def test_times_below_0_are_0() -> None:
    answer = checked(pb.EmbedStreamResponse(request_id=9, queue_us=-5, inference_us=-5))

    assert (answer.queue_us, answer.inference_us) == (0, 0)


# Statuses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "code", "retryable", "dead_letter"),
    [
        (Reason.INVALID_FIELD, Code.INVALID_ARGUMENT, False, False),
        (Reason.MODEL_UNKNOWN, Code.NOT_FOUND, False, False),
        (Reason.EXPIRED, Code.DEADLINE_EXCEEDED, True, False),
        (Reason.ENGINE_FAILED_ALONE, Code.INTERNAL, False, True),
        (Reason.NOT_FINITE, Code.INTERNAL, False, True),
        (Reason.ENGINE_DIED, Code.UNAVAILABLE, True, False),
        (Reason.NOT_STARTED, Code.UNAVAILABLE, True, False),
        (Reason.TOO_MUCH_HELD, Code.RESOURCE_EXHAUSTED, True, False),
        (Reason.REQUEST_TOO_LARGE, Code.RESOURCE_EXHAUSTED, True, False),
    ],
)
def test_what_servers_say(reason: Reason, code: Code, retryable: bool, dead_letter: bool) -> None:
    number = code_pb2.Code.Value(code)

    assert failure_of_status(status(number, reason=reason)) == Failure(
        code=code, reason=reason, message="m", retryable=retryable, dead_letter=dead_letter
    )


def test_field_and_retry_delay() -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="dimensions")
    bad_request = error_details_pb2.BadRequest(field_violations=[violation])
    retry = error_details_pb2.RetryInfo(
        retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_001)
    )

    invalid = failure_of_status(
        status(code_pb2.INVALID_ARGUMENT, bad_request, retry, reason="INVALID_FIELD")
    )
    assert (invalid.field, invalid.retry_after_ms) == ("dimensions", None)
    later = failure_of_status(status(code_pb2.UNAVAILABLE, retry, reason="NOT_STARTED"))
    assert later.retry_after_ms == 1501


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (status(code_pb2.UNKNOWN), Code.UNKNOWN),
        (status(99), Code.UNKNOWN),
        (status(-1), Code.UNKNOWN),
        (status(code_pb2.UNIMPLEMENTED, reason="SOMETHING"), Code.UNIMPLEMENTED),
        (status(code_pb2.UNAVAILABLE), Code.UNAVAILABLE),
        (status(code_pb2.INVALID_ARGUMENT), Code.INVALID_ARGUMENT),
        (status(code_pb2.INTERNAL, reason="INVALID_FIELD"), Code.INTERNAL),
        (status(code_pb2.INTERNAL, reason="BAD_ANSWER"), Code.INTERNAL),
        (status(code_pb2.INTERNAL, reason="NOT_FINITE", domain="x.org"), Code.INTERNAL),
    ],
)
def test_any_other_status_is_to_be_retried(given: status_pb2.Status, code: Code) -> None:
    failure = failure_of_status(given)

    assert (failure.code, failure.reason) == (code, Reason.SERVER_ERROR)
    assert failure.retryable
    assert failure.dead_letter


def test_details_that_can_not_be_read_count_as_absent() -> None:
    given = status(code_pb2.UNAVAILABLE, reason="NOT_STARTED")
    for name in ("ErrorInfo", "RetryInfo", "BadRequest"):
        given.details.add(type_url=f"type.googleapis.com/google.rpc.{name}", value=b"\xff\xff")
    given.details.add(type_url="", value=b"x")

    assert failure_of_status(given).reason is Reason.NOT_STARTED


@pytest.mark.parametrize(("seconds", "expected"), [(-5, 0), (10**11, 10**14), (2**62, 2**53)])
def test_odd_retry_delays(seconds: int, expected: int) -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.seconds = seconds
    failure = failure_of_status(status(code_pb2.UNAVAILABLE, retry, reason="NOT_STARTED"))

    assert failure.retry_after_ms == expected


def test_a_server_s_words_are_bounded() -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="f" * 10_000)
    bad_request = error_details_pb2.BadRequest(field_violations=[violation])
    failure = failure_of_status(
        status(code_pb2.INVALID_ARGUMENT, bad_request, reason="INVALID_FIELD", message="x" * 10**6)
    )

    assert failure.field == "f" * 64
    assert len(failure.message) == 500


# Server states ----------------------------------------------------------------------------------


def test_limits() -> None:
    limits = server_limits(
        pb.ServerState(
            batch_tokens_target=600,
            batch_tokens_max=2400,
            window_tokens=1200,
            inputs_max=1024,
            request_bytes_max=2**34,
            busy_ms=12.5,
            queued_tokens=77,
            draining=True,
        )
    )

    assert (limits.batch_tokens_target, limits.batch_tokens_max) == (600, 2400)
    assert (limits.window_tokens, limits.inputs_max) == (1200, 1024)
    assert (limits.request_bytes_max, limits.busy_ms) == (2**34, 12.5)
    assert (limits.queued_tokens, limits.draining) == (77, True)


@pytest.mark.parametrize(
    ("busy_ms", "expected"), [(math.nan, 0), (-1, 0), (-math.inf, 0), (math.inf, 6e4), (1e300, 6e4)]
)
def test_a_busy_time_that_no_server_means(busy_ms: float, expected: float) -> None:
    assert server_limits(pb.ServerState(busy_ms=busy_ms)).busy_ms == expected


def test_an_empty_state_has_a_target_to_reckon_with() -> None:
    assert server_limits(pb.ServerState()).batch_tokens_target == 1
