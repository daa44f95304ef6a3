"""Answers pass the check exactly if a plain reading of the contract finds them sound."""

from __future__ import annotations

import math
import struct

from google.protobuf.message import DecodeError
from hypothesis import event, given
from hypothesis import strategies as st

from aggregator.core.effects import Dispatch
from aggregator.core.query import Query
from aggregator.wire.rpc import build_request, check_response, failure_of_status, server_limits
from protos.embedding.v1 import embedding_service_pb2 as pb
from tests.unit.wire_builders import from_json

OWN = 8
WORDS = {1: "float32", 2: "float16", 3: "int8", 4: "ubinary"}

kinds = st.tuples(st.sampled_from(sorted(WORDS)), st.sampled_from([0, OWN, 16]))


def query_of(encoding: int, dimensions: int) -> Query:
    return from_json(encoding=WORDS[encoding], dimensions=dimensions or None)


def stride_of(encoding: int, dimensions: int) -> int:
    return {1: 4 * dimensions, 2: 2 * dimensions, 3: dimensions, 4: dimensions // 8}[encoding]


def group_of(queries: list[Query], indexes: list[int]) -> pb.EmbeddingGroup:
    """Give a sound group for queries of one kind."""
    query = queries[indexes[0]]
    dimensions = query.dimensions or OWN
    group = pb.EmbeddingGroup(
        dimensions=dimensions,
        indexes=indexes,
        tokens=[1] * len(indexes),
        embeddings=bytes(len(indexes) * stride_of(query.encoding, dimensions)),
        scales=[0.5] * (len(indexes) if query.encoding == 3 else 0),
    )
    group.encoding = query.encoding  # type: ignore[assignment]
    return group


def damage(draw: st.DrawFn, response: pb.EmbedStreamResponse, inputs: int) -> None:
    """Change one thing, sometimes to what it was."""
    change_error = draw(st.booleans())
    if change_error and response.errors:
        response.errors[0].index = draw(st.integers(0, inputs))
    if not response.groups:
        return
    group = draw(st.sampled_from(list(response.groups)))
    match draw(st.sampled_from(["index", "tokens", "bytes", "scales", "value", "kind", "twice"])):
        case "index":
            group.indexes[-1] = draw(st.integers(0, inputs))
        case "tokens":
            group.tokens.append(1)
        case "bytes":
            group.embeddings += bytes(draw(st.integers(0, 1)))
        case "scales":
            group.scales.append(1.0)
        case "value":
            ending = draw(st.sampled_from([struct.pack("<f", math.nan), b"\0\0\0\x7c", bytes(4)]))
            group.embeddings = group.embeddings[:-4] + ending[-len(group.embeddings) :]
        case "kind":
            group.encoding = draw(st.sampled_from(sorted(WORDS)))  # type: ignore[assignment]
            group.dimensions = draw(st.sampled_from([OWN, 16, 7]))
        case "twice":
            response.groups.append(group)


@st.composite
def responses(draw: st.DrawFn, queries: list[Query]) -> pb.EmbedStreamResponse:
    """Answers to some of the queries, as often sound as not."""
    response = pb.EmbedStreamResponse(request_id=3)
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, query in enumerate(queries):
        match draw(st.sampled_from(["vector", "vector", "vector", "error", "later"])):
            case "vector":
                kinds.setdefault((query.encoding, query.dimensions), []).append(index)
            case "error":
                response.errors.add(index=index).status.code = 13
    response.groups.extend(group_of(queries, indexes) for indexes in kinds.values())
    if draw(st.booleans()):
        damage(draw, response, len(queries))
    return response


def sound(group: pb.EmbeddingGroup, queries: list[Query]) -> bool:
    """Read the contract about one group in the plainest way."""
    encoding, dimensions, rows = int(group.encoding), group.dimensions, len(group.indexes)
    if encoding == 4 and dimensions % 8:
        return False
    if len(group.tokens) != rows or len(group.scales) != (rows if encoding == 3 else 0):
        return False
    if len(group.embeddings) != rows * stride_of(encoding, dimensions):
        return False
    if not all(index < len(queries) for index in group.indexes):
        return False
    asked = [(queries[i].encoding, queries[i].dimensions or OWN) for i in group.indexes]
    letter = {1: "f", 2: "e"}.get(encoding)
    numbers = struct.iter_unpack(f"<{letter}", group.embeddings) if letter else []
    return all(pair == (encoding, dimensions) for pair in asked) and all(
        math.isfinite(number) for (number,) in numbers
    )


@given(st.data(), st.lists(kinds, min_size=1, max_size=4))
def test_the_check_agrees_with_a_plain_reading(
    data: st.DataObject, asked: list[tuple[int, int]]
) -> None:
    queries = [query_of(*kind) for kind in asked]
    response = data.draw(responses(queries))
    groups = list(response.groups)
    failed = [entry.index for entry in response.errors]
    answered = [index for group in groups for index in group.indexes] + failed
    expected = (
        all(sound(group, queries) for group in groups)
        and all(index < len(queries) for index in failed)
        and len(set(answered)) == len(answered)
    )

    event(f"sound: {expected}, vectors: {bool(groups)}")

    answer = check_response(response, queries, OWN)

    assert (answer.fault is None) == expected
    if expected:
        assert [group.indexes for group in answer.groups] == [list(g.indexes) for g in groups]
        assert [entry.index for entry in answer.errors] == failed
    else:
        assert (answer.groups, answer.errors) == ([], [])


@given(st.binary(max_size=300))
def test_any_message_can_be_checked(value: bytes) -> None:
    queries = [from_json(), from_json(encoding="int8")]
    try:
        response = pb.EmbedStreamResponse.FromString(value)
    except DecodeError:
        return
    check_response(response, queries, OWN)
    server_limits(response.state)
    failure_of_status(response.status)


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
            kinds,
            st.sampled_from([None, "query", "document"]),
            st.booleans(),
            st.sampled_from([0, 1, 1000, 2**63 - 1]),
        ),
        max_size=5,
    ),
    st.integers(0, 2**62),
    st.booleans(),
)
def test_requests_say_what_the_queries_say(
    entries: list[tuple[str, tuple[int, int], str | None, bool, int]], now_ns: int, alone: bool
) -> None:
    queries = [
        from_json(
            text=text,
            encoding=WORDS[kind[0]],
            dimensions=kind[1] or None,
            input_type=input_type,
            truncate=truncate,
            ttl_ms=ttl_ms,
        )
        for text, kind, input_type, truncate, ttl_ms in entries
    ]
    claim = Dispatch(
        claim_id=5, model="minilm", server="a", queries=queries, estimate=1.0, exclusive=alone
    )
    request = pb.EmbedStreamRequest.FromString(build_request(claim, now_ns).SerializeToString())

    assert (request.request_id, request.model, request.exclusive) == (5, "minilm", alone)
    assert len(request.inputs) == len(queries)
    for entry, query in zip(request.inputs, queries, strict=True):
        assert entry.text == query.text
        assert (entry.encoding or 1) == query.encoding
        assert entry.dimensions == query.dimensions
        assert entry.input_type == query.input_type
        assert entry.truncate == query.truncate
        assert (entry.timeout_ms > 0) == (query.deadline_ns > 0)
        left_ms = (query.deadline_ns - now_ns) / 1e6
        assert entry.timeout_ms <= max(left_ms, 1)
